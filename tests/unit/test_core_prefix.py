"""Which prefixes can be restored, against a definition read out loud."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core_support import FULL, KV_BLOCKS, KV_INDEXER, KV_SWA, STACKS, rule

from hoststage.core.prefix import Rules, restorable, rules_of
from hoststage.core.stack import HitPolicy, Identity, Pool, PoolKind, Stack

PAGES = st.sampled_from([None, b"1", b"1", b"1", b"2"])


def restorable_by_definition(rules: Rules, present: list[list[bytes | None]]) -> list[int]:
    """Return every prefix length at which each pool has the pages that its policy asks for."""
    n = len(present[0])
    out = []
    for prefix in range(1, n + 1):
        good = True
        for place, pool in enumerate(rules.pools):
            if pool.policy is HitPolicy.TRAILING_PAGES:
                wanted = range(max(0, prefix - pool.trailing), prefix)
            else:
                wanted = range(prefix)
            if pool.policy is HitPolicy.BLOCK_GROUPS:
                good &= prefix % pool.group == 0
            for i in wanted:
                page = present[place][i]
                good &= page is not None and (pool.source < 0 or page == present[pool.source][i])
        if good:
            out.append(prefix)
    return out


@st.composite
def stacks_and_pages(draw: st.DrawFn) -> tuple[Rules, list[list[bytes | None]]]:
    pools = []
    for i in range(draw(st.integers(1, 3))):
        policy = draw(st.sampled_from(list(HitPolicy)))
        source = draw(st.sampled_from([-1, 0])) if i else -1
        pools.append(
            rule(f"p{i}", policy, trailing=draw(st.integers(1, 4)), group=draw(st.integers(1, 3)), source=source)
        )
    n = draw(st.integers(0, 12))
    return Rules(tuple(pools), 0), [draw(st.lists(PAGES, min_size=n, max_size=n)) for _ in pools]


@settings(max_examples=400, deadline=None)
@given(stacks_and_pages())
def test_every_restorable_length_is_found_and_no_other(case: tuple[Rules, list[list[bytes | None]]]) -> None:
    rules, present = case
    runs = restorable(rules, present)
    assert [n for low, high in runs for n in range(low, high + 1)] == restorable_by_definition(rules, present)
    assert all(low <= high for low, high in runs)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(runs))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(STACKS)),
    st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted),
)
def test_the_pages_of_several_lengths_are_the_union_of_each(stack: str, lengths: list[int]) -> None:
    runs = [(n, n) for n in lengths]
    for pool in STACKS[stack].pools:
        spans = pool.needed_by(runs)
        wanted = {i for n in lengths for i in range(pool.needed(n)[0], sum(pool.needed(n)))}
        assert {i for first, count in spans for i in range(first, first + count)} == wanted
        assert sum(count for _, count in spans) == len(wanted)


def test_a_run_of_lengths_needs_the_trailing_pages_of_its_shortest() -> None:
    swa = KV_SWA.pools[1]
    assert swa.needed(1) == (0, 1)
    assert swa.needed(5) == (3, 2)
    assert swa.needed_by([(2, 3), (6, 8)]) == [(0, 3), (4, 4)]


def test_a_window_longer_than_the_prefix_needs_the_whole_prefix() -> None:
    pages: list[list[bytes | None]] = [[b"1"] * 3, [b"1", None, b"1"]]
    assert restorable(KV_SWA, pages) == [(1, 1)]
    pages[1] = [None, b"1", b"1"]
    assert restorable(KV_SWA, pages) == [(3, 3)]


def test_a_sidecar_of_another_commit_is_no_hit() -> None:
    assert restorable(KV_INDEXER, [[b"1", b"1"], [b"1", b"2"]]) == [(1, 1)]


def test_block_groups_end_at_an_edge() -> None:
    assert restorable(KV_BLOCKS, [[b"1"] * 5, [b"1"] * 5]) == [(2, 2), (4, 4)]


def test_no_keys_are_no_prefix() -> None:
    assert restorable(KV_SWA, [[], []]) == []
    assert restorable(Rules((), 0), []) == []


def test_sidecars_are_stored_before_their_sources_and_the_anchor_last() -> None:
    assert FULL.store_order == [2, 1, 0]
    assert KV_INDEXER.store_order == [1, 0]


def test_a_group_is_a_source_and_its_sidecars() -> None:
    assert [FULL.group_of(i) for i in range(3)] == [[0], [1, 2], [1, 2]]


def test_the_rules_of_a_stack_name_sources_by_place() -> None:
    pools = (
        Pool("indexer", PoolKind.SIDECAR, 100, 16, indices_from_pool="kv"),
        Pool("kv", PoolKind.KV, 5000, 16),
        Pool("swa", PoolKind.SWA, 100, 16, sliding_window=40, hit_policy=HitPolicy.TRAILING_PAGES),
    )
    rules = rules_of(Stack(Identity("m"), pools))
    assert rules.anchor == 1
    assert [p.source for p in rules.pools] == [1, -1, -1]
    assert rules.pools[2].trailing == 3
    assert rules.pools[1].stride == 8192
