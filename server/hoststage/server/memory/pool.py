"""Arenas kept warm between sessions, so that a restarting worker finds its memory populated.

A memfd whose descriptor ever left the daemon is never given to another tenant. Inside a tenant it is reused only when no
process has it any more, else closed: one that may still write it could alter what others load, and one that may still read it
would see pages that are no longer its own. Thread-safe: sessions open and close from worker threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hoststage.server.memory.arena import Arena, ArenaKind, MemoryPolicy, MemoryUnavailable


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
        self._lingering: list[Arena] = []
        self._order = itertools.count()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept warm for nobody in particular."""
        with self._lock:
            return sum(i.arena.size for i in self._idle)

    def lingering_bytes(self) -> int:
        """Return the bytes of read arenas given back here that former clients still map. Quick: closing is left to a thread."""
        with self._lock:
            gone = [a for a in self._lingering if not a.is_open_elsewhere()]
            self._lingering = [a for a in self._lingering if a not in gone]
            left = sum(a.size for a in self._lingering)
        if gone:
            threading.Thread(target=_close_all, args=(gone,), name="arena-close").start()
        return left

    def acquire(self, tenant: str, size: int, kind: ArenaKind) -> Arena:
        """Return a populated arena of at least `size` bytes that reads as zeros or as this tenant's own old pages.

        Raises `MemoryUnavailable`. Blocks for as long as populating takes.
        """
        with self._lock:
            found = self._find(tenant, size, kind)
            if found is not None:
                self._idle.remove(found)
        arena = found.arena if found is not None else self._make_or_reclaim(size, kind)
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
            tenant = self._owner.pop(arena)
            kept = sum(i.arena.size for i in self._idle)
            held = arena.handed_out and arena.is_open_elsewhere()
            if not held and kept + arena.size <= self._keep:
                self._idle.append(_Idle(next(self._order), tenant, arena))
                return
            if held and arena.kind is ArenaKind.READ:
                # Closing it would free nothing while it is mapped: it still counts, see `lingering_bytes`.
                self._lingering.append(arena)
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
        """Close all arenas that nobody has acquired."""
        with self._lock:
            arenas = [item.arena for item in self._idle] + self._lingering
            self._idle, self._lingering = [], []
        _close_all(arenas)


def _close_all(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
