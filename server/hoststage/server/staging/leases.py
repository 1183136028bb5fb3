"""Arenas leased whole: memory beyond a session's grant whose slots the client manages itself (an engine's host pools).

Such memory is the engine's own: while its process lives the daemon neither takes it away nor touches it, be it that the daemon stops. When the
lease or its session ends it is kept warm, so that the engine's next start finds it populated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from hoststage.core.ledger import OverBudget
from hoststage.core.prefix import PoolRule
from hoststage.core.sessions import SessionState
from hoststage.core.stack import HitPolicy
from hoststage.server.contract import BudgetFacts, PoolFacts, RequestError, WholeLease
from hoststage.server.memory.arena import Arena, MemoryUnavailable, obtainable_bytes
from hoststage.server.memory.imports import descriptor_limit
from hoststage.server.staging.arenas import ArenaMaker, PoolArena, next_arena_id
from hoststage.shm.libc import PAGE_BYTES

if TYPE_CHECKING:
    from hoststage.server.staging.service import Service
    from hoststage.server.staging.session import Session

log = structlog.get_logger(__name__)

POOL = "leased"
"""Their pool in metrics and status: what a client calls them must not become a label."""


@dataclass(frozen=True, slots=True)
class _Lease:
    session: int
    namespace: str
    name: str
    arena: Arena

    @property
    def holder(self) -> str:
        """Its name in the ledger: not one that ends with the session, for the bytes are free only once the arena was taken back."""
        return f"arena {self.name or 'unnamed'} leased by session {self.session}"


class WholeLeases:
    """The arenas leased whole of all sessions, by arena id."""

    def __init__(self, service: Service, maker: ArenaMaker) -> None:
        self._service = service
        self._maker = maker
        self._leases: dict[int, _Lease] = {}
        # Each is a descriptor here, and engines may have one for each layer: as for imports, an eighth of what may be open is for one session.
        self.most_of_session = descriptor_limit() // 2
        self._returning: set[asyncio.Task[None]] = set()

    async def budget(self) -> BudgetFacts:
        """Return what one lease could have now: of the budget, and of what the node has free."""
        await self._returned()
        self._service.sync_idle_arenas()
        ledger = self._service.ledger
        idle = sum(h.bytes for h in ledger.holders() if h.reclaimable)
        left = min(max(0, ledger.free), obtainable_bytes()) + idle
        return BudgetFacts(ledger.budget, left)

    async def lease(self, session: Session, name: str, size: int) -> WholeLease:
        """Lease an arena of at least `size` bytes. Raises `RequestError`."""
        if size < 1:
            raise RequestError("BUDGET", f"bytes is {size}, must be at least 1", field="bytes")
        self._check_count(session)
        # What a worker that has just ended gives back is what its next start asks for.
        await self._returned()
        self._service.sync_idle_arenas()
        warm = self._maker.idle_whole(session.request.stack.identity.tenant, size)
        self._service.sync_idle_arenas()
        lease = self._take_warm(session, name, warm) if warm is not None else await self._make(session, name, size)
        try:
            self._check_alive(session)
            self._check_count(session)
            arena_id = next_arena_id()
            rule = PoolRule(POOL, HitPolicy.ALL_PAGES, 0, 1, -1, lease.arena.size, lease.arena.size)
            made = PoolArena(arena_id, "whole", 0, 1, rule, lease.arena)
            answer = WholeLease(made.facts(), made.descriptors(), warm is not None)
        except BaseException as error:
            self._spawn_release([lease])
            if isinstance(error, MemoryUnavailable):
                raise _no_memory(error) from error
            raise
        self._leases[arena_id] = lease
        found = "warm" if answer.warm else "fresh"
        self._service.tier.counters["arena_lease", found] += 1
        log.info("arena.leased", session=session.session_id, arena=arena_id, name=name, bytes=size, memory=found)
        return answer

    def _check_count(self, session: Session) -> None:
        mine = sum(lease.session == session.session_id for lease in self._leases.values())
        if mine >= self.most_of_session:
            raise RequestError(
                "ARENA",
                f"session {session.session_id} has leased {mine} arenas, at most {self.most_of_session} are allowed",
                code="RESOURCE_EXHAUSTED",
                remedy="return those that are not used, lease fewer and larger ones, or raise RLIMIT_NOFILE of the daemon",
            )

    def _take_warm(self, session: Session, name: str, arena: Arena) -> _Lease:
        lease = _Lease(session.session_id, session.core.namespace.name, name, arena)
        # It counted as idle until now: its bytes are free for it, unless former clients hold more than there is.
        self._service.ledger.force(lease.holder, arena.size)
        return lease

    async def _make(self, session: Session, name: str, size: int) -> _Lease:
        service, ledger = self._service, self._service.ledger
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        keep = session.core.namespace.name
        while await service.reclaim_for(keep, size, 1):
            pass
        pending = f"arena {name or 'unnamed'} being made for session {session.session_id}"
        try:
            ledger.take(pending, size)
        except OverBudget as error:
            service.tier.counters["arena_lease", "refused"] += 1
            raise RequestError(
                "BUDGET",
                f"{size} bytes wanted, {max(0, error.free)} of {error.budget} are free",
                code="RESOURCE_EXHAUSTED",
                field="bytes",
                remedy="ask for less, or raise memory.budget of the daemon",
            ) from error
        try:
            self._check_alive(session)
            arena = await self._maker.make_whole(session.request.stack.identity.tenant, size)
        except MemoryUnavailable as error:
            service.tier.counters["arena_lease", "refused"] += 1
            raise _no_memory(error) from error
        finally:
            ledger.give(pending, size)
        lease = _Lease(session.session_id, keep, name, arena)
        # Huge pages round it up.
        ledger.force(lease.holder, arena.size)
        return lease

    @staticmethod
    def _check_alive(session: Session) -> None:
        """Populating takes a while, and the client may be gone by then: nobody would give the memory back."""
        if session.core.state is not SessionState.ACTIVE:
            raise RequestError(
                "SESSION_OVER", f"session {session.session_id} ended meanwhile", code="FAILED_PRECONDITION"
            )

    async def give_back(self, session: Session, arena_id: int) -> None:
        """Take back what `lease` gave, unmapped by its client. Raises `RequestError`."""
        lease = self._leases.get(arena_id)
        if lease is None or lease.session != session.session_id:
            raise RequestError("ARENA", f"arena {arena_id} is not leased by this session", field="arena_id")
        del self._leases[arena_id]
        await self._spawn_release([lease])

    def session_over(self, session_id: int) -> None:
        """Take back all that a session leased: its process is gone, or has unmapped it."""
        mine = [arena_id for arena_id, lease in self._leases.items() if lease.session == session_id]
        if mine:
            self._spawn_release([self._leases.pop(arena_id) for arena_id in mine])

    def _spawn_release(self, leases: list[_Lease]) -> asyncio.Task[None]:
        task = self._service.engine.spawn(self._release(leases))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        return task

    async def _release(self, leases: list[_Lease]) -> None:
        for lease in leases:
            await self._maker.release_raw([lease.arena])
            self._service.ledger.give(lease.holder, lease.arena.size)
            self._service.sync_idle_arenas()

    async def _returned(self) -> None:
        """Wait until everything that is on its way back is back."""
        while self._returning:
            await asyncio.wait(set(self._returning))

    def facts(self) -> list[PoolFacts]:
        """Return what operators are told of each."""
        out = []
        for lease in self._leases.values():
            rule = PoolRule(POOL, HitPolicy.ALL_PAGES, 0, 1, -1, lease.arena.size, lease.arena.size)
            pin = PoolArena(0, "whole", 0, 1, rule, lease.arena).pin()
            out.append(PoolFacts(lease.namespace, POOL, "whole", lease.session, rule.stride, 1, {"leased": 1}, 0, pin))
        return out


def _no_memory(error: MemoryUnavailable) -> RequestError:
    return RequestError(
        "BUDGET",
        f"{error.requested} bytes wanted: {error.problem}",
        code="RESOURCE_EXHAUSTED",
        field="bytes",
        remedy=error.remedy,
    )
