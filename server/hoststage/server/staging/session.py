"""An open session: requests of the wire as events of the core, and the core's results as messages of the wire."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from hoststage.core import effects as fx
from hoststage.core.findings import Grant, Verdict
from hoststage.core.sessions import SessionCore, SessionState, SpanPart
from hoststage.core.slots import SlotError
from hoststage.server.contract import (
    ArenaDescriptor,
    ArenaFacts,
    BudgetFacts,
    HoldKey,
    Port,
    Reply,
    RequestError,
    RestoredHold,
    RevokedLeases,
    SessionRequest,
    WholeLease,
)
from hoststage.server.staging.arenas import PoolArena
from hoststage.server.staging.boards import SessionBoard
from hoststage.server.staging.imported import ImportedPath
from hoststage.server.staging.indexes import FEATURE
from hoststage.server.staging.lookups import Lookups
from hoststage.server.staging.messages import InlineReply, PagesInMessages
from hoststage.server.staging.moves import Moves
from hoststage.server.staging.namespaces import NamespaceMemory
from hoststage.server.staging.wire_spans import check_paired, keys_of, parts_of, pool_slots, ranges, reserve_reply
from hoststage.v1 import ops

if TYPE_CHECKING:
    from hoststage.server.staging.engine import Engine
    from hoststage.server.staging.service import Service

log = structlog.get_logger(__name__)

OwnLoad = Callable[[ops.LoadReady], None]
Placed = Sequence[ops.U32] | None


class Session:
    """Implements `hoststage.server.contract.LiveSession`."""

    def __init__(
        self,
        service: Service,
        core: SessionCore,
        request: SessionRequest,
        verdict: Verdict,
        port: Port,
        write: list[PoolArena],
        space: NamespaceMemory,
        board: SessionBoard | None,
        opened_at: float,
    ) -> None:
        assert verdict.grant is not None
        self.core = core
        self.request = request
        self.opened_at = opened_at
        self.resume_token = secrets.token_bytes(16)
        self._grant = verdict.grant
        self._verdict = verdict
        self._service = service
        self._engine = service.engine
        self._tier = service.tier
        self._port = port
        self._write = write
        self._read = space.arenas
        # What only some clients can make use of: the others are not told of it.
        self._indexes = space.indexes if FEATURE in request.features else None
        self.board = board
        self._reserving: dict[int, Reply] = {}
        # Loads whose pages the daemon itself takes out of the leased slots, and which revocations ask for them.
        self._own_loads: dict[int, OwnLoad] = {}
        self._own_revocations: dict[int, int] = {}
        self._imported = ImportedPath(self, service.executor, service.imported_descriptors)
        self.moves = Moves(self, write, space.arenas)
        self._lookups = Lookups(core, service.tier, service.engine)
        self._messages = PagesInMessages(self, write, space.arenas, service.executor)

    # -------------------------------------------------------------- facts

    @property
    def session_id(self) -> int:
        return self.core.session

    @property
    def grant(self) -> Grant:
        return self._grant

    @property
    def verdict(self) -> Verdict:
        return self._verdict

    @property
    def arenas(self) -> Sequence[ArenaFacts]:
        # A pool that stays on the device has no arena, and nothing to map.
        facts = [a.facts() for a in (*self._write, *self._read) if a.arena is not None]
        facts += self._indexes.facts() if self._indexes is not None else []
        return facts if self.board is None else [*facts, self.board.facts()]

    @property
    def pool_count(self) -> int:
        return len(self._write)

    def page_bytes(self, pool: int) -> int:
        return self._write[pool].rule.page_bytes

    @property
    def imported(self) -> ImportedPath:
        return self._imported

    @property
    def engine(self) -> Engine:
        """Who carries out this session's work."""
        return self._engine

    @property
    def max_span_keys(self) -> int:
        """Keys of one span."""
        return self._tier.limits.max_span_keys

    def write_arena(self, pool: int) -> PoolArena:
        """The session's own arena of a pool."""
        return self._write[pool]

    def read_arena(self, pool: int) -> PoolArena:
        """The namespace's arena of a pool."""
        return self._read[pool]

    def descriptors(self) -> list[ArenaDescriptor]:
        indexes = self._indexes.arenas if self._indexes is not None else []
        boards = [self.board.arena] if self.board is not None else []
        return [d for a in (*self._write, *self._read, *indexes, *boards) for d in a.descriptors()]

    # -------------------------------------------------------------- requests

    def submit(self, op: ops.HotRequest, request_id: int, reply: Reply) -> None:
        self._check_active()
        try:
            match op:
                case ops.Lookup():
                    self._lookups.begin(op, self._keys(op.span), reply)
                case ops.Load():
                    self._load(op, reply)
                case ops.Release():
                    self._tier.release(self.core, op.load_ids, op.pins)
                case ops.Commit():
                    self._commit(op, request_id, reply)
                case ops.Reserve():
                    self._reserve(op, request_id, reply)
        except SlotError as error:
            raise self._stale(error) from error
        finally:
            self._engine.settle()

    def _stale(self, error: SlotError) -> RequestError:
        return RequestError(
            "STALE_SLOT",
            f"session {self.session_id}: {error}",
            code="FAILED_PRECONDITION",
            field="slots",
            remedy="reserve anew; after a reconnect, slots of the earlier session are void",
        )

    def _check_active(self) -> None:
        if self.core.state is not SessionState.ACTIVE:
            raise RequestError(
                "SESSION_OVER",
                f"session {self.session_id} is {self.core.state.value}",
                code="FAILED_PRECONDITION",
                remedy="open a new session",
            )

    def _keys(self, span: ops.Span) -> list[bytes]:
        return keys_of(span, self._tier.limits.max_span_keys)

    def _parts(self, span: ops.Span, keys: list[bytes], slots: Sequence[ops.PoolSlots] | None = None) -> list[SpanPart]:
        return parts_of(span, keys, len(self._write), slots)

    # -------------------------------------------------------------- writing

    def _reserve(self, op: ops.Reserve, request_id: int, reply: Reply) -> None:
        keys = self._keys(op.span) if op.span.keys else []
        parts = self._parts(op.span, keys)
        if not keys:
            ahead = self._tier.limits.max_credits
            if any(p.count > ahead for p in parts):
                raise RequestError(
                    "CREDITS", f"at most {ahead} slots a pool may be granted ahead", code="RESOURCE_EXHAUSTED"
                )
        parent = op.span.parent
        if parent and not self.core.namespace.covered(parent):
            self._engine.spawn(self._reserve_with_parent(op, parts, request_id, reply))
            return
        self._reserve_now(op, parts, request_id, reply)

    async def _reserve_with_parent(self, op: ops.Reserve, parts: list[SpanPart], request_id: int, reply: Reply) -> None:
        """The parent is not known here: the store may have it all the same."""
        await self._believe_parent(op.span.parent)
        if self.core.state is SessionState.ACTIVE:
            self._reserve_now(op, parts, request_id, reply)
            self._engine.settle()

    async def _believe_parent(self, parent: bytes) -> None:
        space = self.core.namespace
        if self._engine.store is not None:
            anchor = space.rules.anchor
            [found] = await self._engine.store.exists(space.name, space.rules.pools[anchor].name, [parent])
            if found is not None:
                space.beliefs[anchor].add((parent,))

    def _reserve_now(self, op: ops.Reserve, parts: list[SpanPart], request_id: int, reply: Reply) -> None:
        result = self._tier.reserve(self.core, parts, op.span.parent, request_id, op.wait_ms / 1000, self._engine.now())
        if result is None:
            self._reserving[request_id] = reply
        else:
            reply(reserve_reply(result))

    def reserve_ended(self, ended: fx.ReserveEnded) -> None:
        reply = self._reserving.pop(ended.request_id, None)
        if reply is not None:
            reply(reserve_reply(ended.result))

    def _commit(self, op: ops.Commit, request_id: int, reply: Reply, placed: Placed = None) -> None:
        keys = self._keys(op.span)
        parts = self._parts(op.span, keys, op.slots)
        if not keys:
            raise RequestError("RANGES", "a commit names no keys", field="span.keys")
        if op.span.parent and not self.core.namespace.covered(op.span.parent):
            self._engine.spawn(self._commit_with_parent(op, parts, request_id, reply, placed))
            return
        reply(self._commit_now(parts, op.span.parent, request_id, placed))

    async def _commit_with_parent(
        self, op: ops.Commit, parts: list[SpanPart], request_id: int, reply: Reply, placed: Placed
    ) -> None:
        await self._believe_parent(op.span.parent)
        if self.core.state is SessionState.ACTIVE:
            try:
                answer = self._commit_now(parts, op.span.parent, request_id, placed)
            except SlotError as error:
                answer = ops.CommitReply(ops.Outcome.CANCELLED, detail=f"slots changed meanwhile: {error}")
            reply(answer)
            self._engine.settle()

    def _commit_now(self, parts: list[SpanPart], parent: bytes, request_id: int, placed: Placed) -> ops.CommitReply:
        result = self._tier.commit(self.core, parts, parent, request_id, self._engine.now(), placed)
        return ops.CommitReply(ops.Outcome(result.outcome), result.commit_id, pool_slots(result.credits), result.detail)

    def place_ahead(self, span: ops.Span, slots: Sequence[ops.PoolSlots]) -> Placed:
        """Take read slots for reserved pages that are to be published, None where there are none; see `Tier.place_ahead`."""
        placed = self._tier.place_ahead(self.core, self._parts(span, self._keys(span), slots))
        self._engine.settle()
        return placed

    def unplace(self, span: ops.Span, slots: Sequence[ops.PoolSlots], placed: Sequence[ops.U32]) -> None:
        """Give such slots back."""
        self._tier.unplace(self.core, self._parts(span, self._keys(span), slots), placed)
        self._engine.settle()

    def commit_placed(self, op: ops.Commit, request_id: int, reply: Reply, placed: Placed) -> None:
        """Commit pages that the daemon itself has put in place. As `submit`."""
        self._check_active()
        try:
            self._commit(op, request_id, reply, placed)
        except SlotError as error:
            raise self._stale(error) from error
        finally:
            self._engine.settle()

    def commit_ended(self, ended: fx.CommitEnded) -> None:
        self._port.push(
            ops.Stored(ended.commit_id, ended.request_id, ops.Outcome(ended.outcome), ended.pages, ended.detail)
        )

    def abort(self, slots: Sequence[ops.PoolSlots]) -> None:
        self._check_active()
        parts = []
        for i, entry in enumerate(slots):
            if entry.pool >= len(self._write):
                raise RequestError("RANGES", f"pool {entry.pool} is not in the stack", field=f"slots[{i}].pool")
            check_paired(entry, f"slots[{i}]")
            parts.append(SpanPart(entry.pool, 0, len(entry.slots), (), entry.slots, entry.generations))
        try:
            self._tier.abort(self.core, parts)
        except SlotError as error:
            raise RequestError("STALE_SLOT", str(error), code="FAILED_PRECONDITION", field="slots") from error
        finally:
            self._engine.settle()

    # -------------------------------------------------------------- reading

    def _load(self, op: ops.Load, reply: Reply) -> None:
        load_id, result = self._begin(op)
        if result is None:
            reply(ops.LoadReply(ops.Outcome.PENDING, load_id))
        else:
            slots, named = pool_slots(result.parts), ranges(result.parts)
            reply(ops.LoadReply(ops.Outcome(result.outcome), load_id, result.prefix, named, slots, result.detail))

    def _begin(self, op: ops.Load) -> tuple[int, fx.LoadResult | None]:
        keys = self._keys(op.span)
        if not 1 <= op.prefix <= len(keys):
            raise RequestError("RANGES", f"prefix is {op.prefix} for {len(keys)} keys", field="prefix")
        needs = None
        if op.span.ranges:
            parts = self._parts(op.span, keys)
            needs = [(p.pool, p.first, min(p.count, max(0, op.prefix - p.first))) for p in parts]
        limits = self._tier.limits
        wait = op.deadline_ms / 1000 if op.deadline_ms else limits.load_deadline
        return self._tier.load(
            self.core,
            keys,
            op.prefix,
            needs=needs,
            pin=op.pin,
            deadline=self._engine.now() + wait,
            accept_shorter=op.accept_shorter,
        )

    def load_result(self, result: fx.LoadResult) -> None:
        if self._service.holds.load_result(result):
            return
        message = ops.LoadReady(
            result.load_id,
            ops.Outcome(result.outcome),
            result.last,
            result.prefix,
            ranges(result.parts),
            pool_slots(result.parts),
            result.detail,
        )
        own = self._own_loads.get(result.load_id)
        if own is None:
            self._port.push(message)
        else:
            own(message)

    def touch(self, lookups: int, loads: int, used: Sequence[tuple[int, Sequence[int]]]) -> None:
        if any(pool >= len(self._write) for pool, _ in used):
            raise RequestError("RANGES", "a pool that is not in the stack", field="touch.slots")
        self._tier.touch(self.core, lookups, loads, used)

    def cancel_load(self, load_id: int) -> None:
        self._tier.cancel(self.core, load_id)
        self._engine.settle()

    def leases_revoked(self, revoke: fx.Revoke) -> None:
        [load_id] = revoke.load_ids
        if load_id in self._own_loads:
            # Ours to give up, and on its way to be: the client does not know of these leases.
            self._own_revocations[load_id] = revoke.revocation
            return
        self._port.push(RevokedLeases(revoke.revocation, revoke.load_ids, (), revoke.reason))

    def revoke_ack(self, revocation: int) -> None:
        if not self._tier.revoke_acknowledged(self.core, revocation):
            raise RequestError(
                "NOT_REVOKED",
                f"session {self.session_id} was not asked for revocation {revocation}, or has answered it",
                code="FAILED_PRECONDITION",
                field="revoke_ack.revocation",
                remedy="acknowledge each LeaseRevoked once, by its number",
            )
        self._engine.settle()

    # -------------------------------------------------------------- pages that the daemon itself moves

    def begin_own_load(self, op: ops.Load, arrived: OwnLoad) -> int:
        """Begin a load whose groups go to `arrived`; it must be ended by `end_own_load`. Returns its number."""
        self._check_active()
        load_id, result = self._begin(op)
        self._own_loads[load_id] = arrived
        if result is not None:
            self.load_result(result)
        self._engine.settle()
        return load_id

    def end_own_load(self, load_id: int) -> None:
        """Give up what such a load leases. Safe to repeat."""
        self._own_loads.pop(load_id, None)
        self._tier.release(self.core, (load_id,))
        revocation = self._own_revocations.pop(load_id, None)
        if revocation is not None:
            self._tier.revoke_acknowledged(self.core, revocation)
        self._engine.settle()

    def copy_began(self) -> None:
        """A thread begins to use the arenas, which stay until it has ended, whatever becomes of the session."""
        self._tier.copy_began(self.core)

    def copy_ended(self) -> None:
        """Such a use has ended."""
        self._tier.copy_ended(self.core)
        self._engine.settle()

    # -------------------------------------------------------------- inline payload

    def inline_load(self, op: ops.Load, reply: InlineReply) -> None:
        self._messages.load(op, reply)

    def inline_store(
        self, span: ops.Span, pages: Sequence[Sequence[bytes | bytearray]], request_id: int, wait_ms: int, reply: Reply
    ) -> None:
        self._check_active()
        self._messages.store(span, self._parts(span, self._keys(span)), pages, request_id, wait_ms, reply)

    def commit_filled(self, span: ops.Span, slots: tuple[ops.PoolSlots, ...], request_id: int, reply: Reply) -> None:
        """Commit slots that the daemon has filled itself. Raises `RequestError` where the session is over."""
        self._check_active()

        def committed(answer: ops.HotReply) -> None:
            assert isinstance(answer, ops.CommitReply)
            if answer.outcome not in (ops.Outcome.ACCEPTED, ops.Outcome.BELIEVED_STORED):
                # The client does not know these slots, so it cannot give them back.
                self.abort_refused(slots)
            reply(answer)

        try:
            self.submit(ops.Commit(span, slots), request_id, committed)
        except RequestError as error:
            committed(ops.CommitReply(ops.Outcome.CANCELLED, detail=str(error)))

    def abort_refused(self, slots: tuple[ops.PoolSlots, ...]) -> None:
        """Give slots back that the daemon reserved for the client, and whose commit was refused."""
        try:
            self.abort(slots)
        except RequestError as error:
            log.error("session.slots_lost", session=self.session_id, error=str(error))

    # -------------------------------------------------------------- holds and memory beyond the grant

    async def hold(self, key: HoldKey, ranges: Sequence[ops.PoolRange], durable: bool, ttl_ms: int) -> ops.ReserveReply:
        self._check_active()
        return await self._service.holds.hold(self.core, key, ranges, durable, ttl_ms, self._grant)

    async def seal_hold(self, key: HoldKey, note: bytes) -> None:
        self._check_active()
        await self._service.holds.seal(self.core, key, note, self._grant)

    async def restore(self, key: HoldKey) -> RestoredHold:
        self._check_active()
        return await self._service.holds.restore(self.core, key, self._grant)

    async def discard(self, key: HoldKey) -> None:
        self._check_active()
        await self._service.holds.discard(self.core, key, self._grant)

    async def lease_arena(self, name: str, size: int) -> WholeLease:
        self._check_active()
        return await self._service.leases.lease(self, name, size)

    async def return_arena(self, arena_id: int) -> None:
        await self._service.leases.give_back(self, arena_id)

    async def budget(self) -> BudgetFacts:
        self._check_active()
        return await self._service.leases.budget()
