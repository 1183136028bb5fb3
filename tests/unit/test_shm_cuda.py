"""Registration with CUDA, as far as it goes without a device."""

import pytest

from hoststage.shm.cuda import CudaUnavailable, Runtime, pieces

GIB = 1 << 30


def test_pieces_end_at_slot_boundaries_and_cover_everything():
    stride = 3 << 20
    cut = pieces(200 * GIB // stride * stride, stride)
    assert all(at % stride == 0 for at, _ in cut)
    assert all(size <= 64 * GIB for _, size in cut)
    assert [at for at, _ in cut[1:]] == [at + size for at, size in cut[:-1]]
    assert sum(size for _, size in cut) == 200 * GIB // stride * stride


def test_a_slot_larger_than_a_piece_is_a_piece_of_its_own():
    assert pieces(20, 10, most=4) == [(0, 10), (10, 10)]


def test_a_runtime_that_is_not_there_is_said_to_be_absent():
    with pytest.raises(CudaUnavailable, match="not available"):
        Runtime("/nonexistent/libcudart.so")
