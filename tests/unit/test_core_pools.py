"""Slots, write pools, read pools and beliefs: bounds, generations, books that balance."""

from __future__ import annotations

import numpy as np
import pytest

from hoststage.core.beliefs import Beliefs
from hoststage.core.readpool import ReadPool
from hoststage.core.slots import SlotError, Slots, SlotState, SlotTable, as_slots
from hoststage.core.writepool import WritePool

FREE, RESERVED, RESIDENT = SlotState.FREE, SlotState.RESERVED, SlotState.RESIDENT


# ---------------------------------------------------------------- slots


def test_the_lowest_slots_are_taken_first_and_the_last_freed_again() -> None:
    table = SlotTable(5)
    assert table.take(3, RESERVED).tolist() == [0, 1, 2]
    table.release(as_slots([1]), RESERVED)
    assert table.take(2, RESERVED).tolist() == [1, 3]
    assert table.conserved()


def test_taking_more_than_is_free_changes_nothing() -> None:
    table = SlotTable(3)
    table.take(2, RESERVED)
    with pytest.raises(SlotError, match="2 slots wanted, 1 of 3"):
        table.take(2, RESERVED)
    assert table.by_state() == {"free": 1, "reserved": 2}
    assert table.take(0, RESERVED).tolist() == []
    assert table.conserved()


def test_each_taking_of_a_slot_is_a_new_generation() -> None:
    table = SlotTable(1)
    slots = table.take(1, RESERVED)
    before = table.generations(slots).copy()
    table.release(slots, RESERVED)
    table.take(1, RESERVED)
    with pytest.raises(SlotError, match="generation 2"):
        table.check(slots, before, RESERVED)
    table.check(slots, before + 1, RESERVED)


@pytest.mark.parametrize(
    ("slots", "generations", "words"),
    [
        ([0, 3], [1, 1], "out of range"),
        ([0, 0xFFFFFFFF], [1, 1], "out of range"),
        ([0, 0], [1, 1], "twice"),
        ([0, 1], [1], "come with"),
        ([0, 2], [1, 0], "FREE"),
        ([0, 1], [1, 0], "generation"),
    ],
)
def test_a_batch_with_one_bad_reference_is_refused_whole(slots: list[int], generations: list[int], words: str) -> None:
    table = SlotTable(3)
    table.take(2, RESERVED)
    with pytest.raises(SlotError, match=words):
        table.check(as_slots(slots), as_slots(generations), RESERVED)
    assert table.conserved()


def test_a_move_of_slots_of_which_one_is_in_another_state_changes_nothing() -> None:
    table = SlotTable(2)
    table.take(1, RESERVED)
    with pytest.raises(SlotError, match="RESERVED"):
        table.move(as_slots([0, 1]), RESERVED, RESIDENT)
    assert table.by_state() == {"free": 1, "reserved": 1}


# ---------------------------------------------------------------- write pools


def test_holds_and_stores_never_take_each_others_share() -> None:
    pool = WritePool(3, holds=2)
    held = pool.hold(2)
    assert pool.room == 3
    with pytest.raises(SlotError, match="hold slots"):
        pool.hold(1)
    pool.reserve(3)
    assert pool.room == 0
    pool.drop_hold(held)
    assert pool.room == 0
    with pytest.raises(SlotError, match="write slots"):
        pool.reserve(1)
    assert pool.hold(2).tolist()
    assert pool.table.conserved()


def test_what_the_owner_may_still_write_stays_out_of_use_until_it_is_gone() -> None:
    pool = WritePool(3, holds=1)
    slots = pool.reserve(2)
    pool.hold(1)
    assert pool.quarantine() == 2
    with pytest.raises(SlotError, match="QUARANTINED"):
        pool.abort(slots, pool.table.generations(slots))
    assert pool.room == 1
    assert pool.owner_gone() == 3
    assert (pool.table.free, pool.held, pool.room) == (4, 0, 3)


def test_what_was_committed_outlives_its_owner() -> None:
    pool = WritePool(3)
    slots = pool.reserve(2)
    pool.table.move(slots, RESERVED, SlotState.COMMITTED)
    pool.reserve(1)
    assert pool.owner_gone() == 1
    assert pool.busy == 2


def test_slots_granted_ahead_are_counted_until_they_are_committed() -> None:
    pool = WritePool(4)
    ahead = pool.reserve(2, ahead=True)
    pool.reserve(1)
    assert pool.credits == 2
    pool.commit(ahead[:1])
    assert pool.credits == 1
    pool.table.release(ahead[:1], SlotState.COMMITTED)
    assert pool.reserve(1).tolist() == ahead[:1].tolist()
    assert pool.credits == 1


# ---------------------------------------------------------------- read pools


def cache(size: int = 4, *, reserve: int = 1, write_span: int = 1, keep: bool = True) -> ReadPool:
    return ReadPool(size, reserve=reserve, write_span=write_span, keep=keep)


def publish(pool: ReadPool, *names: str, commit: bytes = b"c") -> Slots:
    slots = pool.place_publish(len(names))
    assert slots is not None
    pool.filled(slots, [n.encode() for n in names], [commit] * len(names), load=False)
    return slots


def resident(pool: ReadPool) -> set[str]:
    pool.check()
    return {key.decode() for key in pool.index}


def test_publishing_never_takes_the_reserve_even_from_an_empty_arena() -> None:
    pool = cache(8, reserve=3)
    assert pool.place_publish(6) is None
    slots = pool.place_publish(5)
    assert slots is not None
    assert pool.place_publish(1) is None
    assert pool.place_load(3) is not None
    pool.check()


def test_loads_leave_room_for_one_write_span() -> None:
    pool = cache(8, reserve=3, write_span=2)
    assert pool.place_load(7) is None
    assert pool.place_load(6) is not None
    assert pool.place_load(1) is None
    assert pool.place_publish(2) is not None
    pool.check()


def test_while_loads_wait_publishing_has_one_write_span_and_no_more() -> None:
    pool = cache(8, reserve=2, write_span=2)
    first = pool.place_publish(2, loads_wait=True)
    assert first is not None
    assert pool.place_publish(1, loads_wait=True) is None
    pool.begin_drain(first)
    pool.filled(first, [b"a", b"b"], [b"c"] * 2, load=False)
    assert pool.place_publish(1, loads_wait=True) is None
    pool.end_drain(first)
    assert pool.place_publish(2, loads_wait=True) is not None
    pool.check()


def test_the_least_recently_used_page_goes_first() -> None:
    pool = cache(4, reserve=1)
    for name in "abc":
        publish(pool, name)
    used = as_slots([pool.index[b"a"]])
    pool.lease(used)
    pool.release(used)
    publish(pool, "d")
    assert resident(pool) == {"a", "c", "d"}


def test_a_page_is_as_recent_as_the_end_of_its_last_lease() -> None:
    pool = cache(4, reserve=1)
    publish(pool, "a")
    used = as_slots([pool.index[b"a"]])
    pool.lease(used)
    publish(pool, "b")
    publish(pool, "c")
    pool.release(used)
    publish(pool, "d")
    assert resident(pool) == {"a", "c", "d"}


def test_evicting_published_pages_leaves_the_order_of_the_others_alone() -> None:
    pool = cache(6, reserve=2, write_span=1)
    fetched = pool.place_load(1)
    assert fetched is not None
    pool.filled(fetched, [b"oldest"], [b"c"], load=True)
    publish(pool, "a", "b", "c", "d")
    publish(pool, "e")
    assert resident(pool) == {"oldest", "b", "c", "d", "e"}
    assert pool.place_load(2) is not None
    assert resident(pool) == {"b", "c", "d", "e"}


def test_leased_and_draining_pages_are_not_evicted() -> None:
    pool = cache(4, reserve=1, write_span=0)
    slots = publish(pool, "a", "b", "c")
    pool.lease(slots[:1])
    pool.begin_drain(slots[1:2])
    assert pool.evictable == 1
    assert pool.place_load(3) is None
    assert resident(pool) == {"a", "b", "c"}
    assert pool.place_load(2) is not None
    assert resident(pool) == {"a", "b"}


def test_an_eviction_that_cannot_be_enough_evicts_nothing_and_can_be_tried_again() -> None:
    pool = cache(4, reserve=0, write_span=0)
    slots = publish(pool, "a", "b", "c", "d")
    pool.lease(slots[2:])
    assert pool.place_publish(3) is None
    assert resident(pool) == {"a", "b", "c", "d"}
    assert pool.place_publish(2) is not None
    assert resident(pool) == {"c", "d"}


def test_what_is_evicted_is_told_and_a_drop_is_not() -> None:
    pool = cache(3, reserve=1)
    told: list[bytes] = []
    pool.evicted = told.extend
    publish(pool, "a", "b")
    publish(pool, "c")
    assert told == [b"a"]
    assert pool.drop([b"b", b"unknown"]) == 1
    assert told == [b"a"]
    assert pool.drop_idle() == 1
    assert told == [b"a", b"c"]


def test_a_dropped_page_serves_those_who_lease_it_and_is_freed_after_the_last() -> None:
    pool = cache(3)
    slots = publish(pool, "a")
    pool.lease(slots)
    pool.lease(slots)
    pool.drop([b"a"])
    pool.release(slots)
    assert pool.table.state[slots[0]] == SlotState.READY
    pool.release(slots)
    assert pool.table.state[slots[0]] == FREE
    assert (pool.load_held, pool.published_held) == (0, 0)
    pool.check()


def test_a_dropped_page_is_freed_only_after_its_store_write() -> None:
    pool = cache(3)
    slots = publish(pool, "a")
    pool.begin_drain(slots)
    pool.drop([b"a"])
    assert pool.table.state[slots[0]] == RESIDENT
    pool.end_drain(slots)
    assert pool.table.state[slots[0]] == FREE
    pool.check()


def test_a_published_page_replaces_an_older_one_which_leaves_with_its_last_lease() -> None:
    pool = cache(4)
    old = publish(pool, "a", commit=b"1")
    pool.lease(old)
    new = publish(pool, "a", commit=b"2")
    assert pool.index == {b"a": int(new[0])}
    assert pool.commits[old[0]] == b"1"
    pool.release(old)
    assert pool.table.state[old[0]] == FREE
    pool.check()


def test_a_fetched_page_does_not_displace_one_published_meanwhile() -> None:
    pool = cache(4)
    fetched = pool.place_load(1)
    assert fetched is not None
    new = publish(pool, "a", commit=b"2")
    pool.filled(fetched, [b"a"], [b"1"], load=True)
    pool.lease(fetched)
    assert pool.index == {b"a": int(new[0])}
    pool.release(fetched)
    assert pool.table.state[fetched[0]] == FREE
    pool.check()


def test_in_buffer_only_a_page_stays_no_longer_than_its_last_lease() -> None:
    pool = cache(3, keep=False)
    slots = pool.place_load(2)
    assert slots is not None
    pool.filled(slots, [b"a", b"b"], [b"c", b"c"], load=True)
    pool.lease(slots[:1])
    pool.settle(slots)
    assert resident(pool) == {"a"}
    pool.release(slots[:1])
    assert resident(pool) == set()
    assert pool.table.free == 3


def test_slots_into_which_nothing_came_are_free_again() -> None:
    pool = cache(4)
    published, loaded = pool.place_publish(2), pool.place_load(1)
    assert published is not None
    assert loaded is not None
    pool.unfilled(published, load=False)
    pool.unfilled(loaded, load=True)
    assert (pool.table.free, pool.load_held, pool.published_held) == (4, 0, 0)


def test_check_notices_books_that_do_not_balance() -> None:
    pool = cache(4)
    publish(pool, "a")
    pool.load_held += 1
    with pytest.raises(SlotError, match="loads hold"):
        pool.check()
    pool.load_held -= 1
    pool.leases[0] += 1
    with pytest.raises(SlotError, match="leased"):
        pool.check()


# ---------------------------------------------------------------- beliefs


def test_the_belief_confirmed_longest_ago_goes_first() -> None:
    beliefs = Beliefs(2)
    beliefs.add([b"a", b"b"])
    beliefs.add([b"a"])
    beliefs.add([b"c"])
    assert (b"a" in beliefs, b"b" in beliefs, b"c" in beliefs) == (True, False, True)
    assert beliefs.drop([b"a", b"b"]) == 1
    assert len(beliefs) == 1
    beliefs.clear()
    assert b"c" not in beliefs


def test_no_room_for_beliefs_is_no_beliefs() -> None:
    beliefs = Beliefs(0)
    beliefs.add([b"a"])
    assert len(beliefs) == 0


def test_index_arrays_are_of_one_type() -> None:
    assert as_slots(range(3)).dtype == np.uint32
