"""The lease board: both ends agree, whatever is listed and taken off, and no order of the two sides' steps loses a page that is read."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoststage.shm import leaseboard, libc
from hoststage.shm.fence import full_fence, full_fence_known
from hoststage.shm.leaseboard import BoardSection, LeaseBoard, LeaseBoardError, board_bytes, make_board

ENTRIES = (14, 10)


def made(entries: tuple[int, ...] = ENTRIES) -> tuple[list[BoardSection], LeaseBoard]:
    memory = memoryview(bytearray(b"\xff" * (board_bytes(entries) + 64)))
    sections = make_board(memory, entries)
    return sections, LeaseBoard(memory)


def listed(section: BoardSection) -> list[int]:
    return sorted(slot for slot in section.slots() if slot >= 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.lists(st.integers(0, 99), min_size=1, max_size=11))))
def test_the_daemon_sees_what_is_listed_and_nothing_else(steps):
    sections, board = made()
    open_listings: list[tuple[object, dict[int, list[int]]]] = []
    for enlist, pick, slots in steps:
        if enlist:
            wanted = {pool: slots for pool in range(2) if pick >> pool & 1}
            room = all(
                len(wanted.get(pool, ())) + sum(len(w.get(pool, ())) for _, w in open_listings) <= n
                for pool, n in enumerate(ENTRIES)
            )
            got = board.enlist(tuple(wanted.items()))
            assert (got is not None) == room
            if got is not None:
                open_listings.append((got, wanted))
        elif open_listings:
            got, _ = open_listings.pop(pick % len(open_listings))
            board.clear(got)
        for pool, section in enumerate(sections):
            assert listed(section) == sorted(s for _, w in open_listings for s in w.get(pool, ()))
    for got, _ in open_listings:
        board.clear(got)
    assert [section.slots() for section in sections] == [[], []]


def test_what_finalizers_drop_is_taken_off_later_and_before_room_runs_out():
    sections, board = made()
    first = board.enlist(((0, [1, 2, 3]),))
    second = board.enlist(((0, [4, 5]), (1, [6])))
    board.drop(first)
    assert listed(sections[0]) == [1, 2, 3, 4, 5]
    assert board.enlist(((0, [7, 8, 9]),)) is not None
    assert listed(sections[0]) == [4, 5, 7, 8, 9]
    board.drop(second)
    board.clear_dropped()
    assert (listed(sections[0]), listed(sections[1])) == ([7, 8, 9], [])


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interruption_after_the_listing_leaves_nothing_listed(monkeypatch):
    sections, board = made()

    def interrupted() -> None:
        raise Interrupt

    monkeypatch.setattr(leaseboard, "full_fence", interrupted)
    with pytest.raises(Interrupt):
        board.enlist(((0, [1, 2, 3]), (1, [4])))
    monkeypatch.undo()
    board.clear_dropped()
    assert (listed(sections[0]), listed(sections[1])) == ([], [])
    assert board.enlist(tuple((pool, range(n)) for pool, n in enumerate(ENTRIES))) is not None


def test_an_interruption_before_the_clearing_leaves_it_to_whoever_comes_next(monkeypatch):
    sections, board = made()
    listing = board.enlist(((0, [1, 2, 3]),))

    def interrupted() -> None:
        raise Interrupt

    monkeypatch.setattr(board, "clear_dropped", interrupted)
    with pytest.raises(Interrupt):
        board.clear(listing)
    monkeypatch.undo()
    board.clear_dropped()
    assert listed(sections[0]) == []


def test_a_board_that_was_let_go_takes_nothing_and_forgets_nothing():
    sections, board = made()
    listing = board.enlist(((0, [1]),))
    board.close()
    board.clear(listing)
    assert board.enlist(((0, [2]),)) is None
    # The daemon ends it with the session: until then somebody may still look at the page.
    assert listed(sections[0]) == [1]


def test_garbage_from_a_client_is_read_within_the_daemons_own_bounds():
    memory = memoryview(bytearray(board_bytes(ENTRIES)))
    sections = make_board(memory, ENTRIES)
    memory[:] = b"\xff" * memory.nbytes
    assert [len(section.slots()) for section in sections] == list(ENTRIES)


def test_memory_that_is_no_board_is_refused():
    memory = memoryview(bytearray(board_bytes(ENTRIES)))
    with pytest.raises(LeaseBoardError, match="no lease board"):
        LeaseBoard(memory)
    make_board(memory, ENTRIES)
    with pytest.raises(LeaseBoardError, match="does not fit"):
        LeaseBoard(memory[:128])
    memory[8:12] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(LeaseBoardError, match="1048576 pools"):
        LeaseBoard(memory)


def test_threads_share_a_board():
    sections, board = made((40, 40))

    def use(slot: int) -> None:
        for _ in range(300):
            listing = board.enlist(((0, [slot]), (1, [slot, slot + 100])))
            assert listing is not None
            assert slot in sections[0].slots()
            board.clear(listing)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [section.slots() for section in sections] == [[], []]


def test_the_fence_is_known_here():
    assert full_fence_known()
    full_fence()
    if libc.has_membarrier_global_expedited():
        libc.membarrier_global_expedited()


def test_a_forked_child_lists_nothing():
    _, board = made()
    listing = board.enlist(((0, [1]),))
    child = os.fork()
    if child == 0:
        board.disown()
        board.clear(listing)
        os._exit(0 if board.enlist(((0, [2]),)) is None else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---------------------------------------------------------------- every order of the two sides' steps


class Machine:
    """Two processors with a store buffer each, as x86 has them: a store is seen by the other when the buffer is emptied, at any later time."""

    def __init__(self) -> None:
        self.memory = {"entry": 0, "stands": 1, "page": 1}
        self.buffers: dict[str, list[tuple[str, int]]] = {"client": [], "daemon": []}
        self.seen: dict[str, int] = {}

    def store(self, who: str, where: str, value: int) -> None:
        self.buffers[who].append((where, value))

    def load(self, who: str, where: str) -> int:
        own = [value for at, value in self.buffers[who] if at == where]
        return own[-1] if own else self.memory[where]

    def drain(self, who: str) -> None:
        for where, value in self.buffers[who]:
            self.memory[where] = value
        self.buffers[who].clear()


Step = Callable[[Machine], None]


def client_steps(*, fenced: bool = True, listed_first: bool = True) -> list[Step]:
    """Find the page, list it, check that it stands, read it."""

    def enlist(m: Machine) -> None:
        m.store("client", "entry", 1)
        if fenced:
            m.drain("client")

    def check(m: Machine) -> None:
        m.seen["leased"] = m.load("client", "stands")

    def read(m: Machine) -> None:
        if m.seen["leased"]:
            m.seen["read"] = m.load("client", "page")

    return [enlist, check, read] if listed_first else [check, enlist, read]


def daemon_steps(*, fenced: bool = True, suspended_first: bool = True) -> list[Step]:
    """Suspend the page in the index, look at the board, give the slot to another page where it is not listed."""

    def suspend(m: Machine) -> None:
        m.store("daemon", "stands", 0)
        if fenced:
            m.drain("daemon")

    def look(m: Machine) -> None:
        m.seen["listed"] = m.load("daemon", "entry")

    def overwrite(m: Machine) -> None:
        m.drain("daemon")
        if not m.seen["listed"]:
            m.memory["page"] = 2

    return [suspend, look, overwrite] if suspended_first else [look, suspend, overwrite]


def orders(client: list[Step], daemon: list[Step]) -> Iterator[list[Step]]:
    """Return every order of both sides' steps, with the client's buffer emptied by itself at any one place, and the daemon's at any other."""
    for places in itertools.combinations(range(len(client) + len(daemon)), len(client)):
        mine, its = iter(client), iter(daemon)
        steps = [next(mine) if at in places else next(its) for at in range(len(client) + len(daemon))]
        for first in range(len(steps) + 1):
            for second in range(len(steps) + 1):
                order = list(steps)
                for at, who in sorted([(first, "client"), (second, "daemon")], reverse=True):
                    order.insert(at, lambda m, who=who: m.drain(who))
                yield order


def torn(client: list[Step], daemon: list[Step]) -> int:
    """Return in how many orders a page is read, under a lease that the client believes in, which has been overwritten."""
    bad = 0
    for order in orders(client, daemon):
        machine = Machine()
        for step in order:
            step(machine)
        bad += machine.seen.get("read") == 2
    return bad


def test_in_no_order_of_both_sides_steps_is_a_page_overwritten_that_is_leased():
    assert torn(client_steps(), daemon_steps()) == 0


@pytest.mark.parametrize(
    ("client", "daemon"),
    [
        ({"listed_first": False}, {}),
        ({}, {"suspended_first": False}),
        ({"fenced": False}, {}),
        ({}, {"fenced": False}),
    ],
    ids=["checks before it lists", "looks before it suspends", "client without a fence", "daemon without a fence"],
)
def test_each_side_needs_its_order_and_its_fence(client, daemon):
    assert torn(client_steps(**client), daemon_steps(**daemon)) > 0
