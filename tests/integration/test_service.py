"""The tier as a service, with real arenas and threads and a store in memory: pages go in and come back whole."""

import asyncio
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from hoststage.core.stack import HitPolicy, Identity, KvLayout, Mode, ModeWish, Pool, PoolKind, Stack
from hoststage.server.contract import Refusal, RequestError, SessionRequest
from hoststage.server.memory.arena import MemoryPolicy
from hoststage.server.memory.pool import ArenaPool
from hoststage.server.staging.service import Service, ServiceOptions
from hoststage.server.store.memory import MemoryStore
from hoststage.shm import fdpass
from hoststage.v1 import ops

PAGE = 10_000


@dataclass
class Inbox:
    """A port that keeps what it is told."""

    messages: list = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, message):
        self.messages.append(message)
        self.changed.set()
        return True

    async def wait_for(self, kind, where=lambda m: True):
        async with asyncio.timeout(10):
            while True:
                for m in self.messages:
                    if isinstance(m, kind) and where(m):
                        return m
                self.changed.clear()
                await self.changed.wait()


def stack(mode=Mode.BUFFER_ONLY, *, swa=False, slots=64, model="m"):
    pools = [Pool("kv", PoolKind.KV, PAGE, 16, host_slots=slots)]
    if swa:
        pools.append(
            Pool(
                "swa",
                PoolKind.SWA,
                5000,
                16,
                sliding_window=64,
                hit_policy=HitPolicy.TRAILING_PAGES,
                host_slots=slots,
            )
        )
    return Stack(Identity(model), tuple(pools), modes=(ModeWish(mode, True),))


@pytest.fixture
async def service():
    executor = ThreadPoolExecutor(4)
    pool = ArenaPool(MemoryPolicy(lock=False))
    made = Service(ServiceOptions(64 << 20), MemoryStore(), pool, executor)
    ticking = asyncio.create_task(made.engine.ticking())
    yield made
    await made.close()
    ticking.cancel()
    executor.shutdown()


async def ask(session, op, request_id=7):
    answer = asyncio.get_running_loop().create_future()
    session.submit(op, request_id, answer.set_result)
    async with asyncio.timeout(10):
        return await answer


def keys_of(n, seed=b""):
    return b"".join(hashlib.sha256(seed + bytes([i])).digest() for i in range(n))


def span(keys, *ranges, parent=b""):
    return ops.Span(keys, 32, tuple(ops.PoolRange(*r) for r in ranges), parent)


async def store(session, keys, pages, *ranges):
    """Reserve, copy and commit; return the commit's reply."""
    granted = await ask(session, ops.Reserve(span(keys, *ranges)))
    assert granted.outcome is ops.Outcome.ACCEPTED, granted
    for (pool, first, count), entry in zip(ranges, granted.slots, strict=True):
        for i, slot in enumerate(entry.slots.tolist()):
            session._write[pool].view(slot)[:] = pages[pool][i]
        assert count == len(entry.slots)
        assert first >= 0
    return await ask(session, ops.Commit(span(keys, *ranges), granted.slots))


def read(session, reply):
    return {
        entry.pool: [bytes(session._read[entry.pool].view(s)) for s in entry.slots.tolist()] for entry in reply.slots
    }


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
async def test_what_one_session_stores_another_loads(service, mode):
    inbox = Inbox()
    writer = await service.open(SessionRequest(stack(mode, swa=True)), inbox)
    keys = keys_of(8)
    pages = {0: [os.urandom(PAGE) for _ in range(8)], 1: [os.urandom(5000) for _ in range(4)]}
    reply = await store(writer, keys, pages, (0, 0, 8), (1, 4, 4))
    assert reply.outcome is ops.Outcome.ACCEPTED
    stored = await inbox.wait_for(ops.Stored)
    assert (stored.outcome, stored.pages, stored.commit_id) == (ops.Outcome.STORED, 12, reply.commit_id)
    service.end(writer.session_id, "bye")

    inbox = Inbox()
    reader = await service.open(SessionRequest(stack(mode, swa=True)), inbox)
    found = await ask(reader, ops.Lookup(span(keys), pin_ms=5000))
    assert found.runs == ((8, 8),)
    assert found.pin
    got = await ask(reader, ops.Load(span(keys), 8, pin=found.pin))
    if got.outcome is ops.Outcome.PENDING:
        got = await inbox.wait_for(ops.LoadReady, lambda m: m.last)
    assert (got.outcome, got.prefix) == (ops.Outcome.READY, 8)
    assert read(reader, got) == pages
    reader.submit(ops.Release((got.load_id,)), 0, lambda _: None)
    assert service.facts().sessions[0].read_leases == 0


async def test_a_session_that_ends_leaves_every_write_slot_and_byte_free(service):
    before = service.ledger.free
    session = await service.open(SessionRequest(stack()), Inbox())
    await ask(session, ops.Reserve(span(b"", (0, 0, 5))))
    service.quarantine(session.session_id, "its connection broke")
    [facts] = [p for p in service.facts().pools if p.session]
    assert facts.by_state["quarantined"] == 5
    service.end(session.session_id, "its process died")
    await service.engine.idle()
    assert service.facts().sessions == ()
    reclaimable = sum(h.bytes for h in service.ledger.holders() if h.reclaimable)
    assert service.ledger.free + reclaimable == before


async def test_a_stale_generation_is_refused_and_nothing_changes(service):
    session = await service.open(SessionRequest(stack()), Inbox())
    granted = await ask(session, ops.Reserve(span(b"", (0, 0, 1))))
    session.abort(granted.slots)
    with pytest.raises(RequestError) as caught:
        await ask(session, ops.Commit(span(keys_of(1), (0, 0, 1)), granted.slots))
    assert caught.value.reason == "STALE_SLOT"


async def test_pages_cross_inline_in_both_directions(service):
    session = await service.open(SessionRequest(stack(Mode.CACHE)), Inbox())
    keys = keys_of(3)
    pages = [os.urandom(PAGE) for _ in range(3)]
    answer = asyncio.get_running_loop().create_future()
    session.inline_store(span(keys, (0, 0, 3)), [pages], 1, 0, answer.set_result)
    assert (await answer).outcome is ops.Outcome.ACCEPTED
    await session._port.wait_for(ops.Stored)
    got, done = [], asyncio.Event()

    def group(message, views):
        got.extend(bytes(v) for pool in views for v in pool)
        if message.last:
            assert message.outcome is ops.Outcome.READY
            done.set()

    session.inline_load(ops.Load(span(keys), 3), group)
    async with asyncio.timeout(10):
        await done.wait()
    assert got == pages
    assert service.facts().sessions[0].read_leases == 0


async def test_of_two_clients_racing_for_the_last_bytes_exactly_one_gets_them(service):
    service.ledger.budget = 3 << 20
    service.options = ServiceOptions(3 << 20)
    asks = [service.open(SessionRequest(stack(model=f"m{i}", slots=160)), Inbox()) for i in range(2)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Refusal)]
    assert len(refused) == 1, results
    assert any(f.rule == "BUDGET" for f in refused[0].verdict.findings)


async def test_a_pool_that_stays_on_the_device_is_needed_by_no_prefix(service):
    kv = Pool("kv", PoolKind.KV, PAGE, 16, host_slots=64)
    ring = Pool(
        *("swa", PoolKind.SWA, 5000, 16),
        sliding_window=64,
        hit_policy=HitPolicy.TRAILING_PAGES,
        layout=KvLayout.UNIFIED_KV,
    )
    unified = Stack(Identity("m"), (kv, ring), modes=(ModeWish(Mode.CACHE, True),))
    inbox = Inbox()
    session = await service.open(SessionRequest(unified), inbox)
    keys, pages = keys_of(5), {0: [os.urandom(PAGE) for _ in range(5)]}
    await store(session, keys, pages, (0, 0, 5))
    await inbox.wait_for(ops.Stored)
    found = await ask(session, ops.Lookup(span(keys), pin_ms=1000))
    assert found.runs == ((1, 5),)
    got = await ask(session, ops.Load(span(keys), 5, pin=found.pin))
    assert got.outcome is ops.Outcome.READY
    assert read(session, got) == pages


async def test_only_who_knows_its_secret_replaces_a_session(service):
    old = await service.open(SessionRequest(stack(), worker="w", pid=7), Inbox())
    await ask(old, ops.Reserve(span(b"", (0, 0, 5))))
    claims = {"previous_session": old.session_id, "previous_epoch": service.boot_epoch, "worker": "w", "pid": 7}
    await service.open(SessionRequest(stack(), previous_token=b"x" * 16, **claims), Inbox())
    assert old.session_id in {s.session for s in service.facts().sessions}
    held = {"previous_token": old.resume_token, "retained_bytes": 4096}
    await service.open(SessionRequest(stack(), **held, **claims), Inbox())
    assert old.session_id in {s.session for s in service.facts().sessions}, "it still maps something"
    await service.open(SessionRequest(stack(), previous_token=old.resume_token, **claims), Inbox())
    assert old.session_id not in {s.session for s in service.facts().sessions}


@pytest.mark.parametrize(("claimed", "counted"), [(4096, 4096), (1 << 63, 10_000)])
async def test_what_a_client_says_it_retains_counts_as_far_as_there_is_such_memory(
    service, monkeypatch, claimed, counted
):
    pool = service._arena_pool
    monkeypatch.setattr("hoststage.server.staging.service.shared_bytes", lambda: pool.bytes + 10_000)
    session = await service.open(SessionRequest(stack(), retained_bytes=claimed), Inbox())
    holder = f"memory retained by session {session.session_id}'s client"
    assert [h.bytes for h in service.ledger.holders() if h.name == holder] == [counted]
    service.end(session.session_id, "bye")
    assert all(h.name != holder for h in service.ledger.holders())


@pytest.mark.parametrize(("beliefs", "written"), [(1000, 8), (0, 16)])
async def test_beliefs_spare_the_writes_of_what_another_session_stored(beliefs, written):
    executor = ThreadPoolExecutor(4)
    store_in_memory = MemoryStore()
    options = ServiceOptions(64 << 20, beliefs_per_pool=beliefs)
    service = Service(options, store_in_memory, ArenaPool(MemoryPolicy(lock=False)), executor)
    keys, pages = keys_of(8), {0: [os.urandom(PAGE) for _ in range(8)]}
    for expected in (ops.Outcome.ACCEPTED, ops.Outcome.BELIEVED_STORED if beliefs else ops.Outcome.ACCEPTED):
        inbox = Inbox()
        session = await service.open(SessionRequest(stack()), inbox)
        granted = await ask(session, ops.Reserve(span(keys, (0, 0, 8))))
        assert granted.outcome is expected
        if granted.slots:
            for slot, page in zip(granted.slots[0].slots.tolist(), pages[0], strict=True):
                session._write[0].view(slot)[:] = page
            await ask(session, ops.Commit(span(keys, (0, 0, 8)), granted.slots))
            await inbox.wait_for(ops.Stored)
    assert store_in_memory.stats().writes == written
    await service.close()
    executor.shutdown()


@pytest.mark.parametrize("model", ["m", "another"])
async def test_memory_counts_until_it_is_back_and_who_needs_it_waits_for_that(service, model):
    first = await service.open(SessionRequest(stack(Mode.CACHE)), Inbox())
    executor = ThreadPoolExecutor(4)
    pool = ArenaPool(MemoryPolicy(lock=False))
    # As much as one session and its namespace need.
    tight = Service(ServiceOptions(service.ledger.taken), MemoryStore(), pool, executor)
    service.end(first.session_id, "bye")
    first = await tight.open(SessionRequest(stack(Mode.CACHE)), Inbox())
    going_on, wait = asyncio.Event(), asyncio.Event()
    release = tight._maker.release

    async def slowly(arenas):
        going_on.set()
        await wait.wait()
        await release(arenas)

    tight._maker.release = slowly
    before = tight.ledger.taken
    tight.end(first.session_id, "bye")
    await going_on.wait()
    assert tight.ledger.taken == before, "the memory is still there"
    opening = asyncio.create_task(tight.open(SessionRequest(stack(Mode.CACHE, model=model)), Inbox()))
    await asyncio.sleep(0.05)
    assert not opening.done()
    wait.set()
    async with asyncio.timeout(10):
        await opening
    assert tight.ledger.taken <= tight.ledger.budget
    await tight.close()
    executor.shutdown()


async def test_namespaces_that_nobody_uses_give_their_descriptors_up_for_new_ones():
    executor = ThreadPoolExecutor(4)
    pool = ArenaPool(MemoryPolicy(lock=False), most_memfds=8)
    service = Service(ServiceOptions(64 << 20), MemoryStore(), pool, executor)
    for n in range(8):
        session = await service.open(SessionRequest(stack(Mode.CACHE, model=f"model {n}")), Inbox())
        service.end(session.session_id, "bye")
        await service.engine.idle()
    assert 0 <= pool.memfds_left < 8
    await service.close()
    assert pool.memfds_left == 8
    executor.shutdown()


async def test_a_session_leases_so_many_arenas_and_no_more(service):
    service.leases.most_of_session = 2
    session = await service.open(SessionRequest(stack()), Inbox())
    leases = [await session.lease_arena("pool", 4096) for _ in range(2)]
    with pytest.raises(RequestError, match="2 arenas, at most 2") as refused:
        await session.lease_arena("pool", 4096)
    assert refused.value.reason == "ARENA"
    await session.return_arena(leases[0].arena.arena_id)
    leases.append(await session.lease_arena("pool", 4096))
    fdpass.close_all([d.fd for lease in leases for d in lease.descriptors])


async def test_a_namespace_is_not_reclaimed_from_under_a_session_that_is_being_opened(service):
    first = await service.open(SessionRequest(stack(Mode.CACHE)), Inbox())
    service.end(first.session_id, "bye")
    await service.engine.idle()
    going_on, wait = asyncio.Event(), asyncio.Event()
    make = service._maker.make

    async def slowly(*args):
        going_on.set()
        await wait.wait()
        return await make(*args)

    service._maker.make = slowly
    opening = asyncio.create_task(service.open(SessionRequest(stack(Mode.CACHE)), Inbox()))
    await going_on.wait()
    assert not await service._reclaim_one("another", 1 << 30) or service._namespaces
    wait.set()
    session = await opening
    assert session.core.namespace.name in service._namespaces
    found = await ask(session, ops.Lookup(span(keys_of(1))))
    assert found.runs == ()


async def test_a_session_that_cannot_get_its_memory_leaves_the_budget_as_it_was(service):
    before = service.ledger.free

    async def fail(*args):
        raise OSError("no memory")

    service._maker.make = fail
    with pytest.raises(OSError, match="no memory"):
        await service.open(SessionRequest(stack()), Inbox())
    assert service.ledger.free == before
    assert service.facts().sessions == ()


def sidecar_stack():
    source = Pool("kv", PoolKind.KV, PAGE, 16, host_slots=64)
    sidecar = Pool("indexer", PoolKind.SIDECAR, 3000, 16, indices_from_pool="kv", host_slots=64)
    return Stack(Identity("m"), (source, sidecar), modes=(ModeWish(Mode.BUFFER_ONLY, True),))


async def test_a_lookup_that_finds_a_foreign_sidecar_lets_the_page_be_stored_again(service):
    inbox = Inbox()
    session = await service.open(SessionRequest(sidecar_stack()), inbox)
    keys = keys_of(1)
    pages = {0: [os.urandom(PAGE)], 1: [os.urandom(3000)]}
    await store(session, keys, pages, (0, 0, 1), (1, 0, 1))
    await inbox.wait_for(ops.Stored)
    assert (await ask(session, ops.Lookup(span(keys)))).longest == 1
    # Another writer's sidecar takes the place of ours, as after a crash between two writes.
    held = service.engine.store._groups[session.core.namespace.name, keys]
    held["indexer"] = type(held["indexer"])(os.urandom(3000), b"another commit..", 0)
    assert (await ask(session, ops.Reserve(span(keys, (0, 0, 1), (1, 0, 1))))).outcome is ops.Outcome.BELIEVED_STORED
    assert (await ask(session, ops.Lookup(span(keys)))).longest == 0
    inbox.messages.clear()
    await store(session, keys, pages, (0, 0, 1), (1, 0, 1))
    await inbox.wait_for(ops.Stored)
    assert (await ask(session, ops.Lookup(span(keys)))).longest == 1


async def test_a_belief_that_the_store_contradicts_is_healed_by_the_lookup(service):
    inbox = Inbox()
    session = await service.open(SessionRequest(stack()), inbox)
    keys, pages = keys_of(2), {0: [os.urandom(PAGE), os.urandom(PAGE)]}
    await store(session, keys, pages, (0, 0, 2))
    await inbox.wait_for(ops.Stored)
    await service.engine.store.delete(session.core.namespace.name, "kv", [keys[:32]])
    assert (await ask(session, ops.Lookup(span(keys)))).longest == 0
    again = await ask(session, ops.Reserve(span(keys, (0, 0, 2))))
    assert again.slots[0].slots[0] != ops.NO_SLOT
    assert again.slots[0].slots[1] == ops.NO_SLOT


async def test_what_is_fetched_while_a_namespace_is_cleared_does_not_stay(service, monkeypatch):
    inbox = Inbox()
    session = await service.open(SessionRequest(stack(Mode.CACHE)), inbox)
    keys, clear = keys_of(2), service._store.clear
    await store(session, keys, {0: [os.urandom(PAGE) for _ in range(2)]}, (0, 0, 2))
    await inbox.wait_for(ops.Stored)
    assert service.evict("", "") == 2

    async def clear_late(namespace):
        await ask(session, ops.Load(span(keys), 2))
        await inbox.wait_for(ops.LoadReady, lambda m: m.last)
        return await clear(namespace)

    monkeypatch.setattr(service._store, "clear", clear_late)
    assert await service.clear(session.core.namespace.name) == (2, 2)
    assert (await ask(session, ops.Lookup(span(keys)))).runs == ()
