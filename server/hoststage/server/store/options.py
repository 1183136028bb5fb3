"""What an operator may set about a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hoststage.server.store.errors import StoreConfigError

GIB = 1 << 30


class DirectIo(Enum):
    """Whether pages bypass the kernel's page cache."""

    AUTO = "auto"
    """Where the file system allows it; otherwise buffered, with a notice."""
    REQUIRED = "required"
    """Refuse to open on a file system that does not allow it."""
    OFF = "off"


class SyncPolicy(Enum):
    """What ``STORED`` promises about the power failing; it always outlives the death of the daemon."""

    NONE = "none"
    """Nothing: a page written within the last seconds may be a miss after the power fails."""
    DATA = "data"
    """The page is on the medium: ``fdatasync`` before every publication, once for each file and call."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The settings of a store, with the same meaning for every driver that has a use for them."""

    limit_bytes: int = 64 * GIB
    """The room that pages may take, headers and padding included."""
    high_watermark: float = 0.95
    """The fraction of the limit at which eviction begins."""
    low_watermark: float = 0.90
    """The fraction of the limit at which it ends."""
    min_free_bytes: int = 1 * GIB
    """Free room that is left to others on the medium; the store shrinks rather than go below it."""
    io_threads: int = 8
    """Threads for reads, and as many again for writes, so that loads never queue behind publishing."""
    segment_bytes: int = 4 * GIB
    """The most that one segment file holds; a small store has smaller ones. Files are sparse."""
    direct_io: DirectIo = DirectIo.AUTO
    sync: SyncPolicy = SyncPolicy.NONE
    create_directory: bool = False
    """Create a directory that does not exist. Off by default, so that a disk not mounted is noticed."""
    quarantine_slots: int = 64
    """How many corrupt pages may be set aside at once; the oldest one makes room for the next."""

    def check(self) -> None:
        """Raise ``StoreConfigError`` for the first setting that cannot be."""
        for field in ("limit_bytes", "io_threads", "segment_bytes"):
            if getattr(self, field) < 1:
                raise _bad(self, field, "It must be at least 1.", "Set a positive number.")
        for field in ("min_free_bytes", "quarantine_slots"):
            if getattr(self, field) < 0:
                raise _bad(self, field, "It must not be negative.", "Set zero or more.")
        if not 0 < self.high_watermark <= 1:
            raise _bad(self, "high_watermark", "It must be above 0 and at most 1.", "Set a fraction such as 0.95.")
        if not 0 < self.low_watermark < self.high_watermark:
            raise _bad(
                self,
                "low_watermark",
                f"It must be above 0 and below high_watermark ({self.high_watermark}).",
                "Set a fraction such as 0.90.",
            )


def _bad(options: StoreOptions, field: str, problem: str, remedy: str) -> StoreConfigError:
    return StoreConfigError(field, str(getattr(options, field)), problem, remedy)
