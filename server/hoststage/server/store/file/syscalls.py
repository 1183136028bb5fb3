"""The system calls that Python's ``os`` lacks, and memory fit for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Final

from hoststage.server.store.base import ALIGNMENT

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
_ZERO_RANGE: Final = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fallocate.restype = ctypes.c_int


def allocate(fd: int, offset: int, length: int) -> int:
    """Allocate blocks for a range within the file, and return 0 or the ``errno``."""
    return _fallocate(fd, _KEEP_SIZE, offset, length)


def punch(fd: int, offset: int, length: int) -> int:
    """Give the blocks of a range back so that it reads as zeros, and return 0 or the ``errno``."""
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def zero(fd: int, offset: int, length: int) -> int:
    """Make a range read as zeros and keep its blocks, without writing to them, and return 0 or the ``errno``."""
    return _fallocate(fd, _ZERO_RANGE | _KEEP_SIZE, offset, length)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    # ctypes lets go of the GIL for the length of the call.
    if _libc.fallocate(fd, mode, offset, length) == 0:
        return 0
    return ctypes.get_errno()


def copy(target: int, source: int, length: int) -> None:
    """Copy bytes between two addresses of this process without holding the GIL."""
    ctypes.memmove(target, source, length)


def view_at(address: int, length: int) -> memoryview:
    """Return a writable view of memory of this process. The caller answers for its life."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def is_aligned(address: int) -> bool:
    """Whether direct I/O may use this address."""
    return address != 0 and address % ALIGNMENT == 0


class AlignedBuffer:
    """Anonymous memory on a page boundary that grows to what is asked of it."""

    __slots__ = ("_map", "address", "view")

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class ThreadBuffers(threading.local):
    """Each I/O thread's own trailer block and bounce page."""

    def __init__(self) -> None:
        self.block = AlignedBuffer(ALIGNMENT)
        self._bounce = AlignedBuffer(ALIGNMENT)

    def bounce(self, length: int) -> AlignedBuffer:
        """Return a buffer of at least ``length`` bytes; its content lasts until this thread's next call."""
        if len(self._bounce.view) < length:
            self._bounce = AlignedBuffer(length)
        return self._bounce


def free_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the room that an unprivileged process may still take, and the size of the file system."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
