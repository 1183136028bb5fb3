"""hoststage's fences beside SGLang's own check of a buffer_only stack (`validate_buffer_only_stack`, release 0.5.23).

Both judge the same generated stacks. Where the table of fences follows SGLang the verdicts must be the same; where
hoststage goes further (a pool grown within the budget, a floor for the full pool) the difference is stated by a test.

SGLang's side runs on its real host pool base, host pool group, sidecar specs and shared arena arithmetic; no memory is
allocated. Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoststage.core.fences import evaluate
from hoststage.core.findings import NodeFacts, Severity
from hoststage.core.stack import (
    HitPolicy,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Placement,
    Pool,
    PoolKind,
    Stack,
)

pytestmark = pytest.mark.engines

pipeline = pytest.importorskip("sglang.srt.mem_cache.buffer_mode.pipeline", exc_type=ImportError)
group = pytest.importorskip("sglang.srt.mem_cache.pool_host.group", exc_type=ImportError)
base = pytest.importorskip("sglang.srt.mem_cache.pool_host.base", exc_type=ImportError)
unified = pytest.importorskip("sglang.srt.mem_cache.pool_host.unified", exc_type=ImportError)
storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
torch = pytest.importorskip("torch")

PAGE = 4096
TOKENS = 16
UNLIMITED = 1 << 50
FOLLOWED = {
    "SWA_POOL_REQUIRED",
    "SWA_POOL_TOO_SMALL",
    "AUXILIARY_SWA",
    "SIDECAR_MAPPING_INCOMPLETE",
    "SIDECAR_SMALLER_THAN_SOURCE",
    "SHARED_ARENA_TOO_SMALL",
}
"""Fences that the table takes over from `validate_buffer_only_stack`."""


class _StagingPool(base.HostKVCache):  # type: ignore[misc, name-defined]
    """SGLang's host pool with its real geometry and free list, and no buffer behind it."""

    def __init__(self, pool: Pool, domain: Any) -> None:
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=0,
            size_per_token=pool.page_bytes // pool.page_tokens,
            start_layer=0,
            end_layer=1,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=pool.page_tokens,
            layout="page_first",
            pin_memory=False,
            device="cpu",
            pool_label=pool.name,
            is_dummy=True,
            host_token_capacity=pool.host_slots * pool.page_tokens,
        )
        self.shared_allocation_domain = domain


_StagingPool.__abstractmethods__ = frozenset()


@dataclass(frozen=True)
class Verdicts:
    """What each side says: None where it accepts, else why not."""

    sglang: str | None
    hoststage: set[str] | None


def shared_domain(stack: Stack) -> Any:
    """Return SGLang's arena for the pools that share one, as large as they ask for together; None where none do."""
    sharing = [p for p in stack.pools if p.shares_arena_with]
    if not sharing:
        return None
    members = [p for p in stack.pools if p.name == sharing[0].shares_arena_with] + sharing
    capacity = sum(p.host_slots * p.page_bytes for p in members)
    backing_class = unified._SharedPageEnvelopeHostBacking
    backing = backing_class.__new__(backing_class)
    backing.lock = threading.RLock()
    backing.capacity_bytes = backing._allocatable_bytes = capacity
    backing.sides = {
        p.name: backing_class._Side(
            page_size=p.page_tokens, page_bytes=p.page_bytes, page_num=capacity // p.page_bytes, grow_direction=grow
        )
        for p, grow in zip(members, ("up", "down"), strict=True)
    }
    return backing


def ask_sglang(stack: Stack) -> str | None:
    """Return why SGLang refuses the stack for buffer_only, or None."""
    domain = shared_domain(stack)
    sharing = {p.name for p in stack.pools if p.shares_arena_with}
    sharing |= {p.shares_arena_with for p in stack.pools if p.shares_arena_with}
    pools = {p.name: _StagingPool(p, domain if p.name in sharing else None) for p in stack.pools if p.has_host_pool}
    entries = [
        group.PoolEntry(name, host, None, lambda layer: layer, is_primary_index_anchor=name == "kv")
        for name, host in pools.items()
    ]
    windows = [
        SimpleNamespace(_swa_kv_pool_host=pools.get(p.name), full_window_pages=p.window_pages)
        for p in stack.of_kind(PoolKind.SWA)
    ]
    # The engine raises the threshold to the largest window before it asks (`resolve_prefetch_threshold`).
    threshold = max([stack.prefetch_threshold_tokens] + [w.full_window_pages * TOKENS for w in windows])
    try:
        pipeline.validate_buffer_only_stack(
            [storage.SidecarPoolSpec(p.name, p.indices_from_pool) for p in stack.of_kind(PoolKind.SIDECAR)],
            group.HostPoolGroup(entries),
            windows[0] if windows else None,
            threshold,
            auxiliary_swa_component=windows[1] if len(windows) > 1 else None,
        )
    except ValueError as refusal:
        return str(refusal)
    return None


def exact_budget(stack: Stack) -> int:
    """Return the bytes of what the stack asks for and not one more, so that nothing can be grown."""
    total = 0
    for pool in stack.pools:
        if not pool.has_host_pool:
            continue
        source = stack.pool(pool.indices_from_pool) if pool.is_sidecar else pool
        if source is not None and source.has_host_pool:
            total += source.host_slots * pool.stride
    return total


def ask_both(stack: Stack, budget: int) -> Verdicts:
    verdict = evaluate(stack, NodeFacts(budget))
    refused = {f.rule for f in verdict.findings if f.severity is Severity.REFUSED}
    return Verdicts(ask_sglang(stack), refused if verdict.refused else None)


KV_SLOTS = 64


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Draw a stack around the boundaries of the rules, with pools of their own and a full pool that is large enough."""
    threshold = draw(st.integers(0, 8 * TOKENS))
    kv = Pool("kv", PoolKind.KV, PAGE, TOKENS, host_slots=KV_SLOTS)
    pools = [kv]
    for name in draw(st.sampled_from([(), ("swa",), ("swa", "aux_swa")])):
        window = draw(st.integers(1, 8 * TOKENS))
        least = 2 * -(-window // TOKENS)
        swa = Pool(
            name,
            PoolKind.SWA,
            PAGE * draw(st.integers(1, 3)),
            TOKENS,
            sliding_window=window,
            hit_policy=HitPolicy.TRAILING_PAGES,
            host_slots=draw(st.integers(max(1, least - 2), least + 2)),
        )
        if draw(st.integers(0, 5)) == 0:
            swa = replace(swa, layout=KvLayout.UNIFIED_KV, placement=Placement.DEVICE_ONLY, host_slots=0)
        pools.append(swa)
    for name in draw(st.sampled_from([(), ("indexer",), ("indexer", "deepseek_v4_c4")])):
        source = draw(st.sampled_from(["kv", "kv", "swa", "draft"]))
        slots = next((p.host_slots for p in pools if p.name == source), KV_SLOTS)
        pools.append(
            Pool(
                name,
                PoolKind.SIDECAR,
                TOKENS * draw(st.integers(1, 99)),
                TOKENS,
                indices_from_pool=source,
                host_slots=max(1, slots + draw(st.integers(-1, 2))),
            )
        )
    return Stack(Identity("m"), tuple(pools), modes=(ModeWish(Mode.BUFFER_ONLY),), prefetch_threshold_tokens=threshold)


@st.composite
def shared_stacks(draw: st.DrawFn) -> Stack:
    """Draw a full and a window pool in one arena, around the two smallest transfers."""
    window, threshold = draw(st.integers(1, 8 * TOKENS)), draw(st.integers(0, 12 * TOKENS))
    full = max(1, -(-threshold // TOKENS), -(-window // TOKENS))
    swa_slots = 2 * -(-window // TOKENS)
    kv_slots = max(1, 2 * full + draw(st.integers(-2, 2)))
    kv = Pool("kv", PoolKind.KV, PAGE * draw(st.integers(1, 3)), TOKENS, host_slots=kv_slots)
    swa = Pool(
        "swa",
        PoolKind.SWA,
        PAGE * draw(st.integers(1, 3)),
        TOKENS,
        sliding_window=window,
        hit_policy=HitPolicy.TRAILING_PAGES,
        shares_arena_with="kv",
        host_slots=max(1, swa_slots + draw(st.integers(-2, 2))),
    )
    return Stack(Identity("m"), (kv, swa), modes=(ModeWish(Mode.BUFFER_ONLY),), prefetch_threshold_tokens=threshold)


@settings(max_examples=400, deadline=None)
@given(stacks())
def test_the_same_verdict_on_pools_of_their_own_where_nothing_can_grow(stack: Stack) -> None:
    both = ask_both(stack, exact_budget(stack))
    assert (both.sglang is None) is (both.hoststage is None), both
    assert both.hoststage is None or both.hoststage & FOLLOWED, both


@settings(max_examples=300, deadline=None)
@given(shared_stacks())
def test_the_same_verdict_on_a_shared_arena_where_nothing_can_grow(stack: Stack) -> None:
    both = ask_both(stack, exact_budget(stack))
    assert (both.sglang is None) is (both.hoststage is None), both
    assert both.hoststage is None or both.hoststage == {"SHARED_ARENA_TOO_SMALL", "BUDGET"}, both


@settings(max_examples=200, deadline=None)
@given(st.one_of(stacks(), shared_stacks()))
def test_with_a_budget_only_the_sizes_that_can_grow_are_granted_beyond_sglang(stack: Stack) -> None:
    both = ask_both(stack, UNLIMITED)
    if both.sglang is None:
        assert both.hoststage is None, both
    elif both.hoststage is None:
        assert "two minimum Full/SWA transfers" in both.sglang
    else:
        assert both.hoststage <= FOLLOWED - {"SWA_POOL_TOO_SMALL", "SHARED_ARENA_TOO_SMALL"}


def test_the_full_pool_has_a_floor_here_that_sglang_does_not_check() -> None:
    kv = Pool("kv", PoolKind.KV, PAGE, TOKENS, host_slots=7)
    stack = Stack(Identity("m"), (kv,), modes=(ModeWish(Mode.BUFFER_ONLY),), prefetch_threshold_tokens=4 * TOKENS)
    both = ask_both(stack, exact_budget(stack))
    assert both.sglang is None
    assert both.hoststage == {"POOL_TOO_SMALL", "BUDGET"}


@pytest.mark.parametrize(
    ("pools", "rule", "words"),
    [
        ("ring", "SWA_POOL_REQUIRED", "unified_kv"),
        ("small", "SWA_POOL_TOO_SMALL", "two minimum"),
        ("unmapped", "SIDECAR_MAPPING_INCOMPLETE", "incomplete"),
        ("smaller", "SIDECAR_SMALLER_THAN_SOURCE", "smaller than its index source"),
    ],
)
def test_both_refuse_for_the_same_reason(pools: str, rule: str, words: str) -> None:
    kv = Pool("kv", PoolKind.KV, PAGE, TOKENS, host_slots=KV_SLOTS)
    swa = Pool("swa", PoolKind.SWA, PAGE, TOKENS, sliding_window=4 * TOKENS, host_slots=8)
    indexer = Pool("indexer", PoolKind.SIDECAR, PAGE, TOKENS, indices_from_pool="kv", host_slots=KV_SLOTS)
    ring = replace(swa, layout=KvLayout.UNIFIED_KV, placement=Placement.DEVICE_ONLY, host_slots=0)
    chosen = {
        "ring": (kv, ring),
        "small": (kv, replace(swa, host_slots=7)),
        "unmapped": (kv, replace(indexer, indices_from_pool="swa")),
        "smaller": (kv, replace(indexer, host_slots=KV_SLOTS - 1)),
    }[pools]
    stack = Stack(Identity("m"), chosen, modes=(ModeWish(Mode.BUFFER_ONLY),))
    both = ask_both(stack, exact_budget(stack))
    assert both.sglang is not None
    assert words in both.sglang
    assert both.hoststage is not None
    assert rule in both.hoststage
