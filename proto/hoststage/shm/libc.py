"""Bindings to the C library's memory calls.

Every call goes through a ``CDLL`` handle, so the GIL is released while the kernel works: populating a gibibyte through
``mmap.madvise`` would stop every Python thread for a second. A failing call raises the matching :class:`OSError`
subclass with the call's name in its message.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, cast

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
"""The page size of this machine, in bytes."""


class Prot(IntFlag):
    """Protection of a mapping, as ``mmap(2)`` names it."""

    NONE = 0
    READ = 1
    WRITE = 2


class MapFlag(IntFlag):
    """Flags of ``mmap(2)``."""

    SHARED = 0x01
    PRIVATE = 0x02
    FIXED = 0x10
    ANONYMOUS = 0x20
    NORESERVE = 0x4000


class Advice(IntEnum):
    """Advice values of ``madvise(2)``; not all are in Python's :mod:`mmap`."""

    REMOVE = 9
    DONTFORK = 10
    HUGEPAGE = 14
    DONTDUMP = 16
    POPULATE_READ = 22
    POPULATE_WRITE = 23
    COLLAPSE = 25


class Seal(IntFlag):
    """Seals of a memfd, as ``fcntl(2)`` names them."""

    SEAL = 0x01
    SHRINK = 0x02
    GROW = 0x04
    WRITE = 0x08
    FUTURE_WRITE = 0x10


F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SETSIG = 10
FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02

_MAP_FAILED = ctypes.c_void_p(-1).value
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_MEMBARRIER_QUERY, _MEMBARRIER_GLOBAL_EXPEDITED = 0, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _bind(name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
    function = getattr(_libc, name)
    function.restype = restype
    function.argtypes = list(argtypes)
    return cast(Callable[..., Any], function)


_ptr, _size, _int, _off = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_ulong = ctypes.c_ulong
_mmap = _bind("mmap64" if hasattr(_libc, "mmap64") else "mmap", _ptr, _ptr, _size, _int, _int, _int, _off)
_munmap = _bind("munmap", _int, _ptr, _size)
_madvise = _bind("madvise", _int, _ptr, _size, _int)
_mlock = _bind("mlock", _int, _ptr, _size)
_munlock = _bind("munlock", _int, _ptr, _size)
_fallocate = _bind("fallocate64" if hasattr(_libc, "fallocate64") else "fallocate", _int, _int, _int, _off, _off)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

memmove = _bind("memmove", None, _ptr, _ptr, _size)
"""``memmove(dst_address, src_address, nbytes)`` on raw addresses, GIL released."""

_process_vm_readv = _bind("process_vm_readv", ctypes.c_ssize_t, _int, _ptr, _ulong, _ptr, _ulong, _ulong)
_memset = _bind("memset", _ptr, _ptr, _int, _size)
_preadv = _bind("preadv64" if hasattr(_libc, "preadv64") else "preadv", ctypes.c_ssize_t, _int, _ptr, _int, _off)
_pwritev = _bind("pwritev64" if hasattr(_libc, "pwritev64") else "pwritev", ctypes.c_ssize_t, _int, _ptr, _int, _off)
_fstatfs = _bind("fstatfs64" if hasattr(_libc, "fstatfs64") else "fstatfs", _int, _int, _ptr)


def _fail(call: str, detail: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}({detail}): {os.strerror(code)}")


def mmap(address: int, length: int, prot: Prot, flags: MapFlag, fd: int = -1, offset: int = 0) -> int:
    """Maps ``length`` bytes and returns the address; raises :class:`OSError` on failure."""
    result: int | None = _mmap(address or None, length, int(prot), int(flags), fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _fail("mmap", f"length={length}, fd={fd}")
    return result


def munmap(address: int, length: int) -> None:
    """Removes the mappings of a range."""
    if _munmap(address, length) != 0:
        raise _fail("munmap", f"address={address:#x}, length={length}")


def madvise(address: int, length: int, advice: Advice) -> None:
    """Advises the kernel about a range.

    ``POPULATE_WRITE`` reports an unbacked page as ``EFAULT`` or ``ENOMEM`` instead of raising ``SIGBUS``; kernels before
    5.14 answer ``EINVAL``. ``EINTR`` and ``EAGAIN`` are retried here.
    """
    while _madvise(address, length, int(advice)) != 0:
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            raise _fail("madvise", f"address={address:#x}, length={length}, advice={advice.name}")


def collapse(address: int, length: int) -> bool:
    """Have each 2 MiB of a range made one huge page, keeping what is in it; false where the kernel (before 6.1) or its memory does not allow it.

    What could be collapsed until then stays so. Unlike with :func:`madvise`, ``EAGAIN`` is no reason to try again: memory in
    small pieces would make that last for ever.
    """
    return int(_madvise(address, length, int(Advice.COLLAPSE))) == 0


def mlock(address: int, length: int) -> None:
    """Locks a range in memory; ``ENOMEM`` or ``EPERM`` where ``RLIMIT_MEMLOCK`` forbids it."""
    if _mlock(address, length) != 0:
        raise _fail("mlock", f"address={address:#x}, length={length}")


def munlock(address: int, length: int) -> None:
    """Unlocks a range that :func:`mlock` locked."""
    if _munlock(address, length) != 0:
        raise _fail("munlock", f"address={address:#x}, length={length}")


def memset(address: int, value: int, length: int) -> None:
    """Sets ``length`` bytes to ``value``, GIL released."""
    _memset(address, value, length)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Gives the pages of a file range back to the system; reading them gives zeros afterwards."""
    if _fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        raise _fail("fallocate", f"fd={fd}, offset={offset}, length={length}")


def gather_scatter(local_iovecs: int, remote_iovecs: int, count: int) -> int:
    """Copies within this process from ``remote`` to ``local`` vectors in one call, and returns the bytes copied.

    Both arguments are addresses of arrays of ``count`` (at most 1024) pairs of 64-bit address and length. It is
    ``process_vm_readv(2)`` on this very process: one system call, hence one release of the GIL, for a whole batch.
    """
    done = int(_process_vm_readv(os.getpid(), local_iovecs, count, remote_iovecs, count, 0))
    if done < 0:
        raise _fail("process_vm_readv", f"count={count}")
    return done


def preadv(fd: int, iovecs: int, count: int, offset: int) -> int:
    """Reads a file from ``offset`` on into ``count`` (at most 1024) vectors of 64-bit address and length; returns the bytes read."""
    while (done := int(_preadv(fd, iovecs, count, offset))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _fail("preadv", f"fd={fd}, offset={offset}, count={count}")
    return done


def pwritev(fd: int, iovecs: int, count: int, offset: int) -> int:
    """Writes ``count`` (at most 1024) vectors of 64-bit address and length to a file from ``offset`` on; returns the bytes written."""
    while (done := int(_pwritev(fd, iovecs, count, offset))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _fail("pwritev", f"fd={fd}, offset={offset}, count={count}")
    return done


def filesystem_magic(fd: int) -> int:
    """Returns the ``f_type`` of ``fstatfs(2)``: which kind of file system an open file lies on."""
    # The first word of the structure; 256 bytes are more than it has on any Linux.
    answer = (ctypes.c_ulong * 32)()
    if _fstatfs(fd, ctypes.addressof(answer)) != 0:
        raise _fail("fstatfs", f"fd={fd}")
    return int(answer[0]) & 0xFFFFFFFF


class NumaPolicy(IntEnum):
    """Policies of ``mbind(2)``."""

    BIND = 2
    INTERLEAVE = 3


def mbind(address: int, length: int, policy: NumaPolicy, nodes: tuple[int, ...]) -> None:
    """Sets the NUMA policy of a range that is not yet populated."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind: no system call number known for {platform.machine()}")
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    # The kernel reads maxnode - 1 bits.
    arguments = (_ptr(address), ctypes.c_ulong(length), _int(policy), mask, ctypes.c_ulong(words * 64 + 1))
    if _syscall(ctypes.c_long(number), *arguments, ctypes.c_uint(0)) != 0:
        raise _fail("mbind", f"policy={policy.name}, nodes={nodes}")


def _membarrier(command: int) -> int:
    number = _SYS_MEMBARRIER.get(platform.machine())
    if number is None:
        return -1
    return int(_syscall(ctypes.c_long(number), _int(command), ctypes.c_uint(0), _int(0)))


def has_membarrier_global_expedited() -> bool:
    """Whether the kernel (4.16, and no filter in the way) knows :func:`membarrier_global_expedited`."""
    commands = _membarrier(_MEMBARRIER_QUERY)
    return commands > 0 and bool(commands & _MEMBARRIER_GLOBAL_EXPEDITED)


def membarrier_global_expedited() -> None:
    """A full memory barrier of the calling thread, and of the threads of processes that registered for it; raises :class:`OSError` without it."""
    if _membarrier(_MEMBARRIER_GLOBAL_EXPEDITED) != 0:
        raise _fail("membarrier", "GLOBAL_EXPEDITED")
