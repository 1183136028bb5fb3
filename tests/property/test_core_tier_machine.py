"""Whatever clients, copies, the store and time do, and in whatever order: no wrong byte, no lost slot, no load that waits for writes.

`--hypothesis-profile=thorough` runs it for longer.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core_support import STACKS, Client, World, machine_settings

from hoststage.core.effects import Fetched, Outcome, Written
from hoststage.core.prefix import agreed, restorable
from hoststage.core.sessions import SessionState, SpanPart
from hoststage.core.slots import NO_SLOT, SlotError, as_slots
from hoststage.core.stack import Mode

LENGTH = 8
TRUNK = [bytes([n]) for n in range(4)]
CHAINS = [TRUNK + [bytes([base + n]) for n in range(LENGTH - 4)] for base in (16, 32)]

PICK = st.integers(0, 99)
CHAIN = st.sampled_from(CHAINS)
PREFIX = st.integers(1, LENGTH)


class TierMachine(RuleBasedStateMachine):
    """Several sessions of one namespace against a model of memory and store."""

    world: World

    @initialize(
        stack=st.sampled_from(sorted(STACKS)),
        has_store=st.sampled_from([True, True, True, False]),
        sizes=st.sampled_from([(9, 3, 1), (6, 2, 2), (12, 4, 3), (10, 8, 2), (16, 3, 2), (11, 2, 1)]),
        modes=st.lists(st.sampled_from([Mode.CACHE, Mode.CACHE, Mode.BUFFER_ONLY]), min_size=1, max_size=3),
        stored=st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)),
        read=st.lists(PICK, max_size=3),
    )
    def start(
        self,
        stack: str,
        has_store: bool,
        sizes: tuple[int, int, int],
        modes: list[Mode],
        stored: tuple[int, int],
        read: list[int],
    ) -> None:
        slots, reserve, span = sizes
        self.world = World(
            STACKS[stack], has_store=has_store, read_slots=slots, reserve=reserve, write_span=span, boards=True
        )
        self.pins: list[tuple[Client, int, list[bytes], list[tuple[int, int]]]] = []
        for i, mode in enumerate(modes):
            self._open(mode, i)
        for chain, length in zip(CHAINS, stored, strict=True):
            self._write_whole(self.world.clients[1], chain, length)
        for at in read:
            self._lease_by_itself(self.world.clients[1 + at % len(modes)], at)

    def _open(self, mode: Mode, credit: int) -> None:
        # Without a store there is nothing to stage for: the fences refuse buffer_only.
        self.world.open(mode if self.world.has_store else Mode.CACHE, credit)

    def _write_whole(self, client: Client, chain: list[bytes], length: int) -> None:
        """Store the first pages of a chain, with nothing else going on."""
        for at in range(length):
            parts = self.world.parts(chain, at, 1)
            result = self.world.reserve_pages(client, parts, parent=chain[at - 1] if at else b"")
            if result is not None and result.outcome is Outcome.ACCEPTED:
                self.world.commit(client, parts)
                if parts in client.reservations:
                    self.world.abort(client, parts)
                self.world.carry_all()

    def client(self, pick: int) -> Client | None:
        active = [c for c in self.world.clients.values() if c.core.state is SessionState.ACTIVE]
        return active[pick % len(active)] if active else None

    # ------------------------------------------------------------------ sessions

    @precondition(lambda self: len(self.world.tier.sessions) < 4)
    @rule(mode=st.sampled_from(list(Mode)), credit=st.integers(0, 3))
    def open(self, mode: Mode, credit: int) -> None:
        self._open(mode, credit)

    @rule(what=st.sampled_from(["nothing", "quarantine", "end", "evict", "the store evicts", "clear"]), pick=PICK)
    def disturb(self, what: str, pick: int) -> None:
        """What may happen to a session, the cache or the store at any time; a miss is all that may come of it."""
        clients, world = list(self.world.clients.values()), self.world
        if what == "quarantine" and (client := self.client(pick)):
            world.quarantine(client)
        elif what == "end" and clients:
            world.end(clients[pick % len(clients)])
        elif what == "evict":
            world.space.pools[pick % len(world.space.pools)].drop_idle()
        elif what == "the store evicts" and world.store:
            del world.store[list(world.store)[pick % len(world.store)]]
        elif what == "clear":
            world.clear()

    # ------------------------------------------------------------------ writing

    @rule(
        pick=PICK,
        chain=CHAIN,
        first=st.integers(0, LENGTH - 1),
        count=st.integers(1, 4),
        with_parent=st.booleans(),
        only=st.sampled_from([0, 0, 0, 1, 2, 3]),
        wait=st.sampled_from([0.0, 0.0, 2.0]),
        at_once=st.booleans(),
    )
    def reserve(
        self,
        pick: int,
        chain: list[bytes],
        first: int,
        count: int,
        with_parent: bool,
        only: int,
        wait: float,
        at_once: bool,
    ) -> None:
        if (client := self.client(pick)) is None:
            return
        pools = [(only - 1) % len(self.world.rules.pools)] if only else []
        parts = self.world.parts(chain, first, count, pools)
        parent = chain[first - 1] if with_parent and first else b""
        result = self.world.reserve_pages(client, parts, parent=parent, wait=wait)
        if result is not None and result.outcome is Outcome.ACCEPTED and at_once:
            self.world.commit(client, parts, parent)

    @rule(pick=PICK, count=st.integers(1, 3), pool=PICK)
    def reserve_ahead(self, pick: int, count: int, pool: int) -> None:
        if client := self.client(pick):
            self.world.reserve_pages(client, [SpanPart(pool % len(self.world.rules.pools), 0, count)])

    @rule(pick=PICK, chain=CHAIN, first=st.integers(0, LENGTH - 1))
    def commit_from_credits(self, pick: int, chain: list[bytes], first: int) -> None:
        if (client := self.client(pick)) is None or not client.credits:
            return
        got = client.credits.pop(pick % len(client.credits))
        n = min(len(got.slots), LENGTH - first)
        if n < len(got.slots):
            client.credits.append(type(got)(got.pool, got.first, got.slots[n:], got.generations[n:]))
        part = SpanPart(got.pool, first, n, chain[first : first + n], got.slots[:n], got.generations[:n])
        self.world.write(client, [part])
        outcome = self.world.commit(client, [part])
        if outcome not in (Outcome.ACCEPTED, Outcome.BELIEVED_STORED):
            client.credits.append(type(got)(got.pool, 0, got.slots[:n], got.generations[:n]))

    @rule(pick=PICK, chain=CHAIN, length=PREFIX)
    def write_whole(self, pick: int, chain: list[bytes], length: int) -> None:
        client = self.client(pick)
        if client and not client.waiting:
            self._write_whole(client, chain, length)

    @rule(pick=PICK, at=PICK, with_parent=st.booleans(), aborts=st.sampled_from([False, False, True]))
    def commit_or_abort(self, pick: int, at: int, with_parent: bool, aborts: bool) -> None:
        if (client := self.client(pick)) and client.reservations:
            parts = client.reservations[at % len(client.reservations)]
            if aborts:
                self.world.abort(client, parts)
                return
            chain = next(c for c in CHAINS if parts[0].keys[0] in c)
            parent = chain[parts[0].first - 1] if with_parent and parts[0].first else b""
            self.world.commit(client, parts, parent)

    @rule(pick=PICK, at=PICK)
    def place_ahead(self, pick: int, at: int) -> None:
        """As the daemon does with pages that it reads from a client's own memory, before it commits them."""
        if (client := self.client(pick)) and client.reservations:
            parts = client.reservations[at % len(client.reservations)]
            if id(parts) not in client.placed:
                self.world.place_ahead(client, parts)

    @rule(
        pick=PICK,
        at=PICK,
        fault=st.sampled_from(["stale", "twice", "twice in two parts", "foreign"]),
        aborts=st.booleans(),
    )
    def bad_reference(self, pick: int, at: int, fault: str, aborts: bool) -> None:
        """A stale, doubled or foreign slot is refused, and nothing has changed."""
        if (client := self.client(pick)) is None or not client.reservations:
            return
        part = client.reservations[at % len(client.reservations)][0]
        mask = part.slots != NO_SLOT
        slots, gens, keys = (
            part.slots[mask],
            part.generations[mask],
            [k for k, m in zip(part.keys, mask, strict=True) if m],
        )
        if not len(slots):
            return
        parts = [SpanPart(part.pool, 0, len(slots), keys, slots, gens)]
        if fault == "stale":
            parts[0].generations = gens - 1
        elif fault == "twice":
            twice = [b"x" + k for k in keys]
            parts = [
                SpanPart(
                    part.pool, 0, 2 * len(slots), keys + twice, as_slots([*slots, *slots]), as_slots([*gens, *gens])
                )
            ]
        elif fault == "twice in two parts":
            parts.append(SpanPart(part.pool, 0, len(slots), [b"x" + k for k in keys], slots, gens))
        else:
            parts[0].slots = as_slots([*slots[1:], client.core.write[part.pool].table.size])
        books = self.books(client)
        try:
            if aborts:
                self.world.tier.abort(client.core, parts)
            else:
                self.world.tier.commit(client.core, parts, b"", 0, self.world.now)
        except SlotError:
            assert self.books(client) == books
            assert not self.world.tier.effects()
            return
        raise AssertionError(f"a {fault} slot was accepted")

    def books(self, client: Client) -> list[object]:
        """Return all that a refused request must leave alone."""
        tables = [w.table for w in client.core.write] + [p.table for p in self.world.space.pools]
        return [[t.state.tolist(), t.generation.tolist(), t.free] for t in tables] + [
            [dict(pages) for pages in self.world.space.in_flight],
            list(client.core.commits),
        ]

    # ------------------------------------------------------------------ reading

    @rule(
        pick=PICK,
        chain=CHAIN,
        at=PICK,
        there=st.sampled_from([True, True, False]),
        shorter=st.booleans(),
        wait=st.sampled_from([1.0, 30.0]),
    )
    def load(self, pick: int, chain: list[bytes], at: int, there: bool, shorter: bool, wait: float) -> None:
        """Load a prefix that a lookup would answer, or any."""
        lengths = [n for low, high in restorable(self.world.rules, self.present(chain)) for n in range(low, high + 1)]
        if not there or not lengths:
            lengths = list(range(1, LENGTH + 1))
        if client := self.client(pick):
            self.world.load(client, chain, lengths[at % len(lengths)], shorter=shorter, wait=wait)

    @rule(pick=PICK, chain=CHAIN, first=st.integers(0, LENGTH - 1), count=st.integers(1, 4), pools=PICK)
    def load_ranges(self, pick: int, chain: list[bytes], first: int, count: int, pools: int) -> None:
        """A client that names the pages itself, of some pools."""
        if client := self.client(pick):
            end = min(LENGTH, first + count)
            chosen = [i for i in range(len(self.world.rules.pools)) if pools >> i & 1] or [0]
            self.world.load(client, chain, end, needs=[(i, first, end - first) for i in chosen])

    def present(self, chain: list[bytes]) -> list[list[bytes | None]]:
        """Return what a lookup would see: resident pages, and those in the store."""
        present = self.world.tier.presence(self.world.space, chain)
        for pool, pages in enumerate(present):
            for i, page in enumerate(pages):
                stored = self.world.store.get((pool, chain[i]))
                if page is None and stored is not None:
                    pages[i] = stored.commit_id
        return present

    @rule(pick=PICK, chain=CHAIN, seconds=st.sampled_from([0.4, 20.0]), longest=st.booleans())
    def look_up_and_pin(self, pick: int, chain: list[bytes], seconds: float, longest: bool) -> None:
        runs = restorable(self.world.rules, self.present(chain))
        if (client := self.client(pick)) is None or not runs:
            return
        answer = [(runs[-1][1], runs[-1][1])] if longest else runs
        pin = self.world.tier.pin(client.core, chain, answer, self.world.now + seconds)
        self.world.settle()
        if pin:
            self.pins.append((client, pin, chain, answer))

    @rule(at=PICK, which=PICK, shorter=st.booleans())
    def load_pinned(self, at: int, which: int, shorter: bool) -> None:
        """A load of anything that a lookup answered cannot miss while its pin lasts."""
        self.pins = [p for p in self.pins if p[0].core.state is SessionState.ACTIVE]
        if not self.pins:
            return
        client, pin, chain, runs = self.pins.pop(at % len(self.pins))
        prefix = [n for low, high in runs for n in range(low, high + 1)][which % sum(h - low + 1 for low, h in runs)]
        held = client.core.pins.get(pin)
        whole = held is not None and held.ready and self.pin_holds(client, held.load_id, prefix)
        _, result = self.world.load(client, chain, prefix, pin=pin, shorter=shorter)
        assert pin not in client.core.pins or (result is not None and result.outcome is Outcome.QUOTA)
        if whole:
            assert result is not None
            assert (result.outcome, result.prefix) == (Outcome.READY, prefix)

    def pin_holds(self, client: Client, pin: int, prefix: int) -> bool:
        """Return whether the pin came to hold all pages of a prefix, of commits that agree."""
        held, rules, n = client.core.pins[pin], self.world.rules, prefix
        slots = self.world.space.loads.pages_of(held)
        present: list[list[bytes | None]] = []
        for place, pool in enumerate(self.world.space.pools):
            at = [slots.get((place, key)) for key in held.keys[:n]]
            present.append([None if slot is None else pool.commits[slot] for slot in at])
        there = agreed(rules, present)
        return all(
            there[i][first : first + count].all() for i, (first, count) in enumerate(r.needed(n) for r in rules.pools)
        )

    @rule(pick=PICK, at=PICK, how=st.sampled_from(["release", "release", "cancel", "release a pin"]))
    def let_go(self, pick: int, at: int, how: str) -> None:
        if how == "release a pin":
            if self.pins:
                client, pin, *_ = self.pins.pop(at % len(self.pins))
                self.world.tier.release(client.core, [], [pin])
                self.world.settle()
        elif (client := self.client(pick)) and client.core.loads:
            load_id = list(client.core.loads)[at % len(client.core.loads)]
            if how == "release":
                self.world.release(client, load_id)
                return
            ready = client.core.loads[load_id].ready
            self.world.tier.cancel(client.core, load_id)
            self.world.settle()
            assert (load_id in client.core.loads) == ready

    @rule(pick=PICK, at=PICK, how=st.sampled_from(["lease", "lease", "lease", "wipe", "spoil"]))
    def read_by_itself(self, pick: int, at: int, how: str) -> None:
        """A client reads what is resident without asking for it, for as long as it likes; or it writes anything at all on its board."""
        readers = [c for c in self.world.clients.values() if c.core.boards and c.core.state is SessionState.ACTIVE]
        if not readers:
            return
        client = readers[pick % len(readers)]
        if how == "lease":
            self._lease_by_itself(client, at)
            return
        self.world.let_go_by_itself(client)
        if how == "spoil":
            for board in client.core.boards.values():
                board.listed[:] = [at % 20 - 1]

    def _lease_by_itself(self, client: Client, at: int) -> None:
        there = [(place, key) for place, pool in enumerate(self.world.space.pools) for key in sorted(pool.index)]
        if there:
            self.world.lease_by_itself(client, *there[at % len(there)])

    # ------------------------------------------------------------------ the surroundings

    @precondition(lambda self: self.world.publishes or self.world.writes or self.world.reads)
    @rule(
        steps=st.lists(st.tuples(st.sampled_from(["publish", "write", "read"]), PICK), min_size=1, max_size=5),
        faults=st.booleans(),
        copied=st.sampled_from([True, True, False]),
        written=st.lists(st.sampled_from(Written), min_size=1, max_size=3),
        fetched=st.sampled_from(Fetched),
        batch=st.integers(1, 4),
    )
    def carry_out(
        self,
        steps: list[tuple[str, int]],
        faults: bool,
        copied: bool,
        written: list[Written],
        fetched: Fetched,
        batch: int,
    ) -> None:
        """Do some of what the core asked for, in any order."""
        world = self.world
        for kind, at in steps:
            if kind == "publish" and world.publishes:
                world.carry_publish(at, ok=copied or not faults)
            elif kind == "write" and world.writes:
                world.carry_write(at, written if faults else [Written.STORED])
            elif kind == "read" and world.reads:
                world.carry_read(at, batch, fetched if faults else Fetched.HIT)
            world.check()

    @rule()
    def carry_out_all(self) -> None:
        self.world.carry_all()

    @rule(seconds=st.sampled_from([0.0, 0.3, 0.6, 2.5, 1000.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = machine_settings()
