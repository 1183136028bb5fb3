"""Copies between addresses move exactly the bytes that they were asked to move, whatever way they take."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from hoststage.shm import copy as shm_copy
from hoststage.shm.copy import UnaddressableBuffer, address_of, copy_bytes, copy_pages


@pytest.fixture(params=["batched", "page by page"])
def way(request, monkeypatch):
    """Both with the batched system call and as where a sandbox forbids it."""
    monkeypatch.setattr(shm_copy, "_batched_copy_refused", request.param == "page by page")


def _copied(dst, src, dst_offsets, src_offsets, lengths):
    expected = dst.copy()
    sizes = np.broadcast_to(lengths, len(dst_offsets))
    for to, origin, n in zip(dst_offsets, src_offsets, sizes, strict=True):
        expected[to : to + n] = src[origin : origin + n]
    moved = copy_pages(
        address_of(dst).address, np.array(dst_offsets), address_of(src).address, np.array(src_offsets), lengths
    )
    assert moved == int(np.sum(sizes))
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.parametrize("count", [1, 2, 7, 1024, 1025, 2500])
@pytest.mark.usefixtures("way")
def test_scattered_pages_of_one_size_arrive_and_nothing_else_changes(count):
    rng = np.random.default_rng(count)
    src = rng.integers(0, 256, 4000 * 1000, dtype=np.uint8)
    dst = rng.integers(0, 256, 4000 * 1000, dtype=np.uint8)
    _copied(dst, src, rng.permutation(4000)[:count] * 1000, rng.permutation(4000)[:count] * 1000, 999)


@pytest.mark.usefixtures("way")
def test_pages_of_different_sizes_some_empty():
    rng = np.random.default_rng(5)
    src = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    dst = np.zeros(1 << 20, dtype=np.uint8)
    lengths = rng.integers(0, 4096, 200)
    _copied(dst, src, rng.permutation(256)[:200] * 4096, rng.permutation(256)[:200] * 4096, lengths)


@pytest.mark.usefixtures("way")
def test_adjacent_pages_are_copied_as_one():
    src = np.random.default_rng(6).integers(0, 256, 1 << 20, dtype=np.uint8)
    dst = np.zeros(1 << 20, dtype=np.uint8)
    offsets = np.arange(256) * 4096
    _copied(dst, src, offsets, offsets, 4096)


@pytest.mark.parametrize(("pages", "page"), [(1, 9 << 20), (5, (3 << 20) + 5000), (700, 16 << 10), (9, 1 << 20)])
@pytest.mark.parametrize("scattered", [False, True])
def test_threads_that_share_a_copy_bring_every_byte_and_touch_nothing_else(pages, page, scattered):
    gap = 4096 if scattered else 0
    source = np.random.default_rng(pages).integers(0, 256, pages * (page + gap), dtype=np.uint8)
    target = np.zeros(pages * (page + gap) + 64, dtype=np.uint8)
    places = np.arange(pages, dtype=np.int64) * (page + gap)
    to = places[::-1].copy() if scattered else places
    done = copy_pages(target.ctypes.data, to, source.ctypes.data, places, page, threads=3)
    assert done == pages * page
    expected = np.zeros_like(target)
    for a, b in zip(to.tolist(), places.tolist(), strict=True):
        expected[a : a + page] = source[b : b + page]
    assert np.array_equal(target, expected)


def test_a_shared_copy_of_an_unmapped_page_is_an_error_and_no_crash():
    source = np.ones(16 << 20, dtype=np.uint8)
    target = np.zeros(16 << 20, dtype=np.uint8)
    places = np.arange(1024, dtype=np.int64) * 16384
    wrong = places + source.ctypes.data
    wrong[700] = 4096
    with pytest.raises(OSError):
        copy_pages(target.ctypes.data, places, 0, wrong, 16384, threads=4)


def test_a_forked_child_shares_copies_with_threads_of_its_own():
    source, target = np.ones(8 << 20, dtype=np.uint8), np.zeros(8 << 20, dtype=np.uint8)
    place = np.zeros(1, dtype=np.int64)
    copy_pages(target.ctypes.data, place, source.ctypes.data, place, source.nbytes, threads=2)
    child = os.fork()
    if not child:
        target[:] = 0
        copy_pages(target.ctypes.data, place, source.ctypes.data, place, source.nbytes, threads=2)
        os._exit(0 if target.all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_pages_copy_nothing():
    empty = np.array([], dtype=np.int64)
    assert copy_pages(0, empty, 0, empty, 4096) == 0


def test_an_unmapped_page_is_an_error_and_no_crash():
    if shm_copy._batched_copy_refused:
        pytest.skip("this sandbox forbids the batched copy")
    src = np.zeros(1 << 20, dtype=np.uint8)
    offsets = np.array([0, 200_000])
    with pytest.raises(OSError, match=r"could be copied|Bad address"):
        copy_pages(4096, offsets, address_of(src).address, offsets, 100_000)


def test_mismatched_or_negative_offsets_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        copy_pages(0, np.array([1, 2]), 0, np.array([1]), 1)
    with pytest.raises(ValueError, match="negative"):
        copy_pages(0, np.array([-1]), 0, np.array([1]), 1)


@pytest.mark.parametrize("nbytes", [0, 1, 32 << 10, (32 << 10) + 1, 3 << 20])
def test_one_range(nbytes):
    src = random.Random(nbytes).randbytes(nbytes)
    dst = bytearray(nbytes + 1)
    copy_bytes(address_of(dst).address, address_of(src).address, nbytes)
    assert dst == src + b"\0"


def test_addresses_of_buffers_of_every_sort():
    data = bytearray(b"abcdef")
    place = address_of(memoryview(data)[2:])
    assert (place.address, place.nbytes, place.readonly) == (address_of(data).address + 2, 4, False)
    assert address_of(b"abc").readonly
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert address_of(array[1]).address == address_of(array).address + 12
    array.flags.writeable = False
    assert address_of(array).readonly
    assert address_of(b"").nbytes == 0


def test_a_cpu_tensor_is_addressed_without_a_copy():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    place = address_of(tensor[1])
    assert (place.address, place.nbytes) == (tensor.data_ptr() + 8, 8)
    with pytest.raises(UnaddressableBuffer, match="not contiguous"):
        address_of(tensor.t())


def test_what_cannot_be_addressed_is_refused_with_the_remedy():
    with pytest.raises(UnaddressableBuffer, match="ascontiguousarray"):
        address_of(np.zeros((4, 4))[:, 1])
    with pytest.raises(UnaddressableBuffer, match="contiguous copy"):
        address_of(memoryview(bytearray(8))[::2])
    with pytest.raises(UnaddressableBuffer, match="int offers no buffer"):
        address_of(3)


def test_the_shared_memory_library_needs_neither_torch_nor_the_server():
    import subprocess

    code = (
        "import sys, hoststage.shm.copy, hoststage.shm.mapping, hoststage.shm.fdpass, hoststage.shm.peer\n"
        "print([m for m in ('torch', 'grpc', 'hoststage.server', 'hoststage.core', 'uvloop') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(root / part) for part in ("proto", "server", "client"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
