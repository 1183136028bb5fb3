"""The reading side of the tier: loads, pins and their quota."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hoststage.core.effects import Fetched, LoadResult, Outcome, Revoke
from hoststage.core.loads import Fetch, Load
from hoststage.core.sessions import NamespaceCore, SessionCore
from hoststage.core.tierstate import TierState


class Reading(TierState):
    """Events of loads and pins."""

    __slots__ = ()

    def presence(self, space: NamespaceCore, keys: Sequence[bytes]) -> list[list[bytes | None]]:
        """Return, per pool, the commit id of each key's resident page, None where it is not resident."""
        return space.loads.resident(keys)

    def load(
        self,
        session: SessionCore,
        keys: list[bytes],
        prefix: int,
        *,
        needs: list[tuple[int, int, int]] | None,
        pin: int,
        deadline: float,
        accept_shorter: bool,
    ) -> tuple[int, LoadResult | None]:
        """Begin a load. Return `(load id, result)`; the result is None while it is pending."""
        space = session.namespace
        given = needs is not None
        if needs is None:
            needs = space.rules.needs(prefix)
        load = Load(next(self._ids), session.session, keys, prefix, needs, deadline, accept_shorter, given)
        load.charged = load.pages
        consumed = session.pins.get(pin)
        # The load comes in the place of its pin.
        leased = session.read_leases - (consumed.charged if consumed is not None else 0)
        if leased + load.charged > self.limits.max_read_leases:
            result = LoadResult(
                session.session,
                load.load_id,
                Outcome.QUOTA,
                True,
                detail=f"{leased} pages are leased and {load.charged} more wanted; "
                f"a session may lease {self.limits.max_read_leases}",
            )
            return load.load_id, result
        session.read_leases += load.charged
        session.loads[load.load_id] = load
        if consumed is not None:
            load.pinned = space.loads.pages_of(consumed)
        begun = space.loads.begin(load, self._effects)
        load.pinned = {}
        self._note_result(begun)
        if consumed is not None:
            self._end_load(session, consumed)
            self._retry(space)
        return load.load_id, begun

    def _note_result(self, result: LoadResult | None) -> None:
        if result is None or not result.last:
            return
        self.counters["load", result.outcome.name.lower()] += 1
        session = self.sessions.get(result.session)
        if session is None:
            return
        if result.outcome is not Outcome.READY:
            self._forget_load(session, result.load_id)
        elif (load := session.loads.get(result.load_id)) is not None:
            # It may have become shorter.
            session.read_leases += load.pages - load.charged
            load.charged = load.pages

    def _forget_load(self, session: SessionCore, load_id: int) -> None:
        load = session.loads.pop(load_id, None) or session.pins.pop(load_id, None)
        if load is not None:
            session.read_leases -= load.charged

    def pin(self, session: SessionCore, keys: list[bytes], runs: Sequence[tuple[int, int]], until: float) -> int:
        """Hold the pages of every prefix length in `runs`, fetching those that only the store has.

        Return 0, and nothing is held, where there is no room for all.
        """
        space = session.namespace
        prefix = runs[-1][1]
        needs = [
            (i, *span) for i, rule in enumerate(space.rules.pools) if rule.on_host for span in rule.needed_by(runs)
        ]
        load = Load(next(self._ids), session.session, keys, prefix, needs, until, silent=True)
        load.charged = load.pages
        if session.read_leases + load.charged > self.limits.max_read_leases:
            return 0
        if space.loads.begin(load, self._effects) is not None:
            return 0
        session.read_leases += load.charged
        session.pins[load.load_id] = load
        return load.load_id

    def fetched(self, space: NamespaceCore, results: Sequence[tuple[Fetch, Fetched, bytes]]) -> None:
        """The store I/O of a `StoreRead` has ended."""
        for fetch, outcome, _ in results:
            self.counters["fetched_pages", outcome.name.lower()] += 1
            if outcome in (Fetched.MISS, Fetched.CORRUPT):
                self.counters["beliefs_healed", ""] += space.beliefs[fetch.pool].drop((fetch.key,))
            elif outcome is Fetched.HIT and fetch not in space.loads.forgotten:
                space.beliefs[fetch.pool].add((fetch.key,))
        before = len(self._effects)
        space.loads.fetched(results, self._effects)
        self._note_results(before)

    def _note_results(self, start: int) -> None:
        for effect in self._effects[start:]:
            if isinstance(effect, LoadResult):
                self._note_result(effect)

    def release(self, session: SessionCore, loads: Iterable[int], pins: Iterable[int] = ()) -> None:
        """Give leases up. Ids that are not the session's are ignored: they ended already."""
        for load_id in loads:
            load = session.loads.get(load_id)
            if load is not None:
                self._end_load(session, load)
        for pin in pins:
            load = session.pins.get(pin)
            if load is not None:
                self._end_load(session, load)
        self._retry(session.namespace)

    def touch(self, session: SessionCore, lookups: int, loads: int, used: Iterable[tuple[int, Iterable[int]]]) -> None:
        """The session served itself by the page indexes: so many hits, and per pool the slots that it read."""
        self.counters["lookup", "index_hit"] += lookups
        self.counters["load", "index_hit"] += loads
        for pool, slots in used:
            session.namespace.pools[pool].touch(slots)

    def cancel(self, session: SessionCore, load_id: int) -> None:
        """Cancel a load that has not ended; its slots stay out of use until their store I/O has."""
        load = session.loads.get(load_id)
        if load is not None and not load.ready:
            self._cancel(session, load, "cancelled by the client")
            self._retry(session.namespace)

    def _cancel(self, session: SessionCore, load: Load, why: str) -> None:
        self._end_load(session, load)
        self.counters["load", "cancelled"] += 1
        self._effects.append(LoadResult(session.session, load.load_id, Outcome.CANCELLED, True, detail=why))

    def _end_load(self, session: SessionCore, load: Load) -> None:
        session.namespace.loads.drop(load)
        self._forget_load(session, load.load_id)

    def _refuse_oversize(self, space: NamespaceCore) -> None:
        """Room was set aside for a board: a load that waits, and can never be placed now, would hold up all behind it."""
        for load in [x for x in space.loads.parked if space.loads.too_large(x)]:
            self._cancel(
                self.sessions[load.session], load, "what it asks for is more than loads may have since a session came"
            )
        self._retry(space)

    # -------------------------------------------------------------- revocation

    def _ask_back(self, space: NamespaceCore, now: float) -> None:
        """Ask for the oldest leases back that the first parked load could be placed with, where it has waited for long."""
        parked = space.loads.parked
        if not parked:
            return
        head = parked[0]
        if head.parked_since is None:
            head.parked_since = now
        if now - head.parked_since < self.limits.revoke_after:
            return
        lacking = space.loads.lacking(head)
        for load in list(space.loads.loads.values()):
            useful = any(lacking.get(part.pool, 0) > 0 and len(part.slots) for part in load.parts)
            if load.silent or not load.ready or not useful:
                continue
            # What was asked for already counts, so that one load that waits does not take everybody's leases.
            for part in load.parts:
                lacking[part.pool] = lacking.get(part.pool, 0) - len(part.slots)
            if not load.revoked:
                self._ask_for(load, head, now)

    def _ask_for(self, load: Load, head: Load, now: float) -> None:
        load.revoked = True
        revocation = next(self._ids)
        self.sessions[load.session].revocations[revocation] = (load.load_id,)
        self.counters["revocations", ""] += 1
        waited = now - (head.parked_since or now)
        reason = f"a load of session {head.session} has waited {waited:.1f} seconds for room"
        self._effects.append(Revoke(load.session, revocation, (load.load_id,), reason))

    def revoke_acknowledged(self, session: SessionCore, revocation: int) -> bool:
        """The client reads what was asked back no more; False where nothing of that number was asked for."""
        loads = session.revocations.pop(revocation, None)
        if loads is None:
            return False
        self.release(session, loads)
        return True

    def _retry(self, space: NamespaceCore) -> None:
        if space.loads.parked:
            before = len(self._effects)
            space.loads.retry_parked(self._effects)
            self._note_results(before)
