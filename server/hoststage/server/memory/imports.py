"""Memory of a client's own, read and written by descriptor and never mapped.

A mapping of memory that another process may truncate kills whoever touches it (SIGBUS). A descriptor does not: what is not there any more
is a short read. Three things make a descriptor of a stranger's safe to use, and all are settled before it is accepted:

- It is shared memory. Whatever else has a descriptor (a pipe, a file of FUSE or NFS) could block the thread that uses it for as long as its owner
  likes. `F_GET_SEALS` tells without asking a file system.
- It is opened anew, so that the client cannot change how we write: with `O_APPEND` set meanwhile, a write at an offset would go to the end.
- It is as large as announced and has memory behind it. A write beyond the end would grow the file, and one into a hole would be charged to the daemon:
  so this is asked again before every write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hoststage.shm import libc

Table = NDArray[np.int64]

_TMPFS = 0x01021994
_HUGETLBFS = 0x958458F6
_BLOCK = 512
_IOV_MAX = 1024
_RUN_BYTES = 1 << 30
"""Bytes of one call; the kernel cuts a transfer short at 2 GiB."""


class ImportProblem(Exception):
    """Memory of a client cannot be used. reason: UPPER_SNAKE. field and remedy: what to correct, and how."""

    def __init__(self, reason: str, message: str, field: str, remedy: str) -> None:
        self.reason, self.field, self.remedy = reason, field, remedy
        super().__init__(message)


def descriptor_limit() -> int:
    """Return how many imported descriptors the daemon may keep: a quarter of what it may open."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def open_memory(fds: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return descriptors of our own for those of a client, in order. Raises `ImportProblem`; then none is left open.

    sizes: bytes that were announced for each.
    """
    if len(fds) != len(sizes):
        raise ImportProblem(
            "IMPORT_DESCRIPTORS",
            f"{len(fds)} descriptors came where {len(sizes)} were announced",
            "import_memory.bytes",
            "pass one descriptor for each entry, in their order",
        )
    opened: list[int] = []
    try:
        for i, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
            _check_kind(fd, f"memfds[{i}]")
            opened.append(_open_anew(fd, f"memfds[{i}]"))
            check_backed(opened[-1], size, f"memfds[{i}]")
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def _check_kind(fd: int, field: str) -> None:
    def refused(found: str, remedy: str) -> ImportProblem:
        return ImportProblem("IMPORT_KIND", f"{field} is {found}", field, remedy)

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    memfd = "pass a memfd, or a file of a tmpfs such as /dev/shm"
    try:
        fcntl.fcntl(fd, libc.F_GET_SEALS)
    except OSError as error:
        # EBADF: a descriptor that only names a file (O_PATH).
        raise refused("no shared memory", memfd) from error
    # From here on it is the kernel's own memory, and asking for it blocks nobody.
    magic = libc.filesystem_magic(fd)
    if magic == _HUGETLBFS:
        raise refused(
            "of huge pages, which the kernel does not write by descriptor", "pass a memfd without MFD_HUGETLB"
        )
    if magic != _TMPFS or not stat.S_ISREG(os.fstat(fd).st_mode):
        raise refused("no shared memory", memfd)
    if flags & os.O_ACCMODE != os.O_RDWR:
        # Opening it anew must give nobody more than they had.
        raise refused("not open for reading and writing", "pass a descriptor that was opened with O_RDWR")


def _open_anew(fd: int, field: str) -> int:
    try:
        # Not to wait for a lease on the file, which its owner gives up when it likes (seconds, by the kernel's own patience).
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise RLIMIT_NOFILE of the daemon"
        else:
            remedy = "pass a memfd, or let the daemon's user read and write the file"
        raise ImportProblem(
            "IMPORT_OPEN", f"{field} cannot be opened by the daemon: {error.strerror}", field, remedy
        ) from error


def check_backed(fd: int, size: int, field: str) -> None:
    """Check that a file has `size` bytes and memory behind as many. Raises `ImportProblem`."""
    found = os.fstat(fd)
    if found.st_size < size:
        raise ImportProblem(
            "IMPORT_TRUNCATED",
            f"{field} has {found.st_size} bytes, {size} were announced",
            field,
            "keep the memory as large as it was announced for as long as it is imported",
        )
    if found.st_blocks * _BLOCK < size:
        raise ImportProblem(
            "IMPORT_NOT_POPULATED",
            f"{field} has memory behind {found.st_blocks * _BLOCK} of {size} bytes",
            field,
            "populate it first (MADV_POPULATE_WRITE): what the daemon wrote into a hole would be charged to the daemon",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of one memfd: `offsets` in it, `addresses` in this process, `sizes`; `int64[n]` each."""

    fd: int
    size: int
    field: str
    offsets: Table
    addresses: Table
    sizes: Table

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return int(self.sizes.sum())

    def parts(self, most: int) -> Iterator[Pieces]:
        """Cut into parts of about `most` bytes, each to be moved by one thread."""
        order = np.argsort(self.offsets, kind="stable")
        offsets, addresses, sizes = self.offsets[order], self.addresses[order], self.sizes[order]
        marks = np.cumsum(sizes) // max(1, most)
        edges = np.flatnonzero(np.diff(marks)) + 1
        for a, b in zip([0, *edges.tolist()], [*edges.tolist(), len(sizes)], strict=True):
            yield Pieces(self.fd, self.size, self.field, offsets[a:b], addresses[a:b], sizes[a:b])


def read_pieces(pieces: Pieces) -> None:
    """Copy pieces of a memfd into this process. Raises `ImportProblem` where the client has made it smaller."""
    for offset, vectors, expected in _runs(pieces):
        try:
            done = libc.preadv(pieces.fd, vectors.ctypes.data, len(vectors), offset)
        except OSError as error:
            raise ImportProblem(
                "IMPORT_READ",
                f"{pieces.field} cannot be read: {os.strerror(error.errno or 0)}",
                pieces.field,
                "see the kernel's log of the host",
            ) from error
        if done != expected:
            check_backed(pieces.fd, pieces.size, pieces.field)
            raise _changed(pieces.field, done, expected)


def write_pieces(pieces: Pieces) -> None:
    """Copy pieces from this process into a memfd, never beyond its end. Raises `ImportProblem`."""
    for offset, vectors, expected in _runs(pieces):
        check_backed(pieces.fd, pieces.size, pieces.field)
        try:
            done = libc.pwritev(pieces.fd, vectors.ctypes.data, len(vectors), offset)
        except OSError as error:
            raise ImportProblem(
                "IMPORT_WRITE",
                f"{pieces.field} cannot be written: {os.strerror(error.errno or 0)}",
                pieces.field,
                "do not seal imported memory against writing, and leave room in its memory control group",
            ) from error
        if done != expected:
            check_backed(pieces.fd, pieces.size, pieces.field)
            raise _changed(pieces.field, done, expected)


def _changed(field: str, done: int, expected: int) -> ImportProblem:
    return ImportProblem(
        "IMPORT_TRUNCATED",
        f"{field}: {done} of {expected} bytes could be moved; its size changed meanwhile",
        field,
        "keep the memory as large as it was announced for as long as it is imported",
    )


def _runs(pieces: Pieces) -> Iterator[tuple[int, NDArray[np.int64], int]]:
    """Yield `(file offset, vectors, bytes)` of pieces that follow each other in the file: one call each.

    Fewer calls matter more than their size: each one gives up the GIL and has to win it back.
    """
    if not len(pieces.offsets):
        return
    order = np.argsort(pieces.offsets, kind="stable")
    offsets, sizes = pieces.offsets[order], pieces.sizes[order]
    vectors = np.ascontiguousarray(np.stack((pieces.addresses[order], sizes), axis=1))
    ends = offsets + sizes
    breaks = (np.flatnonzero(offsets[1:] != ends[:-1]) + 1).tolist()
    for a, b in zip([0, *breaks], [*breaks, len(offsets)], strict=True):
        start = a
        while start < b:
            stop = min(b, start + _IOV_MAX)
            # One piece always fits: the wire bounds its size.
            fit = int(np.searchsorted(ends[start:stop], offsets[start] + _RUN_BYTES, side="right"))
            stop = start + max(1, fit)
            yield int(offsets[start]), vectors[start:stop], int(ends[stop - 1] - offsets[start])
            start = stop
