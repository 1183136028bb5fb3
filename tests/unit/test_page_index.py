"""The page index: its writer and its reader agree, whatever is put and dropped, and a reader notices that a page has left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoststage.shm.pageindex import KEY_BYTES, PageIndex, PageIndexError, PageIndexWriter, index_bytes, table_size

SLOTS = 32


def made(slots: int = SLOTS) -> tuple[PageIndexWriter, PageIndex]:
    memory = memoryview(bytearray(index_bytes(slots)))
    return PageIndexWriter(memory, slots), PageIndex(memory.toreadonly(), slots)


def key(n: int, size: int = 32) -> bytes:
    return n.to_bytes(4, "little") * (size // 4)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, SLOTS - 1), st.integers(0, 80)), max_size=300),
    st.sampled_from([4, 20, 32]),
)
def test_what_is_found_is_what_stands_there(steps, size):
    writer, reader = made()
    slots: dict[int, bytes] = {}
    for put, slot, n in steps:
        if put and slot not in slots and key(n, size) not in slots.values():
            slots[slot] = key(n, size)
            writer.put(slots[slot], slot)
        elif not put and slots.pop(slot, None) is not None:
            writer.drop(slot)
        for asked in range(0, 80, 7):
            found = reader.find(key(asked, size), size)
            where = [s for s, k in slots.items() if k == key(asked, size)]
            assert (found[0] if found else []) == where
    every = list(slots.items())
    if every:
        # One by one and in a batch, which take different ways.
        found = reader.find(b"".join(k for _, k in every), size)
        assert found is not None
        assert list(found[0]) == [s for s, _ in every]
        assert reader.stands(found)


def test_many_keys_are_found_in_one_batch():
    slots = 5000
    writer, reader = made(slots)
    keys = [key(n * 7919) for n in range(slots)]
    for slot, each in enumerate(keys):
        writer.put(each, slot)
    found = reader.find(b"".join(keys[100:4196]), 32)
    assert found is not None
    assert np.array_equal(found[0], np.arange(100, 4196))
    assert reader.stands(found)
    writer.drop(2000)
    assert not reader.stands(found)
    assert reader.find(b"".join(keys[100:4196]), 32) is None


def test_many_keys_are_found_wherever_they_lie():
    slots = 3000
    writer, reader = made(slots)
    keys = [key(n * 7919) for n in range(slots)]
    order = np.random.default_rng(1).permutation(slots)
    # A stretch in order, as a batch leaves it, amid what lies anywhere.
    order[500:600] = np.sort(order[500:600])
    for each, slot in zip(keys, order.tolist(), strict=True):
        writer.put(each, slot)
    for first, count in ((0, 3000), (480, 200), (17, 9)):
        found = reader.find(b"".join(keys[first : first + count]), 32)
        assert found is not None
        assert np.array_equal(found[0], order[first : first + count])
        assert reader.stands(found)
    writer.drop(int(order[2999]))
    assert reader.find(b"".join(keys), 32) is None


def test_a_page_that_left_and_came_back_does_not_stand_any_more():
    writer, reader = made()
    writer.put(key(1), 3)
    found = reader.find(key(1), 32)
    assert found == ([3], [found[1][0]])
    writer.drop(3)
    assert not reader.stands(found)
    writer.put(key(2), 3)
    assert not reader.stands(found)
    writer.drop(3)
    writer.put(key(1), 3)
    assert not reader.stands(found)


def test_a_key_of_another_length_is_another_key():
    writer, reader = made()
    writer.put(b"abcd", 0)
    assert reader.find(b"abcd", 4) is not None
    assert reader.find(b"abcd\0\0\0\0", 8) is None
    assert reader.find(b"abc", 3) is None


def test_keys_that_are_too_long_are_left_to_the_daemon():
    writer, reader = made()
    long = bytes(KEY_BYTES + 1)
    writer.put(long, 0)
    assert reader.find(long, len(long)) is None
    writer.drop(0)


def test_keys_that_all_want_one_place_do_no_harm():
    writer, reader = made(200)
    # The same home: the hash takes lanes of 8 bytes, each times an odd factor; these differ in nothing that it sees.
    step = 1 << 63
    same = [b"".join(((n >> lane & 1) * step).to_bytes(8, "little") for lane in range(2)) + bytes(16) for n in range(4)]
    for slot, each in enumerate(same):
        writer.put(each, slot)
    assert [reader.find(each, 32)[0] for each in same if reader.find(each, 32)] == [[0], [1], [2], [3]]
    writer.drop(0)
    assert reader.find(same[0], 32) is None
    assert [reader.find(each, 32)[0] for each in same[1:]] == [[1], [2], [3]]


def test_after_closing_nothing_is_found_and_nothing_stands():
    writer, reader = made()
    writer.put(key(5), 5)
    found = reader.find(key(5), 32)
    writer.close()
    assert reader.find(key(5), 32) is None
    assert not reader.stands(found)


def test_memory_of_another_size_is_no_index():
    memory = memoryview(bytearray(index_bytes(SLOTS)))
    PageIndexWriter(memory, SLOTS)
    with pytest.raises(PageIndexError, match="33 slots takes"):
        PageIndex(memory, SLOTS + 1)
    with pytest.raises(PageIndexError, match="no page index of 31 slots"):
        PageIndex(memory, SLOTS - 1)


def test_the_table_is_never_more_than_two_thirds_full():
    for slots in (1, 2, 10, 11, 1000, 1_000_000):
        assert table_size(slots) * 2 >= slots * 3
        assert table_size(slots).bit_count() == 1
