"""Arenas kept warm between sessions, so that a restarting worker finds its memory populated.

A memfd whose descriptor ever left the daemon is never given to another tenant. Inside a tenant it is reused only when no
process has it any more, else closed: one that may still write it could alter what others load, and one that may still read it
would see pages that are no longer its own. Thread-safe: sessions open and close from worker threads.
"""

from __future__ import annotations

import itertools
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hoststage.server.memory.arena import Arena, ArenaKind, MemoryPolicy, MemoryUnavailable

_MAPS = Path("/proc/sys/vm/max_map_count")
_USUAL_MAPS = 65530


@dataclass(slots=True)
class _Idle:
    order: int
    tenant: str
    arena: Arena


def memfd_limit() -> int:
    """Return how many memfds all arenas may have: half of the files that the daemon may open, and a quarter of its mappings.

    What is left is for those who connect. Small arenas cost next to none of the budget: without a bound of their own they could take
    every descriptor, and nobody would be answered any more.
    """
    try:
        maps = int(_MAPS.read_text())
    except (OSError, ValueError):
        maps = _USUAL_MAPS
    return max(16, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, maps // 4))


class ArenaPool:
    """Makes, keeps and closes arenas.

    `keep_bytes`: how much may be kept warm; what is leased whole is apart from it, and kept where `keep_whole`. `most_memfds`: of all arenas
    together, those kept warm among them; 0: as `memfd_limit` says.
    """

    def __init__(
        self, policy: MemoryPolicy, keep_bytes: int = 1 << 30, *, keep_whole: bool = True, most_memfds: int = 0
    ) -> None:
        self._policy = policy
        self._keep = keep_bytes
        self._keep_whole = keep_whole
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._owner: dict[Arena, str] = {}
        self._lingering: list[_Idle] = []
        self._order = itertools.count()
        self._most_memfds = most_memfds or memfd_limit()
        self._being_made = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes kept warm for nobody in particular."""
        with self._lock:
            return sum(i.arena.size for i in self._idle)

    @property
    def bytes(self) -> int:
        """Bytes of all arenas, those that former clients still map among them."""
        with self._lock:
            kept = sum(i.arena.size for i in (*self._idle, *self._lingering))
            return kept + sum(arena.size for arena in self._owner)

    @property
    def memfds_left(self) -> int:
        """Memfds that new arenas may have before anything is closed for them."""
        with self._lock:
            return self._most_memfds - self._memfds()

    def memfds_of(self, size: int, kind: ArenaKind = ArenaKind.READ) -> int:
        """Return how many memfds an arena of that size has."""
        return 1 if kind is ArenaKind.WHOLE else -(-size // self._policy.chunk_bytes)

    def _memfds(self) -> int:
        kept = sum(len(i.arena.chunks) for i in (*self._idle, *self._lingering))
        return self._being_made + kept + sum(len(arena.chunks) for arena in self._owner)

    @contextmanager
    def _room_for(self, size: int, kind: ArenaKind) -> Iterator[None]:
        """Count an arena's memfds while it is being made, having closed idle arenas for them. Raises `MemoryUnavailable`."""
        n = self.memfds_of(size, kind)
        while True:
            with self._lock:
                taken = self._memfds()
                if taken + n <= self._most_memfds:
                    self._being_made += n
                    break
                idle = self._idle.pop(0).arena if self._idle else None
            if idle is None:
                raise MemoryUnavailable(
                    size,
                    f"arenas have {taken} memfds, of {self._most_memfds} that all may have",
                    "End sessions and leases that are not needed, or raise RLIMIT_NOFILE of the daemon: half of it is for arenas.",
                )
            idle.close()
        try:
            yield
        finally:
            with self._lock:
                self._being_made -= n

    def lingering_bytes(self) -> int:
        """Return the bytes of arenas given back here that former clients still map. Quick: closing is left to a thread."""
        with self._lock:
            gone = [i for i in self._lingering if not i.arena.is_open_elsewhere()]
            self._lingering = [i for i in self._lingering if i not in gone]
            left = sum(i.arena.size for i in self._lingering)
            kept = [i for i in gone if self._keeps(i.arena)]
            self._idle += kept
        if len(gone) > len(kept):
            closing = [i.arena for i in gone if i not in kept]
            threading.Thread(target=_close_all, args=(closing,), name="arena-close").start()
        return left

    def acquire(self, tenant: str, size: int, kind: ArenaKind) -> Arena:
        """Return a populated arena of at least `size` bytes that reads as zeros or as this tenant's own old pages.

        Raises `MemoryUnavailable`. Blocks for as long as populating takes.
        """
        arena = self.take_idle(tenant, size, kind)
        if arena is None:
            with self._room_for(size, kind):
                arena = self._make_or_reclaim(size, kind)
                with self._lock:
                    self._owner[arena] = tenant
        return arena

    def take_idle(self, tenant: str, size: int, kind: ArenaKind) -> Arena | None:
        """Return a warm arena of the tenant that fits, None where there is none. Does not block."""
        with self._lock:
            found = self._find(tenant, size, kind)
            if found is None:
                return None
            self._idle.remove(found)
            self._owner[found.arena] = tenant
            return found.arena

    def _find(self, tenant: str, size: int, kind: ArenaKind) -> _Idle | None:
        fit = [
            i
            for i in self._idle
            # Not much larger than asked for: the budget counts what was granted.
            if i.arena.kind is kind and size <= i.arena.size < size + (2 << 20) and tenant == i.tenant
        ]
        return min(fit, key=lambda i: i.arena.size, default=None)

    def _make_or_reclaim(self, size: int, kind: ArenaKind) -> Arena:
        try:
            return self._make(size, kind)
        except MemoryUnavailable:
            # What is kept warm for somebody else must not be what is missing.
            if not self.reclaim(size):
                raise
        return self._make(size, kind)

    def _make(self, size: int, kind: ArenaKind) -> Arena:
        arena = Arena.create(kind.value, size, kind, self._policy)
        try:
            arena.prefault(self._policy.threads, lock=self._policy.lock)
            if self._policy.cuda:
                arena.register_cuda()
        except BaseException:
            arena.close()
            raise
        return arena

    def release(self, arena: Arena) -> None:
        """Take an arena back: keep it warm where that is safe and there is room, else close it."""
        with self._lock:
            item = _Idle(next(self._order), self._owner.pop(arena), arena)
            held = arena.handed_out and arena.is_open_elsewhere()
            if not held and self._keeps(arena):
                self._idle.append(item)
                return
            if held and arena.kind is not ArenaKind.WRITE:
                # Closing it would free nothing while it is mapped: it still counts, see `lingering_bytes`.
                self._lingering.append(item)
                return
        arena.close()

    def _keeps(self, arena: Arena) -> bool:
        """Whether an arena that nobody has any more is kept warm. The host pools of an engine are larger than all else together."""
        if arena.kind is ArenaKind.WHOLE:
            return self._keep_whole
        kept = sum(i.arena.size for i in self._idle if i.arena.kind is not ArenaKind.WHOLE)
        return kept + arena.size <= self._keep

    def reclaim(self, amount: int) -> int:
        """Close idle arenas, the longest idle first, until `amount` bytes are free; return how many bytes were."""
        freed = 0
        while freed < amount:
            with self._lock:
                if not self._idle:
                    break
                arena = self._idle.pop(0).arena
            arena.close()
            freed += arena.size
        return freed

    def close(self) -> None:
        """Close all arenas that nobody has acquired."""
        with self._lock:
            arenas = [item.arena for item in self._idle + self._lingering]
            self._idle, self._lingering = [], []
        _close_all(arenas)


def _close_all(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
