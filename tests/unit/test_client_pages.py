"""Runs are cut into commits that fit, and callers' memory is found where it is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoststage.client import StackError
from hoststage.client._pages import PageRows, adjacent, pack_keys, split
from hoststage.client.cuda import availability, register_arenas
from hoststage.shm.cuda import pieces
from hoststage.v1.ops import NO_SLOT, PoolRange

PAGE = 64


@st.composite
def runs(draw):
    keys = draw(st.integers(1, 200))
    ranges = []
    for pool in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, keys - 1))
        ranges.append(PoolRange(pool, first, draw(st.integers(1, keys - first))))
    room = [draw(st.integers(1, 64)) for _ in ranges]
    return keys, ranges, room, draw(st.integers(1, 250))


@given(runs())
def test_pieces_cover_every_page_once_in_order_and_fit(run):
    keys, ranges, room, most_keys = run
    seen = {r.pool: [] for r in ranges}
    before = 0
    for piece in split(keys, ranges, room, most_keys):
        assert before <= piece.start < piece.end <= keys
        assert piece.end - piece.start <= most_keys
        before = piece.end
        for part in piece.parts:
            assert 0 < part.count <= room[part.pool]
            assert part.first >= 0
            assert part.first + part.count <= piece.end - piece.start
            at = ranges[part.pool].first
            places = range(piece.start + part.first, piece.start + part.first + part.count)
            assert part.row == places[0] - at
            seen[part.pool] += places
    for r in ranges:
        assert seen[r.pool] == list(range(r.first, r.first + r.count))


def test_a_run_that_fits_is_one_commit():
    [piece] = split(8, [PoolRange(0, 0, 8), PoolRange(1, 4, 4)], [8, 4], 100)
    assert (piece.start, piece.end, len(piece.parts)) == (0, 8, 2)


def test_keys_are_packed_or_refused():
    assert pack_keys([b"ab", b"cd"]).packed == b"abcd"
    assert len(pack_keys(bytes(96))) == 3
    for bad in ([], b"", bytes(33), [b"a", b"bc"], [b""], [bytes(65)]):
        with pytest.raises(StackError, match="keys"):
            pack_keys(bad)


def test_rows_are_found_in_lists_arrays_and_shaped_arrays():
    array = np.arange(4 * PAGE, dtype=np.uint8).reshape(4, PAGE)
    shaped = array.view(np.uint16).reshape(4, 2, PAGE // 4)
    lists = [bytes(row) for row in array]
    for given_rows in (array, shaped, lists):
        rows = PageRows(given_rows, "kv", PAGE, writable=False)
        assert rows.count == 4
        assert [rows.row_bytes(i) for i in range(4)] == lists


@pytest.mark.parametrize(
    ("rows", "writable", "words"),
    [
        ([bytes(PAGE - 1)], False, "64 bytes are due"),
        ([bytes(PAGE)], True, "read-only"),
        (np.zeros((4, PAGE), np.uint8)[::2], False, "contiguous"),
        (np.zeros((4, PAGE + 1), np.uint8), False, "256 bytes are due"),
        (np.zeros((4, PAGE), np.uint8)[:, : PAGE // 2], False, "'128 bytes': 256 bytes are due"),
        ([np.zeros((2, PAGE), np.uint8)[:, 1]], False, "'2 bytes': 64 bytes are due"),
        (object(), False, "first axis"),
        ([3], False, "no buffer"),
    ],
)
def test_memory_out_of_form_is_refused_by_name(rows, writable, words):
    with pytest.raises(StackError, match=words) as caught:
        PageRows(rows, "kv", PAGE, writable=writable)
    assert caught.value.field.startswith("pages['kv']")


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 5000))
def test_registration_is_cut_at_slot_boundaries(slots, stride, most):
    size = slots * stride
    cut = pieces(size, stride, most)
    assert cut[0][0] == 0
    assert sum(n for _, n in cut) == size
    for (at, n), (following, _) in itertools.pairwise(cut):
        assert at + n == following
        assert following % stride == 0
    assert all(n <= max(most, stride) for _, n in cut)


def test_without_a_device_the_report_says_so_and_nothing_fails():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert availability(load_torch=True) == "not available: torch sees no CUDA device"
    report = register_arenas([], "auto")
    assert not report.pinned
    assert report.reason.startswith("not available: ")


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([7], True),
        ([7, 8, 9], True),
        ([7, 9, 8], False),
        ([7, 9, 9], False),
        ([9, 8, 7], False),
        ([7, 8, 10], False),
        ([NO_SLOT], False),
        ([7, NO_SLOT], False),
        ([NO_SLOT - 1, NO_SLOT], False),
        ([NO_SLOT, 0], False),
        ([NO_SLOT, 0, 1], False),
    ],
)
def test_slots_are_adjacent_where_each_follows_the_one_before(slots, expected):
    assert adjacent(np.array(slots, dtype=np.uint32)) is expected
