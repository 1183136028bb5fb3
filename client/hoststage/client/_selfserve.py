"""Serving oneself: lookups, copies and leases of resident pages by the daemon's page indexes, without asking the daemon.

A copy is checked afterwards: where a page has left its slot meanwhile, what was copied does not count, and the daemon is asked. For a
view the slots are listed on the session's lease board first, and checked then: what stands, stays, until it is taken off the board. The daemon hears of
the hits now and then, so that what is read here is not what it evicts first.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hoststage.client._arenas import Arena, Arenas
from hoststage.client._pages import KeyRun, PageRows
from hoststage.client.errors import SessionLost
from hoststage.shm.fence import full_fence_known
from hoststage.shm.leaseboard import LeaseBoard, Listing
from hoststage.shm.pageindex import Found, PageIndex, Slots, numbers
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1.ops import PoolRange

_MOST_TOUCHED = 4096
_MOST_LOADS = 16_384

_boards: weakref.WeakSet[LeaseBoard] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child does not map the boards: what it inherited is released without them."""
    for board in list(_boards):
        board.disown()


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True, slots=True)
class _Pool:
    """One pool: its index, the pages that lie in its slots, and how many pages at a prefix's end it needs (0: all).

    whole: all of its pages, which costs more to ask for anew each time than one page's view does.
    """

    place: int
    index: PageIndex
    pages: Arena
    trailing: int
    whole: memoryview

    def first(self, prefix: int) -> int:
        """The first page that a prefix needs."""
        return max(0, prefix - self.trailing) if self.trailing else 0


class OwnPages(NamedTuple):
    """Pages of one pool that are leased without the daemon's help: the pool's place, that of the first page in the prefix, and where they lie."""

    pool: int
    first: int
    arena: Arena
    slots: Slots
    views: list[memoryview]


class OwnLease:
    """A lease that stands because the session's board lists the pages; it ends with `release`, or when it is dropped."""

    __slots__ = ("_board", "_listing")

    def __init__(self, board: LeaseBoard) -> None:
        """It is made before the listing, which no interruption then leaves without an owner."""
        self._board = board
        # Taken out once, whoever releases first: an entry that is given back twice would be two leases' own.
        self._listing: list[Listing] = []

    def hold(self, listing: Listing) -> None:
        """Own what is listed."""
        self._listing.append(listing)

    def release(self) -> None:
        """Take the pages off the board; safe to repeat."""
        try:
            listing = self._listing.pop()
        except IndexError:
            return
        self._board.clear(listing)

    def __del__(self) -> None:
        # A finalizer may run in the middle of anything, a method of the board's included.
        if listing := getattr(self, "_listing", None):
            self._board.drop(listing.pop())


class SelfService:
    """The page indexes of one connection, and its lease board where it has one."""

    def __init__(self, arenas: Arenas) -> None:
        self._pools = tuple(
            _Pool(
                place,
                PageIndex(index.whole(), index.slots),
                arenas.read[place],
                index.trailing_pages,
                arenas.read[place].whole(),
            )
            for place, index in sorted(arenas.index.items())
        )
        self._board: LeaseBoard | None = None
        self.board_pages = 0
        """Pages of every pool that can be leased at once; 0 where there is no board."""
        if arenas.board is not None and full_fence_known():
            self._board = LeaseBoard(arenas.board.whole())
            self.board_pages = min((n for n in self._board.entries if n), default=0)
            _boards.add(self._board)
        self._lock = threading.Lock()
        self._lookups = 0
        # One entry a load: pools and slots. Made sense of by the housekeeper, which has the time.
        self._read: deque[Sequence[tuple[int, Slots]]] = deque(maxlen=_MOST_LOADS)

    def holds(self, run: KeyRun) -> bool:
        """Return whether every page of the run is resident in every pool, so that every prefix of it can be restored."""
        pools = self._pools
        if not pools:
            return False
        for pool in pools:
            found = pool.index.find(run.packed, run.key_bytes)
            if found is None or not pool.index.stands(found):
                return False
        with self._lock:
            self._lookups += 1
        return True

    def _wanted(self, prefix: int, ranges: Sequence[PoolRange]) -> list[tuple[_Pool, int, int]]:
        """Return the pools and the places in the run of their pages, from the first one to behind the last one, that a load is about.

        Those that a prefix needs, or the given ranges of it. Nothing where there is nothing to serve, or the daemon is to say what is wrong.
        """
        if not ranges:
            return [(pool, pool.first(prefix), prefix) for pool in self._pools]
        pools = {pool.place: pool for pool in self._pools}
        named = {r.pool for r in ranges}
        sound = len(named) == len(ranges) and named <= pools.keys()
        if not sound or not all(r.count > 0 and r.first >= 0 and r.first + r.count <= prefix for r in ranges):
            return []
        return [(pools[r.pool], r.first, r.first + r.count) for r in ranges]

    def copy(
        self, run: KeyRun, prefix: int, rows: Mapping[int, PageRows], ranges: Sequence[PoolRange] = ()
    ) -> dict[int, int] | None:
        """Copy the pages that a prefix needs, or those ranges of it; return, per pool, the place of the first one.

        None where a page is not resident, or has left while it was copied: the rows then hold nothing of use.
        """
        found: list[tuple[_Pool, Found]] = []
        wanted = self._wanted(prefix, ranges)
        if not wanted:
            return None
        for pool, first, end in wanted:
            there = pool.index.find(run.cut(first, end), run.key_bytes)
            if there is None:
                return None
            found.append((pool, there))
        for pool, there in found:
            target = rows.get(pool.place)
            if target is not None:
                if target.count < len(there[0]):
                    return None
                target.from_arena(0, pool.pages, there[0])
        if not all(pool.index.stands(there) for pool, there in found):
            return None
        self._read.append([(pool.place, there[0]) for pool, there in found])
        return {pool.place: first for pool, first, _ in wanted}

    def lease(
        self, run: KeyRun, prefix: int, ranges: Sequence[PoolRange] = ()
    ) -> tuple[OwnLease, list[OwnPages]] | None:
        """Lease the pages that a prefix needs, or those ranges of it, to be looked at where they lie.

        None where a page is not resident, or the board has no room for all of them.
        """
        board, places = self._board, self._wanted(prefix, ranges)
        if board is None or not places:
            return None
        if any(end - first > board.entries[pool.place] for pool, first, end in places):
            return None  # before any of the work that a long prefix makes
        found: list[tuple[_Pool, Found]] = []
        pages: list[OwnPages] = []
        for pool, first, end in places:
            arena, whole = pool.pages, pool.whole
            there = pool.index.find(run.cut(first, end), run.key_bytes)
            if there is None:
                return None
            stride, size = arena.stride, arena.page_bytes
            starts = [slot * stride for slot in numbers(there[0])]
            views = [whole[start : start + size] for start in starts]
            found.append((pool, there))
            pages.append(OwnPages(pool.place, first, arena, there[0], views))
        wanted = [(each.pool, each.slots) for each in pages]
        lease = OwnLease(board)
        listing = board.enlist(wanted)
        if listing is None:
            return None
        lease.hold(listing)
        # The index was looked at before: what has left since then may have been overwritten without a look at our board.
        for pool, there in found:
            if not pool.index.stands(there):
                lease.release()
                return None
        self._read.append(wanted)
        return lease, pages

    def flush(self) -> None:
        """Take off the board what was dropped without a release."""
        if self._board is not None:
            self._board.clear_dropped()

    def close(self) -> None:
        """Let the indexes and the board go, so that they can be unmapped; whoever is reading one right now still holds it."""
        self._pools, self.board_pages = (), 0
        if self._board is not None:
            self._board.close()

    def news(self) -> pb.ClientMessage | None:
        """Return what the daemon has not heard of yet; None where there is nothing. For one thread."""
        with self._lock:
            lookups, self._lookups = self._lookups, 0
        loads = len(self._read)
        if not lookups and not loads:
            return None
        used: dict[int, set[int]] = {}
        for _ in range(loads):
            for place, slots in self._read.popleft():
                each = used.setdefault(place, set())
                if len(each) < _MOST_TOUCHED:
                    each.update(numbers(slots))
        touched = [pb.PoolSlots(pool=place, slots=sorted(each)[:_MOST_TOUCHED]) for place, each in used.items()]
        return pb.ClientMessage(touch=pb.Touch(lookups=lookups, loads=loads, slots=touched))


def self_service(arenas: Arenas) -> SelfService | None:
    """Return the means to serve oneself; None where the daemon gave no index to some pool with pages here."""
    if not arenas.index or set(arenas.index) != set(arenas.read):
        return None
    try:
        return SelfService(arenas)
    except (ValueError, SessionLost):
        # Of another layout than we know: the daemon is asked instead.
        return None
