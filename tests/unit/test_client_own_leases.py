"""Leases that a client takes by itself: what leaves between the look at the index and the board is noticed, and nothing stays listed by mistake."""

from __future__ import annotations

import gc
import hashlib
from types import SimpleNamespace

import pytest

from hoststage.client._pages import KeyRun
from hoststage.client._selfserve import SelfService
from hoststage.shm.leaseboard import board_bytes, make_board
from hoststage.shm.pageindex import PageIndexWriter, index_bytes

SLOTS, PAGE, ENTRIES = 32, 64, (12, 4)
KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(16)]


class Space:
    """Two pools, the second a window of two pages, with pages of all keys: page `n` lies in slot `31 - n`."""

    def __init__(self) -> None:
        self.writers, index, read = [], {}, {}
        for pool, trailing in ((0, 0), (1, 2)):
            memory, pages = memoryview(bytearray(index_bytes(SLOTS))), memoryview(bytearray(SLOTS * PAGE))
            self.writers.append(PageIndexWriter(memory, SLOTS))
            for n, key in enumerate(KEYS):
                self.writers[pool].put(key, 31 - n)
                pages[(31 - n) * PAGE : (32 - n) * PAGE] = bytes([n]) * PAGE
            index[pool] = arena(memory.toreadonly(), slots=SLOTS, trailing_pages=trailing)
            read[pool] = arena(pages.toreadonly(), stride=PAGE, page_bytes=PAGE)
        board = memoryview(bytearray(board_bytes(ENTRIES)))
        self.sections = make_board(board, ENTRIES)
        self.service = SelfService(SimpleNamespace(index=index, read=read, board=arena(board)))

    def listed(self) -> list[list[int]]:
        return [sorted(slot for slot in section.slots() if slot >= 0) for section in self.sections]


def arena(memory: memoryview, **facts: int) -> SimpleNamespace:
    return SimpleNamespace(whole=lambda: memory, **facts)


def run(*names: int) -> KeyRun:
    return KeyRun(b"".join(KEYS[n] for n in names), 32)


@pytest.mark.parametrize("prefix", [1, 3, 12])
def test_what_a_prefix_needs_is_listed_as_long_as_the_lease_stands(prefix):
    space = Space()
    leased = space.service.lease(run(*range(12)), prefix)
    assert leased is not None
    lease, (kv, window) = leased
    assert space.listed() == [list(range(32 - prefix, 32)), [*range(32 - prefix, 32)][:2]]
    assert (kv.first, window.first) == (0, max(0, prefix - 2))
    assert [bytes(view) for view in kv.views] == [bytes([n]) * PAGE for n in range(prefix)]
    assert [bytes(view) for view in window.views] == [bytes([n]) * PAGE for n in range(window.first, prefix)]
    lease.release()
    lease.release()
    assert space.listed() == [[], []]


def test_a_page_that_leaves_between_the_look_and_the_listing_is_not_leased(monkeypatch):
    for pool in (0, 1):
        for how in ("drop", "suspend"):
            space = Space()
            writer, board = space.writers[pool], space.service._board
            assert board is not None

            def late(wanted, board=board, writer=writer, how=how, enlist=board.enlist):
                writer.drop(30) if how == "drop" else writer.suspend([30])
                return enlist(wanted)

            monkeypatch.setattr(board, "enlist", late)
            assert space.service.lease(run(0, 1), 2) is None
            assert space.listed() == [[], []]


def test_a_slot_that_was_given_to_another_page_is_not_leased_for_the_first_one(monkeypatch):
    space = Space()
    board = space.service._board
    enlist = board.enlist

    def late(wanted):
        space.writers[0].drop(31)
        space.writers[0].put(KEYS[0][::-1], 31)
        return enlist(wanted)

    monkeypatch.setattr(board, "enlist", late)
    assert space.service.lease(run(0), 1) is None
    assert space.listed() == [[], []]


def test_what_is_not_resident_or_has_no_room_is_for_the_daemon_to_lease():
    space = Space()
    space.writers[1].drop(30)
    assert space.service.lease(run(0, 1), 2) is None
    assert space.service.lease(run(*range(13)), 13) is None
    assert space.service.board_pages == 4
    space.service.close()
    assert space.service.lease(run(0), 1) is None
    assert space.listed() == [[], []]


def test_a_lease_that_is_dropped_is_taken_off_at_the_next_flush():
    space = Space()
    leased = space.service.lease(run(2), 1)
    del leased
    gc.collect()
    assert space.listed() == [[29], [29]]
    space.service.flush()
    assert space.listed() == [[], []]


def test_what_serves_by_the_index_finds_nothing_once_its_memory_is_gone_and_raises_nothing():
    space = Space()
    service, held = space.service, space.service.lease(run(0), 1)
    assert service.holds(run(0, 1))
    service.close()
    service.close()
    assert (service.board_pages, service.holds(run(0, 1)), service.copy(run(0), 1, {})) == (0, False, None)
    assert service.lease(run(0), 1) is None
    held[0].release()
    service.flush()


def test_a_prefix_beyond_the_board_is_not_even_looked_up(monkeypatch):
    space = Space()
    # The second pool needs two pages of each prefix, the first one all.
    assert space.service.lease(run(*range(12)), 12) is not None
    for pool in space.service._pools:
        monkeypatch.setattr(pool.index, "find", None)
    assert space.service.lease(run(*range(13)), 13) is None
