"""The hot operations as plain data, the same on the gRPC stream and on the local lane.

Each of them has a protobuf twin in `hoststage.proto`, where every field is documented, and a fixed frame in `lane.py`.
`convert.py` holds the tested conversion between the two, so that the meaning has one source. Slots and generations are numpy `uint32`
arrays; `NO_SLOT` marks a page without a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

U32: TypeAlias = NDArray[np.uint32]

NO_SLOT = 0xFFFFFFFF
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class Outcome(IntEnum):
    """What became of a page or of a span; the numbers are those of the protobuf enum."""

    UNSPECIFIED = 0
    ACCEPTED = 1
    BELIEVED_STORED = 2
    STORED = 3
    RESIDENT = 4
    OVERSIZE = 5
    PARENT_UNCOVERED = 6
    PARENT_FAILED = 7
    BACKLOG_FULL = 8
    POOL_FULL = 9
    STORE_FULL = 10
    STORE_FAILED = 11
    DRAINING = 12
    MISS = 13
    CANCELLED = 14
    PENDING = 15
    READY = 16
    QUOTA = 17

    @classmethod
    def _missing_(cls, value: object) -> Outcome:
        # A newer peer may know outcomes that we do not: they must be survivable.
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class PoolRange:
    """Keys `[first, first + count)` of a span, in the pool at place `pool` of the stack."""

    pool: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of content-chained keys, packed one after the other (`key_bytes` each)."""

    keys: bytes
    key_bytes: int
    ranges: tuple[PoolRange, ...] = ()
    parent: bytes = b""

    def __len__(self) -> int:
        return len(self.keys) // self.key_bytes if self.key_bytes else 0

    def key(self, index: int) -> bytes:
        """Return the key at `index`."""
        return self.keys[index * self.key_bytes : (index + 1) * self.key_bytes]

    def split(self, first: int = 0, count: int | None = None) -> list[bytes]:
        """Return keys `[first, first + count)` one by one."""
        size, keys = self.key_bytes, self.keys
        end = len(keys) if count is None else (first + count) * size
        return [keys[i : i + size] for i in range(first * size, end, size)]


@dataclass(frozen=True, slots=True, eq=False)
class PoolSlots:
    """Slots and their generations, one a page of a range; `NO_SLOT` where a page has none."""

    pool: int
    slots: U32
    generations: U32

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolSlots):
            return NotImplemented
        return (
            self.pool == other.pool
            and np.array_equal(self.slots, other.slots)
            and np.array_equal(self.generations, other.generations)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Reserve:
    span: Span
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReserveReply:
    outcome: Outcome
    slots: tuple[PoolSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    span: Span
    slots: tuple[PoolSlots, ...]


@dataclass(frozen=True, slots=True)
class CommitReply:
    outcome: Outcome
    commit_id: bytes = b""
    credits: tuple[PoolSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    span: Span
    pin_ms: int = 0


@dataclass(frozen=True, slots=True)
class LookupReply:
    """`runs`: inclusive runs of restorable prefix lengths, `(first, last)` ascending."""

    runs: tuple[tuple[int, int], ...] = ()
    pin: int = 0

    @property
    def longest(self) -> int:
        """The longest restorable prefix in pages, 0 for a miss."""
        return self.runs[-1][1] if self.runs else 0

    def restorable(self, prefix: int) -> bool:
        """Return whether a prefix of that many pages can be restored."""
        return any(first <= prefix <= last for first, last in self.runs)

    def longest_at_most(self, prefix: int) -> int:
        """Return the longest restorable prefix of at most `prefix` pages, 0 where there is none."""
        return max((min(last, prefix) for first, last in self.runs if first <= prefix), default=0)


@dataclass(frozen=True, slots=True)
class Load:
    span: Span
    prefix: int
    pin: int = 0
    deadline_ms: int = 0
    accept_shorter: bool = False


@dataclass(frozen=True, slots=True)
class LoadReply:
    outcome: Outcome
    load_id: int = 0
    prefix: int = 0
    ranges: tuple[PoolRange, ...] = ()
    slots: tuple[PoolSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadReady:
    load_id: int
    outcome: Outcome
    last: bool
    prefix: int = 0
    ranges: tuple[PoolRange, ...] = ()
    slots: tuple[PoolSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    load_ids: tuple[int, ...] = ()
    pins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    commit_id: bytes
    commit_request: int
    outcome: Outcome
    pages: int = 0
    detail: str = ""


HotRequest: TypeAlias = Reserve | Commit | Lookup | Load | Release
HotReply: TypeAlias = ReserveReply | CommitReply | LookupReply | LoadReply
HotPush: TypeAlias = Stored | LoadReady
HotMessage: TypeAlias = HotRequest | HotReply | HotPush
