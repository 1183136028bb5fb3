"""The loads of a namespace: placed, parked, fetched and ended.

A page that several loads want is fetched once. A load that cannot be placed is parked and retried in order.
The load's own answer is the truth: pages that went meanwhile are intersected over all pools at its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hoststage.core.beliefs import Beliefs
from hoststage.core.effects import Effect, Fetched, LoadResult, Outcome, PartSlots, StoreRead
from hoststage.core.loads import GROUP_KEYS, MISSING, WAITING, Fetch, Load, LoadPart, Plan
from hoststage.core.prefix import Rules, restorable
from hoststage.core.readpool import ReadPool
from hoststage.core.slots import NO_SLOTS, Slots, as_slots
from hoststage.core.stack import HitPolicy


class LoadTable:
    """The loads of one namespace."""

    def __init__(
        self, namespace: str, rules: Rules, pools: Sequence[ReadPool], beliefs: Sequence[Beliefs], *, has_store: bool
    ) -> None:
        self.namespace = namespace
        self.rules = rules
        self.pools = pools
        self.beliefs = beliefs
        self.has_store = has_store
        groups = (rule.group for rule in rules.pools if rule.policy is HitPolicy.BLOCK_GROUPS)
        self._group = math.lcm(*groups)
        self._step = math.lcm(GROUP_KEYS, self._group)
        self._trails = any(rule.on_host and rule.policy is HitPolicy.TRAILING_PAGES for rule in rules.pools)
        self.fetches: dict[tuple[int, bytes], Fetch] = {}
        # Under store I/O too, of pages that were forgotten meanwhile: for the loads that wait for them already, and for nobody else.
        self.forgotten: set[Fetch] = set()
        self.loads: dict[int, Load] = {}
        self.parked: deque[Load] = deque()
        self.single_flight_joins = 0

    # -------------------------------------------------------------- beginning

    def begin(self, load: Load, out: list[Effect]) -> LoadResult | None:
        """Start a load, or park it behind others. Return its result where it has one at once; None while it is pending.

        A load that consumes a pin gets the very pages that the pin holds, whatever has become of the index since.
        """
        if not self._to_edge(load):
            load.done = True
            detail = f"a prefix of {load.prefix} pages ends inside a block group"
            return LoadResult(load.session, load.load_id, Outcome.MISS, True, detail=detail)
        if self.too_large(load):
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
        # Nobody overtakes a load that waits, but for one whose pages are all held already, by its pin for instance.
        if (self.parked and not self._held_already(load)) or not self._start(load, out):
            if load.silent:
                self._forget(load)
                return LoadResult(load.session, load.load_id, Outcome.POOL_FULL, True)
            self.parked.append(load)
            return None
        return self._finish(load, out) if load.outstanding == 0 else None

    def _to_edge(self, load: Load) -> bool:
        """Shorten a load to the edge of a block group; False where it would not be shortened, or nothing would be left."""
        beyond = 0 if load.given or load.silent else load.prefix % self._group
        if beyond == 0:
            return True
        if not load.accept_shorter or beyond == load.prefix:
            return False
        self._shorten(load, load.prefix - beyond)
        return True

    def _shorten(self, load: Load, prefix: int) -> None:
        load.prefix = prefix
        load.needs = self.rules.needs(prefix)

    def lacking(self, load: Load) -> dict[int, int]:
        """Return, by pool, how many slots too many other loads hold for this one to be placed."""
        more: dict[int, int] = {}
        for pool, first, count in load.needs:
            index, leases = self.pools[pool].index, self.pools[pool].leases
            for key in load.keys[first : first + count]:
                slot = index.get(key)
                takes = (pool, key) not in self.fetches if slot is None else bool(leases[slot] == 0)
                more[pool] = more.get(pool, 0) + takes
        return {pool: n + self.pools[pool].load_held - self.pools[pool].load_limit for pool, n in more.items()}

    def too_large(self, load: Load) -> bool:
        """Return whether a load can never be placed, whatever others give up."""
        wanted: dict[int, int] = {}
        for pool, _, count in load.needs:
            wanted[pool] = wanted.get(pool, 0) + count
        return any(count > self.pools[pool].load_limit for pool, count in wanted.items())

    def _held_already(self, load: Load) -> bool:
        """Return whether every page of the load is leased or on its way, so that it takes no room."""
        for pool, first, count in load.needs:
            read = self.pools[pool]
            for key in load.keys[first : first + count]:
                slot = load.pinned.get((pool, key), read.index.get(key))
                held = (pool, key) in self.fetches if slot is None else bool(read.leases[slot])
                if not held:
                    return False
        return True

    def _start(self, load: Load, out: list[Effect]) -> bool:
        """Lease what is there and place what is not; False, with nothing changed, where there is no room."""
        plans = [self._plan(load, *need) for need in load.needs]
        more: dict[int, int] = {}
        for plan in plans:
            more[plan.pool] = more.get(plan.pool, 0) + self.pools[plan.pool].unleased(plan.hits) + plan.wanted
        if any(self.pools[pool].load_held + n > self.pools[pool].load_limit for pool, n in more.items()):
            return False
        # All leases come before the first eviction, which must not take a page that this load is about to use.
        for plan in plans:
            self.pools[plan.pool].lease(plan.hits)
        placed: list[Slots] = []
        for plan in plans:
            if not plan.fresh:
                placed.append(NO_SLOTS)
                continue
            taken = self.pools[plan.pool].place_load(plan.wanted)
            if taken is None:
                for before, slots in zip(plans, placed, strict=False):
                    if len(slots):
                        self.pools[before.pool].unfilled(slots, load=True)
                for leased in plans:
                    self.pools[leased.pool].release(leased.hits)
                return False
            placed.append(taken)
        self._attach(load, plans, placed, out)
        return True

    def _plan(self, load: Load, pool: int, first: int, count: int) -> Plan:
        """Look up what a load needs in a pool."""
        index = self.pools[pool].index
        keys = load.keys[first : first + count]
        found = [index.get(k, WAITING) for k in keys]
        if load.pinned:
            found = [load.pinned.get((pool, k), s) for k, s in zip(keys, found, strict=True)]
        slots = np.array(found, dtype=np.int64)
        if WAITING not in found:
            return Plan(pool, first, slots, slots.astype(np.uint32), [])
        hits = slots[slots >= 0].astype(np.uint32)
        fresh: list[int] = []
        if self.has_store:
            fresh = [at for at in np.flatnonzero(slots < 0).tolist() if (pool, keys[at]) not in self.fetches]
        return Plan(pool, first, slots, hits, fresh)

    def _attach(
        self,
        load: Load,
        plans: Sequence[Plan],
        placed: Sequence[Slots],
        out: list[Effect],
    ) -> None:
        """Make the load wait for the fetches that it joins or starts."""
        load.parts = []
        load.outstanding = 0
        issued: list[Fetch] = []
        for part_at, (plan, taken) in enumerate(zip(plans, placed, strict=True)):
            pool, first, slots = plan.pool, plan.first, plan.slots
            load.parts.append(LoadPart(pool, first, slots))
            if len(plan.hits) == len(slots):
                continue
            new = dict(zip(plan.fresh, taken.tolist(), strict=True))
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

    def fetched(self, results: Sequence[tuple[Fetch, Fetched, bytes]], out: list[Effect]) -> None:
        """Store I/O of these fetches has ended, with what it brought and the commit id of each page."""
        touched: dict[Load, None] = {}
        hits: dict[int, list[tuple[Fetch, bytes]]] = {}
        leases: dict[tuple[Load, int], list[int]] = {}
        for fetch, outcome, commit_id in results:
            if fetch not in self.forgotten:
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
            read = self.pools[pool]
            if self.forgotten:
                read.drop(f.key for f, _ in got if f in self.forgotten and read.index.get(f.key) == f.slot)
            read.settle(as_slots(f.slot for f, _ in got))
        if self.forgotten:
            self.forgotten.difference_update(fetch for fetch, _, _ in results)
        for load in touched:
            self._progress(load, out)
        self.retry_parked(out)

    def forget(self, pool: int, keys: Iterable[bytes]) -> int:
        """Take pages out of a pool's index, and let none of them that is being fetched get there. Return how many were there."""
        gone = list(keys)
        fetching = (self.fetches.pop((pool, key), None) for key in gone)
        self.forgotten.update(fetch for fetch in fetching if fetch is not None)
        return self.pools[pool].drop(gone)

    def _progress(self, load: Load, out: list[Effect]) -> None:
        if load.outstanding == 0:
            result = self._finish(load, out)
            if result is not None and not load.silent:
                out.append(result)
        elif not load.silent and not (load.accept_shorter and self._trails):
            self._announce(load, out)

    def _announce(self, load: Load, out: list[Effect]) -> None:
        """Push whole groups of keys whose pages, in every pool, have arrived and agree."""
        front = load.prefix
        for part in load.parts:
            open_at = np.flatnonzero(part.slots < 0)
            if len(open_at):
                front = min(front, part.first + int(open_at[0]))
        front -= front % self._step
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
            at = commits.setdefault(part.pool, {})
            at.update((part.first + i, ids[s]) for i, s in enumerate(part.slots.tolist()) if s >= 0)
        for pool, ids_at in commits.items():
            source = commits.get(self.rules.pools[pool].source) if self.rules.pools[pool].source >= 0 else None
            if source is not None:
                wrong = [i for i, c in ids_at.items() if i in source and source[i] != c]
                bad = min([bad, *wrong])
        return bad

    # -------------------------------------------------------------- ending

    @staticmethod
    def pages_of(pin: Load) -> dict[tuple[int, bytes], int]:
        """Return the slots that a pin holds, by pool and key."""
        return {
            (part.pool, pin.keys[part.first + i]): slot
            for part in pin.parts
            for i, slot in enumerate(part.slots.tolist())
            if slot >= 0
        }

    def _finish(self, load: Load, out: list[Effect]) -> LoadResult | None:
        """All I/O of the load has ended: say what is really there. None where it went on with a shorter prefix."""
        if load.silent:
            load.ready = True
            return None
        while True:
            bad = self._disagreement(load) if len(load.parts) > 1 or self._any_missing(load) else load.prefix
            if bad >= load.prefix:
                return self._ready(load)
            self._heal(load, bad)
            shorter = self._shorter(load, bad)
            if not load.accept_shorter or load.given or shorter == 0:
                self.drop(load)
                return LoadResult(
                    load.session, load.load_id, Outcome.MISS, True, detail=f"page {bad} of the prefix is gone"
                )
            if not self._trails:
                self._trim(load, shorter)
                return self._ready(load)
            self._release_parts(load)
            self._shorten(load, shorter)
            if not self._start(load, out):
                self.parked.appendleft(load)
                return None
            if load.outstanding:
                return None

    def _ready(self, load: Load) -> LoadResult:
        load.ready = True
        parts = self._part_slots(load, load.announced, load.prefix)
        return LoadResult(load.session, load.load_id, Outcome.READY, True, load.prefix, parts)

    @staticmethod
    def _any_missing(load: Load) -> bool:
        return any((part.slots < 0).any() for part in load.parts)

    def _shorter(self, load: Load, bad: int) -> int:
        """Return the longest prefix up to `bad` that may be there; 0 for none."""
        if self._trails and not self.has_store:
            runs = restorable(self.rules, self.resident(load.keys[:bad]))
            return runs[-1][1] if runs else 0
        return bad - bad % self._group

    def resident(self, keys: Sequence[bytes]) -> list[list[bytes | None]]:
        """Return, per pool, the commit id of each key's resident page, None where it is not resident."""
        out: list[list[bytes | None]] = []
        for pool in self.pools:
            index, commits = pool.index, pool.commits
            out.append([commits[s] if (s := index.get(k)) is not None else None for k in keys])
        return out

    def _heal(self, load: Load, bad: int) -> None:
        """Pages at `bad` that do not belong together must not be found together again, and may be stored anew."""
        found: dict[int, set[bytes]] = {}
        for part in load.parts:
            at = bad - part.first
            if 0 <= at < len(part.slots) and (slot := int(part.slots[at])) >= 0:
                family = self.rules.group_of(part.pool)[0]
                found.setdefault(family, set()).add(self.pools[part.pool].commits[slot])
        for family, commits in found.items():
            if len(commits) > 1:
                for place in self.rules.group_of(family):
                    self.pools[place].drop([load.keys[bad]])
                    self.beliefs[place].drop([load.keys[bad]])

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
