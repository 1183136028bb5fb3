"""Arenas: sealed memfd chunks that the daemon maps contiguously.

A chunk is sealed in one call after the daemon's only writable mapping exists: nobody can shrink, grow or re-seal it, so
that a client's truncation cannot kill the daemon; a read arena also gets `F_SEAL_FUTURE_WRITE`, after which nobody can write it but through
that one mapping. Creation and populating block and are meant for a worker thread; both release the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from hoststage.server.memory.limits import free_bytes, swap_bytes
from hoststage.shm import libc
from hoststage.shm.cuda import CudaUnavailable, Registered, Runtime
from hoststage.shm.mapping import HUGE_PAGE_BYTES, Chunk, Mapping, MappingError

_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_HUGETLB = 1, 2, 4
# One call holds this process's address space, so that a thread which maps memory meanwhile waits for it: keep it short.
_POPULATE_PIECE = 16 << 20
_HEADROOM = 64 << 20
_SLOW_STRETCH_SECONDS = 0.02
"""What 2 MiB may take to be had in one piece: 0.3 ms are usual, 9 were seen in a virtual machine that had never touched the memory before."""


class MemoryUnavailable(RuntimeError):
    """Memory for an arena could not be had.

    `requested` and `available` in bytes (`available` is None where memory was not what was short); the remedy says what an
    operator can do.
    """

    def __init__(self, requested: int, problem: str, remedy: str, available: int | None = None) -> None:
        self.requested, self.problem, self.remedy, self.available = requested, problem, remedy, available
        super().__init__(f"{requested} bytes of shared memory are not available: {problem}. {remedy}")


class ArenaKind(Enum):
    """`WRITE`: private to one session and writable by it. `READ`: read-only to everyone but the daemon. `WHOLE`: leased whole to one session,
    whose engine keeps its own pages in it and may outlive the daemon."""

    WRITE = "write"
    READ = "read"
    WHOLE = "whole"


class HugePages(Enum):
    """`AUTO` tries and falls back; `REQUIRED` fails where there are none."""

    OFF = "off"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How arenas are made.

    chunk_bytes: a multiple of 2 MiB. threads: for populating; 0: one a core. interleave: spread pages over the NUMA nodes,
    where there is more than one. cuda: register the daemon's own mapping with CUDA, where there is a device.
    """

    chunk_bytes: int = 1 << 30
    huge_pages: HugePages = HugePages.AUTO
    lock: bool = True
    threads: int = 0
    interleave: bool = True
    cuda: bool = False

    def __post_init__(self) -> None:
        if self.chunk_bytes < HUGE_PAGE_BYTES or self.chunk_bytes % HUGE_PAGE_BYTES:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; it must be a positive multiple of {HUGE_PAGE_BYTES}")


@dataclass(frozen=True, slots=True)
class PinReport:
    """What was achieved: `cuda`, `mlock`, `resident` (populated, and the host has no swap) or `none`; and why not more."""

    achieved: str
    reason: str
    huge_pages: bool
    bytes: int


class _Piece(NamedTuple):
    """A range to populate: in the mapping, and in its chunk."""

    address: int
    length: int
    fd: int
    offset: int


class Arena:
    """One arena. Made by `Arena.create`; `handed_out` is set once a descriptor of it has left the daemon."""

    def __init__(self, kind: ArenaKind, size: int, chunks: list[Chunk], mapping: Mapping, huge: bool) -> None:
        self.kind = kind
        self.size = size
        self.chunks: Sequence[Chunk] = chunks
        self.handed_out = False
        self.report = PinReport("none", "not populated yet", huge, size)
        self._mapping = mapping
        self._huge = huge
        self._gathers = False
        self._gathered: list[int] = []
        self._closed = False
        self._numa_problem = ""
        self._cuda: tuple[Runtime, Registered] | None = None

    @classmethod
    def create(cls, name: str, size: int, kind: ArenaKind, policy: MemoryPolicy) -> Arena:
        """Make an arena of at least `size` bytes, not yet populated. Raises `MemoryUnavailable`."""
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1 byte")
        huge_wanted = policy.huge_pages is not HugePages.OFF
        if huge_wanted and _free_huge_pages() * HUGE_PAGE_BYTES >= size:
            try:
                return cls._make(name, size, kind, policy, huge=True)
            except MemoryUnavailable:
                if policy.huge_pages is HugePages.REQUIRED:
                    raise
        elif policy.huge_pages is HugePages.REQUIRED:
            raise MemoryUnavailable(
                size,
                f"{_free_huge_pages()} huge pages of 2 MiB are free",
                f"Set vm.nr_hugepages to at least {-(-size // HUGE_PAGE_BYTES)}, or memory.huge_pages to 'auto'.",
            )
        # Asked before and not found out by populating: over a cgroup's limit, the kernel kills instead of refusing.
        free = _free_bytes()
        if size > free:
            raise MemoryUnavailable(
                size,
                f"{free} bytes are free within this host's memory and this container's limit",
                "Lower memory.budget, or raise the memory limit of the daemon's container: its arenas are charged to it.",
                free,
            )
        return cls._make(name, size, kind, policy, huge=False)

    @classmethod
    def _make(cls, name: str, size: int, kind: ArenaKind, policy: MemoryPolicy, *, huge: bool) -> Arena:
        unit = HUGE_PAGE_BYTES if huge else libc.PAGE_BYTES
        total = -(-size // unit) * unit
        chunks: list[Chunk] = []
        mapping: Mapping | None = None
        try:
            # What is leased whole may be named by descriptor and offset (the path `imported`), and pieces of a page cross no edge of a memfd there.
            most = total if kind is ArenaKind.WHOLE else policy.chunk_bytes
            for start in range(0, total, most):
                part = min(most, total - start)
                flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING | (_MFD_HUGETLB if huge else 0)
                fd = os.memfd_create(f"hoststage-{name}", flags)
                chunks.append(Chunk(fd, part))
                os.ftruncate(fd, part)
            mapping = Mapping.map(chunks, writable=True)
            seals = libc.Seal.SHRINK | libc.Seal.GROW | libc.Seal.SEAL
            if kind is ArenaKind.READ:
                seals |= libc.Seal.FUTURE_WRITE
            for chunk in chunks:
                fcntl.fcntl(chunk.fd, libc.F_ADD_SEALS, int(seals))
            arena = cls(kind, total, chunks, mapping, huge)
            if policy.interleave:
                arena.interleave(numa_nodes())
            if huge:
                # Making and mapping a huge-page memfd succeeds without any page behind it: only populating tells.
                arena.prefault(policy.threads)
            arena._gathers = policy.huge_pages is not HugePages.OFF and not huge
            return arena
        except BaseException as error:
            if mapping is not None:
                mapping.unmap()
            for chunk in chunks:
                os.close(chunk.fd)
            if isinstance(error, (OSError, MappingError)):
                raise _unavailable(size, error) from error
            raise

    def interleave(self, nodes: tuple[int, ...]) -> None:
        """Spread pages that are not populated yet over NUMA nodes. A refusal (seccomp, no CAP_SYS_NICE) is noted, not raised."""
        if len(nodes) < 2:
            return
        try:
            libc.mbind(self.address, self.size, libc.NumaPolicy.INTERLEAVE, nodes)
        except OSError as error:
            self._numa_problem = f"not spread over NUMA nodes {nodes}: {error.strerror}"

    def register_cuda(self, stride: int = libc.PAGE_BYTES) -> PinReport:
        """Register the daemon's mapping with CUDA; the report says whether, and why not."""
        try:
            runtime = Runtime()
            done = runtime.register(self.address, self.size, stride, read_only=False)
        except CudaUnavailable as error:
            self.report = replace(self.report, reason=_joined(self.report.reason, f"CUDA {error}"))
            return self.report
        if done.ranges:
            self._cuda = (runtime, done)
            self.report = replace(self.report, achieved="cuda", reason=self._numa_problem)
        else:
            self.report = replace(self.report, reason=_joined(self.report.reason, done.reason))
        return self.report

    def prefault(self, threads: int = 0, *, lock: bool = False) -> PinReport:
        """Populate every page, in parallel, and lock them where asked and allowed. Raises `MemoryUnavailable`."""
        pieces = list(self._pieces())
        try:
            if len(pieces) == 1:
                self._populate(pieces[0])
            else:
                with ThreadPoolExecutor(threads or os.cpu_count() or 1, "prefault") as pool:
                    for _ in pool.map(self._populate, pieces):
                        pass
        except OSError as error:
            raise _unavailable(self.size, error) from error
        self.report = self._pin(lock)
        return self.report

    def _pieces(self) -> Iterator[_Piece]:
        base = self.address
        for chunk in self.chunks:
            for at in range(0, chunk.size, _POPULATE_PIECE):
                yield _Piece(base + at, min(_POPULATE_PIECE, chunk.size - at), chunk.fd, at)
            base += chunk.size

    def _populate(self, piece: _Piece) -> None:
        if self._gathers:
            self._gather(piece)
        try:
            libc.madvise(piece.address, piece.length, libc.Advice.POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14. Allocating in the file reports a shortage too, where touching a page would raise SIGBUS.
            os.posix_fallocate(piece.fd, piece.offset, piece.length)

    def _gather(self, piece: _Piece) -> None:
        """Make a piece of huge pages where the kernel has memory in such lumps, before it is populated page by page.

        Without any setting of the host: a page is touched in each 2 MiB, and then they are collapsed around it. Direct
        I/O is told one place for 2 MiB then instead of 512, copies miss fewer translations, and the kernel clears a huge page several
        times as fast as 512 small ones.
        """
        first = -(-piece.address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = (piece.address + piece.length) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first >= last:
            return
        started = time.monotonic()
        try:
            for address in range(first, last, HUGE_PAGE_BYTES):
                libc.madvise(address, libc.PAGE_BYTES, libc.Advice.POPULATE_WRITE)
        except OSError:
            self._gathers = False  # a kernel before 5.14, or a shortage that populating will report
            return
        whole = libc.collapse(first, last - first)
        slow = time.monotonic() - started > _SLOW_STRETCH_SECONDS * ((last - first) // HUGE_PAGE_BYTES)
        if whole:
            self._gathered.append(last - first)
        if slow or not whole:
            # Memory is in small pieces, and looking for larger ones costs more than they bring.
            self._gathers = False

    @property
    def _in_huge_pages(self) -> bool:
        """Whether all of it, but for an end of less than 2 MiB for each memfd, is in huge pages."""
        return self._huge or sum(self._gathered) > max(0, self.size - len(self.chunks) * HUGE_PAGE_BYTES)

    def _pin(self, lock: bool) -> PinReport:
        why = "locking was not asked for"
        if lock:
            try:
                libc.mlock(self.address, self.size)
            except OSError:
                soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                why = (
                    f"mlock of {self.size} bytes was refused: RLIMIT_MEMLOCK is {soft} bytes; raise it "
                    "(systemd LimitMEMLOCK=infinity) or grant CAP_IPC_LOCK"
                )
            else:
                return PinReport("mlock", self._numa_problem, self._in_huge_pages, self.size)
        why = _joined(why, self._numa_problem)
        if swap_bytes() == 0:
            return PinReport("resident", why, self._in_huge_pages, self.size)
        return PinReport("none", f"{why}; the host has swap", self._in_huge_pages, self.size)

    @property
    def address(self) -> int:
        """Where the daemon's mapping starts; aligned to 2 MiB."""
        return self._mapping.address

    def view(self, offset: int, length: int) -> memoryview:
        """A writable view of the daemon's mapping."""
        return self._mapping.view(offset, length)

    def descriptors(self) -> list[Chunk]:
        """Fresh descriptors for a client, in chunk order, close-on-exec; whoever gets them closes them.

        Each is opened anew through `/proc/self/fd`, so that it is an open file of its own: read-only for a read arena, and
        visible to `has_foreign_writable_mapping` and `is_open_elsewhere`. Raises `MemoryUnavailable` at the limit of
        open files.
        """
        self.handed_out = True
        mode = os.O_RDONLY if self.kind is ArenaKind.READ else os.O_RDWR
        out: list[Chunk] = []
        try:
            for chunk in self.chunks:
                out.append(Chunk(os.open(f"/proc/self/fd/{chunk.fd}", mode | os.O_CLOEXEC), chunk.size))
        except OSError as error:
            for chunk in out:
                os.close(chunk.fd)
            raise _unavailable(self.size, error) from error
        return out

    def has_foreign_writable_mapping(self) -> bool:
        """Whether a process may still write what was handed out, through a mapping or a descriptor.

        A read lease is refused by the kernel while any open file of the memfd that was opened for writing lives, be it by
        a descriptor or only by a mapping. The file that `memfd_create` itself returned is not among those that the kernel counts, so
        the daemon's own mapping does not show here (seen on Linux 6.18).
        """
        return any(not _lease(chunk.fd, fcntl.F_RDLCK) for chunk in self.chunks)

    def is_open_elsewhere(self) -> bool:
        """Whether any process still has what was handed out, for writing or for reading, as a descriptor or a mapping.

        A write lease, asked for on a descriptor opened anew for reading, is refused while another open file of the memfd
        lives (seen on Linux 6.18: an open file for reading, also when only its mapping is left, refuses it; the daemon's
        own does not). Where the kernel has no such lease the answer is yes: the memory is then not reused.
        """
        for chunk in self.chunks:
            fd = os.open(f"/proc/self/fd/{chunk.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not _lease(fd, fcntl.F_WRLCK):
                    return True
            finally:
                os.close(fd)
        return False

    def zero(self) -> None:
        """Overwrite everything with zeros (another client of the tenant must not read what the last one wrote)."""
        libc.memset(self.address, 0, self.size)

    def close(self) -> None:
        """Give the memory back. Safe to repeat.

        The pages of a write arena go at once, also under the mappings of client processes, which read zeros from then on.
        Those of a read arena cannot be taken (its seal forbids it), and those of an arena leased whole must not be: an engine that outlives
        the daemon goes on using them. They stay for as long as a client maps them: see `is_open_elsewhere`.
        """
        if self._closed:
            return
        self._closed = True
        if self._cuda is not None:
            runtime, done = self._cuda
            runtime.unregister(done.ranges)
        self._mapping.unmap()
        for chunk in self.chunks:
            if self.handed_out and self.kind is ArenaKind.WRITE:
                # A kernel that cannot do this keeps the pages until the last mapping goes: nothing more can be done here.
                with contextlib.suppress(OSError):
                    libc.punch_hole(chunk.fd, 0, chunk.size)
            os.close(chunk.fd)


def obtainable_bytes() -> int:
    """Return the bytes that a new arena could have on this node now, whatever the budget says."""
    return max(_free_bytes(), _free_huge_pages() * HUGE_PAGE_BYTES)


def _free_bytes() -> int:
    return max(0, free_bytes() - _HEADROOM)


def _lease(fd: int, kind: int) -> bool:
    """Whether the kernel grants a lease, which is given back at once.

    A process that opens the file in that moment breaks the lease, of which the kernel tells by SIGIO, and SIGIO kills by
    default: a client could end the daemon so (seen). SIGURG is ignored by default.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def numa_nodes(root: str = "/") -> tuple[int, ...]:
    """NUMA nodes that have memory and that this process may use, in order; one where the kernel does not say."""
    base = Path(root)
    try:
        nodes = _number_list((base / "sys/devices/system/node/has_memory").read_text())
    except (OSError, ValueError):
        return (0,)
    # A cpuset may forbid some of them; binding to one of those is refused.
    with contextlib.suppress(OSError, ValueError):
        for line in (base / "proc/self/status").read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                nodes &= _number_list(line.partition(":")[2])
    return tuple(sorted(nodes)) or (0,)


def _number_list(text: str) -> set[int]:
    """Return the numbers of a kernel list such as "0-1,4"."""
    out: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        out.update(range(int(low), int(high or low) + 1))
    return out


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _free_huge_pages() -> int:
    try:
        return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def _unavailable(size: int, error: Exception) -> MemoryUnavailable:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return MemoryUnavailable(size, "too many open files", "Raise RLIMIT_NOFILE of the daemon.")
    return MemoryUnavailable(
        size,
        str(error) or type(error).__name__,
        "Lower memory.budget, or raise the memory limit of the daemon's container: its arenas are charged to it.",
    )
