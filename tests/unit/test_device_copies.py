"""Copies of a device's pages as rectangles, with the CUDA runtime's 2D copy played by plain copies: every byte goes where it belongs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hoststage.client.engines.sglang.devicecopy import copies_for, rectangles
from hoststage.client.errors import StackError
from hoststage.shm import cuda


def _places(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_rows_at_even_steps_are_one_rectangle() -> None:
    found = rectangles(_places(0, 100, 200, 300), _places(1000, 1050, 1100, 1150), _places(50, 50, 50, 50))
    assert found == [(0, 4, 100, 50)]


def test_a_new_step_another_length_or_a_step_back_begins_another_one() -> None:
    assert rectangles(_places(0, 100, 500), _places(0, 100, 200), _places(8, 8, 8)) == [(0, 2, 100, 100), (2, 1, 8, 8)]
    assert rectangles(_places(0, 100), _places(0, 100), _places(8, 16)) == [(0, 1, 8, 8), (1, 1, 16, 16)]
    assert rectangles(_places(100, 0), _places(0, 100), _places(8, 8)) == [(0, 1, 8, 8), (1, 1, 8, 8)]
    # Pages that are the same page twice, or overlap, are never one rectangle.
    assert rectangles(_places(0, 4), _places(0, 100), _places(8, 8)) == [(0, 1, 8, 8), (1, 1, 8, 8)]
    assert rectangles(_places(), _places(), _places()) == []


@pytest.mark.parametrize("seed", range(20))
def test_rectangles_copy_the_bytes_that_single_copies_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    base = source.__array_interface__["data"][0]
    one, other = np.zeros(1 << 16, dtype=np.uint8), np.zeros(1 << 16, dtype=np.uint8)
    to, frm, sizes = [], [], []
    for piece in range(4):
        size = int(rng.integers(8, 64))
        # Slots and rows in runs, as allocators hand them out.
        slots = rng.permutation(60)[:20] if seed % 2 else np.sort(rng.permutation(60)[:20])
        rows = np.sort(rng.permutation(60)[:20])
        to += [piece * 16384 + int(slot) * 256 for slot in slots]
        frm += [piece * 16384 + int(row) * 64 for row in rows]
        sizes += [size] * 20
    for at, place, size in zip(to, frm, sizes, strict=True):
        one[at : at + size] = source[place : place + size]
    runtime = _runtime(_Played())
    target = other.__array_interface__["data"][0]
    arrays = (np.array(to) + target, np.array(frm) + base, np.array(sizes))
    for first, rows_, to_step, source_step in rectangles(*arrays):
        runtime.copy_rows(
            (int(arrays[0][first]), to_step),
            (int(arrays[1][first]), source_step),
            int(arrays[2][first]),
            rows_,
            7,
            pinned=True,
        )
    assert np.array_equal(one, other)


class _Played:
    """Plays `cudaMemcpy2DAsync` with plain copies; answers `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.cleared = 0

    def cudaMemcpy2DAsync(
        self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int, kind: int, stream: int
    ) -> int:
        assert kind == 4
        assert stream == 7
        assert min(to_step, source_step) >= width
        for row in range(rows):
            ctypes.memmove(to + row * to_step, source + row * source_step, width)
        return self.code

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0

    def cudaGetErrorString(self, code: int) -> bytes:
        return b"invalid pitch"


def _runtime(library: _Played) -> cuda.Runtime:
    runtime = cuda.Runtime.__new__(cuda.Runtime)
    runtime._enqueue, runtime._lib = library, library
    return runtime


def test_a_copy_that_the_runtime_refuses_is_an_error_and_leaves_none_pending() -> None:
    library = _Played(code=12)
    buffer = np.zeros(16, dtype=np.uint8)
    at = buffer.__array_interface__["data"][0]
    with pytest.raises(cuda.CudaFailed, match="invalid pitch"):
        _runtime(library).copy_rows((at, 8), (at + 8, 8), 8, 1, 7, pinned=False)
    assert library.cleared == 1


def test_a_device_of_another_kind_is_refused() -> None:
    class Device:
        type = "xpu"

    with pytest.raises(StackError, match="xpu"):
        copies_for(Device(), lambda: True)
