"""The tier as a service: sessions with their memory, the budget, and the engine that moves pages.

Implements `hoststage.server.contract.TierService`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import structlog

from hoststage.core.commits import DrainPolicy
from hoststage.core.fences import ProtocolRanges, evaluate
from hoststage.core.findings import Grant, NodeFacts, Verdict
from hoststage.core.ledger import Ledger, OverBudget
from hoststage.core.prefix import Rules, rules_of
from hoststage.core.sessions import SessionCore, SessionLimits, SessionState
from hoststage.core.stack import Mode, PayloadPath, namespace_of
from hoststage.core.tier import Tier
from hoststage.core.writepool import WritePool
from hoststage.server.contract import ImportFacts, PoolFacts, Port, Refusal, SessionRequest, TierFacts
from hoststage.server.memory.arena import ArenaKind, MemoryUnavailable
from hoststage.server.memory.imports import descriptor_limit
from hoststage.server.memory.limits import shared_bytes
from hoststage.server.memory.pool import ArenaPool
from hoststage.server.staging import boards
from hoststage.server.staging.arenas import ArenaMaker, PoolArena
from hoststage.server.staging.durable import HoldOptions
from hoststage.server.staging.engine import Engine
from hoststage.server.staging.holds import Holds
from hoststage.server.staging.imports import DescriptorBudget
from hoststage.server.staging.indexes import make_indexes
from hoststage.server.staging.leases import WholeLeases
from hoststage.server.staging.namespaces import (
    NamespaceMemory,
    adapt,
    contended,
    in_stack_order,
    new_namespace,
    space_holder,
)
from hoststage.server.staging.reports import read_pool_facts, session_facts, write_pool_facts
from hoststage.server.staging.session import Session
from hoststage.server.store.base import Store
from hoststage.v1.ops import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger(__name__)

_JUDGEMENTS = 4


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What an operator may set about the tier. Sizes in bytes."""

    budget_bytes: int
    limits: SessionLimits = field(default_factory=SessionLimits)
    drains: DrainPolicy = field(default_factory=DrainPolicy)
    beliefs_per_pool: int = 1_000_000
    pinned: str = "resident"
    pin_problem: str = ""
    memlock_bytes: int = 0
    cuda: bool = False
    holds: HoldOptions = field(default_factory=HoldOptions)


_RETURNING = "arenas that are being given back"


class Service:
    """See `TierService` for the meaning of the public methods."""

    def __init__(self, options: ServiceOptions, store: Store | None, pool: ArenaPool, executor: Executor) -> None:
        self.options = options
        self.executor = executor
        self.ledger = Ledger(options.budget_bytes)
        self.tier = Tier(secrets.token_bytes(8), options.limits, options.drains)
        self.engine = Engine(self.tier, store, executor, self._session_over)
        self.holds = Holds(self.engine, options.holds)
        self.imported_descriptors = DescriptorBudget(descriptor_limit())
        self._store = store
        self._maker = ArenaMaker(pool, executor)
        self._arena_pool = pool
        self.leases = WholeLeases(self, self._maker)
        self._sessions: dict[int, Session] = {}
        self._namespaces: dict[str, NamespaceMemory] = {}
        # A lock lives only as long as someone opens a session of its namespace.
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._entering: set[str] = set()
        self._came_back = asyncio.Event()
        self._ids = itertools.count(1)

    @property
    def boot_epoch(self) -> bytes:
        return self.tier.epoch

    # -------------------------------------------------------------- handshake

    def negotiate(self, request: SessionRequest) -> Verdict:
        return self._judge(request)[0]

    def _judge(self, request: SessionRequest) -> tuple[Verdict, bool]:
        """Return the verdict, and whether it needs the namespace's idle memory to be made anew.

        Read arenas stay warm when the last session of a namespace has gone. They are no obstacle to a stack that they do not fit.
        """
        low, high = request.protocol
        ranges = ProtocolRanges(low, high, PROTOCOL_MIN, PROTOCOL_MAX)
        name = namespace_of(request.stack)
        live = self._namespaces.get(name)
        verdict = evaluate(request.stack, self._facts(live), ranges)
        if verdict.refused and live is not None and not self.engine.in_use(name):
            anew = evaluate(request.stack, self._facts(None), ranges)
            return anew, not anew.refused
        return verdict, False

    def _facts(self, live: NamespaceMemory | None) -> NodeFacts:
        pools = live.core.pools if live else []
        names = live.names if live else ()
        return NodeFacts(
            budget_bytes=self.options.budget_bytes,
            # Idle memory of the namespace is what the session will use: it is neither charged again nor free for it.
            holders=tuple(
                replace(h, reclaimable=False) if live and h.name == live.holder else h for h in self.ledger.holders()
            ),
            store_configured=self._store is not None,
            pinned=self.options.pinned,
            pin_problem=self.options.pin_problem,
            memlock_bytes=self.options.memlock_bytes,
            cuda=self.options.cuda,
            live_read_slots={name: p.size for name, p in zip(names, pools, strict=True)},
            live_page_bytes={a.rule.name: a.rule.page_bytes for a in live.arenas} if live else {},
            live_shapes=live.shapes if live else (),
        )

    async def open(self, request: SessionRequest, port: Port) -> Session:
        self._replace_previous(request)
        name = namespace_of(request.stack)
        async with self._opening.setdefault(name, asyncio.Lock()):
            session_id = next(self._ids)
            holder = f"session {session_id} ({request.worker or request.client or 'unnamed'})"
            verdict, grant = await self._take_grant(request, name, holder)
            # From here on the namespace's memory is spoken for, though no session is in it yet.
            self._entering.add(name)
            try:
                space = await self._namespace(request, grant, name)
                await self._index(space, grant)
                board = await self._board_arena(request, grant, space)
                try:
                    write = await self._write_arenas(request, grant, space.core.rules)
                except BaseException:
                    self._drop_arena(board)
                    raise
                # What was warm for it counts once from now on, as its own.
                self.sync_idle_arenas()
            except BaseException:
                self.ledger.give(holder)
                self._unused(name, request)
                raise
            finally:
                self._entering.discard(name)
            return self._enter(session_id, request, verdict, port, space, write, board)

    async def _take_grant(self, request: SessionRequest, name: str, holder: str) -> tuple[Verdict, Grant]:
        """Judge a stack and take its grant from the budget. Raises `Refusal`."""
        for _ in range(_JUDGEMENTS):
            verdict, anew = self._judge(request)
            if self.tier.draining or verdict.grant is None:
                raise Refusal(verdict)
            if anew:
                await self._close_namespace(name)
            try:
                await self._take(request, verdict.grant, name, holder)
            except OverBudget:
                # Someone else was faster while memory was being reclaimed: judge again, with what is left now.
                continue
            return verdict, verdict.grant
        raise Refusal(Verdict(None, (*verdict.findings, contended(self.options.budget_bytes))))

    def _unused(self, name: str, request: SessionRequest) -> None:
        """A session could not be opened after all: its namespace's memory is anybody's again, if nobody else uses it."""
        space = self._namespaces.get(name)
        if space is None:
            self.ledger.give(space_holder(request, name))
        elif not space.core.sessions:
            self.ledger.mark(space.holder, reclaimable=True)

    def _replace_previous(self, request: SessionRequest) -> None:
        """End the session that this client says it has left and unmapped."""
        old = self._own_previous(request)
        if old is not None and not request.retained_bytes:
            self.end(old.session_id, "replaced by its own client, which has unmapped")

    def _own_previous(self, request: SessionRequest) -> Session | None:
        """Return the session that this client has left, where it is still here and the client proves that it was its own."""
        old = self._sessions.get(request.previous_session)
        if old is None or request.previous_epoch != self.boot_epoch:
            return None
        return old if hmac.compare_digest(old.resume_token, request.previous_token) else None

    async def _take(self, request: SessionRequest, grant: Grant, name: str, holder: str) -> None:
        """Take the grant from the budget, closing idle namespaces and arenas for it. Raises `OverBudget`."""

        def need() -> int:
            # Others may reclaim the namespace while this one waits for room.
            return grant.session_bytes + (0 if name in self._namespaces else grant.namespace_bytes)

        # The board, of each pool its write arena, and where they are new its read arena and the index of that.
        memfds = 1 + sum(
            (3 if name not in self._namespaces else 1)
            + self._arena_pool.memfds_of(g.stride * (g.write_slots + g.read_slots))
            for g in grant.pools
        )
        self.sync_idle_arenas()
        while await self.reclaim_for(name, need(), memfds):
            pass
        fresh = name not in self._namespaces
        # No await between the last look and the taking: two clients never get the same bytes.
        self.ledger.take(holder, grant.session_bytes)
        if fresh:
            try:
                self.ledger.take(space_holder(request, name), grant.namespace_bytes)
            except OverBudget:
                self.ledger.give(holder)
                raise

    def sync_idle_arenas(self) -> None:
        """Arenas that are kept warm for reuse count, and are the first to go; what former clients still map counts too."""
        self.ledger.give("idle arenas")
        self.ledger.force("idle arenas", self._arena_pool.idle_bytes)
        self.ledger.mark("idle arenas", reclaimable=True)
        self.ledger.give("former clients' mappings")
        self.ledger.force("former clients' mappings", self._arena_pool.lingering_bytes())

    async def reclaim_for(self, keep: str, size: int, memfds: int) -> bool:
        """Give up some idle memory where so many bytes, or memfds, are not free; False where nothing was given up, or need be."""
        if size <= self.ledger.free and memfds <= self._arena_pool.memfds_left:
            return False
        if any(h.name == _RETURNING for h in self.ledger.holders()):
            await self._came_back.wait()
            return True
        given_up = await self._reclaim_one(keep, max(1, size - self.ledger.free))
        self.sync_idle_arenas()
        return given_up

    async def _reclaim_one(self, keep: str, amount: int) -> bool:
        """Give up idle memory: warm arenas first, then the longest unused namespace. False where there is none."""
        if self._arena_pool.idle_bytes and await self._maker.reclaim(amount):
            return True
        idle = [
            (space.used_at, name)
            for name, space in self._namespaces.items()
            # One whose memory is taken for a session that is just being opened has none yet.
            if name != keep and name not in self._entering and not self.engine.in_use(name)
        ]
        if not idle:
            return False
        await self._close_namespace(min(idle)[1])
        return True

    async def _close_namespace(self, name: str) -> None:
        space = self._namespaces.pop(name)
        self.tier.namespaces.pop(name)
        self.engine.read_arenas.pop(name)
        arenas = list(space.arenas)
        if space.indexes is not None:
            space.indexes.close()
            arenas = [*space.indexes.arenas, *arenas]
        await self._give_back(arenas, [space.holder])
        log.info("namespace.closed", namespace=name[:12], model=space.model)

    async def _namespace(self, request: SessionRequest, grant: Grant, name: str) -> NamespaceMemory:
        found = self._namespaces.get(name)
        if found is not None:
            found.used_at = self.engine.now()
            self.ledger.mark(found.holder, reclaimable=False)
            adapt(found, request.stack, grant)
            return found
        rules = rules_of(request.stack)
        slots = [g.read_slots for g in in_stack_order(request.stack, grant)]
        arenas = await self._maker.make(request.stack.identity.tenant, ArenaKind.READ, rules.pools, slots)
        space = new_namespace(
            request,
            grant,
            name,
            arenas,
            has_store=self._store is not None,
            beliefs=self.options.beliefs_per_pool,
            now=self.engine.now(),
        )
        self._namespaces[name] = space
        self.tier.namespaces[name] = space.core
        self.engine.read_arenas[name] = arenas
        log.info("namespace.opened", namespace=name[:12], model=space.model, bytes=grant.namespace_bytes)
        return space

    async def _index(self, space: NamespaceMemory, grant: Grant) -> None:
        """Give a namespace in which pages stay its page indexes. They are an extra: without them clients ask."""
        if space.indexes is not None or grant.mode is not Mode.CACHE or not space.core.rules.self_service:
            return
        try:
            space.indexes = await make_indexes(self._maker, space.tenant, space.core.rules.pools, space.core.pools)
        except MemoryUnavailable as error:
            log.warning("namespace.no_index", namespace=space.core.name[:12], problem=str(error))

    async def _board_arena(self, request: SessionRequest, grant: Grant, space: NamespaceMemory) -> PoolArena | None:
        """Return memory for a lease board, None where the session gets none. It is an extra, as the indexes are."""
        if grant.path is not PayloadPath.SHM or space.indexes is None or not boards.can_use(request.features):
            return None
        if not space.core.next_boards():
            return None
        try:
            return await boards.make_arena(self._maker, space.tenant, space.core.rules.pools)
        except MemoryUnavailable as error:
            log.warning("session.no_board", namespace=space.core.name[:12], problem=str(error))
            return None

    def _drop_arena(self, arena: PoolArena | None) -> None:
        if arena is not None:
            self.engine.spawn(self._maker.release([arena]))

    async def _write_arenas(self, request: SessionRequest, grant: Grant, rules: Rules) -> list[PoolArena]:
        slots = [g.write_slots + g.hold_slots for g in in_stack_order(request.stack, grant)]
        return await self._maker.make(request.stack.identity.tenant, ArenaKind.WRITE, rules.pools, slots)

    def _enter(
        self,
        session_id: int,
        request: SessionRequest,
        verdict: Verdict,
        port: Port,
        space: NamespaceMemory,
        write: list[PoolArena],
        board_arena: PoolArena | None,
    ) -> Session:
        assert verdict.grant is not None
        grants = in_stack_order(request.stack, verdict.grant)
        core = SessionCore(
            session_id,
            space.core,
            verdict.grant.mode,
            # Generations start at random, so that a reference of an earlier session or daemon is refused, whoever sends it.
            [WritePool(g.write_slots, g.hold_slots, generation=secrets.randbits(31)) for g in grants],
            # Slots ahead of need are for clients that write them.
            min(request.credits, self.options.limits.max_credits) if verdict.grant.path is PayloadPath.SHM else 0,
        )
        board = None
        # Room may have gone since the memory was asked for.
        if board_arena is not None and (shares := space.core.next_boards()):
            board = boards.lay_out(board_arena, shares, len(grants))
            core.boards.update(board.sections)
        else:
            self._drop_arena(board_arena)
        self.tier.open(core)
        session = Session(self, core, request, verdict, port, write, space, board, self.engine.now())
        self._sessions[session_id] = session
        self.engine.listeners[session_id] = session
        self.engine.write_arenas[session_id] = write
        if self._own_previous(request) is None:
            # What a session of this daemon left mapped is on that session's account until its client is gone.
            self.ledger.force(f"memory retained by session {session_id}'s client", self._believable(request))
        log.info(
            "session.opened",
            session=session_id,
            client=request.client,
            worker=request.worker,
            namespace=space.core.name[:12],
            model=space.model,
            mode=verdict.grant.mode.value,
            path=verdict.grant.path.value,
        )
        return session

    def _believable(self, request: SessionRequest) -> int:
        """Return the bytes that a client may have kept of an earlier daemon: its word, as far as there is so much shared memory that is not ours.

        Whoever claims more would otherwise leave nothing of the budget to anybody.
        """
        most = max(0, shared_bytes() - self._arena_pool.bytes)
        if request.retained_bytes <= most:
            return request.retained_bytes
        log.warning("session.claims_too_much", client=request.client, claimed=request.retained_bytes, counted=most)
        return most

    # -------------------------------------------------------------- endings

    def quarantine(self, session_id: int, reason: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.core.state is SessionState.ACTIVE:
            log.warning("session.quarantined", session=session_id, reason=reason)
            self.tier.quarantine(session.core)
            session.imported.interrupted()
            self.holds.interrupted(session_id)
            self.engine.settle()

    def end(self, session_id: int, reason: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.core.state is not SessionState.ENDING:
            log.info("session.ended", session=session_id, reason=reason, open_commits=len(session.core.commits))
            self.holds.session_gone(session_id)
            self.engine.listeners.pop(session_id, None)
            self.tier.end(session.core)
            session.imported.end()
            self.engine.settle()

    def _session_over(self, session_id: int) -> None:
        session = self._sessions.pop(session_id)
        arenas = self.engine.write_arenas.pop(session_id)
        if session.board is not None:
            arenas = [*arenas, session.board.arena]
        names = [h.name for h in self.ledger.holders()]
        for holder in names:
            if holder.endswith(f" session {session_id}'s client"):
                self.ledger.give(holder)
        space = self._namespaces.get(session.core.namespace.name)
        if space is not None and not space.core.sessions:
            space.used_at = self.engine.now()
            self.ledger.mark(space.holder, reclaimable=True)
        self.leases.session_over(session_id)
        # What it had counts until it is back: nobody else is granted memory that is still there. From now on, since nobody may take it in between.
        self.engine.spawn(self._give_back(arenas, [n for n in names if n.startswith(f"session {session_id} ")]))

    def _give_back(self, arenas: list[PoolArena], holders: Sequence[str]) -> Coroutine[Any, Any, None]:
        """Give arenas back, which count as reclaimable from now on until they are closed or idle. The coroutine returned must be run."""
        size = sum(self.ledger.move(holder, _RETURNING) for holder in holders)
        self.ledger.mark(_RETURNING, reclaimable=True)

        async def release() -> None:
            try:
                await self._maker.release(arenas)
            finally:
                self.ledger.give(_RETURNING, size)
                self.sync_idle_arenas()
                came_back, self._came_back = self._came_back, asyncio.Event()
                came_back.set()

        return release()

    # -------------------------------------------------------------- operators

    def drain(self) -> int:
        self.tier.draining = True
        return self.tier.open_commits()

    async def drained(self) -> None:
        while self.tier.open_commits():  # noqa: ASYNC110 - the core has no event to wait for
            await asyncio.sleep(0.01)

    def evict(self, namespace: str, pool: str) -> int:
        evicted = 0
        for name, space in self._namespaces.items():
            if namespace and not name.startswith(namespace):
                continue
            for rule, read in zip(space.core.rules.pools, space.core.pools, strict=True):
                if not pool or rule.name == pool:
                    evicted += read.drop_idle()
        self.engine.settle()
        return evicted

    async def clear(self, namespace: str) -> tuple[int, int]:
        resident = 0
        try:
            held = await self.holds.durable.clear(namespace)
            stored = held + (await self._store.clear(namespace) if self._store is not None else 0)
        finally:
            # Last, since pages may be fetched for as long as the store has them.
            space = self._namespaces.get(namespace)
            if space is not None:
                resident = space.core.clear()
        return resident, stored

    def facts(self) -> TierFacts:
        now = self.engine.now()
        counters = {**self.tier.counters, **self.holds.counters()}
        counters["daemon_copies", ""] = self.engine.daemon_copies
        counters["single_flight_joins", ""] = sum(s.core.loads.single_flight_joins for s in self._namespaces.values())
        counters["evictions", ""] = sum(p.evictions for s in self._namespaces.values() for p in s.core.pools)
        kept = sum(p.boards.honoured for s in self._namespaces.values() for p in s.core.pools)
        counters["listed_kept", ""] = kept
        waiting = self.tier.drains.waiting
        problems = (f"{waiting} commits cannot be stored and are being retried",) if waiting else ()
        return TierFacts(
            self.options.budget_bytes,
            self.ledger.taken,
            tuple(session_facts(s, now) for s in self._sessions.values()),
            tuple(self._pool_facts()),
            counters,
            waiting,
            problems,
            self.holds.facts(),
            ImportFacts(
                self.imported_descriptors.taken,
                self.imported_descriptors.limit,
                sum(s.imported.imports.bytes for s in self._sessions.values()),
            ),
        )

    def _pool_facts(self) -> list[PoolFacts]:
        read = [f for name, space in self._namespaces.items() for f in read_pool_facts(name, space)]
        write = [
            f for s in self._sessions.values() for f in write_pool_facts(s, self.engine.write_arenas[s.session_id])
        ]
        return read + write + self.leases.facts()

    async def close(self) -> None:
        for session_id in list(self._sessions):
            self.end(session_id, "the daemon stops")
        await self.engine.idle()
        for name in list(self._namespaces):
            await self._close_namespace(name)
        await asyncio.get_running_loop().run_in_executor(self.executor, self._arena_pool.close)
