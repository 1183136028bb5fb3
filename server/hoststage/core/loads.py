"""Loads: pages on their way to a session, resident already or fetched from the store.

A page that several loads want is fetched once. A load that cannot be placed is parked and retried in order.
The load's own answer is the truth: pages that went meanwhile are intersected over all pools at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hoststage.core.effects import Effect, Fetched, LoadResult, Outcome, PartSlots, StoreRead
from hoststage.core.prefix import Rules
from hoststage.core.readpool import ReadPool
from hoststage.core.slots import Slots, as_slots
from hoststage.core.stack import HitPolicy

WAITING = -1
MISSING = -2
GROUP_KEYS = 32
"""Keys whose pages are announced together while a load is still under way."""


@dataclass(slots=True, eq=False)
class Fetch:
    """One page under store I/O into a read slot. `waiters`: who wants it, and where."""

    pool: int
    key: bytes
    slot: int
    waiters: list[tuple[Load, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class LoadPart:
    """Pages of one pool: keys `[first, first + len(slots))`; a slot, or WAITING, or MISSING."""

    pool: int
    first: int
    slots: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Load:
    """`silent`: a pin, which holds pages and says nothing. `given`: the client named the ranges itself."""

    load_id: int
    session: int
    keys: list[bytes]
    prefix: int
    needs: list[tuple[int, int, int]]
    deadline: float
    accept_shorter: bool = False
    given: bool = False
    silent: bool = False
    parts: list[LoadPart] = field(default_factory=list)
    outstanding: int = 0
    announced: int = 0
    done: bool = False
    ready: bool = False

    @property
    def pages(self) -> int:
        """Pages that it asks for: what counts against the session's quota."""
        return sum(count for _, _, count in self.needs)


class LoadTable:
    """The loads of one namespace."""

    def __init__(self, namespace: str, rules: Rules, pools: Sequence[ReadPool], *, has_store: bool) -> None:
        self.namespace = namespace
        self.rules = rules
        self.pools = pools
        self.has_store = has_store
        self.fetches: dict[tuple[int, bytes], Fetch] = {}
        self.loads: dict[int, Load] = {}
        self.parked: deque[Load] = deque()
        self.single_flight_joins = 0

    # -------------------------------------------------------------- beginning

    def begin(self, load: Load, out: list[Effect]) -> LoadResult | None:
        """Start a load, or park it behind others. Return its result where it has one at once; None while it is pending."""
        if self._too_large(load):
            load.done = True
            limits = ", ".join(f"{r.name}: {p.load_limit}" for r, p in zip(self.rules.pools, self.pools, strict=True))
            return LoadResult(
                load.session,
                load.load_id,
                Outcome.OVERSIZE,
                True,
                detail=f"a prefix of {load.prefix} pages can never be placed; slots for loads are {limits}",
            )
        self.loads[load.load_id] = load
        if self.parked and not load.silent:
            self.parked.append(load)
            return None
        if not self._start(load, out):
            if load.silent:
                self._forget(load)
                return LoadResult(load.session, load.load_id, Outcome.POOL_FULL, True)
            self.parked.append(load)
            return None
        return self._finish(load, out) if load.outstanding == 0 else None

    def _too_large(self, load: Load) -> bool:
        return any(count > self.pools[pool].load_limit for pool, _, count in load.needs)

    def _start(self, load: Load, out: list[Effect]) -> bool:
        """Lease what is there and place what is not; False, with nothing changed, where there is no room."""
        plans: list[tuple[int, int, NDArray[np.int64], Slots, list[int], list[Fetch]]] = []
        for pool, first, count in load.needs:
            index = self.pools[pool].index
            keys = load.keys[first : first + count]
            slots = np.fromiter((index.get(k, WAITING) for k in keys), dtype=np.int64, count=count)
            hits = slots[slots >= 0].astype(np.uint32)
            joins: list[Fetch] = []
            fresh: list[int] = []
            if len(hits) < count:
                for at in np.flatnonzero(slots < 0).tolist():
                    fetch = self.fetches.get((pool, keys[at]))
                    if fetch is None:
                        fresh.append(at)
                    else:
                        joins.append(fetch)
            plans.append((pool, first, slots, hits, fresh, joins))
        leased: list[tuple[int, Slots]] = []
        placed: list[tuple[int, Slots]] = []
        given: list[Slots] = []
        for pool, _, _, hits, fresh, _ in plans:
            read = self.pools[pool]
            unleased = int(np.count_nonzero(read.leases[hits] == 0))
            wanted = len(fresh) if self.has_store else 0
            if read.load_held + unleased + wanted > read.load_limit:
                return self._undo(leased, placed)
            read.lease(hits)
            leased.append((pool, hits))
            taken = read.place_load(wanted)
            if taken is None:
                return self._undo(leased, placed)
            placed.append((pool, taken))
            given.append(taken)
        self._attach(load, plans, given, out)
        return True

    def _undo(self, leased: list[tuple[int, Slots]], placed: list[tuple[int, Slots]]) -> bool:
        for pool, slots in placed:
            self.pools[pool].unfilled(slots, load=True)
        for pool, slots in leased:
            self.pools[pool].release(slots)
        return False

    def _attach(
        self,
        load: Load,
        plans: list[tuple[int, int, NDArray[np.int64], Slots, list[int], list[Fetch]]],
        given: list[Slots],
        out: list[Effect],
    ) -> None:
        """Make the load wait for the fetches that it joins or starts."""
        load.parts = []
        load.outstanding = 0
        issued: list[Fetch] = []
        for part_at, (pool, first, slots, _, fresh, _) in enumerate(plans):
            load.parts.append(LoadPart(pool, first, slots))
            new = dict(zip(fresh, given[part_at].tolist(), strict=False))
            for at in np.flatnonzero(slots < 0).tolist():
                key = load.keys[first + at]
                fetch = self.fetches.get((pool, key))
                if fetch is None:
                    if at not in new:
                        slots[at] = MISSING
                        continue
                    fetch = self.fetches[(pool, key)] = Fetch(pool, key, new[at])
                    issued.append(fetch)
                else:
                    self.single_flight_joins += 1
                fetch.waiters.append((load, part_at, at))
                load.outstanding += 1
        if issued:
            out.append(StoreRead(self.namespace, tuple(issued)))

    # -------------------------------------------------------------- progress

    def fetched(self, results: Iterable[tuple[Fetch, Fetched, bytes]], out: list[Effect]) -> None:
        """Store I/O of these fetches has ended, with what it brought and the commit id of each page."""
        touched: dict[Load, None] = {}
        hits: dict[int, list[tuple[Fetch, bytes]]] = {}
        leases: dict[tuple[Load, int], list[int]] = {}
        for fetch, outcome, commit_id in results:
            del self.fetches[(fetch.pool, fetch.key)]
            alive = [w for w in fetch.waiters if not w[0].done]
            for load, part_at, at in alive:
                load.outstanding -= 1
                touched[load] = None
                load.parts[part_at].slots[at] = fetch.slot if outcome is Fetched.HIT else MISSING
                if outcome is Fetched.HIT:
                    leases.setdefault((load, fetch.pool), []).append(fetch.slot)
            if outcome is Fetched.HIT:
                hits.setdefault(fetch.pool, []).append((fetch, commit_id))
            else:
                self.pools[fetch.pool].unfilled(as_slots([fetch.slot]), load=True)
        for pool, got in hits.items():
            slots = as_slots(f.slot for f, _ in got)
            self.pools[pool].filled(slots, [f.key for f, _ in got], [c for _, c in got], load=True)
        for (_, pool), taken in leases.items():
            self.pools[pool].lease(as_slots(taken))
        for pool, got in hits.items():
            self.pools[pool].settle(as_slots(f.slot for f, _ in got))
        for load in touched:
            self._progress(load, out)
        self.retry_parked(out)

    def _progress(self, load: Load, out: list[Effect]) -> None:
        if load.outstanding == 0:
            result = self._finish(load, out)
            if result is not None and not load.silent:
                out.append(result)
        elif not load.silent and not (load.accept_shorter and self._has_trailing()):
            self._announce(load, out)

    def _has_trailing(self) -> bool:
        return any(r.policy is HitPolicy.TRAILING_PAGES for r in self.rules.pools)

    def _announce(self, load: Load, out: list[Effect]) -> None:
        """Push whole groups of keys whose pages, in every pool, have arrived and agree."""
        front = load.prefix
        for part in load.parts:
            open_at = np.flatnonzero(part.slots < 0)
            if len(open_at):
                front = min(front, part.first + int(open_at[0]))
        front -= front % GROUP_KEYS
        if front <= load.announced or self._disagreement(load) < front:
            return
        parts = self._part_slots(load, load.announced, front)
        load.announced = front
        out.append(LoadResult(load.session, load.load_id, Outcome.READY, False, parts=parts))

    def _part_slots(self, load: Load, start: int, end: int) -> tuple[PartSlots, ...]:
        """Slots for keys `[start, end)` in every part that has any there."""
        out = []
        for part in load.parts:
            low, high = max(start, part.first), min(end, part.first + len(part.slots))
            if low < high:
                slots = part.slots[low - part.first : high - part.first].astype(np.uint32)
                out.append(PartSlots(part.pool, low, slots, self.pools[part.pool].table.generations(slots)))
        return tuple(out)

    def _disagreement(self, load: Load) -> int:
        """First key at which a page is missing, or a sidecar's commit is not its source's; the prefix where there is none."""
        bad = load.prefix
        commits: dict[int, dict[int, bytes]] = {}
        for part in load.parts:
            gone = np.flatnonzero(part.slots == MISSING)
            if len(gone):
                bad = min(bad, part.first + int(gone[0]))
            ids = self.pools[part.pool].commits
            commits[part.pool] = {part.first + i: ids[s] for i, s in enumerate(part.slots.tolist()) if s >= 0}
        for pool, ids_at in commits.items():
            source = commits.get(self.rules.pools[pool].source) if self.rules.pools[pool].source >= 0 else None
            if source is not None:
                wrong = [i for i, c in ids_at.items() if i in source and source[i] != c]
                bad = min([bad, *wrong])
        return bad

    # -------------------------------------------------------------- ending

    def _finish(self, load: Load, out: list[Effect]) -> LoadResult | None:
        """All I/O of the load has ended: say what is really there. None where it went on with a shorter prefix."""
        if load.silent:
            load.ready = True
            return None
        bad = self._disagreement(load) if len(load.parts) > 1 or self._any_missing(load) else load.prefix
        if bad >= load.prefix:
            load.ready = True
            parts = self._part_slots(load, load.announced, load.prefix)
            return LoadResult(load.session, load.load_id, Outcome.READY, True, load.prefix, parts)
        self._heal(load, bad)
        shorter = self._shorter(bad)
        if not load.accept_shorter or load.given or shorter == 0:
            self.drop(load)
            return LoadResult(
                load.session, load.load_id, Outcome.MISS, True, detail=f"page {bad} of the prefix is gone"
            )
        if not self._has_trailing():
            self._trim(load, shorter)
            load.ready = True
            parts = self._part_slots(load, load.announced, shorter)
            return LoadResult(load.session, load.load_id, Outcome.READY, True, shorter, parts)
        self._release_parts(load)
        load.prefix = shorter
        load.needs = [(i, *rule.needed(shorter)) for i, rule in enumerate(self.rules.pools)]
        if not self._start(load, out):
            self.parked.appendleft(load)
            return None
        return self._finish(load, out) if load.outstanding == 0 else None

    @staticmethod
    def _any_missing(load: Load) -> bool:
        return any((part.slots < 0).any() for part in load.parts)

    def _shorter(self, bad: int) -> int:
        for rule in self.rules.pools:
            if rule.policy is HitPolicy.BLOCK_GROUPS:
                bad -= bad % rule.group
        return bad

    def _heal(self, load: Load, bad: int) -> None:
        """Pages at `bad` that do not belong together must not be found together again."""
        key = load.keys[bad]
        for part in load.parts:
            if part.first <= bad < part.first + len(part.slots):
                for place in self.rules.group_of(part.pool):
                    if len(self.rules.group_of(part.pool)) > 1:
                        self.pools[place].drop([key])

    def _trim(self, load: Load, prefix: int) -> None:
        load.prefix = prefix
        load.announced = min(load.announced, prefix)
        for part in load.parts:
            keep = max(0, prefix - part.first)
            beyond = part.slots[keep:]
            part.slots = part.slots[:keep]
            self._release(part.pool, beyond)

    def _release(self, pool: int, slots: NDArray[np.int64]) -> None:
        held = slots[slots >= 0].astype(np.uint32)
        if len(held):
            self.pools[pool].release(held)

    def _release_parts(self, load: Load) -> None:
        for part in load.parts:
            self._release(part.pool, part.slots)
        load.parts = []

    def _forget(self, load: Load) -> None:
        load.done = True
        self.loads.pop(load.load_id, None)

    def drop(self, load: Load) -> None:
        """End a load or pin, in whatever state: its leases are free, fetches that only it wanted go on unobserved."""
        if load.done:
            return
        if load in self.parked:
            self.parked.remove(load)
        self._forget(load)
        self._release_parts(load)

    def retry_parked(self, out: list[Effect]) -> None:
        """Room may have appeared: start parked loads in order, as far as it goes."""
        while self.parked:
            load = self.parked[0]
            if not self._start(load, out):
                return
            self.parked.popleft()
            if load.outstanding == 0:
                result = self._finish(load, out)
                if result is not None:
                    out.append(result)
