"""Arenas kept warm between sessions, so that a restarting worker finds its memory populated.

A memfd whose descriptor ever left the daemon is never given to another tenant. Inside a tenant it is reused only when nobody
can write it any more, else closed. Thread-safe: sessions open and close from worker threads.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

from hoststage.server.memory.arena import Arena, ArenaKind, MemoryPolicy


@dataclass(slots=True)
class _Idle:
    order: int
    tenant: str
    arena: Arena


class ArenaPool:
    """Makes, keeps and closes arenas. `keep_bytes`: how much may be kept warm."""

    def __init__(self, policy: MemoryPolicy, keep_bytes: int = 1 << 30) -> None:
        self._policy = policy
        self._keep = keep_bytes
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._owner: dict[Arena, str] = {}
        self._order = itertools.count()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept warm for nobody in particular."""
        with self._lock:
            return sum(i.arena.size for i in self._idle)

    def acquire(self, tenant: str, size: int, kind: ArenaKind) -> Arena:
        """Return a populated arena of at least `size` bytes that reads as zeros or as this tenant's own old pages.

        Raises `MemoryUnavailable`. Blocks for as long as populating takes.
        """
        with self._lock:
            found = self._find(tenant, size, kind)
            if found is not None:
                self._idle.remove(found)
        arena = found.arena if found is not None else self._make(size, kind)
        with self._lock:
            self._owner[arena] = tenant
        return arena

    def _find(self, tenant: str, size: int, kind: ArenaKind) -> _Idle | None:
        fit = [
            i
            for i in self._idle
            # Not much larger than asked for: the budget counts what was granted.
            if i.arena.kind is kind and size <= i.arena.size < size + (2 << 20) and tenant == i.tenant
        ]
        return min(fit, key=lambda i: i.arena.size, default=None)

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
            tenant = self._owner.pop(arena)
            kept = sum(i.arena.size for i in self._idle)
            # A read arena may still be mapped by its readers, whom nothing tells that its pages have become others'.
            reusable = arena.kind is ArenaKind.WRITE and not arena.has_foreign_writable_mapping()
            if reusable and kept + arena.size <= self._keep:
                self._idle.append(_Idle(next(self._order), tenant, arena))
                return
        arena.close()

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
        """Close all idle arenas."""
        with self._lock:
            idle, self._idle = self._idle, []
        for item in idle:
            item.arena.close()
