"""Maps a list of memfd chunks as one contiguous range.

Used by the daemon for its own writable mapping and by clients for what the daemon handed them. Python's :mod:`mmap` is
not used: it keeps a duplicate of the descriptor and cannot place chunks side by side.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.shm import libc

HUGE_PAGE_BYTES = 2 << 20


class MappingError(RuntimeError):
    """A chunk cannot be mapped; the message names the chunk, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One memfd of an arena: its descriptor and the bytes of it that belong to the arena."""

    fd: int
    size: int


class Mapping:
    """A contiguous range of this process's memory that shows an arena's chunks in order.

    The caller keeps the descriptors and may close them once :meth:`map` has returned. Views hold the range: see
    :meth:`unmap`.
    """

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self.address = address
        self.size = size
        self.writable = writable
        self._root_type = ctypes.c_ubyte * size
        self._root: weakref.ref[ctypes.Array[ctypes.c_ubyte]] | None = None
        self._state = _MappedRange(address, size)

    @classmethod
    def map(
        cls,
        chunks: Sequence[Chunk],
        writable: bool,
        *,
        private_to_process: bool = False,
        require_seals: bool = False,
    ) -> Mapping:
        """Maps the chunks side by side, aligned to 2 MiB.

        :param chunks: descriptors and sizes in bytes (multiples of 4 KiB), in arena order.
        :param writable: whether this process may write through the mapping.
        :param private_to_process: sets ``MADV_DONTFORK | MADV_DONTDUMP``; clients do, so that a forked child cannot touch
            leased slots and a core dump does not hold the cache.
        :param require_seals: refuse a memfd that may still shrink, which would make a later read raise ``SIGBUS``.
        :raises MappingError: when a chunk is too small, unsealed, or the kernel refuses the mapping.
        """
        _check_chunks(chunks, require_seals)
        total = sum(chunk.size for chunk in chunks)
        address = _reserve(total)
        try:
            _place(chunks, address, writable)
            if private_to_process:
                libc.madvise(address, total, libc.Advice.DONTFORK)
                libc.madvise(address, total, libc.Advice.DONTDUMP)
        except BaseException:
            libc.munmap(address, total)
            raise
        return cls(address, total, writable)

    @property
    def mapped(self) -> bool:
        """Whether new views may be taken: neither unmapped nor waiting to be."""
        return not self._state.closing

    @property
    def resident(self) -> bool:
        """Whether the range is still mapped in this process, if only by views that outlived :meth:`unmap`."""
        return not self._state.unmapped

    @property
    def has_views(self) -> bool:
        """Whether any view or array of this mapping is still alive in this process."""
        return self._root is not None and self._root() is not None

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """A flat byte view of ``length`` bytes from ``offset``; read-only unless the mapping is writable.

        :raises ValueError: when the range does not lie inside the mapping, or the mapping is closed.
        """
        length = self.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"view [{offset}, {offset + length}) lies outside a mapping of {self.size} bytes")
        view = memoryview(self._export()).cast("B")[offset : offset + length]
        return view if self.writable else view.toreadonly()

    def guard(self) -> object:
        """What keeps the range mapped for as long as it is referred to: a view without the cost of one.

        :raises ValueError: when the mapping is closed.
        """
        return self._export()

    def array(self, offset: int, count: int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """A one-dimensional array of ``count`` items of ``dtype`` from byte ``offset``, without a copy."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.view(offset, count * kind.itemsize), dtype=kind, count=count)

    def unmap(self) -> bool:
        """Gives the range back; safe to repeat. Returns whether the range is gone now.

        While views live the range stays mapped, since touching them would otherwise crash the process; the last view
        that dies unmaps it. A caller that must report what it cannot let go asks :attr:`resident`.
        """
        with self._state.lock:
            self._state.closing = True
            busy = self.has_views
        if not busy:
            self._state.unmap()
        return self._state.unmapped

    def _export(self) -> ctypes.Array[ctypes.c_ubyte]:
        with self._state.lock:
            if self._state.closing:
                raise ValueError("the mapping is closed")
            root = self._root() if self._root is not None else None
            if root is None:
                root = self._root_type.from_address(self.address)
                self._root = self._state.root = weakref.ref(root, self._state.on_last_view)
            return root


class _MappedRange:
    """What the death of the last view needs to know, kept apart from the mapping so that neither keeps the other."""

    def __init__(self, address: int, size: int) -> None:
        self.lock = threading.RLock()
        self.closing = False
        self.unmapped = False
        self.root: object = None
        self._address = address
        self._size = size

    def on_last_view(self, root: object) -> None:
        with self.lock:
            # Views may have been taken anew, while this call was on its way.
            last = self.closing and root is self.root
        if last:
            self.unmap()

    def unmap(self) -> None:
        with self.lock:
            if self.unmapped:
                return
            self.unmapped = True
        libc.munmap(self._address, self._size)


def _check_chunks(chunks: Sequence[Chunk], require_seals: bool) -> None:
    if not chunks:
        raise MappingError("an arena has at least one chunk, got none")
    for index, chunk in enumerate(chunks):
        where = f"chunk {index} of {len(chunks)}"
        if chunk.size <= 0 or chunk.size % libc.PAGE_BYTES:
            raise MappingError(f"{where}: size {chunk.size} is not a positive multiple of {libc.PAGE_BYTES} bytes")
        try:
            actual = os.fstat(chunk.fd).st_size
            seals = libc.Seal(fcntl.fcntl(chunk.fd, libc.F_GET_SEALS)) if require_seals else libc.Seal(0)
        except OSError as error:
            raise MappingError(f"{where}: descriptor {chunk.fd} is not a usable memfd: {error.strerror}") from error
        if actual < chunk.size:
            raise MappingError(f"{where}: descriptor {chunk.fd} has {actual} bytes, {chunk.size} expected")
        if require_seals and libc.Seal.SHRINK not in seals:
            raise MappingError(
                f"{where}: descriptor {chunk.fd} lacks F_SEAL_SHRINK (seals {int(seals):#x}), so a truncation by its "
                "owner would kill this process; map only arenas that the daemon sealed"
            )


def _reserve(total: int) -> int:
    """Reserves an inaccessible range aligned to the huge page size, trimming what alignment left over."""
    padded = total + HUGE_PAGE_BYTES
    flags = libc.MapFlag.PRIVATE | libc.MapFlag.ANONYMOUS | libc.MapFlag.NORESERVE
    try:
        start = libc.mmap(0, padded, libc.Prot.NONE, flags)
    except OSError as error:
        raise MappingError(f"no room for {total} bytes of address space: {error.strerror}") from error
    address = (start + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if address > start:
        libc.munmap(start, address - start)
    tail = start + padded - (address + total)
    if tail:
        libc.munmap(address + total, tail)
    return address


def _place(chunks: Sequence[Chunk], address: int, writable: bool) -> None:
    prot = libc.Prot.READ | libc.Prot.WRITE if writable else libc.Prot.READ
    for index, chunk in enumerate(chunks):
        try:
            libc.mmap(address, chunk.size, prot, libc.MapFlag.SHARED | libc.MapFlag.FIXED, chunk.fd)
        except OSError as error:
            access = "writable" if writable else "read-only"
            raise MappingError(
                f"chunk {index} of {len(chunks)}: the kernel refuses a {access} mapping of {chunk.size} bytes: "
                f"{error.strerror}"
            ) from error
        address += chunk.size
