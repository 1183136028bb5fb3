"""Boards: where sessions write by themselves which resident pages they read, so that a lease costs no request.

A client writes a slot on its board and then looks whether the index still says that the page stands there. The daemon takes a page's word in
the index back and then looks at the boards. Each has a full barrier between its two steps, so that at least one of them sees the other: either the
client finds the page gone, or the daemon finds it listed, and a page that is listed stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

LEAST_ENTRIES = 4
"""A board with fewer is not worth its descriptor."""
MOST_ENTRIES = 256


class IndexMirror(Protocol):
    """What follows the index, entry by entry, for others to read.

    An entry is dropped, or suspended, before its slot can be given to another page. `resume` ends a suspension: the page is where it was all
    the time. `barrier`: whatever was done here until now is seen by everybody before what the caller reads next.
    """

    def put(self, key: bytes, slot: int) -> None: ...
    def drop(self, slot: int) -> None: ...
    def suspend(self, slots: Iterable[int]) -> None: ...
    def resume(self, slots: Iterable[int]) -> None: ...
    def barrier(self) -> None: ...


class Board(Protocol):
    """One session's board for one pool. It is the client's to write: what stands there may be anything."""

    @property
    def entries(self) -> int:
        """The most slots that can be listed on it."""
        ...

    def slots(self) -> Iterable[int]:
        """Return what is listed now, at most `entries` numbers."""
        ...


class Boards:
    """The boards of all sessions for one read pool.

    entries: what they can list together. lingering: slots whose pages left the index while they were listed; they are free once a look
    finds them on no board. honoured: how often a page stayed because it was listed.
    """

    __slots__ = ("_all", "entries", "honoured", "lingering")

    def __init__(self) -> None:
        self._all: list[Board] = []
        self.entries = 0
        self.honoured = 0
        self.lingering: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, board: Board) -> None:
        """A session has a board from now on."""
        self._all.append(board)
        self.entries += board.entries

    def remove(self, board: Board) -> None:
        """Its session is over: what it lists counts no more."""
        self._all.remove(board)
        self.entries -= board.entries

    def listed(self, slots: Collection[int], mirror: IndexMirror | None) -> set[int]:
        """Return those of the slots that are listed. Their entries in the index must have been dropped or suspended before."""
        if not self._all or not slots:
            return set()
        assert mirror is not None
        mirror.barrier()
        found: set[int] = set()
        for board in self._all:
            found.update(board.slots())
        return found.intersection(slots) if found else found


def board_room(size: int, reserve: int, write_span: int) -> int:
    """Return what all boards of a pool may list together, 0 where that is too little to be of use.

    Neither loads nor publishing have what may be listed, and both must be left with enough: the reserve, and several spans.
    """
    room = min(size // 16, (size - reserve - write_span) // 4)
    return room if room >= LEAST_ENTRIES else 0


def board_share(room: int, given: int) -> int:
    """Return the entries that one more board gets, 0 for none: at most a quarter of the room, so that others have some too."""
    share = min(MOST_ENTRIES, max(LEAST_ENTRIES, room // 4), room - given)
    return share if share >= LEAST_ENTRIES else 0
