"""Whatever a stack says, the fences answer: never an exception, every row evaluated, grants within the invariants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from hoststage.core.fences import RULES, Applies, Context, ProtocolRanges, Rule, evaluate, verdict
from hoststage.core.findings import BudgetHolder, Finding, NodeFacts, Severity, Verdict
from hoststage.core.sizing import size_pools
from hoststage.core.stack import (
    SLOT_ALIGNMENT,
    HitPolicy,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Parallel,
    PayloadPath,
    Placement,
    Pool,
    PoolKind,
    Retraction,
    RetractionWish,
    Role,
    Stack,
    WritePolicy,
)

ABSURD = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([0, -1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 200, -(1 << 200)]),
    st.integers(),
)
NAMES = st.one_of(st.sampled_from(["kv", "swa", "aux", "mamba", "c4", "indexer", ""]), st.text(max_size=5))


@st.composite
def pools(draw: st.DrawFn, numbers: st.SearchStrategy[int] = ABSURD, names: st.SearchStrategy[str] = NAMES) -> Pool:
    return Pool(
        name=draw(names),
        kind=draw(st.sampled_from(PoolKind)),
        page_bytes=draw(numbers),
        page_tokens=draw(numbers),
        layers=draw(numbers),
        sliding_window=draw(numbers),
        hit_policy=draw(st.sampled_from(HitPolicy)),
        trailing_pages=draw(numbers),
        group_pages=draw(numbers),
        layout=draw(st.sampled_from(KvLayout)),
        placement=draw(st.sampled_from(Placement)),
        indices_from_pool=draw(st.one_of(st.just(""), names)),
        shares_arena_with=draw(st.one_of(st.just(""), names)),
        replicated=draw(st.booleans()),
        pieces=tuple(draw(st.lists(numbers, max_size=2))),
        host_slots=draw(numbers),
        device_slots=draw(numbers),
    )


WISHES = st.builds(
    RetractionWish,
    st.sampled_from(Retraction),
    window_only=st.booleans(),
    concurrent_receive=st.booleans(),
    required=st.booleans(),
)
MODES = st.lists(st.builds(ModeWish, st.sampled_from(Mode), st.booleans()), max_size=3).map(tuple)
PATHS = st.lists(st.sampled_from(PayloadPath), max_size=3).map(tuple)


def stacks(
    pool_tuples: st.SearchStrategy[tuple[Pool, ...]], numbers: st.SearchStrategy[int]
) -> st.SearchStrategy[Stack]:
    ranks = st.builds(
        Parallel,
        tp_rank=numbers,
        tp_size=numbers,
        pp_rank=numbers,
        pp_size=numbers,
        cp_size=numbers,
        dcp_rank=st.one_of(st.none(), numbers),
        dcp_size=numbers,
    )
    return st.builds(
        Stack,
        identity=st.builds(Identity, model=st.text(max_size=4), tenant=st.text(max_size=4)),
        pools=pool_tuples,
        parallel=st.one_of(st.just(Parallel()), ranks),
        role=st.sampled_from(Role),
        write_policy=st.sampled_from(WritePolicy),
        modes=MODES,
        retraction=WISHES,
        paths=PATHS,
        largest_request_tokens=numbers,
        prefetch_threshold_tokens=numbers,
        maps_sidecars=st.booleans(),
        hands_over_state=st.booleans(),
        requires_pinned=st.booleans(),
    )


FACTS = st.builds(
    NodeFacts,
    budget_bytes=ABSURD,
    holders=st.lists(st.builds(BudgetHolder, st.text(max_size=3), ABSURD, st.booleans()), max_size=3).map(tuple),
    store_configured=st.booleans(),
    pinned=st.sampled_from(["cuda", "mlock", "resident", "none", "?"]),
    memlock_bytes=ABSURD,
    paths=PATHS,
    live_read_slots=st.dictionaries(NAMES, ABSURD, max_size=3),
    live_page_bytes=st.dictionaries(NAMES, ABSURD, max_size=3),
)


@settings(max_examples=400, deadline=None)
@given(stacks(st.lists(pools(), max_size=5).map(tuple), ABSURD), FACTS)
def test_no_stack_however_absurd_raises(stack: Stack, facts: NodeFacts) -> None:
    verdict = evaluate(stack, facts)
    assert all(-(1 << 63) <= v < 1 << 63 for f in verdict.findings for v in f.values.values() if isinstance(v, int))
    if verdict.grant is None:
        assert any(f.severity is Severity.REFUSED for f in verdict.findings)
    for mode in Mode:
        size_pools(stack, facts, mode, holds=True).explain()


SMALL = st.integers(0, 9)


@st.composite
def plausible(draw: st.DrawFn) -> Stack:
    """Draw a stack that has a fair chance of being granted."""
    tokens = draw(st.sampled_from([1, 16, 64]))
    kv = Pool("kv", PoolKind.KV, draw(st.integers(1, 9000)), tokens, host_slots=draw(st.integers(0, 40)))
    swa = Pool(
        "swa",
        PoolKind.SWA,
        draw(st.integers(1, 9000)),
        tokens,
        sliding_window=draw(st.integers(1, 400)),
        hit_policy=HitPolicy.TRAILING_PAGES,
        host_slots=draw(st.integers(0, 60)),
    )
    aux = replace(swa, name="aux", host_slots=draw(st.integers(0, 60)))
    mamba = Pool("mamba", PoolKind.MAMBA, draw(st.integers(1, 90000)), tokens, host_slots=draw(SMALL))
    c4 = Pool("c4", PoolKind.SIDECAR, draw(st.integers(1, 9000)), tokens, indices_from_pool="kv")
    chosen = tuple(p for p in (kv, swa, aux, mamba, c4) if draw(st.booleans()))
    if draw(st.booleans()):
        chosen = tuple(replace(p, shares_arena_with="kv") if p.kind is PoolKind.SWA else p for p in chosen)
    return Stack(
        identity=Identity("m"),
        pools=chosen,
        modes=draw(MODES),
        write_policy=draw(st.sampled_from(WritePolicy)),
        retraction=draw(WISHES),
        parallel=Parallel(tp_size=draw(st.integers(1, 4))),
        largest_request_tokens=draw(st.integers(0, 2000)),
        prefetch_threshold_tokens=draw(st.integers(0, 600)),
    )


@st.composite
def nodes(draw: st.DrawFn) -> NodeFacts:
    budget = draw(st.one_of(st.integers(0, 1 << 20), st.integers(1 << 20, 1 << 28)))
    holders = (BudgetHolder("other", draw(st.integers(0, budget))),)
    live = draw(st.dictionaries(st.sampled_from(["kv", "swa", "mamba", "c4"]), st.integers(1, 50)))
    return NodeFacts(
        budget, holders=holders, store_configured=draw(st.booleans()), live_read_slots=draw(st.sampled_from([{}, live]))
    )


@settings(max_examples=500, deadline=None)
@given(plausible(), nodes())
def test_a_grant_obeys_the_invariants_and_the_budget(stack: Stack, facts: NodeFacts) -> None:
    grant = evaluate(stack, facts).grant
    if grant is None:
        return
    sizes = {p.pool: p for p in grant.pools}
    charged = 0
    for pool in stack.pools:
        granted = sizes[pool.name]
        live = facts.live_read_slots.get(pool.name, 0)
        charged += (granted.write_slots + granted.hold_slots + max(0, granted.read_slots - live)) * granted.stride
        assert granted.stride % SLOT_ALIGNMENT == 0
        assert granted.stride >= pool.page_bytes
        assert granted.write_slots >= max(1, pool.window_pages)
        assert granted.read_slots >= granted.reserve_slots >= max(1, pool.window_pages)
        if pool.window_pages:
            assert granted.reserve_slots >= granted.read_slots // 10
        if grant.mode is Mode.CACHE:
            assert granted.read_slots > granted.reserve_slots
        if pool.is_sidecar:
            source = sizes[pool.indices_from_pool]
            assert (granted.write_slots, granted.read_slots) == (source.write_slots, source.read_slots)
        if live and not pool.is_sidecar:
            assert granted.read_slots == live
    assert charged <= facts.free_bytes
    assert grant.retraction is not Retraction.HOST_POOL or all(p.hold_slots > 0 for p in grant.pools)


@settings(max_examples=300, deadline=None)
@given(plausible(), st.sampled_from(Mode))
def test_an_ask_is_kept_exactly_or_raised_to_the_least(stack: Stack, mode: Mode) -> None:
    sizing = size_pools(stack, NodeFacts(1 << 40), mode, holds=False)
    for pool in sizing.pools:
        if pool.asked_slots and not pool.shared:
            assert pool.slots == max(pool.asked_slots, pool.least_slots)
    arenas = [p for p in sizing.pools if p.shared and p.source == p.pool]
    asked = sum(p.asked_slots * p.stride for p in arenas)
    least = sum(p.least_slots * p.stride for p in arenas)
    assert sum(p.slots * p.stride for p in arenas) <= max(asked, least)


@settings(max_examples=200, deadline=None)
@given(plausible(), nodes())
def test_sizes_are_the_same_each_time_and_for_each_rank(stack: Stack, facts: NodeFacts) -> None:
    other = replace(stack, parallel=replace(stack.parallel, tp_rank=stack.parallel.tp_size - 1))
    for mode in Mode:
        assert size_pools(stack, facts, mode) == size_pools(other, facts, mode)


@settings(max_examples=200, deadline=None)
@given(plausible(), nodes())
def test_what_would_fit_does_fit(stack: Stack, facts: NodeFacts) -> None:
    for mode in Mode:
        sizing = size_pools(stack, facts, mode)
        fitted = sizing.fitted()
        if fitted is None:
            assert sizing.least_bytes > facts.free_bytes
        else:
            assert fitted.charged_bytes <= facts.free_bytes


def _counted(stack: Stack, facts: NodeFacts) -> tuple[Counter[tuple[str, Mode | None]], Verdict]:
    """Evaluate with every row wrapped in a counter of its calls by mode."""
    calls: Counter[tuple[str, Mode | None]] = Counter()

    def wrapped(rule: Rule) -> Rule:
        def check(ctx: Context) -> list[Finding]:
            calls[rule.id, ctx.mode] += 1
            return list(rule.check(ctx))

        return replace(rule, check=check)

    with mock.patch.object(verdict, "RULES", tuple(wrapped(rule) for rule in RULES)):
        return calls, evaluate(stack, facts, ProtocolRanges())


@settings(max_examples=150, deadline=None)
@given(plausible(), nodes())
def test_every_row_is_evaluated_for_every_mode_asked_for(stack: Stack, facts: NodeFacts) -> None:
    calls, _ = _counted(stack, facts)
    modes = {wish.mode for wish in stack.modes}
    expected: set[tuple[str, Mode | None]] = set()
    for rule in RULES:
        if rule.applies is Applies.STACK:
            expected.add((rule.id, None))
        elif rule.applies is Applies.BUFFER_ONLY:
            expected |= {(rule.id, m) for m in modes if m is Mode.BUFFER_ONLY}
        elif rule.applies is Applies.EACH_MODE or stack.retraction.retraction is Retraction.HOST_POOL:
            expected |= {(rule.id, m) for m in modes}
    assert calls == Counter(dict.fromkeys(expected, 1))
