"""Sizes against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.fences_stacks import C4, GIB, HOLDS, INDEXER, KV, MAMBA, PAGE, SWA, W, node, stack

from hoststage.core.fences import evaluate
from hoststage.core.findings import NodeFacts, PoolGrant
from hoststage.core.sizing import Sizing, size_pools
from hoststage.core.stack import (
    HitPolicy,
    Identity,
    Mode,
    ModeWish,
    Parallel,
    Pool,
    PoolKind,
    Retraction,
    RetractionWish,
    Stack,
)

MIB = 1 << 20
KV_64K = replace(KV, page_bytes=64 << 10, host_slots=0)


def sized(sizing: Sizing, pool: str) -> tuple[int, int, int, int]:
    """Return write, read, reserve and hold slots."""
    found = sizing.pool(pool)
    assert found is not None
    return found.write_slots, found.read_slots, found.reserve_slots, found.hold_slots


def test_the_daemon_stages_sixteen_mib_a_side_in_buffer_only() -> None:
    sizing = size_pools(stack(KV_64K), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (256, 256, 1, 0)
    assert sizing.charged_bytes == 32 * MIB


def test_two_spans_are_chosen_where_they_are_more_than_that() -> None:
    wide = replace(SWA, page_bytes=8 * MIB, host_slots=0)
    sizing = size_pools(stack(KV_64K, wide), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "swa") == (2 * W, 2 * W, W, 0)


def test_a_sidecar_shares_the_depth_with_its_source() -> None:
    sidecar = replace(C4, page_bytes=64 << 10)
    sizing = size_pools(stack(KV_64K, sidecar), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == sized(sizing, "deepseek_v4_c4") == (128, 128, 1, 0)
    assert sizing.charged_bytes == 32 * MIB


def test_an_ask_in_buffer_only_is_halved_between_the_sides() -> None:
    sizing = size_pools(stack(replace(KV, host_slots=17)), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (9, 8, 1, 0)


def test_an_ask_in_cache_keeps_an_eighth_to_write() -> None:
    sizing = size_pools(stack(replace(KV, host_slots=80)), node(), Mode.CACHE)
    assert sized(sizing, "kv") == (10, 70, 1, 0)


def test_a_large_window_pool_reserves_a_tenth_of_its_read_slots() -> None:
    sizing = size_pools(stack(replace(SWA, host_slots=200)), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "swa") == (100, 100, 10, 0)


def test_the_full_pool_reserves_the_pages_of_the_window_that_loads_with_them() -> None:
    sizing = size_pools(stack(KV, SWA), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (8, 8, W, 0)


def test_block_groups_stay_whole() -> None:
    grouped = replace(KV, hit_policy=HitPolicy.BLOCK_GROUPS, group_pages=4)
    sizing = size_pools(stack(grouped, prefetch_threshold_tokens=5 * 64), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (8, 8, 8, 0)


def test_a_state_pool_needs_one_trailing_slot_a_side() -> None:
    sizing = size_pools(stack(KV, MAMBA, prefetch_threshold_tokens=512), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "mamba") == (1, 1, 1, 0)


@pytest.mark.parametrize(("tp", "replicated", "read"), [(1, False, 8192), (4, False, 2048), (4, True, 8192)])
def test_cache_takes_half_the_budget_divided_by_the_shards(tp: int, replicated: bool, read: int) -> None:
    pool = replace(KV_64K, replicated=replicated)
    sizing = size_pools(stack(pool, parallel=Parallel(tp_size=tp)), node(), Mode.CACHE)
    assert sized(sizing, "kv") == (256, read - 256, 1, 0)
    assert sizing.charged_bytes == read * (64 << 10)


def test_cache_divides_its_share_by_the_device_pools_where_they_are_known() -> None:
    kv = replace(KV, page_bytes=MIB, host_slots=0, device_slots=400)
    swa = replace(SWA, page_bytes=MIB, host_slots=0, device_slots=100)
    sizing = size_pools(stack(kv, swa), node(), Mode.CACHE)
    # 512 MiB less 16 of write arena each leave 480 pages, four fifths of them for kv.
    assert sized(sizing, "kv") == (16, 384, W, 0)
    assert sized(sizing, "swa") == (16, 96, 9, 0)


def test_cache_keeps_one_state_for_sixteen_pages() -> None:
    kv = replace(KV, page_bytes=MIB, host_slots=0)
    mamba = replace(MAMBA, page_bytes=16 * MIB, host_slots=0)
    sizing = size_pools(stack(kv, mamba), node(), Mode.CACHE)
    # 512 MiB less 16 and 32 of write arena leave 464: 232 pages and 14 states.
    assert sized(sizing, "kv") == (16, 232, 1, 0)
    assert sized(sizing, "mamba") == (2, 14, 1, 0)


def test_what_the_daemon_chose_shrinks_to_the_budget_and_what_was_asked_stays() -> None:
    asked = replace(KV_64K, name="kv2", host_slots=100)
    sizing = size_pools(stack(asked, KV_64K), node(10 * MIB), Mode.BUFFER_ONLY)
    assert sizing.fits
    assert sum(sized(sizing, "kv2")[:2]) == 100
    write, read, _, _ = sized(sizing, "kv")
    assert 0 <= 60 - (write + read) <= 2


def test_nothing_shrinks_below_the_least() -> None:
    sizing = size_pools(stack(KV_64K, prefetch_threshold_tokens=256), node(0), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (4, 4, 4, 0)
    assert not sizing.fits
    assert sizing.fitted() is None


def test_holds_come_out_of_the_ask_while_staging_keeps_its_least() -> None:
    wished = stack(replace(KV, host_slots=20), retraction=HOLDS, largest_request_tokens=640)
    assert sized(size_pools(wished, node(), Mode.BUFFER_ONLY), "kv") == (5, 5, 1, 10)
    assert sized(size_pools(wished, node(), Mode.BUFFER_ONLY, holds=False), "kv") == (10, 10, 1, 0)


def test_holds_grow_the_pool_where_they_must() -> None:
    wished = stack(replace(KV, host_slots=4), retraction=HOLDS, largest_request_tokens=640)
    assert sized(size_pools(wished, node(), Mode.BUFFER_ONLY), "kv") == (1, 1, 1, 10)


def test_no_hold_is_larger_than_the_device_pool_and_two_requests_take_two() -> None:
    wish = RetractionWish(Retraction.HOST_POOL, concurrent_receive=True)
    wished = stack(replace(KV, host_slots=0, device_slots=7), retraction=wish, largest_request_tokens=640)
    assert sized(size_pools(wished, node(), Mode.BUFFER_ONLY), "kv")[3] == 14


def test_a_live_read_arena_is_taken_as_it_is_and_not_charged() -> None:
    facts = node(live_read_slots={"kv": 99, "indexer": 99})
    sizing = size_pools(stack(KV, INDEXER), facts, Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == (8, 99, 1, 0)
    assert sizing.charged_bytes == 2 * 8 * PAGE


def test_a_shared_arena_is_divided_by_bytes() -> None:
    kv = replace(KV, page_bytes=2 * PAGE, host_slots=16)
    swa = replace(SWA, shares_arena_with="kv", host_slots=8)
    sizing = size_pools(stack(kv, swa), node(), Mode.BUFFER_ONLY)
    # 40 pages asked; the least is 8 of two pages and 8 of one; of the 16 left kv asked for four fifths: 12 pages, 6 slots.
    assert sum(sized(sizing, "kv")[:2]) == 14
    assert sum(sized(sizing, "swa")[:2]) == 11


def test_the_arithmetic_is_shown_with_its_numbers() -> None:
    text = "\n".join(size_pools(stack(KV, SWA, C4), node(), Mode.BUFFER_ONLY).explain())
    assert "swa: window = ceil(250 / 64) = 4 pages" in text
    assert "kv: stride = ceil(4096 / 4096) × 4096 = 4096 bytes" in text
    assert "deepseek_v4_c4: slots = as many as its source kv = 16 slots" in text
    assert f"charged to the node = 65536 + 32768 + 65536 = 163840 bytes of {GIB} free" in text


def test_a_grant_is_what_was_sized() -> None:
    pool = size_pools(stack(SWA), node(), Mode.BUFFER_ONLY).pool("swa")
    assert pool is not None
    assert pool.grant == PoolGrant("swa", PAGE, W, W, W, 0, W)


def test_a_sidecar_of_an_unsized_source_may_ask_for_both() -> None:
    sizing = size_pools(stack(replace(KV, host_slots=0), INDEXER), node(), Mode.BUFFER_ONLY)
    assert sized(sizing, "kv") == sized(sizing, "indexer") == (8, 8, 1, 0)


def test_a_pool_without_host_pages_has_no_size() -> None:
    ring = replace(KV, name="draft", kind=PoolKind.SIDECAR, indices_from_pool="absent")
    assert size_pools(stack(KV, ring), node(), Mode.CACHE).pool("draft") is None


def test_a_live_read_arena_too_small_for_a_window_refuses_a_stack_that_shares_its_arena() -> None:
    window = Pool(
        name="swa",
        kind=PoolKind.SWA,
        page_bytes=1,
        page_tokens=16,
        sliding_window=17,
        hit_policy=HitPolicy.TRAILING_PAGES,
        shares_arena_with="kv",
    )
    sharing = Stack(
        Identity("m"),
        (window, replace(window, name="aux", host_slots=1)),
        modes=(ModeWish(Mode.BUFFER_ONLY),),
    )
    verdict = evaluate(sharing, NodeFacts(budget_bytes=24576, live_read_slots={"swa": 1}))
    assert verdict.grant is None
    [finding] = [f for f in verdict.findings if f.values.get("live_read_slots") == 1]
    assert (finding.rule, finding.subject) == ("SHARED_ARENA_TOO_SMALL", "swa")
    assert evaluate(sharing, NodeFacts(budget_bytes=24576 + 8192, live_read_slots={"swa": 2})).grant is not None
