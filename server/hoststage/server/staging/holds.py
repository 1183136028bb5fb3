"""Holds as the wire asks for them: ordinary ones in slots, durable ones through slots into the store and back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hoststage.core.effects import LoadResult, Outcome, PartSlots
from hoststage.core.findings import Grant
from hoststage.core.holds import HeldPages, HoldBusy, HoldExists, HoldMissing, HoldName, HoldState, HoldTable
from hoststage.core.sessions import SessionCore
from hoststage.core.stack import Retraction
from hoststage.server.contract import HoldFacts, HoldKey, RequestError, RestoredHold
from hoststage.server.staging.durable import DurableHolds, HoldOptions, IndexFull, Page
from hoststage.server.staging.engine import Engine
from hoststage.server.staging.hold_records import HoldRecord
from hoststage.server.store.base import PageRead, ReadOutcome
from hoststage.v1 import ops

if TYPE_CHECKING:
    from hoststage.server.staging.arenas import PoolArena

T = TypeVar("T")
MAX_TOKEN_BYTES = 64
MAX_REQUEST_BYTES = 256
MAX_NOTE_BYTES = 64 * 1024


class _Restoring:
    """A load of a hold's pages: groups come in, and one result in the end."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.parts: dict[int, list[PartSlots]] = {}
        self.ended: asyncio.Future[LoadResult] = asyncio.get_running_loop().create_future()

    def add(self, result: LoadResult) -> None:
        for part in result.parts:
            self.parts.setdefault(part.pool, []).append(part)
        if result.last and not self.ended.done():
            self.ended.set_result(result)

    def slots(self) -> tuple[ops.PoolSlots, ...]:
        return tuple(
            ops.PoolSlots(
                pool, np.concatenate([p.slots for p in parts]), np.concatenate([p.generations for p in parts])
            )
            for pool, parts in sorted(self.parts.items())
        )


class Holds:
    """Checks requests about holds and carries them out."""

    def __init__(self, engine: Engine, options: HoldOptions) -> None:
        self.table = HoldTable()
        self.durable = DurableHolds(engine.store, options, self._forget)
        self._engine = engine
        self._tier = engine.tier
        self._restoring: dict[int, _Restoring] = {}
        self._options = options

    # -------------------------------------------------------------- checks

    @staticmethod
    def _name(session: SessionCore, key: HoldKey, grant: Grant) -> HoldName:
        if grant.retraction is not Retraction.HOST_POOL:
            raise RequestError(
                "RETRACTION",
                "the session was granted no holds",
                code="FAILED_PRECONDITION",
                remedy="ask for retraction host_pool at the handshake; its findings say why it was refused",
            )
        if not 1 <= len(key.owner_token) <= MAX_TOKEN_BYTES:
            raise RequestError(
                "HOLD_NAME",
                f"owner_token has {len(key.owner_token)} bytes, must have 1 to {MAX_TOKEN_BYTES}",
                field="id.owner_token",
            )
        if not 1 <= len(key.request.encode()) <= MAX_REQUEST_BYTES:
            raise RequestError("HOLD_NAME", f"request must have 1 to {MAX_REQUEST_BYTES} bytes", field="id.request")
        return (session.namespace.name, key.owner_token, key.request, key.attempt)

    def _ttl(self, durable: bool, ttl_ms: int) -> float:
        if not durable:
            return 0.0
        if self._engine.store is None:
            raise RequestError(
                "DURABLE_HOLD",
                "this daemon has no store to keep durable holds in",
                code="FAILED_PRECONDITION",
                field="durable",
                remedy="hold without durable, or configure store.url",
            )
        if ttl_ms / 1000 > self._options.max_ttl:
            raise RequestError(
                "HOLD_TTL",
                f"ttl_ms is {ttl_ms}, at most {int(self._options.max_ttl * 1000)}",
                field="ttl_ms",
                remedy="ask for less, or raise staging.max_hold_ttl of the daemon",
            )
        return ttl_ms / 1000 if ttl_ms else self._options.ttl

    @staticmethod
    def _wants(session: SessionCore, ranges: Sequence[ops.PoolRange]) -> list[tuple[int, int]]:
        """Return `(pool, pages)` each: a request lives in every pool that has hold slots, a sidecar page for page with its source."""
        wants: dict[int, int] = {}
        for i, r in enumerate(ranges):
            if r.pool >= len(session.write):
                raise RequestError("RANGES", f"pool {r.pool} is not in the stack", field=f"ranges[{i}].pool")
            wants[r.pool] = wants.get(r.pool, 0) + r.count
        rules = session.namespace.rules.pools
        for pool, write in enumerate(session.write):
            source = rules[pool].source
            expected = wants.get(source, 0) if source >= 0 else max(1, wants.get(pool, 0))
            if write.holds and wants.get(pool, 0) != expected:
                raise RequestError(
                    "HOLD_INCOMPLETE",
                    f"{wants.get(pool, 0)} pages of pool {rules[pool].name}, must be {expected} or more"
                    if source < 0
                    else f"{wants.get(pool, 0)} pages of sidecar {rules[pool].name}, must be {expected} as its source has",
                    field="ranges",
                    remedy="hold pages of every pool that the request lives in: it cannot resume without one of them",
                )
        return [(pool, n) for pool, n in wants.items() if n]

    # -------------------------------------------------------------- hold and seal

    async def hold(
        self,
        session: SessionCore,
        key: HoldKey,
        ranges: Sequence[ops.PoolRange],
        durable: bool,
        ttl_ms: int,
        grant: Grant,
    ) -> ops.ReserveReply:
        """Grant hold slots. Raises `RequestError`."""
        name = self._name(session, key, grant)
        ttl = self._ttl(durable, ttl_ms)
        wants = self._wants(session, ranges)
        if self._tier.draining:
            return ops.ReserveReply(ops.Outcome.DRAINING, detail="the daemon is draining")
        try:
            if durable and await self._exists(name):
                raise HoldExists(f"request {name[2]!r}, attempt {name[3]} is held durably already")
            self._check_alive(session)
            result = self.table.hold(session, name, wants, durable=durable, ttl=ttl)
        except HoldExists as error:
            raise RequestError(
                "HOLD_EXISTS", str(error), code="ALREADY_EXISTS", field="id", remedy="discard it, or raise the attempt"
            ) from error
        return ops.ReserveReply(ops.Outcome(result.outcome), _slots(result.parts), result.detail)

    async def _exists(self, name: HoldName) -> bool:
        try:
            return await self.durable.exists(name)
        except OSError as error:
            raise RequestError(
                "HOLD_STORE_FAILED", str(error), code="UNAVAILABLE", remedy="hold without durable, or try again"
            ) from error

    @staticmethod
    def _check_alive(session: SessionCore) -> None:
        if session.state.value != "active":
            raise RequestError("SESSION_OVER", f"session {session.session} is over", code="FAILED_PRECONDITION")

    async def seal(self, session: SessionCore, key: HoldKey, note: bytes, grant: Grant) -> None:
        """The pages of a hold are written; a durable one is in the store when this returns. Raises `RequestError`."""
        name = self._name(session, key, grant)
        if len(note) > MAX_NOTE_BYTES:
            raise RequestError("HOLD_NOTE", f"the note has {len(note)} bytes, at most {MAX_NOTE_BYTES}", field="note")
        try:
            if not self.table.own(session, name).durable:
                self.table.seal(session, name, note)
                return
            held = self.table.begin_move(session, name)
        except HoldMissing as error:
            raise RequestError("HOLD_MISSING", str(error), code="NOT_FOUND", field="id") from error
        except HoldBusy as error:
            raise RequestError("HOLD_BUSY", str(error), code="FAILED_PRECONDITION", field="id") from error
        # The engine owns the work, so that it goes on to its end when the one who asked has gone.
        outcome, detail = await self._owned(self._store(session, name, held, note))
        self.table.counters["hold_seal", outcome.name.lower()] += 1
        if outcome is not Outcome.STORED:
            full = outcome is Outcome.STORE_FULL
            raise RequestError(
                f"HOLD_{outcome.name}",
                f"the hold is not stored: {detail}; its slots are still held",
                code="RESOURCE_EXHAUSTED" if full else "UNAVAILABLE",
                remedy="seal again, or discard it",
            )

    async def _store(self, session: SessionCore, name: HoldName, held: HeldPages, note: bytes) -> tuple[Outcome, str]:
        outcome, detail = Outcome.STORE_FAILED, "the daemon failed"
        try:
            rules = session.namespace.rules
            arenas = self._engine.write_arenas[session.session]
            slots = dict(held.slots)
            pools = [(rules.pools[pool].name, len(s)) for pool, s in held.slots]
            pages = [
                _page(arenas[pool], i, slot)
                for pool in rules.store_order
                if pool in slots
                for i, slot in enumerate(slots[pool].tolist())
            ]
            outcome, detail = await self.durable.write(name, pools, pages, note, held.ttl, lambda: not held.gone)
        except IndexFull as error:
            outcome, detail = Outcome.STORE_FULL, str(error)
        except OSError as error:
            detail = str(error)
        finally:
            # Stored, it needs its slots no more; else its owner may seal it again.
            self.table.end_move(session, name, held, None if outcome is Outcome.STORED else HoldState.OPEN)
            self._tier.hold_io_ended(session)
            self._engine.settle()
        return outcome, detail

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await work
            except Exception as error:
                if not ended.done():
                    ended.set_exception(error)
            else:
                if not ended.done():
                    ended.set_result(result)

        self._engine.spawn(run())
        return await ended

    # -------------------------------------------------------------- restore

    async def restore(self, session: SessionCore, key: HoldKey, grant: Grant) -> RestoredHold:
        """Return the pages of a hold, or why there are none. Raises `RequestError`."""
        restored = await self._restore(session, self._name(session, key, grant))
        self.table.counters["hold_restore", restored.outcome.name.lower()] += 1
        return restored

    async def _restore(self, session: SessionCore, name: HoldName) -> RestoredHold:
        found = self.table.restore(session, name)
        if found is not None:
            parts, note = found
            return RestoredHold(ops.Outcome.READY, "write", _slots(parts), note)
        held = self.table.holds.get(name)
        if held is not None:
            whose = "not sealed yet" if held.session == session.session else "another session's"
            return RestoredHold(ops.Outcome.MISS, detail=f"the hold is {whose}")
        try:
            record, detail = await self.durable.find(name)
            note_found = None if record is None else await self.durable.note_of(record)
        except OSError as error:
            return RestoredHold(ops.Outcome.STORE_FAILED, detail=str(error))
        if record is None:
            return RestoredHold(ops.Outcome.MISS, detail=detail)
        if note_found is None:
            return RestoredHold(ops.Outcome.MISS, detail="the store has lost the note of the hold")
        self._check_alive(session)
        return await self._fetch(session, name, record, note_found)

    async def _fetch(self, session: SessionCore, name: HoldName, record: HoldRecord, note: bytes) -> RestoredHold:
        """Bring a durable hold into the read arena, or where it is too large for that, into the session's own hold slots."""
        places = {rule.name: i for i, rule in enumerate(session.namespace.rules.pools)}
        missing = [pool for pool, _ in record.pools if pool not in places]
        if missing:
            return RestoredHold(
                ops.Outcome.MISS, detail=f"the hold has pages of pool {missing[0]}, which is not in this stack"
            )
        wants = [(places[pool], n) for pool, n in record.pools]
        space = session.namespace
        if any(n > space.pools[pool].load_limit for pool, n in wants):
            return await self._copy(session, name, record, note, wants)
        most = max(n for _, n in wants)
        load_id, result = self._tier.load(
            session,
            [record.core_key(i) for i in range(most)],
            most,
            needs=[(pool, 0, n) for pool, n in wants],
            pin=0,
            deadline=self._engine.now() + self._tier.limits.load_deadline,
            accept_shorter=False,
        )
        restoring = self._restoring[load_id] = _Restoring(session.session)
        try:
            if result is not None:
                restoring.add(result)
            self._engine.settle()
            ended = await restoring.ended
        finally:
            del self._restoring[load_id]
        if ended.outcome is not Outcome.READY:
            detail = "the store has lost pages of the hold" if ended.outcome is Outcome.MISS else ended.detail
            return RestoredHold(ops.Outcome(ended.outcome), detail=detail)
        return RestoredHold(ops.Outcome.READY, "read", restoring.slots(), note, load_id)

    def load_result(self, result: LoadResult) -> bool:
        """Take the result of a load that restores a hold; False where it is no such load."""
        restoring = self._restoring.get(result.load_id)
        if restoring is not None:
            restoring.add(result)
        return restoring is not None

    async def _copy(
        self, session: SessionCore, name: HoldName, record: HoldRecord, note: bytes, wants: list[tuple[int, int]]
    ) -> RestoredHold:
        try:
            held, refusal = self.table.begin_copy(session, name, wants)
        except HoldBusy as error:
            raise RequestError("HOLD_BUSY", str(error), code="FAILED_PRECONDITION", field="id") from error
        if held is None:
            return RestoredHold(ops.Outcome(refusal.outcome), detail=refusal.detail)
        held.note = note
        detail = await self._owned(self._fill(session, name, held, record))
        found = self.table.restore(session, name)
        if detail or found is None:
            return RestoredHold(ops.Outcome.MISS, detail=detail or "discarded meanwhile")
        return RestoredHold(ops.Outcome.READY, "write", _slots(found[0]), note)

    async def _fill(self, session: SessionCore, name: HoldName, held: HeldPages, record: HoldRecord) -> str:
        """Read a hold into slots; return what was wrong, or an empty text."""
        detail = "the daemon failed"
        try:
            assert self._engine.store is not None
            arenas = self._engine.write_arenas[session.session]
            reads = [
                PageRead(name_, record.key(i), view, address, stride)
                for pool, slots in held.slots
                for index, slot in enumerate(slots.tolist())
                for name_, i, view, address, stride in [_page(arenas[pool], index, slot)]
            ]
            results = await self._engine.store.read_into(record.space, reads)
            bad = [r for r in results if r.outcome is not ReadOutcome.HIT]
            detail = f"the store has lost {len(bad)} of {len(reads)} pages of the hold" if bad else ""
        finally:
            self.table.end_move(session, name, held, None if detail else HoldState.SEALED)
            self._tier.hold_io_ended(session)
            self._engine.settle()
        return detail

    # -------------------------------------------------------------- endings

    async def discard(self, session: SessionCore, key: HoldKey, grant: Grant) -> None:
        """Free a hold, in slots and in the store. Raises `RequestError`."""
        name = self._name(session, key, grant)
        had_copy = self.table.discard_copy(session, name)
        try:
            self.table.discard(session, name)
            self._engine.settle()
            return
        except HoldMissing as error:
            missing = error
        try:
            found = await self._owned(self.durable.discard(name))
        except OSError as error:
            raise RequestError("HOLD_STORE_FAILED", str(error), code="UNAVAILABLE", remedy="discard again") from error
        if found:
            self.table.counters["hold_ended", "discarded"] += 1
        elif not had_copy:
            raise RequestError("HOLD_MISSING", str(missing), code="NOT_FOUND", field="id") from missing

    def session_gone(self, session_id: int) -> None:
        """Its ordinary holds are gone with it; whoever waits for a restore of its is told."""
        self.table.session_gone(session_id)
        self.interrupted(session_id)

    def interrupted(self, session_id: int) -> None:
        """Its loads have ended unheard."""
        for load_id, restoring in list(self._restoring.items()):
            if restoring.session == session_id:
                restoring.add(LoadResult(session_id, load_id, Outcome.CANCELLED, True, detail="the session ended"))

    def _forget(self, record: HoldRecord) -> None:
        """Pages of a deleted hold that are in host memory must not stay there."""
        space = self._tier.namespaces.get(record.namespace)
        if space is None:
            return
        sizes = dict(record.pools)
        for place, rule in enumerate(space.rules.pools):
            space.loads.forget(place, (record.core_key(i) for i in range(sizes.get(rule.name, 0))))

    def facts(self) -> HoldFacts:
        """What operators are told."""
        held = [*self.table.holds.values(), *self.table.copies.values()]
        sessions = self._tier.sessions.values()
        return HoldFacts(
            ordinary=sum(not h.durable for h in held),
            durable=len(self.durable),
            moving=sum(h.state is HoldState.MOVING for h in held),
            durable_pages=self.durable.pages,
            slots_held=sum(w.held for s in sessions for w in s.write),
            slots=sum(w.holds for s in sessions for w in s.write),
        )

    def counters(self) -> dict[tuple[str, str], int]:
        """Counters for the metrics."""
        return {**self.table.counters, ("hold_ended", "expired"): self.durable.expired}


def _page(arena: PoolArena, index: int, slot: int) -> Page:
    return arena.rule.name, index, arena.view(slot), arena.address(slot), arena.rule.stride


def _slots(parts: Sequence[PartSlots]) -> tuple[ops.PoolSlots, ...]:
    return tuple(ops.PoolSlots(p.pool, p.slots, p.generations) for p in parts)
