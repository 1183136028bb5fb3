"""A small world around the core's tier: stacks, a store, memory that only effects move, and the rules that must hold at every moment.

It stands for the daemon: it carries out effects when it is told to, in any order, and checks what the core hands out against
what was committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import settings

from hoststage.core.commits import Commit, DrainPolicy
from hoststage.core.effects import (
    CommitEnded,
    Fetched,
    LoadResult,
    Outcome,
    PartSlots,
    Publish,
    ReserveEnded,
    ReserveResult,
    SessionOver,
    StoreRead,
    StoreWrite,
    Written,
)
from hoststage.core.loads import Fetch, Load
from hoststage.core.prefix import PoolRule, Rules
from hoststage.core.readpool import ReadPool
from hoststage.core.sessions import NamespaceCore, SessionCore, SessionLimits, SessionState, SpanPart
from hoststage.core.slots import NO_SLOT, Slots, SlotState
from hoststage.core.stack import HitPolicy, Mode
from hoststage.core.tier import Tier
from hoststage.core.writepool import WritePool
from hoststage.shm.pageindex import PageIndex, PageIndexWriter, index_bytes


def machine_settings() -> settings:
    """Return the settings of a state machine: quick, or those of `--hypothesis-profile=thorough`."""
    if settings.get_current_profile_name() == "thorough":
        return settings(deadline=None)
    return settings(max_examples=150, stateful_step_count=50, deadline=None)


NAMESPACE = "space"
EPOCH = b"\0" * 8


def rule(
    name: str, policy: HitPolicy = HitPolicy.ALL_PAGES, *, trailing: int = 0, group: int = 1, source: int = -1
) -> PoolRule:
    """Return the rule of a pool of small pages."""
    return PoolRule(name, policy, trailing, group, source, 100, 4096)


KV = Rules((rule("kv"),), 0)
KV_SWA = Rules((rule("kv"), rule("swa", HitPolicy.TRAILING_PAGES, trailing=2)), 0)
KV_INDEXER = Rules((rule("kv"), rule("indexer", source=0)), 0)
KV_MAMBA = Rules((rule("kv"), rule("mamba", HitPolicy.TRAILING_PAGES, trailing=1)), 0)
KV_BLOCKS = Rules((rule("kv", HitPolicy.BLOCK_GROUPS, group=2), rule("indexer", source=0)), 0)
FULL = Rules(
    (
        rule("kv"),
        rule("swa", HitPolicy.TRAILING_PAGES, trailing=2),
        rule("swa_scales", HitPolicy.TRAILING_PAGES, trailing=2, source=1),
    ),
    0,
)
STACKS = {"kv": KV, "swa": KV_SWA, "indexer": KV_INDEXER, "mamba": KV_MAMBA, "blocks": KV_BLOCKS, "full": FULL}


class Stored(NamedTuple):
    """A page in the store, or in memory: the commit that brought it, and its bytes."""

    commit_id: bytes
    content: str


@dataclass(slots=True)
class Client:
    """What one session's client knows: slots that it may write, loads that it was given."""

    core: SessionCore
    reservations: list[list[SpanPart]] = field(default_factory=list)
    credits: list[PartSlots] = field(default_factory=list)
    waiting: dict[int, list[SpanPart]] = field(default_factory=dict)
    pending_loads: dict[int, Load] = field(default_factory=dict)
    views: dict[int, list[PartSlots]] = field(default_factory=dict)
    placed: dict[int, tuple[list[SpanPart], list[Slots]]] = field(default_factory=dict)
    own: list[OwnLease] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ListedSlots:
    """A board for one pool: what its client has written there, which may be anything."""

    entries: int
    listed: list[int] = field(default_factory=list)

    def slots(self) -> list[int]:
        return self.listed[: self.entries]


@dataclass(frozen=True, slots=True)
class OwnLease:
    """A page that a client reads by the index and its board, as it was when it came to."""

    pool: int
    slot: int
    generation: int
    key: bytes
    content: str


class NotingTier(Tier):
    """A tier whose last accepted commit can be looked at, also where it ended at once."""

    __slots__ = ("accepted",)
    accepted: Commit | None

    def _accept(self, *given: object) -> Commit:
        self.accepted = super()._accept(*given)  # type: ignore[arg-type]
        return self.accepted


@dataclass(slots=True)
class World:
    """A tier with one namespace, its store, and the bytes in all arenas. `boards`: sessions may list what they read by the indexes."""

    rules: Rules
    has_store: bool = True
    read_slots: int = 8
    reserve: int = 3
    write_span: int = 2
    write_slots: int = 5
    boards: bool = False
    limits: SessionLimits = field(
        default_factory=lambda: SessionLimits(
            max_read_leases=40, max_open_commits=4, max_credits=3, max_queued_reserves=2, load_deadline=10.0
        )
    )
    policy: DrainPolicy = field(
        default_factory=lambda: DrainPolicy(max_pages=4, retry_first=0.5, retry_most=2.0, deadline=5.0)
    )
    now: float = 100.0
    tier: NotingTier = field(init=False)
    space: NamespaceCore = field(init=False)
    clients: dict[int, Client] = field(default_factory=dict)
    store: dict[tuple[int, bytes], Stored] = field(default_factory=dict)
    committed: dict[tuple[int, bytes], set[Stored]] = field(default_factory=dict)
    acknowledged: set[tuple[bytes, int, bytes]] = field(default_factory=set)
    write_memory: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    read_memory: list[list[str]] = field(default_factory=list)
    indexes: list[PageIndex] = field(default_factory=list)
    publishes: list[tuple[Commit, list[int]]] = field(default_factory=list)
    writes: list[Commit] = field(default_factory=list)
    reads: list[tuple[Fetch, int]] = field(default_factory=list)
    read_before: dict[Fetch, Stored] = field(default_factory=dict)
    open_commits: dict[bytes, Commit] = field(default_factory=dict)
    ended: list[CommitEnded] = field(default_factory=list)
    results: list[LoadResult] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    parked_before: list[Load] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.tier = NotingTier(EPOCH, self.limits, self.policy)
        pools = [
            ReadPool(self.read_slots, reserve=self.reserve, write_span=self.write_span, keep=False)
            for _ in self.rules.pools
        ]
        self.indexes = []
        for pool in pools:
            memory = memoryview(bytearray(index_bytes(self.read_slots)))
            pool.mirror_to(PageIndexWriter(memory, self.read_slots))
            self.indexes.append(PageIndex(memory.toreadonly(), self.read_slots))
        self.space = NamespaceCore(NAMESPACE, self.rules, pools, keep=False, has_store=self.has_store, beliefs=6)
        self.tier.namespaces[NAMESPACE] = self.space
        self.read_memory = [[""] * self.read_slots for _ in pools]

    # ------------------------------------------------------------------ events of clients

    def open(self, mode: Mode = Mode.CACHE, credit: int = 0) -> Client:
        """Open a session."""
        self.serial += 1
        write = [WritePool(self.write_slots, 1) for _ in self.rules.pools]
        core = SessionCore(self.serial, self.space, mode, write, credit)
        if mode is Mode.CACHE and self.boards:
            core.boards.update({pool: ListedSlots(1) for pool in range(len(write))} if self._room_for_boards() else {})
        self.tier.open(core)
        client = self.clients[core.session] = Client(core)
        for pool, arena in enumerate(write):
            self.write_memory[core.session, pool] = [""] * arena.table.size
        return client

    def _room_for_boards(self) -> bool:
        """Return whether one more session may have a board of one entry a pool: as `ReadPool.next_board` for pools that are not as tiny."""
        room = (self.read_slots - self.reserve - self.write_span) // 4
        return all(p.boards.entries < room and p.publish_busy < p.publish_limit for p in self.space.pools)

    def parts(self, keys: Sequence[bytes], first: int, count: int, pools: Sequence[int] = ()) -> list[SpanPart]:
        """Return parts for keys `[first, first + count)` in some pools, by default in all."""
        run = list(keys[first : first + count])
        return [SpanPart(pool, first, len(run), run) for pool in pools or range(len(self.rules.pools))]

    def reserve_pages(
        self, client: Client, parts: list[SpanPart], *, parent: bytes = b"", wait: float = 0.0
    ) -> ReserveResult | None:
        """Reserve slots for the parts, and write the pages into what was granted."""
        self.serial += 1
        request = self.serial
        result = self.tier.reserve(client.core, parts, parent, request, wait, self.now)
        if result is None:
            client.waiting[request] = parts
        else:
            self._reserved(client, parts, result)
        self.settle()
        return result

    def _reserved(self, client: Client, parts: list[SpanPart], result: ReserveResult) -> None:
        if result.outcome is not Outcome.ACCEPTED:
            assert not result.parts
            return
        assert [(p.pool, p.first, p.count) for p in parts] == [(p.pool, p.first, len(p.slots)) for p in result.parts]
        for part, got in zip(parts, result.parts, strict=True):
            self._check_granted(client, got)
            part.slots, part.generations = got.slots, got.generations
        if all(part.keys for part in parts):
            self.write(client, parts)
            client.reservations.append(parts)
        else:
            client.credits += result.parts

    def _check_granted(self, client: Client, got: PartSlots) -> None:
        table = client.core.write[got.pool].table
        real = got.slots[got.slots != NO_SLOT]
        table.check(real, got.generations[got.slots != NO_SLOT], SlotState.RESERVED)
        taken = [s for parts in client.reservations for p in parts if p.pool == got.pool for s in p.slots.tolist()]
        taken += [s for part in client.credits if part.pool == got.pool for s in part.slots.tolist()]
        assert not set(real.tolist()) & (set(taken) - {NO_SLOT}), "a slot was granted twice"

    def write(self, client: Client, parts: Sequence[SpanPart]) -> None:
        """The client's device copy: new bytes for every page that has a slot."""
        self.serial += 1
        for part in parts:
            for key, slot in zip(part.keys, part.slots.tolist(), strict=True):
                if slot != NO_SLOT:
                    memory = self.write_memory[client.core.session, part.pool]
                    memory[slot] = f"{self.rules.pools[part.pool].name} {key.hex()} #{self.serial}"

    def commit(self, client: Client, parts: list[SpanPart], parent: bytes = b"") -> Outcome:
        """Commit parts that were reserved and written."""
        session = client.core.session
        self.serial += 1
        placed = client.placed.pop(id(parts), (parts, None))[1]
        bytes_now = {
            (p.pool, s): self.write_memory[session, p.pool][s] for p in parts for s in p.slots.tolist() if s != NO_SLOT
        }
        result = self.tier.commit(client.core, parts, parent, self.serial, self.now, placed)
        if placed is not None and result.outcome not in (Outcome.ACCEPTED, Outcome.BELIEVED_STORED):
            self.tier.unplace(client.core, parts, placed)
        if result.outcome in (Outcome.ACCEPTED, Outcome.BELIEVED_STORED) and parts in client.reservations:
            client.reservations.remove(parts)
        if result.outcome is Outcome.ACCEPTED:
            commit = self.tier.accepted
            assert commit is not None
            assert commit.commit_id == result.commit_id
            self.open_commits[commit.commit_id] = commit
            slots = {(p.pool, k): s for p in parts for k, s in zip(p.keys, p.slots.tolist(), strict=True)}
            for page in commit.pages:
                content = bytes_now[page.pool, slots[page.pool, page.key]]
                self.committed.setdefault((page.pool, page.key), set()).add(Stored(commit.commit_id, content))
            order = [self.rules.store_order.index(p.pool) for p in commit.pages]
            assert order == sorted(order), "pages are not in store order"
        for part in result.credits:
            self._check_granted(client, part)
            client.credits.append(part)
        self.settle()
        return result.outcome

    def abort(self, client: Client, parts: list[SpanPart]) -> None:
        """Give a reservation back."""
        client.reservations.remove(parts)
        self.tier.abort(client.core, parts)
        self._unplace(client, [parts])
        self.settle()

    def place_ahead(self, client: Client, parts: list[SpanPart]) -> bool:
        """The daemon itself puts the pages of a reservation where they will be published, and spoils the write slots."""
        placed = self.tier.place_ahead(client.core, parts)
        if placed is None:
            return False
        client.placed[id(parts)] = (parts, placed)
        for part, slots in zip(parts, placed, strict=True):
            written = [s for s in part.slots.tolist() if s != NO_SLOT]
            for source, slot in zip(written, slots.tolist(), strict=True):
                assert self.space.pools[part.pool].table.state[slot] == SlotState.FILLING
                self.read_memory[part.pool][slot] = self.write_memory[client.core.session, part.pool][source]
        self.settle()
        return True

    def _unplace(self, client: Client, which: Sequence[list[SpanPart]]) -> None:
        for parts in which:
            found = client.placed.pop(id(parts), None)
            if found is not None:
                self.tier.unplace(client.core, *found)

    def load(
        self,
        client: Client,
        keys: Sequence[bytes],
        prefix: int,
        *,
        pin: int = 0,
        wait: float = 10.0,
        shorter: bool = False,
        needs: list[tuple[int, int, int]] | None = None,
    ) -> tuple[int, LoadResult | None]:
        """Begin a load. Where others wait, it must not take room before them."""
        # Where a shorter one will do, what lies beyond the edge of a block group is not asked for at all.
        edge = prefix - prefix % self.space.loads._group if shorter and needs is None else prefix
        wanted = needs if needs is not None else self.rules.needs(edge or prefix)
        asked = Load(0, 0, list(keys), edge or prefix, wanted, 0.0)
        overtakes = bool(self.space.loads.parked) and not pin and any(n for _, n, _ in self.room_wanted(asked))
        load_id, result = self.tier.load(
            client.core,
            list(keys),
            prefix,
            needs=needs,
            pin=pin,
            deadline=self.now + wait,
            accept_shorter=shorter,
        )
        load = client.core.loads.get(load_id)
        if load is not None:
            client.pending_loads[load_id] = load
            assert load in self.space.loads.parked or not overtakes, "a load took room before those that wait for it"
        if result is not None:
            assert result.last
            assert result.outcome is Outcome.READY or load is None
            self._load_result(result)
        else:
            assert load is not None
        self.settle()
        return load_id, result

    def release(self, client: Client, load_id: int) -> None:
        """Give the pages of a load back."""
        client.views.pop(load_id, None)
        client.pending_loads.pop(load_id, None)
        self.tier.release(client.core, [load_id])
        self.settle()

    def lease_by_itself(self, client: Client, pool: int, key: bytes) -> bool:
        """The client finds a page in the index, lists it on its board, and looks whether it still stands."""
        board = client.core.boards.get(pool)
        found = self.indexes[pool].find(key, len(key))
        if board is None or found is None or len(board.listed) >= board.entries:
            return False
        slot = found[0][0]
        board.listed.append(slot)
        assert self.indexes[pool].stands(found)
        read = self.space.pools[pool]
        content = self.read_memory[pool][slot]
        assert Stored(read.commits[slot], content) in self.committed[pool, key]
        client.own.append(OwnLease(pool, slot, int(read.table.generation[slot]), key, content))
        return True

    def let_go_by_itself(self, client: Client) -> None:
        """The client wipes its board; the daemon looks at its next tick."""
        client.own.clear()
        for board in client.core.boards.values():
            board.listed.clear()
        self.tick(0.0)

    def quarantine(self, client: Client) -> None:
        """The client's connection breaks; nothing is told to it any more."""
        self.tier.quarantine(client.core)
        self._unplace(client, [parts for parts, _ in client.placed.values()])
        client.waiting.clear()
        for load_id in list(client.pending_loads):
            if load_id not in client.core.loads:
                del client.pending_loads[load_id]
                client.views.pop(load_id, None)
        self.settle()

    def end(self, client: Client) -> None:
        """The client's process is gone."""
        del self.clients[client.core.session]
        self.tier.end(client.core)
        self._unplace(client, [parts for parts, _ in client.placed.values()])
        self.settle()

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.tier.tick(self.now)
        self.settle()

    # ------------------------------------------------------------------ effects

    def settle(self) -> None:
        """Note what the core asks for, and check what it tells the clients."""
        for effect in self.tier.effects():
            match effect:
                case LoadResult():
                    self._load_result(effect)
                case CommitEnded():
                    self._commit_ended(effect)
                case ReserveEnded():
                    client = self.clients.get(effect.session)
                    assert client is not None
                    self._reserved(client, client.waiting.pop(effect.request_id), effect.result)
                case Publish(commit):
                    self.publishes.append((commit, self._generations(commit)))
                case StoreWrite(commit):
                    self.writes.append(commit)
                case StoreRead(namespace, fetches):
                    assert namespace == NAMESPACE
                    for fetch in fetches:
                        generation = int(self.space.pools[fetch.pool].table.generation[fetch.slot])
                        self.reads.append((fetch, generation))
                case SessionOver(session):
                    assert session not in self.clients
                    self.over.append(session)

    def _generations(self, commit: Commit) -> list[int]:
        write = self.tier.sessions[commit.session].write
        out = []
        for page in commit.pages:
            out.append(int(write[page.pool].table.generation[page.slot]))
            out.append(int(self.space.pools[page.pool].table.generation[page.read_slot]))
        return out

    def _commit_ended(self, ended: CommitEnded) -> None:
        commit = self.open_commits.pop(ended.commit_id)
        assert ended.pages == len(commit.pages)
        assert all(p.slot == -1 for p in commit.pages)
        if ended.outcome is Outcome.STORED:
            assert self.has_store
            assert all((commit.commit_id, p.pool, p.key) in self.acknowledged for p in commit.pages)
        elif ended.outcome is Outcome.RESIDENT:
            assert not self.has_store
        self.ended.append(ended)

    def carry_publish(self, at: int, *, ok: bool = True) -> None:
        """Make the copies of a `Publish`."""
        commit, generations = self.publishes.pop(at % len(self.publishes))
        assert generations == self._generations(commit), "a slot was reused under a copy"
        write = self.tier.sessions[commit.session].write
        for page in commit.pages:
            assert write[page.pool].table.state[page.slot] == SlotState.COMMITTED
            assert self.space.pools[page.pool].table.state[page.read_slot] == SlotState.FILLING
            content = self.write_memory[commit.session, page.pool][page.slot] if ok else "torn"
            self.read_memory[page.pool][page.read_slot] = content
        self.tier.published(commit, ok, self.now)
        self.settle()

    def carry_write(self, at: int, outcomes: Sequence[Written] = (Written.STORED,)) -> None:
        """Do the store I/O of a `StoreWrite`; `outcomes` are repeated over its pages."""
        commit = self.writes.pop(at % len(self.writes))
        results = []
        for i, page in enumerate(commit.unstored):
            if page.read_slot >= 0:
                content = self.read_memory[page.pool][page.read_slot]
            else:
                state = self.tier.sessions[commit.session].write[page.pool].table.state[page.slot]
                assert state == SlotState.DRAINING
                content = self.write_memory[commit.session, page.pool][page.slot]
            stored = Stored(commit.commit_id, content)
            assert stored in self.committed[page.pool, page.key], "other bytes than were committed go to the store"
            outcome = outcomes[i % len(outcomes)]
            results.append(outcome)
            if outcome is Written.STORED:
                self.store[page.pool, page.key] = stored
                self.acknowledged.add((commit.commit_id, page.pool, page.key))
        self.tier.written(commit, results, "as the test has it", self.now)
        self.settle()

    def carry_read(self, at: int, count: int = 1, failure: Fetched = Fetched.HIT) -> None:
        """Do the store I/O of some fetches; `failure` is what happens to pages that the store has."""
        start = at % len(self.reads)
        batch = self.reads[start : start + count]
        del self.reads[start : start + count]
        results = []
        for fetch, generation in batch:
            table = self.space.pools[fetch.pool].table
            assert table.state[fetch.slot] == SlotState.FILLING
            assert table.generation[fetch.slot] == generation, "a slot was reused under a read"
            found = self.read_before.pop(fetch, None) or self.store.get((fetch.pool, fetch.key))
            outcome = Fetched.MISS if found is None else failure
            if outcome is Fetched.HIT and found is not None:
                self.read_memory[fetch.pool][fetch.slot] = found.content
                results.append((fetch, outcome, found.commit_id))
            else:
                self.read_memory[fetch.pool][fetch.slot] = "torn"
                results.append((fetch, outcome, b""))
        forgotten = [fetch for fetch, *_ in results if fetch in self.space.loads.forgotten]
        self.tier.fetched(self.space, results)
        for fetch in forgotten:
            assert self.space.pools[fetch.pool].index.get(fetch.key) != fetch.slot, (
                "a page came back after it was cleared"
            )
        self.settle()

    def clear(self) -> None:
        """An operator clears the namespace. What is being fetched may have been read already."""
        for fetch, _ in self.reads:
            if (page := self.store.get((fetch.pool, fetch.key))) is not None:
                self.read_before[fetch] = page
        self.store.clear()
        self.space.clear()

    def carry_all(self) -> None:
        """Carry out every effect, and those that follow, successfully."""
        while self.publishes or self.writes or self.reads:
            if self.publishes:
                self.carry_publish(0)
            if self.writes:
                self.carry_write(0)
            if self.reads:
                self.carry_read(0, len(self.reads))

    # ------------------------------------------------------------------ what loads are given

    def _load_result(self, result: LoadResult) -> None:
        self.results.append(result)
        client = self.clients[result.session]
        if result.outcome is not Outcome.READY:
            assert result.last
            assert not result.parts
            assert result.load_id not in client.core.loads
            client.pending_loads.pop(result.load_id, None)
            client.views.pop(result.load_id, None)
            return
        load = client.pending_loads[result.load_id]
        for part in result.parts:
            self._check_view(load, part)
        client.views.setdefault(result.load_id, []).extend(result.parts)
        if result.last:
            assert load.ready
            del client.pending_loads[result.load_id]
            self._check_whole(load, result.prefix, client.views[result.load_id])

    def _check_view(self, load: Load, part: PartSlots) -> None:
        """Every page that is handed out is the one committed under its key."""
        pool = self.space.pools[part.pool]
        pool.table.check(part.slots, part.generations, SlotState.READY)
        for i, slot in enumerate(part.slots.tolist()):
            key = load.keys[part.first + i]
            assert pool.leases[slot] > 0
            page = Stored(pool.commits[slot], self.read_memory[part.pool][slot])
            assert page in self.committed[part.pool, key], f"{page} was never committed under {key.hex()}"

    def _check_whole(self, load: Load, prefix: int, views: Sequence[PartSlots]) -> None:
        """A load that ended got each page that its prefix needs, once, and sidecars of the same commit as their source."""
        assert 0 < prefix <= len(load.keys)
        got: dict[int, dict[int, int]] = {}
        for part in views:
            at = got.setdefault(part.pool, {})
            for i, slot in enumerate(part.slots.tolist()):
                assert part.first + i not in at
                at[part.first + i] = slot
        if load.given:
            wanted = {pool: set(range(first, first + n)) for pool, first, n in load.needs if n}
        else:
            spans = [(i, *r.needed(prefix)) for i, r in enumerate(self.rules.pools)]
            wanted = {pool: set(range(first, first + n)) for pool, first, n in spans if n}
        assert {pool: set(at) for pool, at in got.items()} == wanted
        for place, r in enumerate(self.rules.pools):
            if r.policy is HitPolicy.BLOCK_GROUPS and not load.given:
                assert prefix % r.group == 0
            for at, slot in got.get(place, {}).items() if r.source >= 0 else ():
                source = got.get(r.source, {}).get(at)
                if source is not None:
                    assert self.space.pools[place].commits[slot] == self.space.pools[r.source].commits[source]

    # ------------------------------------------------------------------ what holds at every moment

    def check(self) -> None:
        """Check every invariant that the core can be held to."""
        self._check_books()
        self._check_leases()
        self._check_own_leases()
        self._check_parked()
        self._check_sessions()
        self.check_indexes()

    def check_indexes(self) -> None:
        """A reader of a page index finds what is resident, where it is, and nothing else."""
        keys = {key for _, key in (*self.committed, *self.store)}
        for pool, index in zip(self.space.pools, self.indexes, strict=True):
            for key in keys:
                found = index.find(key, len(key))
                slot = pool.index.get(key)
                assert found is None if slot is None else found is not None and found[0] == [slot]
                assert found is None or index.stands(found)

    def _check_books(self) -> None:
        for pool in self.space.pools:
            pool.check()
            assert np.count_nonzero(pool.published) <= self.read_slots - self.reserve
            assert pool.publish_busy <= self.read_slots - self.reserve - pool.boards.entries
            filled = np.count_nonzero((pool.table.state == SlotState.FILLING) & ~pool.published)
            leased = np.count_nonzero(pool.leases)
            assert filled + leased <= self.read_slots - self.write_span
            resident = pool.table.state == SlotState.RESIDENT
            idle = resident & ~pool.draining
            for slot in set(np.flatnonzero(idle).tolist()) - pool.boards.lingering:
                key = pool.keys[slot]
                assert pool.keep, "a page stays that nobody uses"
                assert key is not None
                assert pool.index[key] == slot
            for key, slot in pool.index.items():
                assert pool.table.state[slot] in (SlotState.READY, SlotState.RESIDENT), key
        for session in self.tier.sessions.values():
            for write in session.write:
                assert write.table.conserved()
                assert write.room >= 0
                assert write.credits <= self.limits.max_credits
        fetches = {(f.pool, f.slot) for f in (*self.space.loads.fetches.values(), *self.space.loads.forgotten)}
        assert fetches == {(f.pool, f.slot) for f, _ in self.reads}, "fetches and store reads differ"
        assert len(fetches) == len(self.reads)
        for place, pool in enumerate(self.space.pools):
            filling = set(np.flatnonzero((pool.table.state == SlotState.FILLING) & ~pool.published).tolist())
            assert filling == {slot for at, slot in fetches if at == place}
            copied = set(np.flatnonzero((pool.table.state == SlotState.FILLING) & pool.published).tolist())
            due = {page.read_slot for commit, _ in self.publishes for page in commit.pages if page.pool == place}
            for client in self.clients.values():
                for parts, placed in client.placed.values():
                    due.update(
                        s
                        for part, slots in zip(parts, placed, strict=True)
                        if part.pool == place
                        for s in slots.tolist()
                    )
            assert copied == due, "slots are taken for publishing by nobody"

    def _check_leases(self) -> None:
        """The leases of slots are those of loads and pins, and what clients see has not changed under them."""
        leases = [np.zeros(self.read_slots, dtype=np.int32) for _ in self.space.pools]
        for session in self.tier.sessions.values():
            holders = [*session.loads.values(), *session.pins.values()]
            assert session.read_leases == sum(load.charged for load in holders)
            assert session.read_leases <= self.limits.max_read_leases
            for load in holders:
                assert not load.done
                for part in load.parts:
                    np.add.at(leases[part.pool], part.slots[part.slots >= 0], 1)
                if load.ready and not load.silent:
                    assert load.charged == sum(len(part.slots) for part in load.parts)
        for pool, counted in zip(self.space.pools, leases, strict=True):
            assert np.array_equal(pool.leases, counted)
        known = {load for s in self.tier.sessions.values() for load in (*s.loads.values(), *s.pins.values())}
        assert known == set(self.space.loads.loads.values())
        for client in self.clients.values():
            for load_id, views in client.views.items():
                for part in views:
                    self._check_view(client.core.loads[load_id], part)

    def _check_own_leases(self) -> None:
        """What a client reads by itself stays where it is, whatever becomes of its key."""
        for client in self.clients.values():
            for own in client.own:
                table = self.space.pools[own.pool].table
                assert table.state[own.slot] in (SlotState.RESIDENT, SlotState.READY)
                assert table.generation[own.slot] == own.generation, "the slot of a page that is listed was taken"
                assert self.read_memory[own.pool][own.slot] == own.content

    def room_wanted(self, load: Load) -> list[tuple[int, int, int]]:
        """Return `(pool, slots to be leased or placed, slots to be placed)` of a parked load."""
        out: Counter[int] = Counter()
        fresh: Counter[int] = Counter()
        for pool, first, count in load.needs:
            read = self.space.pools[pool]
            for key in load.keys[first : first + count]:
                slot = read.index.get(key)
                if slot is not None:
                    out[pool] += int(read.leases[slot] == 0)
                elif (pool, key) not in self.space.loads.fetches and self.has_store:
                    out[pool] += 1
                    fresh[pool] += 1
        return [(pool, out[pool], fresh[pool]) for pool in dict.fromkeys(p for p, _, _ in load.needs)]

    def _check_parked(self) -> None:
        """Nothing waits that could go, least of all for publishing; and nobody overtakes."""
        loads = self.space.loads
        if loads.parked:
            head = loads.parked[0]
            assert head.outstanding == 0
            assert not head.parts
            wanted = self.room_wanted(head)
            limits = [
                (
                    self.space.pools[pool].load_held + n,
                    min(self.reserve, self.read_slots - self.write_span),
                )
                for pool, n, _ in wanted
            ]
            assert any(held > limit for held, limit in limits), "a load waits for something else than loads"
            could = all(
                self.space.pools[pool].load_held + n <= self.space.pools[pool].load_limit
                and fresh <= self.space.pools[pool].table.free + self._evictable(pool, head)
                for pool, n, fresh in wanted
            )
            assert not could, "a load waits although there is room"
        now = list(loads.parked)
        still = [load for load in self.parked_before if load in now]
        assert [load for load in now if load in self.parked_before] == still, "parked loads changed places"
        started = [load for load in self.parked_before if load not in now and not load.done]
        if started and still:
            last = max(map(self.parked_before.index, started))
            assert last < min(map(self.parked_before.index, still)), "a parked load was overtaken"
        self.parked_before = now

    def _evictable(self, pool: int, load: Load) -> int:
        """Return how many pages could make room for a load, which does not evict its own."""
        read = self.space.pools[pool]
        own = {k for place, first, n in load.needs if place == pool for k in load.keys[first : first + n]}
        boards = [s.boards[pool] for s in self.tier.sessions.values() if s.boards]
        listed = {slot for board in boards for slot in board.slots()}
        return read.evictable - sum(
            1
            for key, slot in read.index.items()
            if (key in own or slot in listed)
            and read.table.state[slot] == SlotState.RESIDENT
            and not read.draining[slot]
        )

    def _check_sessions(self) -> None:
        mine = {c.commit_id for s in self.tier.sessions.values() for c in s.commits.values()}
        assert mine == set(self.open_commits)
        assert self.tier.drains.pages_in_flight == sum(len(c.unstored) for c in self.writes)
        for commit in (c for pages in self.space.in_flight for c in pages.values()):
            assert commit.commit_id in mine
        for client in self.clients.values():
            core = client.core
            assert self.tier.sessions[core.session] is core
            assert {q.request_id for q in core.queued} == set(client.waiting)
            if core.state is SessionState.ACTIVE:
                for parts in client.reservations:
                    for part in parts:
                        mask = part.slots != NO_SLOT
                        core.write[part.pool].table.check(part.slots[mask], part.generations[mask], SlotState.RESERVED)
                head = core.queued[0] if core.queued else None
                if head is not None:
                    assert self.blocked(core, head.wants), "a reservation waits although there is room"

    def blocked(self, core: SessionCore, wants: Sequence[SpanPart]) -> bool:
        """Return whether a reservation cannot be granted now. What others stored since it was queued may not count yet."""
        needed = Counter[int]()
        for part in wants:
            needed[part.pool] += part.count
        return any(n > core.write[pool].room for pool, n in needed.items())

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """End everything, carry out everything, and check that nothing is left."""
        for client in list(self.clients.values()):
            self.end(client)
            self.check()
        for _ in range(1000):
            self.carry_all()
            self.check()
            if not self.open_commits:
                break
            self.tick(0.5)
        assert not self.tier.sessions
        assert not self.open_commits
        assert not any(self.space.in_flight)
        assert not self.space.sessions
        assert not self.space.loads.fetches
        assert not self.space.loads.forgotten
        assert not self.space.loads.loads
        assert not self.space.loads.parked
        assert self.tier.drains.pages_in_flight == 0
        assert self.tier.drains.waiting == 0
        assert not list(self.tier.drains.queued())
        assert len(self.over) == len(set(self.over))
        for pool in self.space.pools:
            assert pool.load_held == 0
            assert not pool.draining.any()
            assert pool.table.free + pool.table.counts[SlotState.RESIDENT] == pool.size
            pool.drop_idle()
            assert pool.table.free == pool.size
            assert pool.published_held == 0
            assert not pool.index
