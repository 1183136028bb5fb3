"""Stacks for the tests of fences and sizing: small numbers whose sums are easily done by hand."""

from __future__ import annotations

from dataclasses import replace

from hoststage.core.findings import Finding, NodeFacts, Severity, Verdict
from hoststage.core.stack import (
    HitPolicy,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Placement,
    Pool,
    PoolKind,
    Retraction,
    RetractionWish,
    Stack,
)

PAGE = 4096
GIB = 1 << 30
W = 4
"""Window pages of `SWA`: 250 tokens in pages of 64."""

KV = Pool("kv", PoolKind.KV, page_bytes=PAGE, page_tokens=64, host_slots=16)
SWA = Pool(
    "swa",
    PoolKind.SWA,
    page_bytes=PAGE,
    page_tokens=64,
    sliding_window=250,
    hit_policy=HitPolicy.TRAILING_PAGES,
    host_slots=2 * W,
)
RING = replace(SWA, layout=KvLayout.UNIFIED_KV, placement=Placement.DEVICE_ONLY, host_slots=0)
AUX = replace(SWA, name="aux_swa")
MAMBA = Pool(
    "mamba", PoolKind.MAMBA, page_bytes=3 * PAGE, page_tokens=64, hit_policy=HitPolicy.TRAILING_PAGES, host_slots=2
)
INDEXER = Pool("indexer", PoolKind.SIDECAR, page_bytes=1024, page_tokens=64, indices_from_pool="kv", host_slots=16)
C4 = Pool("deepseek_v4_c4", PoolKind.SIDECAR, page_bytes=2048, page_tokens=64, indices_from_pool="kv")
C128 = Pool(
    "deepseek_v4_c128",
    PoolKind.SIDECAR,
    page_bytes=512,
    page_tokens=64,
    indices_from_pool="kv",
    hit_policy=HitPolicy.BLOCK_GROUPS,
    group_pages=2,
)

BUFFER = (ModeWish(Mode.BUFFER_ONLY),)
CACHE = (ModeWish(Mode.CACHE),)
BOTH = (ModeWish(Mode.BUFFER_ONLY), ModeWish(Mode.CACHE))
HOLDS = RetractionWish(Retraction.HOST_POOL)


def stack(*pools: Pool, modes: tuple[ModeWish, ...] = BUFFER, **changes: object) -> Stack:
    """Return a stack of `pools` that asks for `modes`."""
    base = Stack(Identity(model="m"), pools or (KV,), modes=modes)
    return replace(base, **changes)  # type: ignore[arg-type]


def node(budget: int = GIB, **changes: object) -> NodeFacts:
    """Return a node with a store and `budget` bytes, all free."""
    return replace(NodeFacts(budget_bytes=budget), **changes)  # type: ignore[arg-type]


def found(verdict: Verdict, rule: str, mode: Mode | None = None) -> list[Finding]:
    """Return the findings of one rule, of one mode where it is given."""
    return [f for f in verdict.findings if f.rule == rule and (mode is None or f.mode is mode)]


def refusals(verdict: Verdict, mode: Mode | None = None) -> set[str]:
    """Return the ids of the rules that refuse, of one mode where it is given."""
    return {
        f.rule for f in verdict.findings if f.severity is Severity.REFUSED and (mode is None or f.mode in (mode, None))
    }
