"""Arenas: sealed memfd chunks that the daemon maps contiguously.

A chunk is sealed in one call after the daemon's only writable mapping exists: nobody can shrink, grow or re-seal it, so
that a client's truncation cannot kill the daemon; a read arena also gets `F_SEAL_FUTURE_WRITE`, after which nobody can write it but through
that one mapping. Creation and populating block and are meant for a worker thread; both release the GIL.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from hoststage.shm import libc
from hoststage.shm.cuda import CudaUnavailable, Registered, Runtime
from hoststage.shm.mapping import HUGE_PAGE_BYTES, Chunk, Mapping, MappingError

_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_HUGETLB = 1, 2, 4
_POPULATE_PIECE = 64 << 20


class MemoryUnavailable(RuntimeError):
    """Memory for an arena could not be had. `requested` in bytes; the remedy says what an operator can do."""

    def __init__(self, requested: int, problem: str, remedy: str) -> None:
        self.requested, self.problem, self.remedy = requested, problem, remedy
        super().__init__(f"{requested} bytes of shared memory are not available: {problem}. {remedy}")


class ArenaKind(Enum):
    """`WRITE`: private to one session and writable by it. `READ`: read-only to everyone but the daemon."""

    WRITE = "write"
    READ = "read"


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
        self._closed = False
        self._numa_problem = ""
        self._cuda: tuple[Runtime, Registered] | None = None

    @classmethod
    def create(cls, name: str, size: int, kind: ArenaKind, policy: MemoryPolicy) -> Arena:
        """Make an arena of at least `size` bytes, not yet populated. Raises `MemoryUnavailable`."""
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
        return cls._make(name, size, kind, policy, huge=False)

    @classmethod
    def _make(cls, name: str, size: int, kind: ArenaKind, policy: MemoryPolicy, *, huge: bool) -> Arena:
        unit = HUGE_PAGE_BYTES if huge else libc.PAGE_BYTES
        total = -(-size // unit) * unit
        chunks: list[Chunk] = []
        mapping: Mapping | None = None
        try:
            for start in range(0, total, policy.chunk_bytes):
                part = min(policy.chunk_bytes, total - start)
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
            return arena
        except (OSError, MappingError) as error:
            if mapping is not None:
                mapping.unmap()
            for chunk in chunks:
                os.close(chunk.fd)
            raise _unavailable(size, error) from error

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
        pieces = [(at, min(_POPULATE_PIECE, self.size - at)) for at in range(0, self.size, _POPULATE_PIECE)]
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

    def _populate(self, piece: tuple[int, int]) -> None:
        offset, length = piece
        try:
            libc.madvise(self.address + offset, length, libc.Advice.POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14: touch each page by hand. Without a reservation this could fault, so reserve first.
            libc.memset(self.address + offset, 0, length)

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
                return PinReport("mlock", self._numa_problem, self._huge, self.size)
        why = _joined(why, self._numa_problem)
        if swap_bytes() == 0:
            return PinReport("resident", why, self._huge, self.size)
        return PinReport("none", f"{why}; the host has swap", self._huge, self.size)

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
        visible to `has_foreign_writable_mapping` for a write arena.
        """
        self.handed_out = True
        mode = os.O_RDONLY if self.kind is ArenaKind.READ else os.O_RDWR
        out: list[Chunk] = []
        try:
            for chunk in self.chunks:
                out.append(Chunk(os.open(f"/proc/self/fd/{chunk.fd}", mode | os.O_CLOEXEC), chunk.size))
        except OSError:
            for chunk in out:
                os.close(chunk.fd)
            raise
        return out

    def has_foreign_writable_mapping(self) -> bool:
        """Whether a process may still write what was handed out, through a mapping or a descriptor.

        A read lease is refused by the kernel while any open file of the memfd that was opened for writing lives, be it by
        a descriptor or only by a mapping. The file that `memfd_create` itself returned is not among those that the kernel counts, so
        the daemon's own mapping does not show here (seen on Linux 6.18).
        """
        return any(self._still_written(chunk) for chunk in self.chunks)

    @staticmethod
    def _still_written(chunk: Chunk) -> bool:
        try:
            fcntl.fcntl(chunk.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return True
        fcntl.fcntl(chunk.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def zero(self) -> None:
        """Overwrite everything with zeros (another client of the tenant must not read what the last one wrote)."""
        libc.memset(self.address, 0, self.size)

    def close(self) -> None:
        """Give the memory back. Safe to repeat. Mappings in client processes keep theirs until they unmap."""
        if self._closed:
            return
        self._closed = True
        if self._cuda is not None:
            runtime, done = self._cuda
            runtime.unregister(done.ranges)
        self._mapping.unmap()
        for chunk in self.chunks:
            os.close(chunk.fd)


def swap_bytes(root: str = "/") -> int:
    """Bytes of swap that this host has."""
    for line in (Path(root) / "proc/meminfo").read_text().splitlines():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def numa_nodes(root: str = "/") -> tuple[int, ...]:
    """NUMA nodes that have memory, in order; one where the kernel does not say."""
    try:
        text = (Path(root) / "sys/devices/system/node/has_memory").read_text().strip()
        nodes: list[int] = []
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            nodes.extend(range(int(low), int(high or low) + 1))
    except (OSError, ValueError):
        return (0,)
    return tuple(nodes) or (0,)


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
        str(error),
        "Lower memory.budget, or raise the memory limit of the daemon's container: its arenas are charged to it.",
    )
