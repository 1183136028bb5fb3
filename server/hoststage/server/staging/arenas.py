"""Arenas as the tier uses them: one a pool, found by slot."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hoststage.core.prefix import PoolRule
from hoststage.core.slots import Slots
from hoststage.server.contract import ArenaDescriptor, ArenaFacts, PinFacts
from hoststage.server.memory.arena import Arena, ArenaKind
from hoststage.server.memory.pool import ArenaPool

_ids = itertools.count(1)


def next_arena_id() -> int:
    """Return a number that no other arena of this daemon has."""
    return next(_ids)


@dataclass(slots=True, eq=False)
class PoolArena:
    """The slots of one pool in one arena. `arena` is None where the pool has no slots here."""

    arena_id: int
    kind: str
    pool: int
    slots: int
    rule: PoolRule
    arena: Arena | None

    @property
    def base(self) -> int:
        """Address of the first slot in this process."""
        assert self.arena is not None
        return self.arena.address

    def address(self, slot: int) -> int:
        """Address of a slot in this process."""
        return self.base + slot * self.rule.stride

    def view(self, slot: int) -> memoryview:
        """The page in a slot, `page_bytes` long."""
        assert self.arena is not None
        return self.arena.view(slot * self.rule.stride, self.rule.page_bytes)

    def offsets(self, slots: Slots) -> NDArray[np.int64]:
        """Byte offsets of slots in the arena."""
        return slots.astype(np.int64) * self.rule.stride

    def facts(self) -> ArenaFacts:
        """What a client is told of it."""
        chunks = tuple(c.size for c in self.arena.chunks) if self.arena else ()
        return ArenaFacts(self.arena_id, self.kind, self.pool, self.slots, self.rule.stride, chunks, self.pin())

    def pin(self) -> PinFacts:
        """How firmly it is held."""
        if self.arena is None:
            return PinFacts("none", "the pool has no slots here", False)
        report = self.arena.report
        return PinFacts(report.achieved, report.reason, report.huge_pages)

    def descriptors(self) -> list[ArenaDescriptor]:
        """Fresh duplicates for a client, in chunk order."""
        if self.arena is None:
            return []
        return [ArenaDescriptor(self.arena_id, i, c.size, c.fd) for i, c in enumerate(self.arena.descriptors())]


class ArenaMaker:
    """Makes and gives back arenas in worker threads, so that populating a gigabyte never holds the loop."""

    def __init__(self, pool: ArenaPool, executor: Executor) -> None:
        self._pool = pool
        self._executor = executor

    async def make(
        self, tenant: str, kind: ArenaKind, rules: Sequence[PoolRule], slots: Sequence[int]
    ) -> list[PoolArena]:
        """Return one arena a pool. Raises what the memory layer raises; then nothing is left behind."""
        loop = asyncio.get_running_loop()
        made: list[PoolArena] = []
        try:
            for place, (rule, n) in enumerate(zip(rules, slots, strict=True)):
                arena = None
                if n:
                    arena = await loop.run_in_executor(
                        self._executor, self._pool.acquire, tenant, n * rule.stride, kind
                    )
                made.append(PoolArena(next_arena_id(), kind.value, place, n, rule, arena))
        except BaseException:
            await self.release(made)
            raise
        return made

    async def make_indexes(
        self, tenant: str, rules: Sequence[PoolRule], sizes: Sequence[tuple[int, int]]
    ) -> list[PoolArena]:
        """Return one arena for the page index of each pool with slots. sizes: slots and bytes, one a pool."""
        loop = asyncio.get_running_loop()
        made: list[PoolArena] = []
        try:
            for place, (rule, (slots, size)) in enumerate(zip(rules, sizes, strict=True)):
                if slots:
                    arena = await loop.run_in_executor(self._executor, self._pool.acquire, tenant, size, ArenaKind.READ)
                    made.append(PoolArena(next(_ids), "index", place, slots, rule, arena))
        except BaseException:
            await self.release(made)
            raise
        return made

    async def make_board(self, tenant: str, rule: PoolRule, size: int) -> PoolArena:
        """Return an arena for one session's lease board. Raises what the memory layer raises."""
        loop = asyncio.get_running_loop()
        arena = await loop.run_in_executor(self._executor, self._pool.acquire, tenant, size, ArenaKind.WRITE)
        return PoolArena(next(_ids), "board", 0, 0, rule, arena)

    def idle_whole(self, tenant: str, size: int) -> Arena | None:
        """Return a warm arena for a client that manages it itself, None where there is none."""
        return self._pool.take_idle(tenant, size, ArenaKind.WHOLE)

    async def make_whole(self, tenant: str, size: int) -> Arena:
        """Return an arena that a client manages itself. Raises what the memory layer raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._pool.acquire, tenant, size, ArenaKind.WHOLE)

    async def release(self, arenas: Sequence[PoolArena]) -> None:
        """Give arenas back."""
        await self.release_raw([a.arena for a in arenas if a.arena is not None])

    async def release_raw(self, arenas: Sequence[Arena]) -> None:
        """Give arenas back to the pool, which keeps or closes them."""
        loop = asyncio.get_running_loop()
        for arena in arenas:
            await loop.run_in_executor(self._executor, self._pool.release, arena)

    async def reclaim(self, amount: int) -> int:
        """Close idle arenas of at least `amount` bytes, as far as there are any; return how many bytes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._pool.reclaim, amount)
