"""Other products, measured beside ours where they are installed."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class PeerAbsent(Exception):
    """A peer cannot be measured here; the message says why, and what would change that."""


class Peer(Protocol):
    """Another product, driven with pages of our own. Every call stores or loads one batch and returns its seconds."""

    @property
    def name(self) -> str:
        """What it is called in rows."""
        ...

    def store(self, batch: int, page_bytes: int) -> float:
        """Store `batch` pages under fresh keys."""
        ...

    def load(self, batch: int, page_bytes: int) -> float:
        """Load the pages of the last store of that shape into the caller's memory."""
        ...

    def close(self) -> None:
        """End it, and everything that was started for it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
