"""What reading hands out: matches, loaded pages, groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from hoststage.client._arenas import Arena
from hoststage.client._inline import InlineLoaded, InlineLoading
from hoststage.client._link import Link
from hoststage.client._loadop import Extent, LoadOp
from hoststage.client._pages import PageRows, ScatteredPages
from hoststage.client._selfserve import OwnLease, OwnPages
from hoststage.client.errors import SessionLost, StackError
from hoststage.shm.pageindex import Slots
from hoststage.v1 import ops
from hoststage.v1.imported import ImportedLoadReply
from hoststage.v1.ops import Outcome


@dataclass(frozen=True, slots=True)
class Match:
    """Which prefixes of a run can be restored: every length, as inclusive runs `(first, last)`, ascending.

    `pin` keeps what was answered from being evicted until a load consumes it or it expires; 0: nothing was pinned. Pins belong to the
    connection that gave them: one given before a loss is void and does no harm.
    """

    runs: tuple[tuple[int, int], ...] = ()
    pin: int = 0
    _link: Link | None = field(default=None, repr=False, compare=False)

    @property
    def longest(self) -> int:
        """The longest restorable prefix in pages, 0 for a miss."""
        return self.runs[-1][1] if self.runs else 0

    def __bool__(self) -> bool:
        return bool(self.runs)

    def restorable(self, prefix: int) -> bool:
        """Return whether a prefix of that many pages can be restored."""
        return any(first <= prefix <= last for first, last in self.runs)

    def longest_at_most(self, prefix: int) -> int:
        """Return the longest restorable prefix of at most `prefix` pages, 0 where there is none."""
        return max((min(last, prefix) for first, last in self.runs if first <= prefix), default=0)

    def release(self) -> None:
        """Give the pin up, where no load will consume it."""
        if self.pin and self._link is not None:
            self._link.post(ops.Release((), (self.pin,)))

    @property
    def standing(self) -> bool:
        """Whether the connection that gave the pin stands, as far as is known."""
        return self._link is not None and self._link.lost is None

    def pin_for(self, link: Link) -> int:
        """Return the pin as that connection knows it, 0 where another one gave it."""
        return self.pin if self._link is link else 0


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Pages of a load that have arrived. `first[pool]`: place in the prefix of the first page of `pages[pool]`."""

    first: dict[str, int]
    pages: dict[str, list[memoryview]]


class Loaded:
    """The pages of a loaded prefix; falsy for a miss.

    The pages are read-only views of memory that the daemon fills: zero-copy, valid until `release` (or the end of a `with` block),
    after which the daemon may put other pages there. Pages that were copied into the caller's memory are leased no more.
    """

    __slots__ = (
        "__weakref__",
        "_first",
        "_link",
        "_names",
        "_op",
        "_own",
        "_pages",
        "_places",
        "_released",
        "detail",
        "outcome",
        "prefix",
    )

    def __init__(
        self, names: Sequence[str], prefix: int = 0, outcome: Outcome = Outcome.MISS, detail: str = ""
    ) -> None:
        self.prefix = prefix
        self.outcome = outcome
        self.detail = detail
        self._names = names
        self._op: LoadOp | None = None
        self._own: OwnLease | None = None
        self._link: Link | None = None
        self._first: dict[str, int] = {}
        self._pages: dict[str, list[memoryview]] = {}
        self._places: dict[str, tuple[Arena, Slots]] = {}
        self._released = False

    @classmethod
    def of_slots(cls, names: Sequence[str], op: LoadOp, extents: Mapping[int, list[Extent]], *, views: bool) -> Loaded:
        """Hand out leased slots."""
        loaded = cls(names, op.prefix, op.outcome, op.detail)
        loaded._op, loaded._link = op, op.link
        for pool, parts in extents.items():
            loaded._first[names[pool]] = parts[0].first
            if views:
                arena, slots = op.link.arenas.read[pool], np.concatenate([part.slots for part in parts])
                loaded._places[names[pool]] = (arena, slots)
                loaded._pages[names[pool]] = arena.views(slots)
        return loaded

    @classmethod
    def listed(cls, names: Sequence[str], prefix: int, link: Link, own: OwnLease, pages: Sequence[OwnPages]) -> Loaded:
        """Hand out pages that are leased without the daemon's help."""
        loaded = cls(names, prefix, Outcome.READY)
        loaded._own, loaded._link = own, link
        for each in pages:
            name = names[each.pool]
            loaded._first[name], loaded._pages[name] = each.first, each.views
            loaded._places[name] = (each.arena, each.slots)
        return loaded

    @classmethod
    def copied(cls, names: Sequence[str], prefix: int, first: Mapping[int, int]) -> Loaded:
        """Say what was copied without a lease. first: per pool, the place of its first page."""
        loaded = cls(names, prefix, Outcome.READY)
        loaded._first = {names[pool]: at for pool, at in first.items()}
        return loaded

    @classmethod
    def of_bytes(cls, names: Sequence[str], answers: InlineLoading | InlineLoaded) -> Loaded:
        """Hand out pages that came as bytes."""
        loaded = cls(names, answers.prefix, answers.outcome, answers.text)
        if loaded:
            for pool, place in sorted(answers.pages):
                if place < answers.prefix:
                    loaded._first.setdefault(names[pool], place)
                    page = memoryview(answers.pages[pool, place]).toreadonly()
                    loaded._pages.setdefault(names[pool], []).append(page)
        return loaded

    @classmethod
    def of_places(cls, names: Sequence[str], reply: ImportedLoadReply) -> Loaded:
        """Tell of pages that the daemon has written to the caller's memory."""
        loaded = cls(names, reply.prefix, reply.outcome, reply.detail)
        loaded._first = {names[r.pool]: r.first for r in reply.ranges}
        return loaded

    def __bool__(self) -> bool:
        return self.outcome is Outcome.READY

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that have pages."""
        return tuple(self._first)

    def first(self, pool: str) -> int:
        """Return the place in the prefix of the pool's first page; the prefix itself where it has none."""
        return self._first.get(pool, self.prefix)

    def pages(self, pool: str) -> list[memoryview]:
        """Return the pool's pages in order, read-only. Raises `ValueError` once they were released."""
        if self._released:
            raise ValueError("the pages were released: the daemon may have put others in their place")
        return self._pages.get(pool, [])

    def copy_pieces(self, pool: str, into: ScatteredPages, pieces: slice = slice(None)) -> None:
        """Copy some pieces of each of the pool's pages, one layer of them for instance: row `i` of `into` takes the page at `first(pool) + i`.

        Over shm alone.

        :raises StackError: where the pages do not fit, or came over the inline path. :raises ValueError: once they were released.
        :raises SessionLost: where the connection is lost, and with it the promise that nobody wrote these pages meanwhile.
        """
        if self._released:
            raise ValueError("the pages were released: the daemon may have put others in their place")
        if pool not in self._places:
            raise StackError("pool", pool, f"name one of {sorted(self._places)}, whose pages came over shm")
        arena, slots = self._places[pool]
        rows = PageRows(into, pool, arena.page_bytes, writable=True)
        if rows.count < len(slots):
            raise StackError(f"into[{pool!r}]", f"{rows.count} rows", f"{len(slots)} pages were loaded")
        rows.from_arena(0, arena, slots, pieces)
        self.check()

    def check(self) -> None:
        """Raise `SessionLost` where the connection that leased the pages is lost: what was copied since cannot be relied on."""
        if self._link is not None and self._link.lost is not None:
            raise SessionLost(str(self._link.lost))

    def release(self) -> None:
        """Give the leases up; safe to repeat."""
        self._pages, self._places = {}, {}
        self._released = True
        op, self._op = self._op, None
        own, self._own = self._own, None
        self._link = None
        if op is not None and op.outcome is Outcome.READY:
            op.link.release(op.load_id)
        elif own is not None:
            own.release()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        op = getattr(self, "_op", None)
        if op is not None and op.outcome is Outcome.READY:
            # A finalizer may run in the middle of anything, a send included: the housekeeper sends this.
            op.link.unreleased.append(ops.Release((op.load_id,)))
