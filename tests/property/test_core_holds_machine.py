"""Holds beside stores in one write arena: whatever comes in between, each keeps what it was promised and finds what it put there."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.core_support import EPOCH, KV_SWA, NAMESPACE, machine_settings

from hoststage.core.effects import Outcome, StoreWrite, Written
from hoststage.core.holds import HeldPages, HoldBusy, HoldExists, HoldMissing, HoldState, HoldTable
from hoststage.core.readpool import ReadPool
from hoststage.core.sessions import NamespaceCore, SessionCore, SessionState, SpanPart
from hoststage.core.slots import SlotState
from hoststage.core.stack import Mode
from hoststage.core.tier import Tier
from hoststage.core.writepool import WritePool

USABLE, HOLDS = (4, 3), (3, 2)
NAMES = st.tuples(st.just(NAMESPACE), st.just(b"t"), st.sampled_from("ab"), st.integers(0, 1))
AT = st.integers(0, 1 << 20)
WANTS = st.tuples(st.integers(1, 4), st.integers(1, 3))


@dataclass
class Move:
    """I/O between a hold's slots and the store."""

    session: SessionCore
    name: tuple
    held: HeldPages
    copy: bool


@dataclass
class Client:
    core: SessionCore
    reserved: list[list[SpanPart]] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tier = Tier(EPOCH)
        pools = [ReadPool(4, reserve=2, write_span=1, keep=False) for _ in KV_SWA.pools]
        self.space = NamespaceCore(NAMESPACE, KV_SWA, pools, keep=False, has_store=True, beliefs=4)
        self.tier.namespaces[NAMESPACE] = self.space
        self.table = HoldTable()
        self.clients: list[Client] = []
        self.everyone: list[SessionCore] = []
        self.writes: list = []
        self.moves: list[Move] = []
        self.serial = 0
        self.memory: dict[tuple[int, int, int], int] = {}
        self.wrote: dict[tuple, dict[tuple[int, int], int]] = {}
        for _ in range(2):
            self.open()

    # ------------------------------------------------------------------ sessions

    @rule()
    @precondition(lambda self: len(self.clients) < 2)
    def open(self):
        self.serial += 1
        write = [WritePool(u, h) for u, h in zip(USABLE, HOLDS, strict=True)]
        core = SessionCore(self.serial, self.space, Mode.BUFFER_ONLY, write, 0)
        self.tier.open(core)
        self.clients.append(Client(core))
        self.everyone.append(core)

    @rule(at=AT)
    @precondition(lambda self: self.clients)
    def die(self, at):
        client = self.clients.pop(at % len(self.clients))
        mine = [n for n, h in self.table.holds.items() if h.session == client.core.session]
        assert self.table.session_gone(client.core.session) == len(mine)
        self.tier.end(client.core)
        for name in mine:
            assert name not in self.table.holds
        self.settle()

    @rule(at=AT)
    @precondition(lambda self: self.clients)
    def break_connection(self, at):
        self.tier.quarantine(self.clients[at % len(self.clients)].core)
        self.settle()

    def active(self, at):
        client = self.clients[at % len(self.clients)]
        return client if client.core.state is SessionState.ACTIVE else None

    # ------------------------------------------------------------------ stores

    @rule(at=AT, n=st.integers(1, 4), m=st.integers(0, 3))
    @precondition(lambda self: self.clients)
    def reserve(self, at, n, m):
        if (client := self.active(at)) is None:
            return
        self.serial += 1
        keys = [b"%d/%d" % (self.serial, i) for i in range(n)]
        parts = [SpanPart(0, 0, n, keys)] + (
            [SpanPart(1, n - min(n, m), min(n, m), keys[n - min(n, m) :])] if m else []
        )
        result = self.tier.reserve(client.core, parts, b"", self.serial, 0.0, 0.0)
        if result.outcome is Outcome.ACCEPTED:
            for part, got in zip(parts, result.parts, strict=True):
                part.slots, part.generations = got.slots, got.generations
            client.reserved.append(parts)
        else:
            rooms = [w.room for w in client.core.write]
            assert n > rooms[0] or min(n, m) > rooms[1]

    @rule(at=AT, which=AT, commit=st.booleans())
    @precondition(lambda self: self.clients)
    def end_reservation(self, at, which, commit):
        client = self.active(at)
        if client is None or not client.reserved:
            return
        parts = client.reserved.pop(which % len(client.reserved))
        if commit:
            assert self.tier.commit(client.core, parts, b"", 1, 0.0).outcome is Outcome.ACCEPTED
        else:
            self.tier.abort(client.core, parts)
        self.settle()

    @rule(which=AT, ok=st.booleans())
    @precondition(lambda self: self.writes)
    def carry_write(self, which, ok):
        commit = self.writes.pop(which % len(self.writes))
        outcome = Written.STORED if ok else Written.FAILED
        self.tier.written(commit, [outcome] * len(commit.unstored), "", 1e9)
        self.settle()

    def settle(self):
        self.writes += [e.commit for e in self.tier.effects() if isinstance(e, StoreWrite)]

    # ------------------------------------------------------------------ holds

    def put(self, core, held, key):
        """The owner, or the daemon, writes every page."""
        wrote = {}
        for pool, slots in held.slots:
            for i, slot in enumerate(slots.tolist()):
                self.serial += 1
                wrote[pool, i] = self.memory[core.session, pool, slot] = self.serial
        self.wrote[key] = wrote

    @rule(at=AT, name=NAMES, wants=WANTS, durable=st.booleans())
    @precondition(lambda self: self.clients)
    def hold(self, at, name, wants, durable):
        if (client := self.active(at)) is None:
            return
        write = client.core.write
        free = [w.holds - w.held for w in write]
        if name in self.table.holds:
            with pytest.raises(HoldExists):
                self.table.hold(client.core, name, list(enumerate(wants)), durable=durable)
            return
        result = self.table.hold(client.core, name, list(enumerate(wants)), durable=durable)
        if any(n > w.holds for n, w in zip(wants, write, strict=True)):
            assert result.outcome in (Outcome.OVERSIZE, Outcome.POOL_FULL)
        elif any(n > f for n, f in zip(wants, free, strict=True)):
            assert result.outcome is Outcome.POOL_FULL
        else:
            assert result.outcome is Outcome.ACCEPTED, "no load of writes takes what was promised"
            self.put(client.core, self.table.holds[name], name)

    @rule(at=AT, name=NAMES)
    @precondition(lambda self: self.clients)
    def seal(self, at, name):
        if (client := self.active(at)) is None:
            return
        held = self.table.holds.get(name)
        if held is None or held.session != client.core.session:
            with pytest.raises(HoldMissing):
                self.table.seal(client.core, name, b"")
        elif held.durable:
            if held.state is HoldState.OPEN:
                self.moves.append(Move(client.core, name, self.table.begin_move(client.core, name), False))
            else:
                with pytest.raises(HoldBusy):
                    self.table.begin_move(client.core, name)
        else:
            self.table.seal(client.core, name, b"note")

    @rule(at=AT, name=NAMES, wants=WANTS)
    @precondition(lambda self: self.clients)
    def copy_from_store(self, at, name, wants):
        client = self.active(at)
        if client is None or (client.core.session, name) in self.table.copies:
            return
        held, result = self.table.begin_copy(client.core, name, list(enumerate(wants)))
        assert (held is not None) == (result.outcome is Outcome.ACCEPTED)
        if held is not None:
            self.moves.append(Move(client.core, name, held, True))

    @rule(which=AT, ok=st.booleans())
    @precondition(lambda self: self.moves)
    def io_ends(self, which, ok):
        move = self.moves.pop(which % len(self.moves))
        if move.copy:
            after = HoldState.SEALED if ok else None
            if ok:
                self.put(move.session, move.held, (move.session.session, move.name))
        else:
            for pool, slots in move.held.slots:
                states = move.session.write[pool].table.state[slots]
                assert (states == SlotState.DRAINING).all(), "what the store reads is nobody else's"
            after = None if ok else HoldState.OPEN
        self.table.end_move(move.session, move.name, move.held, after)
        self.tier.hold_io_ended(move.session)
        self.settle()

    @rule(at=AT, name=NAMES)
    @precondition(lambda self: self.clients)
    def restore(self, at, name):
        core = self.clients[at % len(self.clients)].core
        found = self.table.restore(core, name)
        copy, held = self.table.copies.get((core.session, name)), self.table.holds.get(name)
        source = copy or held
        ready = source is not None and source.session == core.session and source.state is HoldState.SEALED
        assert (found is not None) == ready
        if found is not None:
            key = (core.session, name) if copy else name
            got = {
                (p.pool, i): self.memory[core.session, p.pool, s]
                for p in found[0]
                for i, s in enumerate(p.slots.tolist())
            }
            assert got == self.wrote[key]

    @rule(at=AT, name=NAMES)
    @precondition(lambda self: self.clients)
    def discard(self, at, name):
        if (client := self.active(at)) is None:
            return
        self.table.discard_copy(client.core, name)
        held = self.table.holds.get(name)
        if held is None or held.session != client.core.session:
            with pytest.raises(HoldMissing):
                self.table.discard(client.core, name)
        else:
            assert self.table.discard(client.core, name).gone
            assert name not in self.table.holds

    # ------------------------------------------------------------------ what holds at every moment

    @invariant()
    def books_balance_and_promises_stand(self):
        for core in self.everyone:
            if core.session not in self.tier.sessions:
                assert core.idle
                continue
            for write in core.write:
                used = write.table.size - write.table.free - write.held
                assert write.table.conserved()
                assert 0 <= write.held <= write.holds
                assert 0 <= used <= write.usable
                assert write.table.free == (write.usable - used) + (write.holds - write.held)
                assert write.room == write.usable - used

    @invariant()
    def every_held_slot_has_one_hold(self):
        for core in self.everyone:
            live = [h for h in [*self.table.holds.values(), *self.table.copies.values()] if h.session == core.session]
            live += [m.held for m in self.moves if m.session is core and m.held not in live]
            for pool, write in enumerate(core.write):
                slots = [s for h in live for p, taken in h.slots if p == pool for s in taken.tolist()]
                assert len(slots) == len(set(slots)) == write.held

    def teardown(self):
        while self.moves:
            self.io_ends(0, True)
        while self.clients:
            self.die(0)
        while self.writes:
            self.carry_write(0, True)
        assert not self.table.holds
        assert not self.table.copies
        assert not self.tier.sessions
        assert all(core.idle and all(w.held == 0 for w in core.write) for core in self.everyone)


TestHolds = Machine.TestCase
TestHolds.settings = machine_settings()
