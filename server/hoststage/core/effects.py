"""What the core tells its surroundings to do. The core decides, `staging` and `rpc` carry out.

Events name sessions and pools by number; they are translated to wire messages outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from hoststage.core.slots import Slots

if TYPE_CHECKING:
    from hoststage.core.commits import Commit
    from hoststage.core.loads import Fetch


class Outcome(IntEnum):
    """What became of a page or a span. The numbers are those of the wire's enum, which documents each."""

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


class Fetched(IntEnum):
    """What a store read brought for one page."""

    HIT = 1
    MISS = 2
    CORRUPT = 3
    FAILED = 4


class Written(IntEnum):
    """What a store write came to for one page."""

    STORED = 1
    FULL = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class PartSlots:
    """Slots for keys `[first, first + len(slots))` of a span in one pool; `NO_SLOT` where a page has none."""

    pool: int
    first: int
    slots: Slots
    generations: Slots


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """Answer to a reservation."""

    outcome: Outcome
    parts: tuple[PartSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Answer to a commit; `credits` are slots granted in place of those that it took."""

    outcome: Outcome
    commit_id: bytes = b""
    credits: tuple[PartSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Progress or the end (`last`) of a load. `prefix` counts pages and is the truth once `last` is set."""

    session: int
    load_id: int
    outcome: Outcome
    last: bool
    prefix: int = 0
    parts: tuple[PartSlots, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """An accepted commit is stored, resident without a store, or dropped."""

    session: int
    commit_id: bytes
    request_id: int
    outcome: Outcome
    pages: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReserveEnded:
    """A queued reservation has its answer."""

    session: int
    request_id: int
    result: ReserveResult


@dataclass(frozen=True, slots=True)
class Publish:
    """Copy the pages of a commit from their write slots to their read slots, then call `published`."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class StoreWrite:
    """Write the pages of a commit to the store, in order, then call `written`."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class StoreRead:
    """Read pages from the store into FILLING read slots, then call `fetched`."""

    namespace: str
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Ask a session to give leases up that other loads wait for; they stay its own until it acknowledges, releases them or dies."""

    session: int
    revocation: int
    load_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SessionOver:
    """Nothing of the session is in use any more: its write arenas may go."""

    session: int


Effect: TypeAlias = LoadResult | CommitEnded | ReserveEnded | Publish | StoreWrite | StoreRead | Revoke | SessionOver
