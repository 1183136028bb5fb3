"""Read pools and boards: what a session lists stays, whatever becomes of its key, and neither loads nor publishing are stopped by it."""

from __future__ import annotations

import pytest
from tests.core_support import ListedSlots

from hoststage.core.boards import LEAST_ENTRIES, MOST_ENTRIES, board_room, board_share
from hoststage.core.readpool import ReadPool
from hoststage.core.slots import Slots, SlotState
from hoststage.shm.pageindex import PageIndex, PageIndexWriter, index_bytes


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def pool_of(size: int, reserve: int = 1, write_span: int = 1) -> tuple[ReadPool, PageIndex]:
    pool = ReadPool(size, reserve=reserve, write_span=write_span, keep=True)
    memory = memoryview(bytearray(index_bytes(size)))
    pool.mirror_to(PageIndexWriter(memory, size))
    return pool, PageIndex(memory.toreadonly(), size)


def publish(pool: ReadPool, *names: str) -> Slots:
    slots = pool.place_publish(len(names))
    assert slots is not None
    pool.filled(slots, [key(n) for n in names], [b"c"] * len(names), load=False)
    return slots


def resident(pool: ReadPool) -> set[str]:
    return {k.decode().rstrip(".") for k in pool.index}


def test_a_listed_page_is_not_evicted_and_the_next_oldest_goes() -> None:
    pool, index = pool_of(6)
    board = ListedSlots(1)
    pool.add_board(board)
    slots = publish(pool, "a", "b", "c", "d")
    board.listed.append(int(slots[0]))
    found = index.find(key("a"), 32)
    publish(pool, "e")
    assert resident(pool) == {"a", "c", "d", "e"}
    # Where it stood, under the same version: what a reader copied meanwhile counts.
    assert found is not None
    assert index.stands(found)
    assert index.find(key("b"), 32) is None
    assert pool.boards.honoured == 1
    pool.check()


def test_a_listed_page_that_is_replaced_or_dropped_lingers_until_it_is_listed_no_more() -> None:
    pool, index = pool_of(8)
    board = ListedSlots(2)
    pool.add_board(board)
    first = publish(pool, "a", "b")
    board.listed[:] = first.tolist()
    publish(pool, "a")
    assert pool.drop([key("b")]) == 1
    assert index.find(key("b"), 32) is None
    assert pool.boards.lingering == set(first.tolist())
    assert pool.by_state() == {"free": 5, "resident": 1, "lingering": 2}
    pool.sweep()
    assert pool.boards.lingering == set(first.tolist())
    board.listed.pop(0)
    pool.sweep()
    assert pool.boards.lingering == {int(first[1])}
    pool.check()
    pool.remove_board(board)
    assert not pool.boards.lingering
    assert pool.table.free == 7
    pool.check()


def test_a_page_that_lingers_is_freed_once_whoever_asks_for_it() -> None:
    pool, _ = pool_of(5)
    board = ListedSlots(1)
    pool.add_board(board)
    slots = publish(pool, "a")
    board.listed.append(int(slots[0]))
    pool.drop([key("a")])
    board.listed.clear()
    pool.settle(slots)
    pool.check()
    pool.sweep()
    assert pool.table.free == 5
    pool.check()


def test_what_lingers_is_freed_for_whoever_needs_room() -> None:
    pool, _ = pool_of(5)
    board = ListedSlots(1)
    pool.add_board(board)
    slots = publish(pool, "a", "b", "c")
    board.listed.append(int(slots[0]))
    pool.drop([key("a")])
    board.listed.clear()
    assert pool.table.free == 2
    assert pool.place_load(3) is not None
    assert resident(pool) == {"b", "c"}
    pool.check()


def test_evicting_all_spares_what_is_listed() -> None:
    pool, index = pool_of(8)
    board = ListedSlots(1)
    pool.add_board(board)
    slots = publish(pool, "a", "b", "c")
    board.listed.append(int(slots[1]))
    assert pool.drop_idle() == 2
    assert resident(pool) == {"b"}
    assert index.find(key("b"), 32) is not None
    pool.check()


def test_an_eviction_that_cannot_be_enough_leaves_every_page_where_readers_find_it() -> None:
    pool, index = pool_of(4, reserve=0, write_span=0)
    board = ListedSlots(2)
    slots = publish(pool, "a", "b", "c", "d")
    pool.add_board(board)
    board.listed[:] = slots[2:].tolist()
    before = [index.find(key(n), 32) for n in "abcd"]
    assert pool.place_publish(3) is None
    assert resident(pool) == {"a", "b", "c", "d"}
    assert [index.find(key(n), 32) for n in "abcd"] == before
    board.listed.clear()
    assert pool.place_publish(2) is not None
    pool.check()


def test_many_listed_pages_at_the_old_end_do_not_hide_the_others() -> None:
    pool, _ = pool_of(200, reserve=1, write_span=1)
    board = ListedSlots(40)
    slots = publish(pool, *(f"old {i}" for i in range(40)))
    publish(pool, *(f"new {i}" for i in range(120)))
    pool.add_board(board)
    board.listed[:] = slots.tolist()
    assert pool.place_load(150) is not None
    assert resident(pool) >= {f"old {i}" for i in range(40)}
    assert pool.table.counts[SlotState.RESIDENT] == 50
    pool.check()


def test_a_page_that_is_leased_and_listed_stays_until_neither_holds_it() -> None:
    pool, _ = pool_of(8)
    board = ListedSlots(1)
    pool.add_board(board)
    slots = publish(pool, "a")
    pool.lease(slots)
    board.listed.append(int(slots[0]))
    pool.drop([key("a")])
    pool.release(slots)
    assert pool.boards.lingering == {int(slots[0])}
    board.listed.clear()
    pool.sweep()
    assert pool.table.free == 8
    pool.check()


def test_whatever_stands_on_a_board_more_than_its_entries_is_not_looked_at() -> None:
    pool, _ = pool_of(8)
    board = ListedSlots(2, [-1, 4_000_000_000, 0, 1, 2, 3])
    pool.add_board(board)
    publish(pool, "a", "b", "c")
    assert pool.drop_idle() == 3
    assert pool.table.free == 8


@pytest.mark.parametrize("size", [8, 64, 100, 1000, 70_000])
def test_all_boards_together_leave_room_for_loads_and_publishing(size: int) -> None:
    for reserve in (1, size // 10, size // 2, size - 1):
        for span in {1, min(reserve, size - reserve)}:
            pool, _ = pool_of(size, reserve=reserve, write_span=span)
            given = []
            while share := pool.next_board():
                assert LEAST_ENTRIES <= share <= MOST_ENTRIES
                board = ListedSlots(share)
                pool.add_board(board)
                given.append(share)
            assert sum(given) <= size // 16
            assert pool.load_limit >= reserve
            assert pool.publish_limit - sum(given) >= min(span, size - reserve)
            assert len(given) != 1 or given[0] <= max(LEAST_ENTRIES, board_room(size, reserve, span) // 4)


def test_a_share_is_no_more_than_what_is_left_and_no_less_than_is_of_use() -> None:
    assert board_share(0, 0) == 0
    assert board_share(5, 0) == 4
    assert board_share(5, 4) == 0
    assert board_share(40, 0) == 10
    assert board_share(40, 35) == 5
    assert board_share(1 << 20, 0) == MOST_ENTRIES


def test_nobody_gets_a_board_where_pages_do_not_stay_or_publishing_has_all() -> None:
    pool, _ = pool_of(160)
    assert pool.next_board() == 4
    pool.keep = False
    assert pool.next_board() == 0
    pool.keep = True
    assert pool.place_publish(158) is not None
    assert pool.next_board() == 0


def test_nobody_gets_a_board_whose_room_is_being_stored_though_loads_lease_it_too() -> None:
    reserve = 8
    pool, _ = pool_of(160, reserve=reserve, write_span=reserve)
    share = pool.next_board()
    assert share
    names = [f"stored {i}" for i in range(pool.publish_limit)]
    slots = pool.place_publish(len(names))
    assert slots is not None
    pool.begin_drain(slots)
    pool.filled(slots, [key(n) for n in names], [b"c"] * len(names), load=False)
    # The store is slow, and loads lease what is being stored: when they release it, it is still in use.
    leased = slots[: pool.load_limit]
    pool.lease(leased)
    assert pool.next_board() == 0
    pool.release(leased)
    others = pool.place_load(reserve)
    assert others is not None
    pool.filled(others, [key(f"loaded {i}") for i in range(reserve)], [b"c"] * reserve, load=True)
    pool.settle(others)
    # With a board, what it lists would have been in the way of this one.
    assert pool.place_load(reserve) is not None
    pool.check()
