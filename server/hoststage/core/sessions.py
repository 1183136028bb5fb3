"""Sessions and namespaces: what the core keeps for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hoststage.core.beliefs import Beliefs
from hoststage.core.boards import Board
from hoststage.core.commits import Commit
from hoststage.core.effects import Outcome, PartSlots, ReserveResult
from hoststage.core.loads import Load
from hoststage.core.loadtable import LoadTable
from hoststage.core.prefix import Rules
from hoststage.core.readpool import ReadPool
from hoststage.core.slots import NO_SLOT, Slots
from hoststage.core.stack import Mode
from hoststage.core.writepool import WritePool


class SessionState(Enum):
    """QUARANTINED: its connection broke and its process may live. ENDING: it is gone, its commits still drain."""

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one session may hold at once. `revoke_after`: seconds that a load waits for room before leases are asked back."""

    max_span_keys: int = 65_536
    max_read_leases: int = 1 << 20
    max_open_commits: int = 1024
    max_pin_seconds: float = 30.0
    max_credits: int = 256
    max_queued_reserves: int = 256
    load_deadline: float = 30.0
    revoke_after: float = 2.0


@dataclass(slots=True, eq=False)
class QueuedReserve:
    """A reservation that waits for slots."""

    request_id: int
    wants: Sequence[SpanPart]
    until: float


@dataclass(slots=True, eq=False)
class SpanPart:
    """Pages of one pool among the keys of a span, as a client names them. `keys` is empty for slots ahead of need."""

    pool: int
    first: int
    count: int
    keys: Sequence[bytes] = ()
    slots: Slots | None = None
    generations: Slots | None = None


@dataclass(slots=True, eq=False)
class SessionCore:
    """One session's part in the core. `copying`: copies of the daemon into its write arenas that are under way.

    boards: where it lists pages that it reads by the page indexes, by pool; none where it asks for all that it reads.
    """

    session: int
    namespace: NamespaceCore
    mode: Mode
    write: list[WritePool]
    credits: int
    state: SessionState = SessionState.ACTIVE
    commits: dict[bytes, Commit] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    pins: dict[int, Load] = field(default_factory=dict)
    revocations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    queued: deque[QueuedReserve] = field(default_factory=deque)
    read_leases: int = 0
    copying: int = 0
    boards: dict[int, Board] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing of its write arenas is in use."""
        return not self.copying and all(w.table.free == w.table.size for w in self.write)


def write_span(size: int, reserve: int) -> int:
    """Return the slots of a read pool that loads leave to publishing, so that a flood of them cannot stop it."""
    return min(reserve or 1, max(0, size - reserve))


class NamespaceCore:
    """What sessions of one namespace share: read pools, beliefs, loads, and the keys of commits in flight."""

    def __init__(
        self, name: str, rules: Rules, pools: list[ReadPool], *, keep: bool, has_store: bool, beliefs: int
    ) -> None:
        self.name = name
        self.rules = rules
        self.pools = pools
        self.keep = keep
        self.has_store = has_store
        self.beliefs = [Beliefs(beliefs) for _ in rules.pools]
        self.in_flight: list[dict[bytes, Commit]] = [{} for _ in rules.pools]
        self.loads = LoadTable(name, rules, pools, self.beliefs, has_store=has_store)
        self.sessions: set[int] = set()
        for place, pool in enumerate(pools):
            pool.evicted = self._follower(place)

    def _follower(self, place: int) -> Callable[[Sequence[bytes]], None]:
        """Return what to do when pages of a pool are evicted: the rest of their group leaves with them."""
        others = [i for i in self.rules.group_of(place) if i != place]

        def follow(keys: Sequence[bytes]) -> None:
            for other in others:
                self.pools[other].drop(keys)

        return follow

    def upgrade(self) -> None:
        """A session in `cache` mode has come: pages stay from now on."""
        self.keep = True
        for pool in self.pools:
            pool.keep = True

    def clear(self) -> int:
        """Forget all pages, resident or being fetched, and what is believed stored; return how many were resident."""
        resident = 0
        for place, (pool, beliefs) in enumerate(zip(self.pools, self.beliefs, strict=True)):
            fetching = [key for at, key in self.loads.fetches if at == place]
            resident += self.loads.forget(place, [*pool.index, *fetching])
            beliefs.clear()
        return resident

    def next_boards(self) -> dict[int, int]:
        """Return what one more session may list on its board, by pool; nothing where one of them has no room for it."""
        shares = {place: pool.next_board() for place, pool in enumerate(self.pools) if pool.size}
        return shares if all(shares.values()) else {}

    def sweep(self) -> int:
        """Free the slots that linger and that no board lists any more; return how many."""
        return sum(pool.sweep() for pool in self.pools)

    def heal(self, keys: Sequence[bytes], present: Sequence[Sequence[bytes | None]]) -> int:
        """Forget pages whose sidecar is of another commit, so that they can be stored anew; return how many keys.

        `present`: per pool, the commit id of each key's page, as a lookup found it.
        """
        torn: dict[int, set[bytes]] = {}
        for place, rule in enumerate(self.rules.pools):
            if rule.source < 0 or not rule.on_host:
                continue
            for key, mine, its in zip(keys, present[place], present[rule.source], strict=False):
                if mine != its and mine is not None and its is not None:
                    torn.setdefault(rule.source, set()).add(key)
        for source, bad in torn.items():
            for place in self.rules.group_of(source):
                self.pools[place].drop(bad)
                self.beliefs[place].drop(bad)
        return sum(map(len, torn.values()))

    def has(self, pool: int, key: bytes) -> bool:
        """Return whether a page is believed stored, resident where that counts, or on its way."""
        return (
            key in self.beliefs[pool]
            or key in self.in_flight[pool]
            or (not self.has_store and key in self.pools[pool].index)
        )

    def _lacks_all(self, pool: int, keys: Sequence[bytes]) -> bool:
        """Return whether `has` is false for every one of the keys."""
        return (
            self.beliefs[pool].isdisjoint(keys)
            and self.in_flight[pool].keys().isdisjoint(keys)
            and (self.has_store or self.pools[pool].index.keys().isdisjoint(keys))
        )

    def covered(self, key: bytes) -> bool:
        """Return whether the anchor page of `key` is stored, resident or in flight, as far as is known here."""
        anchor = self.rules.anchor
        return self.has(anchor, key) or key in self.pools[anchor].index

    def believed(self, parts: Sequence[SpanPart]) -> list[set[int]]:
        """Return, per part, the places within it of pages that need no store: their whole group is there already."""
        if all(self._lacks_all(part.pool, part.keys) for part in parts):
            return [set() for _ in parts]
        if not self.rules.grouped:
            return [{i for i, key in enumerate(part.keys) if self.has(part.pool, key)} for part in parts]
        wanted = {(part.pool, part.first + i): key for part in parts for i, key in enumerate(part.keys)}
        out = []
        for part in parts:
            group = self.rules.group_of(part.pool)
            there = set()
            for i, key in enumerate(part.keys):
                members = [g for g in group if (g, part.first + i) in wanted] or [part.pool]
                if all(self.has(g, key) for g in members):
                    there.add(i)
            out.append(there)
        return out


def granted(session: SessionCore, parts: Sequence[SpanPart], skip: Sequence[set[int]]) -> ReserveResult | None:
    """Return a reservation's slots, all parts of it, or None where there is no room for all now."""
    need = [part.count - len(there) for part, there in zip(parts, skip, strict=True)]
    by_pool: dict[int, int] = {}
    for part, n in zip(parts, need, strict=True):
        by_pool[part.pool] = by_pool.get(part.pool, 0) + n
    if any(n > session.write[pool].room for pool, n in by_pool.items()):
        return None
    out = []
    for part, n, there in zip(parts, need, skip, strict=True):
        write = session.write[part.pool]
        taken = write.reserve(n, ahead=not part.keys)
        if there:
            slots = _spread(taken, part.count, there)
            gens = _spread(write.table.generations(taken), part.count, there, fill=0)
        else:
            slots, gens = taken, write.table.generations(taken)
        out.append(PartSlots(part.pool, part.first, slots, gens))
    return ReserveResult(Outcome.ACCEPTED, tuple(out))


def _spread(values: Slots, count: int, skip: set[int], fill: int = NO_SLOT) -> Slots:
    """Return `values` at the places that are not skipped, `fill` elsewhere."""
    out = np.full(count, fill, dtype=np.uint32)
    mask = np.ones(count, dtype=np.bool_)
    mask[list(skip)] = False
    out[mask] = values
    return out
