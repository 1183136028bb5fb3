"""The lease board: memory of one session in which it lists the slots that it reads, so that the daemon lets them stay.

The client alone writes it, the daemon reads it. Layout, little-endian: a header of 64 bytes (magic, how many pools), `u32` entries for each
pool, and from the next multiple of 64 bytes on a section for each pool: `u32` extent, and as many `u32` as it has entries: a slot + 1, or 0. Entries from the
extent on are not looked at. The header is for the client: the daemon goes by what it remembers.

To lease pages, a client finds them in the page index, lists their slots, has a full fence, and checks that their versions still stand. If so they
are leased, until it writes zeros. If not, it takes them off the board and asks.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from hoststage.shm.fence import fence, full_fence
from hoststage.shm.pageindex import Slots, array_of

_HEADER = struct.Struct("<8sI")
_HEADER_BYTES = 64
_MAGIC = b"hsboard1"

_FEW = 8
"""So many entries are written one by one: numpy's fixed cost a call is larger than that."""

Listing = tuple[tuple[int, Sequence[int]], ...]
"""For each pool that has any, its place, and which of its entries are in use."""


class LeaseBoardError(ValueError):
    """The memory is no lease board."""


def board_bytes(entries: Sequence[int]) -> int:
    """Return the bytes of a board with so many entries in each pool."""
    return _places(entries)[-1]


def _places(entries: Sequence[int]) -> list[int]:
    """Return where the section of each pool begins, in bytes, and where the last one ends."""
    at = _aligned(_HEADER_BYTES + 4 * len(entries))
    places = [at]
    for n in entries:
        at = _aligned(at + 4 + 4 * n)
        places.append(at)
    return places


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class BoardSection:
    """The daemon's end, for one pool. What it reads may be anything: the client may write all of it, at any time."""

    def __init__(self, memory: memoryview, at: int, entries: int) -> None:
        self._words = memory[at : at + 4 + 4 * entries].cast("I")
        self.entries = entries

    def slots(self) -> list[int]:
        """Return what is listed now, in no order; -1 for an entry that is not in use."""
        extent = self._words[0]
        if not extent:
            return []
        return [entry - 1 for entry in self._words[1 : 1 + min(extent, self.entries)]]


def make_board(memory: memoryview, entries: Sequence[int]) -> list[BoardSection]:
    """Clear the memory, which has at least `board_bytes(entries)` writable bytes, make a board of it, and return its sections."""
    places = _places(entries)
    memory[: places[-1]] = bytes(places[-1])
    _HEADER.pack_into(memory, 0, _MAGIC, len(entries))
    struct.pack_into(f"<{len(entries)}I", memory, _HEADER_BYTES, *entries)
    return [BoardSection(memory, at, n) for at, n in zip(places, entries, strict=False)]


class LeaseBoard:
    """A client's end. Any number of threads may use it.

    memory: the daemon's, mapped writable. :raises LeaseBoardError: where it is no board.
    """

    def __init__(self, memory: memoryview) -> None:
        magic, pools = _HEADER.unpack_from(memory, 0)
        if magic != _MAGIC or _HEADER_BYTES + 4 * pools > memory.nbytes:
            raise LeaseBoardError(f"no lease board in {memory.nbytes} bytes: magic {magic!r}, {pools} pools")
        entries = struct.unpack_from(f"<{pools}I", memory, _HEADER_BYTES)
        places = _places(entries)
        if places[-1] > memory.nbytes:
            raise LeaseBoardError(f"a board with {entries} entries does not fit {memory.nbytes} bytes")
        self._words = [memory[at : at + 4 + 4 * n].cast("I") for at, n in zip(places, entries, strict=False)]
        self._cells = [np.frombuffer(words, dtype=np.uint32) for words in self._words]
        # The lowest go out first, so that the daemon has few to look at.
        self._free = [list(range(n, 0, -1)) for n in entries]
        self.entries: tuple[int, ...] = entries
        self._lock = threading.Lock()
        self._dropped: deque[Listing] = deque()

    def enlist(self, wanted: Sequence[tuple[int, Slots]]) -> Listing | None:
        """List slots of some pools, and have them seen before anything that is read next; None where there is no room for all.

        wanted: place of each pool, and slots of it, one at least.
        """
        listing: list[tuple[int, Sequence[int]]] = []
        try:
            with self._lock:
                if self._dropped:
                    self._clear_dropped()
                if not self._words:
                    return None
                for pool, slots in wanted:
                    if len(slots) > len(self._free[pool]):
                        return None
                for pool, slots in wanted:
                    listing.append((pool, self._take(pool, slots)))
            full_fence()
        except BaseException:
            # Interrupted: nobody will ask for them to be taken off.
            self._dropped.append(tuple(listing))
            raise
        return tuple(listing)

    def _take(self, pool: int, slots: Slots) -> Sequence[int]:
        words, free = self._words[pool], self._free[pool]
        taken = free[-len(slots) :]
        del free[-len(slots) :]
        if len(taken) > _FEW:
            self._cells[pool][taken] = array_of(slots) + 1
        else:
            for at, slot in zip(taken, slots, strict=True):
                words[at] = slot + 1
        words[0] = max(words[0], *taken)
        return taken

    def clear(self, listing: Listing) -> None:
        """Take what was listed off the board: it is read no more."""
        # Left to whoever comes next, where this is interrupted.
        self._dropped.append(listing)
        self.clear_dropped()

    def drop(self, listing: Listing) -> None:
        """Have it taken off soon. For finalizers, which may run in the middle of anything, another method of this one included."""
        self._dropped.append(listing)

    def clear_dropped(self) -> None:
        """Take off what was dropped."""
        if self._dropped:
            with self._lock:
                self._clear_dropped()

    def _clear_dropped(self) -> None:
        # Whoever sees the zeros must not be ahead of our last reads.
        fence()
        while self._dropped:
            self._clear(self._dropped.popleft())

    def _clear(self, listing: Listing) -> None:
        if not self._words:
            return
        for pool, taken in listing:
            words, free = self._words[pool], self._free[pool]
            if len(taken) > _FEW:
                self._cells[pool][taken] = 0
            else:
                for at in taken:
                    words[at] = 0
            free.extend(taken)
            if len(free) == self.entries[pool]:
                words[0] = 0
                if free[-1] != 1:
                    free.sort(reverse=True)

    def close(self) -> None:
        """Let the memory go, so that it can be unmapped. What is listed stays so, until the daemon ends the session."""
        with self._lock:
            self._words, self._cells = [], []

    def disown(self) -> None:
        """In a forked child, which has no such memory, and whose copy of the lock may be held for ever."""
        self._lock = threading.Lock()
        self._words, self._cells = [], []
