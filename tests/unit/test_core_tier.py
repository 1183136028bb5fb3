"""The tier, case by case: what is refused, what is dropped, what waits, and what every load may count on."""

from __future__ import annotations

import pytest
from tests.core_support import FULL, KV, KV_BLOCKS, KV_INDEXER, KV_MAMBA, KV_SWA, Client, Stored, World

from hoststage.core.commits import DrainPolicy
from hoststage.core.effects import Fetched, Outcome, Written
from hoststage.core.loads import GROUP_KEYS
from hoststage.core.sessions import SessionLimits, SpanPart
from hoststage.core.slots import SlotError, SlotState, as_slots
from hoststage.core.stack import Mode

KEYS = [bytes([n]) for n in range(100)]
LIMITS = SessionLimits(max_open_commits=3000, max_credits=3)


def stored(world: World, count: int, *, first: int = 0, keys: list[bytes] = KEYS) -> None:
    """Put pages into the store, as if an earlier daemon had."""
    for pool in range(len(world.rules.pools)):
        for key in keys[first : first + count]:
            page = Stored(b"earlier", f"{pool} {key.hex()}")
            world.store[pool, key] = page
            world.committed.setdefault((pool, key), set()).add(page)


def put(
    world: World, client: Client, first: int, count: int = 1, *, parent: bytes = b"", pools: list[int] | None = None
) -> bytes:
    """Reserve, write and commit pages; return the id of the commit."""
    parts = world.parts(KEYS, first, count, pools or [])
    result = world.reserve_pages(client, parts, parent=parent)
    assert result is not None
    assert result.outcome is Outcome.ACCEPTED
    assert world.commit(client, parts, parent) is Outcome.ACCEPTED
    return next(reversed(client.core.commits), b"")


def outcomes(world: World) -> list[Outcome]:
    return [e.outcome for e in world.ended]


# ---------------------------------------------------------------- admission


def test_each_reason_not_to_write_has_its_own_outcome() -> None:
    world = World(KV, write_slots=3)
    client = world.open()
    assert world.reserve_pages(client, world.parts(KEYS, 0, 4)).outcome is Outcome.OVERSIZE
    assert world.reserve_pages(client, world.parts(KEYS, 1, 1), parent=KEYS[0]).outcome is Outcome.PARENT_UNCOVERED
    put(world, client, 0, 2)
    assert world.reserve_pages(client, world.parts(KEYS, 0, 2)).outcome is Outcome.BELIEVED_STORED
    assert world.reserve_pages(client, world.parts(KEYS, 5, 2)).outcome is Outcome.POOL_FULL
    world.tier.draining = True
    assert world.reserve_pages(client, world.parts(KEYS, 5, 1)).outcome is Outcome.DRAINING
    world.tier.draining = False
    world.finish()


def test_a_parent_in_flight_or_stored_covers() -> None:
    world = World(KV)
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    put(world, client, 1, parent=KEYS[0])
    world.carry_all()
    put(world, client, 2, parent=KEYS[1])
    world.finish()


def test_only_pages_that_are_not_believed_stored_get_slots() -> None:
    world = World(KV_INDEXER)
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0, 2)
    parts = world.parts(KEYS, 0, 4)
    result = world.reserve_pages(client, parts)
    assert [(p.slots != 0xFFFFFFFF).tolist() for p in result.parts] == [[False, False, True, True]] * 2
    world.commit(client, parts)
    world.carry_all()
    assert outcomes(world) == [Outcome.STORED] * 2
    world.finish()


def test_a_page_is_written_again_with_its_whole_group_where_only_a_part_is_believed() -> None:
    world = World(KV_INDEXER)
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    world.carry_all()
    world.space.beliefs[1].drop([KEYS[0]])
    parts = world.parts(KEYS, 0, 1)
    world.reserve_pages(client, parts)
    assert [p.slots.tolist() for p in parts] == [[0], [0]]
    world.commit(client, parts)
    world.carry_all()
    assert world.store[0, KEYS[0]].commit_id == world.store[1, KEYS[0]].commit_id
    world.finish()


def test_queued_reservations_are_served_in_order_and_time_out() -> None:
    world = World(KV, write_slots=3)
    client = world.open(Mode.BUFFER_ONLY)
    held = world.parts(KEYS, 0, 2)
    world.reserve_pages(client, held)
    large, small = world.parts(KEYS, 10, 3), world.parts(KEYS, 20, 1)
    assert world.reserve_pages(client, large, wait=1.0) is None
    assert world.reserve_pages(client, small, wait=5.0) is None
    assert world.reserve_pages(client, world.parts(KEYS, 30, 1), wait=1.0).outcome is Outcome.POOL_FULL
    world.tick(2.0)
    assert client.reservations == [held, small], "what waited behind a reservation that gave up goes on at once"
    world.check()
    world.finish()


def test_slots_of_believed_pages_serve_those_who_wait() -> None:
    world = World(KV, write_slots=2)
    first, second = world.open(Mode.BUFFER_ONLY), world.open(Mode.BUFFER_ONLY)
    parts = world.parts(KEYS, 0, 2)
    world.reserve_pages(second, parts)
    waiting = world.parts(KEYS, 5, 1)
    assert world.reserve_pages(second, waiting, wait=9.0) is None
    put(world, first, 0, 2)
    assert world.commit(second, parts) is Outcome.BELIEVED_STORED
    assert second.reservations == [waiting]
    world.check()
    world.finish()


def test_the_backlog_of_a_session_is_bounded_and_its_slots_stay_its_own() -> None:
    world = World(KV, limits=SessionLimits(max_open_commits=1))
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    parts = world.parts(KEYS, 1, 1)
    world.reserve_pages(client, parts)
    assert world.commit(client, parts) is Outcome.BACKLOG_FULL
    world.carry_all()
    assert world.commit(client, parts) is Outcome.ACCEPTED
    world.finish()


def test_credits_are_capped_and_replaced() -> None:
    world = World(KV, write_slots=8)
    client = world.open(Mode.BUFFER_ONLY, credit=3)
    assert world.reserve_pages(client, [SpanPart(0, 0, 3)]).outcome is Outcome.ACCEPTED
    assert world.reserve_pages(client, [SpanPart(0, 0, 1)]).outcome is Outcome.QUOTA
    put(world, client, 0, 2)
    assert client.core.write[0].credits == 3, "a commit of slots that were no credits brings none"
    [ahead] = client.credits
    part = SpanPart(0, 0, 2, KEYS[5:7], ahead.slots[:2], ahead.generations[:2])
    client.credits = [type(ahead)(0, 0, ahead.slots[2:], ahead.generations[2:])]
    world.write(client, [part])
    assert world.commit(client, [part]) is Outcome.ACCEPTED
    assert client.core.write[0].credits == 3
    assert sum(len(c.slots) for c in client.credits) == 3
    world.check()
    world.finish()


def test_an_abort_that_names_a_slot_in_two_parts_changes_nothing() -> None:
    world = World(KV)
    client = world.open()
    [part] = parts = world.parts(KEYS, 0, 1)
    world.reserve_pages(client, parts)
    with pytest.raises(SlotError, match="twice"):
        world.tier.abort(client.core, [part, part])
    with pytest.raises(SlotError):
        world.tier.commit(client.core, [SpanPart(0, 0, 1, KEYS[:1], part.slots, part.generations + 1)], b"", 1, 0.0)
    assert client.core.write[0].table.by_state() == {"reserved": 1, "free": 5}
    world.abort(client, parts)
    with pytest.raises(SlotError):
        world.tier.abort(client.core, parts)
    world.finish()


# ---------------------------------------------------------------- draining


def test_stored_is_said_only_after_the_last_page() -> None:
    world = World(KV_INDEXER)
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0, 2)
    world.carry_write(0, [Written.STORED, Written.FAILED])
    assert not world.ended
    assert KEYS[0] not in world.space.beliefs[0]
    world.tick(1.0)
    world.carry_write(0)
    assert outcomes(world) == [Outcome.STORED]
    assert KEYS[0] in world.space.beliefs[0]
    world.finish()


@pytest.mark.parametrize(
    ("written", "outcome"), [(Written.FULL, Outcome.STORE_FULL), (Written.FAILED, Outcome.STORE_FAILED)]
)
def test_a_commit_that_cannot_be_stored_is_dropped_at_its_deadline(written: Written, outcome: Outcome) -> None:
    world = World(KV, policy=DrainPolicy(retry_first=0.5, retry_most=2.0, deadline=5.0))
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    attempts = 0
    while not world.ended:
        assert world.now < 106.0
        while world.writes:
            attempts += 1
            world.carry_write(0, [written])
        world.tick(0.1)
    assert outcomes(world) == [outcome]
    assert 4 <= attempts <= 6
    assert client.core.write[0].room == 5
    assert not any(world.space.in_flight)
    world.finish()


def test_a_long_chain_of_descendants_is_dropped_with_its_root() -> None:
    count = 2000
    keys = [n.to_bytes(2, "little") for n in range(count)]
    world = World(KV, write_slots=count, limits=LIMITS, policy=DrainPolicy(max_pages=1, deadline=1.0))
    client = world.open(Mode.BUFFER_ONLY)
    for n in range(count):
        parts = world.parts(keys, n, 1)
        parent = keys[n - 1] if n else b""
        world.reserve_pages(client, parts, parent=parent)
        assert world.commit(client, parts, parent) is Outcome.ACCEPTED
    world.now += 2.0
    world.carry_write(0, [Written.FAILED])
    assert outcomes(world) == [Outcome.STORE_FAILED] + [Outcome.PARENT_FAILED] * (count - 1)
    assert len(world.ended[-1].detail) <= 500
    assert not world.writes
    world.finish()


@pytest.mark.parametrize("mode", [Mode.CACHE, Mode.BUFFER_ONLY])
def test_a_descendant_under_io_is_dropped_when_that_has_ended(mode: Mode) -> None:
    world = World(KV, policy=DrainPolicy(max_pages=9, deadline=1.0))
    client = world.open(mode)
    put(world, client, 0)
    if mode is Mode.CACHE:
        world.carry_publish(0)
    put(world, client, 1, parent=KEYS[0])
    world.now += 2.0
    world.carry_write(0, [Written.FAILED])
    assert outcomes(world) == [Outcome.STORE_FAILED]
    if mode is Mode.CACHE:
        world.carry_publish(0)
    else:
        world.carry_write(0, [Written.FAILED])
    assert outcomes(world) == [Outcome.STORE_FAILED, Outcome.PARENT_FAILED]
    assert not world.writes
    world.check()
    world.finish()


def test_a_descendant_whose_parent_someone_else_brings_is_kept() -> None:
    world = World(KV, policy=DrainPolicy(max_pages=1, deadline=1.0))
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    put(world, client, 1, parent=KEYS[0])
    world.space.beliefs[0].add([KEYS[0]])
    world.now += 2.0
    world.carry_write(0, [Written.FAILED])
    assert outcomes(world) == [Outcome.STORE_FAILED]
    world.carry_write(0)
    assert outcomes(world)[1] is Outcome.STORED
    world.finish()


# ---------------------------------------------------------------- publishing


def test_without_a_store_a_commit_is_refused_while_the_arena_has_no_room() -> None:
    world = World(KV, has_store=False, read_slots=4, reserve=2, write_span=1)
    client = world.open()
    put(world, client, 0, 2)
    world.carry_all()
    assert outcomes(world) == [Outcome.RESIDENT]
    load, _ = world.load(client, KEYS, 2)
    parts = world.parts(KEYS, 5, 1)
    world.reserve_pages(client, parts)
    assert world.commit(client, parts) is Outcome.POOL_FULL
    assert world.space.pools[0].index.keys() == {KEYS[0], KEYS[1]}
    world.release(client, load)
    assert world.commit(client, parts) is Outcome.ACCEPTED
    world.carry_all()
    assert outcomes(world) == [Outcome.RESIDENT] * 2
    world.finish()


def test_where_the_read_arena_is_full_of_leases_a_commit_goes_to_the_store_from_where_it_is() -> None:
    world = World(KV, read_slots=4, reserve=2, write_span=1)
    client = world.open()
    put(world, client, 0, 2)
    world.carry_all()
    world.load(client, KEYS, 2)
    put(world, client, 5)
    assert not world.publishes
    world.carry_all()
    assert outcomes(world) == [Outcome.STORED] * 2
    assert KEYS[5] not in world.space.pools[0].index
    world.finish()


def test_a_copy_that_failed_is_stored_from_the_write_slots() -> None:
    world = World(KV_INDEXER)
    client = world.open()
    put(world, client, 0)
    world.carry_publish(0, ok=False)
    world.carry_all()
    assert outcomes(world) == [Outcome.STORED]
    assert not world.space.pools[0].index
    world.check()
    world.finish()


def test_pages_that_are_put_in_place_before_their_commit_are_published_by_it_without_a_copy() -> None:
    for has_store, outcome in ((True, Outcome.STORED), (False, Outcome.RESIDENT)):
        world = World(KV_INDEXER, has_store=has_store)
        client = world.open()
        parts = world.parts(KEYS, 0, 2)
        world.reserve_pages(client, parts)
        assert world.place_ahead(client, parts)
        assert not world.space.pools[0].index
        assert world.commit(client, parts) is Outcome.ACCEPTED
        assert not world.publishes
        assert world.space.pools[0].index.keys() == {KEYS[0], KEYS[1]}
        assert all(w.table.free == w.table.size for w in client.core.write)
        _, loaded = world.load(client, KEYS, 2)
        assert loaded is not None
        assert loaded.outcome is Outcome.READY
        world.carry_all()
        assert outcomes(world) == [outcome]
        world.check()
        world.finish()


def test_places_of_pages_that_somebody_else_stored_meanwhile_are_free_again() -> None:
    world = World(KV)
    first, second = world.open(), world.open()
    parts = world.parts(KEYS, 0, 3)
    world.reserve_pages(first, parts)
    assert world.place_ahead(first, parts)
    put(world, second, 1, 1)
    assert world.commit(first, parts) is Outcome.ACCEPTED
    world.check()
    again = world.parts(KEYS, 5, 1)
    world.reserve_pages(first, again)
    assert world.place_ahead(first, again)
    put(world, second, 5, 1)
    assert world.commit(first, again) is Outcome.BELIEVED_STORED
    world.check()
    world.carry_all()
    world.finish()


def test_places_of_a_commit_that_is_refused_are_given_back() -> None:
    world = World(KV, limits=SessionLimits(max_open_commits=1))
    client = world.open()
    put(world, client, 0)
    parts = world.parts(KEYS, 1, 1)
    world.reserve_pages(client, parts)
    assert world.place_ahead(client, parts)
    assert world.commit(client, parts) is Outcome.BACKLOG_FULL
    world.check()
    assert world.place_ahead(client, parts)
    world.end(client)
    world.check()
    world.carry_all()
    world.finish()


def test_nothing_is_placed_ahead_where_nothing_is_published_or_there_is_no_room_for_all() -> None:
    world = World(KV_INDEXER, read_slots=4, reserve=2, write_span=1)
    buffers, caches = world.open(Mode.BUFFER_ONLY), world.open()
    for client, count in ((buffers, 1), (caches, 3)):
        parts = world.parts(KEYS, 0, count)
        world.reserve_pages(client, parts)
        assert not world.place_ahead(client, parts)
        world.check()
        world.abort(client, parts)
    world.finish()


def test_evicting_a_source_drags_its_sidecars() -> None:
    world = World(FULL, read_slots=6, reserve=2, write_span=1)
    client = world.open()
    put(world, client, 0, 2)
    world.carry_all()
    assert world.space.pools[1].drop_idle() == 2
    assert [len(p.index) for p in world.space.pools] == [2, 0, 0]
    world.check()
    world.finish()


def test_a_page_that_is_being_fetched_when_its_namespace_is_cleared_is_for_those_who_wait_alone() -> None:
    world = World(KV)
    first, later = world.open(), world.open()
    stored(world, 2)
    world.load(first, KEYS, 2)
    world.clear()
    _, joined = world.load(later, KEYS, 2)
    assert joined is None, "it asks the store anew"
    assert len(world.reads) == 4
    world.carry_read(2, 2)
    world.carry_read(0, 2)
    world.check()
    assert [(r.session, r.outcome) for r in world.results] == [
        (later.core.session, Outcome.MISS),
        (first.core.session, Outcome.READY),
    ]
    assert not world.space.pools[0].index
    assert not any(key in world.space.beliefs[0] for key in KEYS)
    for load_id in list(first.core.loads):
        world.release(first, load_id)
    assert world.space.pools[0].table.free == world.space.pools[0].size
    world.finish()


def test_a_page_that_was_stored_anew_after_a_clear_stays_when_the_old_one_arrives() -> None:
    world = World(KV)
    client = world.open()
    stored(world, 1)
    world.load(client, KEYS, 1)
    world.clear()
    put(world, client, 0)
    world.carry_publish(0)
    world.carry_write(0)
    slot = world.space.pools[0].index[KEYS[0]]
    world.carry_read(0)
    assert world.space.pools[0].index == {KEYS[0]: slot}
    world.finish()


def test_a_rewritten_source_takes_the_older_sidecar_out_of_the_index() -> None:
    world = World(KV_INDEXER)
    client = world.open()
    put(world, client, 0)
    world.carry_all()
    world.space.beliefs[0].clear()
    put(world, client, 0, pools=[0])
    world.carry_all()
    assert KEYS[0] in world.space.pools[0].index
    assert KEYS[0] not in world.space.pools[1].index
    world.finish()


# ---------------------------------------------------------------- loads


def test_ranks_that_ask_for_one_page_cost_one_read() -> None:
    world = World(KV)
    stored(world, 2)
    clients = [world.open() for _ in range(4)]
    loads = [world.load(c, KEYS, 2) for c in clients]
    assert [result for _, result in loads] == [None] * 4
    assert len(world.reads) == 2
    world.tier.cancel(clients[0].core, loads[0][0])
    world.settle()
    late = world.open()
    world.load(late, KEYS, 2)
    assert len(world.reads) == 2
    world.carry_all()
    assert [r.outcome for r in world.results] == [Outcome.CANCELLED] + [Outcome.READY] * 4
    assert len({tuple(r.parts[0].slots.tolist()) for r in world.results[1:]}) == 1
    world.check()
    world.finish()


def test_slots_of_a_cancelled_load_stay_out_of_use_until_its_reads_have_ended() -> None:
    world = World(KV, read_slots=4, reserve=2, write_span=0)
    stored(world, 9)
    client = world.open(Mode.BUFFER_ONLY)
    first, _ = world.load(client, KEYS, 4)
    world.tier.cancel(client.core, first)
    world.settle()
    second, result = world.load(client, KEYS[4:], 1)
    assert result is None
    assert [load.load_id for load in world.space.loads.parked] == [second]
    world.carry_read(0)
    assert not world.space.loads.parked
    world.carry_all()
    assert world.results[-1].outcome is Outcome.READY
    world.finish()


def test_loads_wait_in_order_for_other_loads_alone() -> None:
    world = World(KV, read_slots=6, reserve=3, write_span=2)
    stored(world, 40)
    client = world.open()
    first, _ = world.load(client, KEYS, 3)
    large, _ = world.load(client, KEYS[10:], 4)
    small, result = world.load(client, KEYS[20:], 1)
    assert result is None
    assert [load.load_id for load in world.space.loads.parked] == [large, small]
    world.carry_all()
    world.release(client, first)
    world.carry_all()
    assert [r.load_id for r in world.results if r.outcome is Outcome.READY] == [first, large]
    world.release(client, large)
    world.carry_all()
    assert world.results[-1].load_id == small
    world.check()
    world.finish()


def test_a_load_of_a_window_starts_at_once_whatever_is_being_published() -> None:
    world = World(KV_SWA, read_slots=8, reserve=3, write_span=2)
    stored(world, 3)
    writer, reader = world.open(), world.open()
    put(world, writer, 10, 5)
    assert len(world.publishes) == 1
    world.load(reader, KEYS, 3)
    assert not world.space.loads.parked
    world.carry_read(0, len(world.reads))
    assert world.results[-1].outcome is Outcome.READY
    world.check()
    world.finish()


def test_while_a_load_waits_publishing_does_not_take_the_room_it_waits_for() -> None:
    world = World(KV, read_slots=8, reserve=2, write_span=1, write_slots=40)
    stored(world, 7, keys=KEYS[50:])
    writer, reader = world.open(), world.open()
    put(world, writer, 0, 6)
    world.load(reader, KEYS[50:], 7)
    assert len(world.space.loads.parked) == 1
    put(world, writer, 10, 2)
    assert len(world.publishes) == 1, "more than a write span while a load waits"
    world.carry_publish(0)
    while world.writes:
        world.carry_write(0)
    assert not world.space.loads.parked
    put(world, writer, 20, 1)
    assert len(world.publishes) == 1, "loads cannot stop publishing"
    world.finish()


def test_a_load_that_can_never_be_placed_is_refused_at_once() -> None:
    world = World(KV, read_slots=6, write_span=2)
    stored(world, 9)
    client = world.open()
    _, result = world.load(client, KEYS, 5)
    assert result is not None
    assert result.outcome is Outcome.OVERSIZE
    assert client.core.read_leases == 0
    world.finish()


def test_a_wait_ends_for_those_behind_when_the_session_in_front_goes() -> None:
    for way in ("end", "quarantine", "deadline", "cancel"):
        world = World(KV, read_slots=6, reserve=3, write_span=2)
        stored(world, 40)
        holder, front, behind = world.open(), world.open(), world.open()
        world.load(holder, KEYS, 3)
        world.carry_all()
        waiting, _ = world.load(front, KEYS[10:], 4, wait=1.0)
        world.load(behind, KEYS[20:], 1)
        assert len(world.space.loads.parked) == 2
        if way == "end":
            world.end(front)
        elif way == "quarantine":
            world.quarantine(front)
        elif way == "cancel":
            world.tier.cancel(front.core, waiting)
            world.settle()
        else:
            world.tick(2.0)
        assert not world.space.loads.parked, way
        world.carry_all()
        assert world.results[-1].outcome is Outcome.READY
        world.check()
        world.finish()


def test_a_shortened_load_gives_its_part_of_the_quota_back() -> None:
    for rules in (KV, KV_SWA):
        world = World(rules)
        stored(world, 3)
        client = world.open()
        load, _ = world.load(client, KEYS, 5, shorter=True)
        while world.reads:
            world.carry_read(0, len(world.reads))
        assert world.results[-1].prefix == 3
        assert client.core.read_leases == sum(r.needed(3)[1] for r in rules.pools)
        world.release(client, load)
        assert client.core.read_leases == 0
        world.finish()


def test_the_result_of_a_parked_load_is_noted_wherever_it_starts() -> None:
    world = World(KV, has_store=False, read_slots=6, reserve=3, write_span=2)
    client, other = world.open(), world.open()
    put(world, client, 0, 3)
    world.carry_all()
    put(world, client, 10, 3)
    world.carry_all()
    world.load(other, KEYS, 3)
    world.load(client, KEYS[10:], 3)
    world.load(client, KEYS[50:], 2)
    assert len(world.space.loads.parked) == 2 or world.results[-1].outcome is Outcome.MISS
    world.end(other)
    assert not world.space.loads.parked
    world.check()
    world.finish()


def test_a_long_prefix_without_any_state_page_is_a_miss_and_not_a_long_search() -> None:
    keys = [n.to_bytes(2, "little") for n in range(3000)]
    world = World(KV_MAMBA, has_store=False, read_slots=4000, write_slots=3000, reserve=500, write_span=500)
    client = world.open()
    world.limits = world.tier.limits = SessionLimits()
    parts = world.parts(keys, 0, 3000, [0])
    world.reserve_pages(client, parts)
    world.commit(client, parts)
    world.carry_all()
    _, result = world.load(client, keys, 3000, shorter=True)
    assert result is not None
    assert result.outcome is Outcome.MISS
    world.check()
    world.finish()


def test_a_shorter_prefix_is_the_longest_whose_window_is_there() -> None:
    world = World(KV_SWA, has_store=False, read_slots=12, write_slots=12, reserve=3, write_span=2)
    client = world.open()
    put(world, client, 0, 5)
    world.carry_all()
    put(world, client, 5, 2, pools=[0])
    world.carry_all()
    _, result = world.load(client, KEYS, 7, shorter=True)
    assert result is not None
    assert (result.outcome, result.prefix) == (Outcome.READY, 5)
    world.finish()


@pytest.mark.parametrize("how", [Fetched.MISS, Fetched.CORRUPT, Fetched.FAILED])
def test_a_page_that_does_not_come_is_a_miss(how: Fetched) -> None:
    world = World(KV_INDEXER)
    stored(world, 2)
    world.space.beliefs[0].add(KEYS[:2])
    client = world.open()
    world.load(client, KEYS, 2)
    world.carry_read(1, 1, how)
    world.carry_all()
    assert world.results[-1].outcome is Outcome.MISS
    assert client.core.read_leases == 0
    assert (KEYS[1] in world.space.beliefs[0]) == (how is Fetched.FAILED)
    world.check()
    world.finish()


def test_pages_of_two_commits_are_not_mixed_and_may_be_stored_anew() -> None:
    world = World(KV_INDEXER)
    stored(world, 2)
    other = Stored(b"another", "of another commit")
    world.store[1, KEYS[1]] = other
    world.committed[1, KEYS[1]].add(other)
    client = world.open()
    _, _ = world.load(client, KEYS, 2, shorter=True)
    world.carry_all()
    assert (world.results[-1].outcome, world.results[-1].prefix) == (Outcome.READY, 1)
    assert not world.space.has(0, KEYS[1])
    assert not world.space.has(1, KEYS[1])
    put(world, client, 1)
    world.carry_all()
    _, result = world.load(client, KEYS, 2)
    assert result is not None
    assert result.prefix == 2
    world.finish()


def test_a_prefix_inside_a_block_group_is_shortened_or_missed() -> None:
    world = World(KV_BLOCKS)
    stored(world, 4)
    client = world.open()
    _, missed = world.load(client, KEYS, 3)
    assert missed is not None
    assert missed.outcome is Outcome.MISS
    world.load(client, KEYS, 3, shorter=True)
    world.carry_all()
    assert world.results[-1].prefix == 2
    world.finish()


def test_whole_groups_of_keys_are_announced_as_they_arrive() -> None:
    count = 2 * GROUP_KEYS + 5
    world = World(KV_INDEXER, read_slots=100, reserve=90, write_span=5, limits=SessionLimits())
    stored(world, count)
    client = world.open()
    world.load(client, KEYS, count)
    kv, sidecars = world.reads[:count], world.reads[count:]
    world.reads = [*kv[:GROUP_KEYS], *sidecars[:GROUP_KEYS], *kv[GROUP_KEYS:], *sidecars[GROUP_KEYS:]]
    world.carry_read(0, GROUP_KEYS)
    assert not world.results
    world.carry_read(0, GROUP_KEYS)
    assert [(r.last, len(r.parts[0].slots)) for r in world.results] == [(False, GROUP_KEYS)]
    world.carry_read(0, len(world.reads))
    assert [(r.last, len(r.parts[0].slots)) for r in world.results][1:] == [(True, count - GROUP_KEYS)]
    world.check()
    world.finish()


def test_an_announced_group_stays_whatever_becomes_of_the_rest() -> None:
    count = GROUP_KEYS + 8
    world = World(KV, read_slots=100, reserve=90, write_span=5, limits=SessionLimits())
    stored(world, count)
    client = world.open()
    world.load(client, KEYS, count, shorter=True)
    world.carry_read(0, GROUP_KEYS)
    world.carry_read(3, 1, Fetched.FAILED)
    world.carry_all()
    assert world.results[-1].prefix == GROUP_KEYS + 3
    world.check()
    world.finish()


def test_the_quota_of_read_leases_is_exact() -> None:
    world = World(KV, read_slots=20, limits=SessionLimits(max_read_leases=5))
    stored(world, 20)
    client = world.open()
    load, _ = world.load(client, KEYS, 3)
    world.carry_all()
    _, refused = world.load(client, KEYS[10:], 3)
    assert refused is not None
    assert refused.outcome is Outcome.QUOTA
    world.load(client, KEYS[10:], 2)
    world.carry_all()
    assert client.core.read_leases == 5
    world.release(client, load)
    assert client.core.read_leases == 2
    world.finish()


# ---------------------------------------------------------------- pins


def test_a_load_that_consumes_its_pin_starts_at_once_and_is_counted_once() -> None:
    world = World(KV, read_slots=6, reserve=3, write_span=2, limits=SessionLimits(max_read_leases=6))
    stored(world, 40)
    client, other = world.open(), world.open()
    pin = world.tier.pin(client.core, KEYS, [(1, 3)], world.now + 5)
    world.settle()
    world.carry_all()
    world.load(other, KEYS[10:], 4)
    assert len(world.space.loads.parked) == 1
    load, result = world.load(client, KEYS, 3, pin=pin)
    assert result is not None
    assert result.outcome is Outcome.READY
    assert client.core.read_leases == 3
    assert not client.core.pins
    world.release(client, load)
    assert not world.space.loads.parked
    world.finish()


def test_a_pin_holds_its_pages_through_eviction_and_replacement() -> None:
    world = World(KV_INDEXER)
    client = world.open()
    put(world, client, 0, 2)
    world.carry_all()
    pin = world.tier.pin(client.core, KEYS, [(2, 2)], world.now + 5)
    for pool in world.space.pools:
        pool.drop(KEYS[:1])
    world.space.beliefs[0].clear()
    put(world, client, 1, pools=[0])
    world.carry_all()
    _, result = world.load(client, KEYS, 2, pin=pin)
    assert result is not None
    assert result.outcome is Outcome.READY
    world.finish()


def test_a_pin_of_several_ranges_of_one_pool_does_not_evict_its_own_pages() -> None:
    world = World(KV_SWA, read_slots=12, reserve=4, write_span=0, limits=SessionLimits())
    stored(world, 60)
    client = world.open()
    for first, count in ((7, 2), (0, 1), (20, 1)):
        load, _ = world.load(client, KEYS, first + count, needs=[(1, first, count)])
        world.carry_all()
        world.release(client, load)
    world.load(client, KEYS[40:], 8, needs=[(1, 0, 8)])
    world.carry_all()
    assert world.space.pools[1].table.free == 0
    pin = world.tier.pin(client.core, KEYS, [(2, 2), (9, 9)], world.now + 5)
    world.settle()
    world.check()
    held = world.space.loads.pages_of(client.core.pins[pin])
    assert {key for pool, key in held if pool == 1} == {KEYS[0], KEYS[7], KEYS[8]}
    world.finish()


def test_a_pin_ends_at_its_time_and_with_its_session() -> None:
    world = World(KV)
    stored(world, 3)
    client = world.open()
    pin = world.tier.pin(client.core, KEYS, [(1, 3)], world.now + 1)
    world.settle()
    world.tick(2.0)
    assert pin not in client.core.pins
    assert client.core.read_leases == 0
    world.carry_all()
    world.tier.pin(client.core, KEYS, [(1, 3)], world.now + 99)
    world.check()
    world.end(client)
    assert world.space.pools[0].load_held == 0
    world.finish()


def test_a_pin_whose_reads_fail_holds_the_rest() -> None:
    world = World(KV)
    stored(world, 3)
    client = world.open()
    pin = world.tier.pin(client.core, KEYS, [(1, 3)], world.now + 9)
    world.settle()
    world.carry_read(1, 1, Fetched.FAILED)
    world.carry_all()
    world.check()
    _, result = world.load(client, KEYS, 3, pin=pin)
    assert result is None
    world.carry_all()
    assert world.results[-1].outcome is Outcome.READY
    world.check()
    world.finish()


# ---------------------------------------------------------------- sessions


def test_a_quarantined_session_keeps_what_its_process_may_touch_and_no_more() -> None:
    world = World(KV, read_slots=12, reserve=3, write_span=2)
    stored(world, 9)
    client = world.open()
    world.load(client, KEYS, 2)
    world.carry_all()
    world.load(client, KEYS, 5)
    world.reserve_pages(client, world.parts(KEYS, 20, 2))
    put(world, client, 30)
    world.quarantine(client)
    world.check()
    assert client.core.write[0].table.counts[SlotState.QUARANTINED] == 2
    assert client.core.read_leases == 2
    world.carry_all()
    assert outcomes(world) == [Outcome.STORED]
    world.end(client)
    assert world.over == [client.core.session]
    world.finish()


def test_a_session_is_over_when_its_last_commit_has_left_its_arena() -> None:
    world = World(KV)
    client = world.open(Mode.BUFFER_ONLY)
    put(world, client, 0)
    world.end(client)
    world.tier.end(client.core)
    assert not world.over
    world.carry_all()
    assert world.over == [client.core.session]
    assert not world.tier.sessions
    world.finish()


def test_slots_of_another_session_are_refused() -> None:
    world = World(KV, write_slots=3)
    first, second = world.open(), world.open()
    parts = world.parts(KEYS, 0, 2)
    world.reserve_pages(first, parts)
    with pytest.raises(SlotError):
        world.tier.commit(second.core, parts, b"", 1, 0.0)
    with pytest.raises(SlotError):
        world.tier.abort(second.core, [SpanPart(0, 0, 1, (), as_slots([9]), as_slots([1]))])
    world.finish()
