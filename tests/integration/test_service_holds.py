"""Holds of the tier as a service, with real arenas and threads and a store in memory that fails on order."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hoststage.core.stack import (
    HitPolicy,
    Identity,
    Mode,
    ModeWish,
    Pool,
    PoolKind,
    Retraction,
    RetractionWish,
    Stack,
)
from hoststage.server.contract import HoldKey, RequestError, SessionRequest
from hoststage.server.memory.arena import MemoryPolicy
from hoststage.server.memory.pool import ArenaPool
from hoststage.server.staging.durable import DurableHolds, HoldOptions
from hoststage.server.staging.hold_records import NOTE_BYTES, HoldRecord, decode, digest_of, hold_space
from hoststage.server.staging.service import Service, ServiceOptions
from hoststage.server.store.base import ReadOutcome, WriteOutcome
from hoststage.server.store.memory import MemoryStore
from hoststage.v1 import ops
from tests.integration.test_service import PAGE, Inbox, ask, keys_of, span

SWA_PAGE = 5000
TOKEN = b"owner-secret-token"
KEY = HoldKey(TOKEN, "request-1", 0)


def stack(mode=Mode.BUFFER_ONLY, *, tokens=16 * 16, slots=64, window_only=False, kv=True):
    """A hybrid stack that wants holds of one request of `tokens` tokens: pages of 16, a window of 4 pages."""
    swa = Pool(
        "swa",
        PoolKind.SWA,
        SWA_PAGE,
        16,
        sliding_window=64,
        hit_policy=HitPolicy.TRAILING_PAGES,
        host_slots=slots,
    )
    pools = (Pool("kv", PoolKind.KV, PAGE, 16, host_slots=slots), swa) if kv else (swa,)
    return Stack(
        Identity("held"),
        pools,
        modes=(ModeWish(mode, True),),
        retraction=RetractionWish(Retraction.HOST_POOL, window_only=window_only, required=True),
        largest_request_tokens=tokens,
    )


class Node:
    """Services one after the other on one store, as a daemon that is restarted."""

    def __init__(self):
        self.store = MemoryStore()
        self.executor = ThreadPoolExecutor(4)
        self.options = HoldOptions()
        self.running = []

    def start(self):
        pool = ArenaPool(MemoryPolicy(lock=False))
        service = Service(ServiceOptions(64 << 20, holds=self.options), self.store, pool, self.executor)
        tasks = [
            asyncio.create_task(service.engine.ticking()),
            asyncio.create_task(service.holds.durable.sweeping()),
        ]
        self.running.append((service, tasks))
        return service

    async def stop(self):
        for service, tasks in self.running:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
        self.running.clear()


@pytest.fixture
async def node():
    made = Node()
    yield made
    await made.stop()
    made.executor.shutdown()


async def opened(service, spec=None):
    return await service.open(SessionRequest(spec or stack()), Inbox())


def fill(session, reply):
    """Write random pages into granted hold slots and return them by pool."""
    pages = {}
    for entry in reply.slots:
        arena = session._write[entry.pool]
        pages[entry.pool] = [os.urandom(arena.rule.page_bytes) for _ in entry.slots]
        for slot, page in zip(entry.slots.tolist(), pages[entry.pool], strict=True):
            arena.view(slot)[:] = page
    return pages


async def held(session, *, durable=False, ttl_ms=0, counts=(10, 4), key=KEY, note=b"note"):
    ranges = [ops.PoolRange(i, 0, n) for i, n in enumerate(counts) if n]
    reply = await session.hold(key, ranges, durable, ttl_ms)
    assert reply.outcome is ops.Outcome.ACCEPTED, reply.detail
    pages = fill(session, reply)
    await session.seal_hold(key, note)
    return pages


def pages_of(session, restored):
    arenas = session._read if restored.arena == "read" else session._write
    return {e.pool: [bytes(arenas[e.pool].view(s)) for s in e.slots.tolist()] for e in restored.slots}


def read_idle(session):
    return all(p.table.free == p.size and p.load_held == 0 for p in session.core.namespace.pools)


async def until(check, seconds=10):
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - the tier has no event to wait for
            await asyncio.sleep(0.01)


async def refused(call):
    with pytest.raises(RequestError) as caught:
        await call
    return caught.value.reason


# ---------------------------------------------------------------- ordinary


async def test_an_ordinary_hold_comes_back_byte_for_byte_and_its_slots_are_free_after_the_discard(node):
    session = await opened(node.start())
    pages = await held(session)
    found = await session.restore(KEY)
    assert (found.outcome, found.arena, found.note, found.load_id) == (ops.Outcome.READY, "write", b"note", 0)
    assert pages_of(session, found) == pages
    await session.discard(KEY)
    assert session.core.idle
    assert [w.held for w in session.core.write] == [0, 0]
    assert (await session.restore(KEY)).outcome is ops.Outcome.MISS
    assert await refused(session.discard(KEY)) == "HOLD_MISSING"


async def test_every_misuse_of_an_ordinary_hold_has_its_own_answer(node):
    service = node.start()
    owner, other = await opened(service), await opened(service)
    ranges = [ops.PoolRange(0, 0, 2), ops.PoolRange(1, 0, 1)]
    assert (await owner.hold(KEY, ranges, False, 0)).outcome is ops.Outcome.ACCEPTED
    assert (await owner.restore(KEY)).detail == "the hold is not sealed yet"
    assert await refused(owner.hold(KEY, ranges, False, 0)) == "HOLD_EXISTS"
    await owner.seal_hold(KEY, b"")
    assert (await other.restore(KEY)).detail == "the hold is another session's"
    assert await refused(other.discard(KEY)) == "HOLD_MISSING"
    assert await refused(other.seal_hold(KEY, b"")) == "HOLD_MISSING"
    wrong = replace(KEY, owner_token=b"guess")
    assert (await owner.restore(wrong)).outcome is ops.Outcome.MISS
    assert await refused(owner.discard(wrong)) == "HOLD_MISSING"
    assert await refused(owner.hold(replace(KEY, owner_token=b""), ranges, False, 0)) == "HOLD_NAME"
    assert await refused(owner.hold(replace(KEY, request=""), ranges, False, 0)) == "HOLD_NAME"
    assert await refused(owner.seal_hold(KEY, bytes(NOTE_BYTES + 1))) == "HOLD_NOTE"
    assert await refused(owner.hold(replace(KEY, attempt=1), [ops.PoolRange(0, 0, 2)], False, 0)) == "HOLD_INCOMPLETE"
    assert await refused(owner.hold(replace(KEY, attempt=1), [ops.PoolRange(9, 0, 2)], False, 0)) == "RANGES"
    assert (await owner.restore(KEY)).outcome is ops.Outcome.READY


async def test_a_session_that_was_granted_no_holds_is_told_so(node):
    plain = replace(stack(), retraction=RetractionWish())
    session = await opened(node.start(), plain)
    for call in (
        session.hold(KEY, [ops.PoolRange(0, 0, 1)], False, 0),
        session.seal_hold(KEY, b""),
        session.restore(KEY),
        session.discard(KEY),
    ):
        assert await refused(call) == "RETRACTION"


async def test_a_pure_window_stack_holds_its_window_on_opt_in(node):
    session = await opened(node.start(), stack(kv=False, window_only=True))
    assert session.grant.window_only_holds
    pages = await held(session, counts=(5,))
    assert pages_of(session, await session.restore(KEY)) == pages


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
async def test_the_promised_capacity_stands_while_writes_take_all_they_can(node, mode):
    session = await opened(node.start(), stack(mode))
    reserved = 0
    while (await ask(session, ops.Reserve(span(keys_of(1, os.urandom(4)), (0, 0, 1), (1, 0, 1))))).slots:
        reserved += 1
    assert reserved == session.core.write[1].usable or reserved == session.core.write[0].usable
    holds = [w.holds for w in session.core.write]
    pages = await held(session, counts=holds)
    assert pages_of(session, await session.restore(KEY)) == pages
    more = await session.hold(replace(KEY, attempt=1), [ops.PoolRange(0, 0, 1), ops.PoolRange(1, 0, 1)], False, 0)
    assert more.outcome is ops.Outcome.POOL_FULL
    never = [ops.PoolRange(0, 0, holds[0] + 1), ops.PoolRange(1, 0, 1)]
    assert (await session.hold(replace(KEY, attempt=1), never, False, 0)).outcome is ops.Outcome.OVERSIZE


async def test_an_ordinary_hold_ends_with_its_session(node):
    service = node.start()
    owner, other = await opened(service), await opened(service)
    await held(owner)
    service.end(owner.session_id, "killed")
    assert service.facts().holds.ordinary == 0
    assert (await other.restore(KEY)).outcome is ops.Outcome.MISS
    assert owner.session_id not in service.tier.sessions


# ---------------------------------------------------------------- durable


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
async def test_a_durable_hold_is_taken_over_by_another_session_and_by_another_daemon(node, mode):
    service = node.start()
    owner = await opened(service, stack(mode))
    pages = await held(owner, durable=True)
    assert owner.core.idle, "its slots are free once the store has it"
    service.end(owner.session_id, "killed")
    other = await opened(service, stack(mode))
    found = await other.restore(KEY)
    assert (found.outcome, found.arena, found.note) == (ops.Outcome.READY, "read", b"note")
    assert pages_of(other, found) == pages
    other.submit(ops.Release((found.load_id,)), 0, lambda _: None)
    await node.stop()

    again = node.start()
    third = await opened(again, stack(mode))
    found = await third.restore(KEY)
    assert pages_of(third, found) == pages
    assert again.facts().holds.durable == 1
    third.submit(ops.Release((found.load_id,)), 0, lambda _: None)
    await third.discard(KEY)
    assert (await third.restore(KEY)).outcome is ops.Outcome.MISS
    assert await refused(third.discard(KEY)) == "HOLD_MISSING"
    assert read_idle(third), "no page of a discarded hold stays in host memory"
    assert node.store.stats().pages == 0, "and none in the store"


async def test_the_owner_token_is_nowhere_in_the_store_and_content_keys_never_meet_a_hold(node):
    session = await opened(node.start())
    await held(session, durable=True)
    groups = node.store._groups
    assert all(namespace != session.core.namespace.name for namespace, _ in groups)
    assert {space for space, _ in groups} >= {hold_space(session.core.namespace.name)}
    for (_, key), by_pool in groups.items():
        assert TOKEN not in key
        assert all(TOKEN not in page.data and b"request-1" not in page.data for page in by_pool.values())
    found = await session.restore(KEY)
    index = session.core.namespace.pools[0].index
    assert index
    assert min(map(len, index)) > 64, "no client can name such a key"
    assert found.outcome is ops.Outcome.READY


@pytest.mark.parametrize("size", [0, 3000, NOTE_BYTES])
async def test_notes_of_every_size_come_back(node, size):
    session = await opened(node.start())
    note = os.urandom(size)
    await held(session, durable=True, note=note)
    assert (await session.restore(KEY)).note == note
    await session.discard(KEY)


async def test_attempts_are_apart_and_a_name_can_be_used_again_after_its_discard(node):
    session = await opened(node.start(), stack(Mode.CACHE))
    first = await held(session, durable=True)
    second = await held(session, durable=True, key=replace(KEY, attempt=1))
    ranges = [ops.PoolRange(0, 0, 1), ops.PoolRange(1, 0, 1)]
    assert await refused(session.hold(KEY, ranges, True, 0)) == "HOLD_EXISTS"
    for key, pages in ((KEY, first), (replace(KEY, attempt=1), second)):
        found = await session.restore(key)
        assert pages_of(session, found) == pages
        session.submit(ops.Release((found.load_id,)), 0, lambda _: None)
    await session.discard(KEY)
    third = await held(session, durable=True)
    assert pages_of(session, await session.restore(KEY)) == third


@pytest.mark.parametrize(("outcome", "reason"), [("FULL", "HOLD_STORE_FULL"), ("FAILED", "HOLD_STORE_FAILED")])
async def test_a_store_that_refuses_is_told_to_the_owner_who_keeps_the_pages(node, outcome, reason):
    session = await opened(node.start())
    ranges = [ops.PoolRange(0, 0, 10), ops.PoolRange(1, 0, 4)]
    pages = fill(session, await session.hold(KEY, ranges, True, 0))
    broken = WriteOutcome[outcome]
    node.store.faults.on_write = lambda write: broken if write.pool == "kv" and write.key[-4] == 7 else None
    assert await refused(session.seal_hold(KEY, b"")) == reason
    assert node.store.stats().pages == 0, "nothing of it is left behind"
    assert (await session.restore(KEY)).outcome is ops.Outcome.MISS
    node.store.faults.on_write = None
    await session.seal_hold(KEY, b"later")
    found = await session.restore(KEY)
    assert (found.note, pages_of(session, found)) == (b"later", pages)


async def test_a_store_that_cannot_be_read_is_no_miss(node):
    session = await opened(node.start())
    await held(session, durable=True)
    node.store.faults.on_read = lambda read: ReadOutcome.FAILED
    assert (await session.restore(KEY)).outcome is ops.Outcome.STORE_FAILED
    node.store.faults.on_read = lambda read: ReadOutcome.MISS if read.pool == "swa" else None
    lost = await session.restore(KEY)
    assert (lost.outcome, lost.detail) == (ops.Outcome.MISS, "the store has lost pages of the hold")
    node.store.faults.on_read = None
    assert (await session.restore(KEY)).outcome is ops.Outcome.READY


async def test_an_owner_that_dies_while_its_hold_is_stored_leaves_it_whole(node):
    service = node.start()
    owner = await opened(service)
    ranges = [ops.PoolRange(0, 0, 10), ops.PoolRange(1, 0, 4)]
    pages = fill(owner, await owner.hold(KEY, ranges, True, 0))
    node.store.faults.write_delay = 0.05
    sealing = asyncio.create_task(owner.seal_hold(KEY, b"last words"))
    await asyncio.sleep(0.02)
    service.end(owner.session_id, "killed")
    assert owner.session_id in service.tier.sessions, "its slots are under I/O"
    await sealing
    await until(lambda: owner.session_id not in service.tier.sessions)
    other = await opened(service)
    found = await other.restore(KEY)
    assert (found.note, pages_of(other, found)) == (b"last words", pages)


async def test_a_hold_discarded_while_it_is_stored_is_gone_with_its_slots(node):
    session = await opened(node.start())
    ranges = [ops.PoolRange(0, 0, 10), ops.PoolRange(1, 0, 4)]
    fill(session, await session.hold(KEY, ranges, True, 0))
    node.store.faults.write_delay = 0.05
    sealing = asyncio.create_task(refused(session.seal_hold(KEY, b"")))
    await asyncio.sleep(0.02)
    assert await refused(session.seal_hold(KEY, b"")) == "HOLD_BUSY"
    await session.discard(KEY)
    assert not session.core.idle, "the store still reads them"
    assert await sealing == "HOLD_CANCELLED"
    assert session.core.idle
    assert [w.held for w in session.core.write] == [0, 0]
    assert node.store.stats().pages == 0
    assert (await session.restore(KEY)).outcome is ops.Outcome.MISS


async def test_a_durable_hold_expires_and_leaves_nothing(node):
    service = node.start()
    session = await opened(service, stack(Mode.CACHE))
    await held(session, durable=True, ttl_ms=300)
    found = await session.restore(KEY)
    assert found.outcome is ops.Outcome.READY
    await until(lambda: node.store.stats().pages == 0)
    late = await session.restore(KEY)
    assert late.outcome is ops.Outcome.MISS
    assert service.facts().counters["hold_ended", "expired"] == 1
    session.submit(ops.Release((found.load_id,)), 0, lambda _: None)
    assert read_idle(session)


async def test_expiry_outlives_the_daemon(node):
    service = node.start()
    await held(await opened(service), durable=True, ttl_ms=200)
    await held(await opened(service), durable=True, ttl_ms=60_000, key=replace(KEY, attempt=1))
    await node.stop()
    await asyncio.sleep(0.3)
    again = node.start()
    await until(lambda: again.holds.durable.expired == 1 and len(again.holds.durable) == 1)
    session = await opened(again)
    assert (await session.restore(KEY)).outcome is ops.Outcome.MISS
    assert (await session.restore(replace(KEY, attempt=1))).outcome is ops.Outcome.READY


async def test_a_hold_larger_than_the_read_arena_is_restored_into_the_sessions_own_hold_slots(node):
    service = node.start()
    owner = await opened(service)
    pages = await held(owner, durable=True)
    space = owner.core.namespace
    space.pools[0].write_span = space.pools[0].size - 9
    found = await owner.restore(KEY)
    assert (found.outcome, found.arena, found.note) == (ops.Outcome.READY, "write", b"note")
    assert pages_of(owner, found) == pages
    await owner.discard(KEY)
    assert owner.core.idle
    assert node.store.stats().pages == 0


async def test_a_session_that_ends_while_it_restores_leaves_no_lease(node):
    service = node.start()
    owner = await opened(service)
    await held(owner, durable=True)
    other = await opened(service)
    node.store.faults.read_delay = 0.05
    restoring = asyncio.create_task(other.restore(KEY))
    await asyncio.sleep(0.07)
    service.end(other.session_id, "killed")
    assert (await restoring).outcome is ops.Outcome.CANCELLED
    await service.engine.idle()
    assert read_idle(owner)


async def test_limits_of_durable_holds_are_typed(node):
    node.options = HoldOptions(max_ttl=10, max_durable=1)
    session = await opened(node.start())
    ranges = [ops.PoolRange(0, 0, 1), ops.PoolRange(1, 0, 1)]
    assert await refused(session.hold(KEY, ranges, True, 10_001)) == "HOLD_TTL"
    await held(session, durable=True)
    other = replace(KEY, attempt=1)
    await session.hold(other, ranges, True, 0)
    assert await refused(session.seal_hold(other, b"")) == "HOLD_STORE_FULL"
    await session.discard(KEY)
    await session.seal_hold(other, b"")


async def test_clearing_a_namespace_takes_its_holds_along(node):
    service = node.start()
    session = await opened(service)
    await held(session, durable=True)
    _, stored = await service.clear(session.core.namespace.name)
    assert stored == 14
    assert (await session.restore(KEY)).outcome is ops.Outcome.MISS
    assert node.store.stats().pages == 0


# ---------------------------------------------------------------- records and clocks

NAME = ("ab" * 32, TOKEN, "request-1", 0)


class Clock:
    def __init__(self):
        self.wall, self.mono = 1_000_000.0, 50.0

    def pass_(self, seconds):
        self.wall += seconds
        self.mono += seconds


def holds_on(store, clock):
    return DurableHolds(
        store, HoldOptions(), lambda record: None, wall=lambda: clock.wall, monotonic=lambda: clock.mono
    )


async def sealed(holds, ttl=100.0):
    page = memoryview(bytes(100))
    outcome, detail = await holds.write(NAME, [("kv", 1)], [("kv", 0, page, 0, 100)], b"", ttl, lambda: True)
    assert outcome.name == "STORED", detail


@pytest.mark.parametrize("jump", [-5000.0, 5000.0])
async def test_a_jump_of_the_wall_clock_changes_nothing_for_the_daemon_that_sealed(jump):
    store, clock = MemoryStore(), Clock()
    holds = holds_on(store, clock)
    await sealed(holds)
    clock.wall += jump
    assert await holds.exists(NAME)
    clock.pass_(99)
    assert await holds.sweep() == 0
    clock.pass_(2)
    assert await holds.sweep() == 1
    assert store.stats().pages == 0


async def test_a_wall_clock_that_was_set_back_over_a_restart_grants_no_more_than_the_whole_life():
    store, clock = MemoryStore(), Clock()
    await sealed(holds_on(store, clock))
    clock.wall -= 5000
    again = holds_on(store, clock)
    await again.recover()
    assert await again.exists(NAME)
    clock.pass_(101)
    assert await again.sweep() == 1
    assert store.stats().pages == 0


async def test_pages_of_a_seal_that_a_crash_cut_short_are_cleared_away_at_the_next_start():
    store, clock = MemoryStore(), Clock()
    holds = holds_on(store, clock)
    await sealed(holds)
    await store.delete(hold_space(NAME[0]), "hold_manifest", [digest_of(NAME)])
    assert store.stats().pages == 2
    again = holds_on(store, clock)
    await again.recover()
    assert await again.sweep() == 1
    assert store.stats().pages == 0


def test_records_are_what_they_were_and_nothing_else_is_taken_for_one():
    record = HoldRecord("ab" * 32, digest_of(NAME), bytes(16), 1, 2, (("kv", 3), ("swa", 1)), 4, b"note")
    assert decode(record.encode()) == record
    large = replace(record, note_bytes=NOTE_BYTES, note=bytes(NOTE_BYTES))
    assert large.note_apart
    assert decode(large.encode()) == replace(large, note=None)
    with pytest.raises(ValueError, match="begins with"):
        decode(bytes(4096))
    with pytest.raises(ValueError, match="4096 bytes"):
        decode(b"short")


def test_names_that_look_alike_when_joined_have_different_digests():
    names = [("n", b"a", "bc", 0), ("n", b"ab", "c", 0), ("n", b"a", "bc", 1), ("na", b"", "bc", 0)]
    assert len({digest_of(name) for name in names}) == len(names)
