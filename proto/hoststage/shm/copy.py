"""Copies between raw addresses that let other Python threads run.

Why whole batches go through one call: a call that releases the GIL must win it back, and beside one busy Python thread that costs up
to the switch interval (5 ms). Measured with 512 scattered pages of 16 KiB on a two-core machine, in microseconds a page:

==============================  =====  =====================
way                             alone  beside a busy thread
==============================  =====  =====================
``memmove`` page by page        3.5    789
``numpy.copyto`` page by page   3.9    822
one ``process_vm_readv``        4.5    15
==============================  =====  =====================

From 1 MiB a page the three differ by at most 15 % alone (``memmove`` 6.8 GB/s), so single ranges and very large pages use ``memmove``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hoststage.shm import libc

Offsets = npt.NDArray[np.int64]

_IOV_MAX = 1024
_BATCH_BYTES = 1 << 30  # below the kernel's 2 GiB bound on one transfer, which would cut it short
_LARGE_RUN_BYTES = 8 << 20
_TINY_BYTES = 32 << 10
_SHARE_BYTES = 4 << 20
MOST_THREADS = 4
"""More than a few threads gain nothing: they share the memory's bandwidth."""

# For a few microseconds of work, keeping the GIL is kinder to everyone than handing it over.
_tiny_memmove = ctypes.PyDLL(None).memmove
_tiny_memmove.restype = None
_tiny_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_batched_copy_refused = False


class UnaddressableBuffer(ValueError):
    """A buffer cannot be addressed; the message says what it is and what would do."""


@dataclass(frozen=True, slots=True)
class BufferAddress:
    """Where a buffer's bytes lie. Valid only while the caller keeps the buffer alive."""

    address: int
    nbytes: int
    readonly: bool


def address_of(buffer: object) -> BufferAddress:
    """The address of a C-contiguous buffer, numpy array or torch CPU tensor, without importing torch.

    :raises UnaddressableBuffer: when it is not contiguous, not in host memory, or no buffer.
    """
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "nbytes"):
        return _address_of_tensor(buffer)
    if not isinstance(buffer, np.ndarray):
        try:
            view = memoryview(cast(Any, buffer))
        except TypeError as error:
            raise UnaddressableBuffer(
                f"{type(buffer).__name__} offers no buffer; pass bytes, numpy or a CPU tensor"
            ) from error
        if not view.c_contiguous:
            raise UnaddressableBuffer("the buffer is not C-contiguous; pass a contiguous copy")
        if view.nbytes == 0:
            return BufferAddress(0, 0, view.readonly)
        buffer = np.frombuffer(view.cast("B"), dtype=np.uint8)
    if not buffer.flags.c_contiguous:
        raise UnaddressableBuffer(
            f"the array of shape {buffer.shape} is not C-contiguous; pass numpy.ascontiguousarray of it"
        )
    address, readonly = buffer.__array_interface__["data"]
    return BufferAddress(int(address), buffer.nbytes, bool(readonly))


def copy_bytes(dst_address: int, src_address: int, nbytes: int) -> None:
    """Copies ``nbytes`` between two raw addresses of this process, GIL released above 32 KiB."""
    if nbytes <= _TINY_BYTES:
        _tiny_memmove(dst_address, src_address, nbytes)
    else:
        libc.memmove(dst_address, src_address, nbytes)


def copy_range(dst_address: int, src_address: int, nbytes: int, *, threads: int = 1) -> None:
    """Copies one range; `threads` as for `copy_pages`."""
    shares = min(threads, nbytes // _SHARE_BYTES)
    if shares > 1:
        dst, src, size = (np.array([value], dtype=np.int64) for value in (dst_address, src_address, nbytes))
        _copy_shared(dst, src, size, shares)
    else:
        copy_bytes(dst_address, src_address, nbytes)


def copy_pages(
    dst_base: int,
    dst_offsets: Offsets,
    src_base: int,
    src_offsets: Offsets,
    lengths: Offsets | int,
    *,
    threads: int = 1,
) -> int:
    """Copies many pages between two ranges and returns the bytes copied.

    :param dst_base: address of the destination range.
    :param dst_offsets: ``int64[n]``, byte offset of each page in the destination.
    :param src_base: address of the source range.
    :param src_offsets: ``int64[n]``, byte offset of each page in the source.
    :param lengths: ``int64[n]`` bytes of each page, or one number for all.
    :param threads: how many threads may share the work, the caller's among them; each gets 4 MiB at least.
    :raises ValueError: when the arrays differ in length or hold a negative number.
    :raises OSError: ``EFAULT`` when a range is not mapped.

    Pages adjacent in both ranges are copied as one. Source and destination must not overlap.
    """
    dst, src, size = _runs(dst_offsets, src_offsets, lengths)
    total = int(size.sum())
    if total == 0:
        return 0
    dst = dst + dst_base
    src = src + src_base
    shares = min(threads, total // _SHARE_BYTES)
    if shares > 1:
        _copy_shared(dst, src, size, shares)
    else:
        _copy_runs(dst, src, size)
    return total


def _copy_runs(dst: Offsets, src: Offsets, size: Offsets) -> None:
    total = int(size.sum())
    many = size.size > 1 and total > _TINY_BYTES
    if not many or total // size.size >= _LARGE_RUN_BYTES or not _copy_batched(dst, src, size):
        move = libc.memmove if total > _TINY_BYTES else _tiny_memmove
        for to, origin, nbytes in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
            move(to, origin, nbytes)


def _copy_shared(dst: Offsets, src: Offsets, size: Offsets, shares: int) -> None:
    """Copies in several threads at once. Returns, or raises, only when none of them touches the memory any more."""
    ends = np.cumsum(size)
    cuts = np.arange(1, shares) * (int(ends[-1]) // shares) // libc.PAGE_BYTES * libc.PAGE_BYTES
    # A run that a cut falls into becomes two.
    starts = np.union1d(np.concatenate(([0], ends[:-1])), cuts)
    run = np.searchsorted(ends, starts, side="right")
    within = starts - (ends - size)[run]
    dst, src, size = dst[run] + within, src[run] + within, np.diff(np.append(starts, ends[-1]))
    bounds = [0, *np.searchsorted(starts, cuts).tolist(), len(starts)]
    parts = [(dst[a:b], src[a:b], size[a:b]) for a, b in itertools.pairwise(bounds)]
    helpers: list[Future[None]] = []
    try:
        for part in parts[1:]:
            helpers.append(_helpers().submit(_copy_runs, *part))
        _copy_runs(*parts[0])
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="hoststage-copy")


# The threads do not come along into a child.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def _address_of_tensor(tensor: Any) -> BufferAddress:
    device = getattr(tensor, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise UnaddressableBuffer(f"the tensor is on {device}; copy it to the host first")
    if not tensor.is_contiguous():
        raise UnaddressableBuffer(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()"
        )
    return BufferAddress(int(tensor.data_ptr()), int(tensor.nbytes), False)


def _runs(dst_offsets: Offsets, src_offsets: Offsets, lengths: Offsets | int) -> tuple[Offsets, Offsets, Offsets]:
    dst = np.ascontiguousarray(dst_offsets, dtype=np.int64)
    src = np.ascontiguousarray(src_offsets, dtype=np.int64)
    size = np.broadcast_to(np.asarray(lengths, dtype=np.int64), dst.shape)
    if dst.ndim != 1 or dst.shape != src.shape:
        raise ValueError(f"offsets differ in shape: destination {dst.shape}, source {src.shape}")
    if dst.size == 0:
        return dst, src, size
    if min(int(dst.min()), int(src.min()), int(size.min())) < 0:
        raise ValueError("offsets and lengths must not be negative")
    starts = np.empty(dst.size, dtype=bool)
    starts[0] = True
    np.logical_or(dst[1:] != dst[:-1] + size[:-1], src[1:] != src[:-1] + size[:-1], out=starts[1:])
    first = np.flatnonzero(starts)
    return dst[first], src[first], np.add.reduceat(size, first)


def _copy_batched(dst: Offsets, src: Offsets, size: Offsets) -> bool:
    """Copies through ``process_vm_readv`` on this process; false when the system does not allow that call."""
    global _batched_copy_refused
    if _batched_copy_refused:
        return False
    local = np.stack((dst, size), axis=1)
    remote = np.stack((src, size), axis=1)
    ends = np.cumsum(size)
    start, done = 0, 0
    while start < size.size:
        stop = min(start + _IOV_MAX, int(np.searchsorted(ends, done + _BATCH_BYTES, side="right")))
        stop = max(stop, start + 1)
        expected = int(ends[stop - 1]) - done
        if expected > _BATCH_BYTES:
            libc.memmove(int(dst[start]), int(src[start]), expected)
        else:
            try:
                copied = libc.gather_scatter(local[start:].ctypes.data, remote[start:].ctypes.data, stop - start)
            except OSError as error:
                # A seccomp filter or a sandbox may forbid the call; nothing has been copied by it.
                if error.errno in (errno.EPERM, errno.ENOSYS) and start == 0:
                    _batched_copy_refused = True
                    return False
                raise
            if copied != expected:
                raise OSError(errno.EFAULT, f"only {copied} of {expected} bytes could be copied: a page is not mapped")
        start, done = stop, done + expected
    return True
