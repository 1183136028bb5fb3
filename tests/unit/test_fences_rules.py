"""Every row of the table fails on the wrong side of its boundary and passes on the right one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from tests.unit.fences_stacks import (
    AUX,
    BUFFER,
    C4,
    CACHE,
    HOLDS,
    INDEXER,
    KV,
    MAMBA,
    PAGE,
    RING,
    SWA,
    W,
    found,
    node,
    stack,
)

from hoststage.core.fences import RULES, ProtocolRanges, evaluate
from hoststage.core.findings import NodeFacts, RefusalKind, Severity
from hoststage.core.stack import (
    HitPolicy,
    Parallel,
    PayloadPath,
    Placement,
    Retraction,
    RetractionWish,
    Role,
    Stack,
    WritePolicy,
)

SWA_ALONE = replace(SWA, host_slots=0)
SHARED = replace(SWA, shares_arena_with="kv")
"""With `KV` in one arena one transfer is 4 window pages and 4 full pages of 4 KiB, so the arena needs 16 slots."""


@dataclass(frozen=True)
class Case:
    """One boundary: what is on the wrong side, how severe that is, and the same stack on the right side."""

    rule: str
    what: str
    wrong: Stack
    right: Stack
    severity: Severity = Severity.REFUSED
    kind: RefusalKind = RefusalKind.FAILED_PRECONDITION
    wrong_node: NodeFacts = field(default_factory=node)
    right_node: NodeFacts | None = None
    wrong_protocol: ProtocolRanges | None = None


REFUSED, ADJUSTED, NOTICE = Severity.REFUSED, Severity.ADJUSTED, Severity.NOTICE
BAD, EXHAUSTED = RefusalKind.INVALID_ARGUMENT, RefusalKind.RESOURCE_EXHAUSTED
UNSUPPORTED = RefusalKind.UNIMPLEMENTED
TIGHT_SWA = node((16 + 2 * W - 1) * PAGE)
"""Room for 16 slots of `KV` and one slot less than two windows."""


def geometry(what: str, **changes: object) -> Case:
    return Case("POOL_GEOMETRY", what, stack(replace(KV, **changes)), stack(KV), kind=BAD)  # type: ignore[arg-type]


def holding(tokens: int, host_slots: int = 16, **wish: bool) -> Stack:
    pool = replace(KV, host_slots=host_slots)
    return stack(pool, largest_request_tokens=tokens, retraction=RetractionWish(Retraction.HOST_POOL, **wish))


CASES = [
    Case(
        "PROTOCOL",
        "no common version",
        stack(),
        stack(),
        wrong_protocol=ProtocolRanges(client_min=1, client_max=2, server_min=3, server_max=4),
    ),
    Case(
        "PROTOCOL",
        "no common path",
        stack(paths=(PayloadPath.IMPORTED,)),
        stack(paths=(PayloadPath.IMPORTED,)),
        kind=UNSUPPORTED,
        wrong_node=node(paths=(PayloadPath.SHM, PayloadPath.INLINE)),
        right_node=node(),
    ),
    geometry("page_bytes 0", page_bytes=0),
    geometry("page_tokens 0", page_tokens=0),
    geometry("layers 0", layers=0),
    geometry("negative window", sliding_window=-1),
    geometry("negative ask", host_slots=-1),
    geometry("bad name", name="KV/.."),
    geometry("pieces that do not sum", pieces=(4000, 95)),
    geometry("groups of nothing", hit_policy=HitPolicy.BLOCK_GROUPS),
    Case("POOL_GEOMETRY", "no pool", stack(replace(KV, placement=Placement.DEVICE_ONLY)), stack(), kind=BAD),
    Case("POOL_GEOMETRY", "no mode", stack(modes=()), stack(), kind=BAD),
    Case("POOL_GEOMETRY", "two of a name", stack(KV, KV), stack(KV, replace(KV, name="kv2")), kind=BAD),
    Case("POOL_GEOMETRY", "SWA without window", stack(KV, replace(SWA, sliding_window=0)), stack(KV, SWA), kind=BAD),
    Case(
        "POOL_GEOMETRY",
        "fewer trailing pages than the window has",
        stack(KV, replace(SWA, trailing_pages=W - 1)),
        stack(KV, replace(SWA, trailing_pages=W)),
        kind=BAD,
    ),
    Case(
        "POOL_GEOMETRY",
        "page bytes of a live namespace",
        stack(),
        stack(),
        kind=BAD,
        wrong_node=node(live_page_bytes={"kv": PAGE + 1}),
        right_node=node(live_page_bytes={"kv": PAGE}),
    ),
    Case(
        "POOL_GEOMETRY",
        "rank out of range",
        stack(parallel=Parallel(tp_rank=2, tp_size=2)),
        stack(parallel=Parallel(tp_rank=1, tp_size=2)),
        kind=BAD,
    ),
    Case("POOL_GEOMETRY", "negative request", stack(largest_request_tokens=-1), stack(), kind=BAD),
    Case(
        "PIN_REQUIRED",
        "resident is not pinned",
        stack(requires_pinned=True),
        stack(requires_pinned=True),
        wrong_node=node(pinned="resident", memlock_bytes=8 << 20),
        right_node=node(pinned="mlock"),
    ),
    Case(
        "PIN_REQUIRED",
        "only where it is required",
        stack(requires_pinned=True),
        stack(),
        wrong_node=node(pinned="none"),
    ),
    Case("SIDECAR_MAPPING_INCOMPLETE", "no source", stack(SWA, INDEXER), stack(KV, SWA, INDEXER), kind=BAD),
    Case(
        "SIDECAR_MAPPING_INCOMPLETE",
        "the sidecar has no host pool",
        stack(KV, replace(INDEXER, placement=Placement.DEVICE_ONLY)),
        stack(KV, INDEXER),
        kind=BAD,
    ),
    Case(
        "SIDECAR_MAPPING_INCOMPLETE",
        "the source is a device-only ring",
        stack(KV, RING, replace(INDEXER, indices_from_pool="swa"), modes=CACHE),
        stack(KV, SWA, replace(INDEXER, indices_from_pool="swa", host_slots=2 * W), modes=CACHE),
        kind=BAD,
    ),
    Case(
        "SIDECAR_MAPPING_INCOMPLETE",
        "a circle",
        stack(KV, replace(C4, indices_from_pool="indexer"), replace(INDEXER, indices_from_pool="deepseek_v4_c4")),
        stack(KV, replace(C4, indices_from_pool="indexer"), INDEXER),
        kind=BAD,
    ),
    Case(
        "SIDECAR_SMALLER_THAN_SOURCE",
        "one slot less",
        stack(KV, replace(INDEXER, host_slots=15)),
        stack(KV, replace(INDEXER, host_slots=16)),
        kind=BAD,
    ),
    Case(
        "SIDECAR_SMALLER_THAN_SOURCE",
        "a live sidecar one slot less",
        stack(KV, INDEXER),
        stack(KV, INDEXER),
        kind=BAD,
        wrong_node=node(live_read_slots={"kv": 8, "indexer": 7}),
        right_node=node(live_read_slots={"kv": 8, "indexer": 8}),
    ),
    Case(
        "DCP_UNSUPPORTED",
        "a shard that does not say which it is",
        stack(parallel=Parallel(dcp_rank=None, dcp_size=2)),
        stack(parallel=Parallel(dcp_rank=1, dcp_size=2)),
        kind=UNSUPPORTED,
    ),
    Case(
        "DCP_UNSUPPORTED",
        "a single shard",
        stack(parallel=Parallel(dcp_rank=None, dcp_size=2)),
        stack(parallel=Parallel(dcp_rank=None)),
        kind=UNSUPPORTED,
    ),
    Case(
        "STORE_REQUIRED",
        "no store",
        stack(),
        stack(),
        wrong_node=node(store_configured=False),
        right_node=node(store_configured=True),
    ),
    Case(
        "STORE_REQUIRED",
        "cache needs none",
        stack(),
        stack(modes=CACHE),
        wrong_node=node(store_configured=False),
        right_node=node(store_configured=False),
    ),
    Case("SWA_POOL_REQUIRED", "unified_kv ring", stack(KV, RING), stack(KV, SWA), kind=UNSUPPORTED),
    Case("SWA_POOL_REQUIRED", "cache needs none", stack(KV, RING), stack(KV, RING, modes=CACHE), kind=UNSUPPORTED),
    Case(
        "SWA_POOL_TOO_SMALL",
        "a page less than two windows, no room to grow",
        stack(KV, replace(SWA, host_slots=2 * W - 1)),
        stack(KV, SWA),
        kind=EXHAUSTED,
        wrong_node=TIGHT_SWA,
        right_node=node((16 + 2 * W) * PAGE),
    ),
    Case(
        "SWA_POOL_TOO_SMALL",
        "a page less than two windows, grown",
        stack(KV, replace(SWA, host_slots=2 * W - 1)),
        stack(KV, SWA),
        severity=ADJUSTED,
    ),
    Case(
        "AUXILIARY_SWA",
        "a second ring",
        stack(KV, SWA, replace(RING, name="aux_swa")),
        stack(KV, SWA, AUX),
        kind=UNSUPPORTED,
    ),
    Case(
        "AUXILIARY_SWA",
        "a page less than two windows, grown",
        stack(KV, SWA, replace(AUX, host_slots=2 * W - 1)),
        stack(KV, SWA, AUX),
        severity=ADJUSTED,
    ),
    Case(
        "AUXILIARY_SWA",
        "a page less than two windows, no room to grow",
        stack(KV, SWA, replace(AUX, host_slots=2 * W - 1)),
        stack(KV, SWA, AUX),
        kind=EXHAUSTED,
        wrong_node=node((16 + 4 * W - 1) * PAGE),
        right_node=node((16 + 4 * W) * PAGE),
    ),
    Case(
        "SHARED_ARENA_TOO_SMALL",
        "a slot less than two transfers, no room to grow",
        stack(replace(KV, host_slots=10), replace(SHARED, host_slots=5)),
        stack(replace(KV, host_slots=10), replace(SHARED, host_slots=6)),
        kind=EXHAUSTED,
        wrong_node=node(15 * PAGE),
        right_node=node(16 * PAGE),
    ),
    Case(
        "SHARED_ARENA_TOO_SMALL",
        "a slot less than two transfers, grown",
        stack(replace(KV, host_slots=10), replace(SHARED, host_slots=5)),
        stack(replace(KV, host_slots=10), replace(SHARED, host_slots=6)),
        severity=ADJUSTED,
    ),
    Case(
        "SIDECAR_UNSUPPORTED",
        "a client that cannot",
        stack(KV, INDEXER, maps_sidecars=False),
        stack(KV, INDEXER),
        kind=UNSUPPORTED,
    ),
    Case(
        "SIDECAR_UNSUPPORTED",
        "no sidecar",
        stack(KV, INDEXER, maps_sidecars=False),
        stack(KV, maps_sidecars=False),
        kind=UNSUPPORTED,
    ),
    Case(
        "MAMBA_STATE_UNSUPPORTED",
        "no host pool",
        stack(KV, replace(MAMBA, placement=Placement.DEVICE_ONLY)),
        stack(KV, MAMBA),
        kind=UNSUPPORTED,
    ),
    Case(
        "MAMBA_STATE_UNSUPPORTED",
        "not handed over",
        stack(KV, MAMBA, hands_over_state=False),
        stack(KV, MAMBA),
        kind=UNSUPPORTED,
    ),
    Case("WRITE_BACK_RESOLVED", "write_back", stack(write_policy=WritePolicy.WRITE_BACK), stack(), severity=ADJUSTED),
    Case("DECODE_ROLE", "decode", stack(role=Role.DECODE), stack(role=Role.PREFILL), severity=NOTICE),
    Case(
        "POOL_TOO_SMALL",
        "one slot cannot stage both ways",
        stack(replace(KV, host_slots=1)),
        stack(replace(KV, host_slots=2)),
        severity=ADJUSTED,
    ),
    Case(
        "POOL_TOO_SMALL",
        "two spans of the prefetch threshold, no room to grow",
        stack(replace(KV, host_slots=7), prefetch_threshold_tokens=256),
        stack(replace(KV, host_slots=8), prefetch_threshold_tokens=256),
        kind=EXHAUSTED,
        wrong_node=node(7 * PAGE),
        right_node=node(8 * PAGE),
    ),
    Case(
        "POOL_TOO_SMALL",
        "cache needs a third window",
        stack(KV, replace(SWA, host_slots=3 * W - 1), modes=CACHE),
        stack(KV, replace(SWA, host_slots=3 * W), modes=CACHE),
        severity=ADJUSTED,
    ),
    Case(
        "POOL_TOO_SMALL",
        "a live read arena below one span",
        stack(prefetch_threshold_tokens=256),
        stack(prefetch_threshold_tokens=256),
        wrong_node=node(live_read_slots={"kv": 3}),
        right_node=node(live_read_slots={"kv": 4}),
    ),
    Case(
        "BUDGET",
        "a byte short",
        stack(),
        stack(),
        kind=EXHAUSTED,
        wrong_node=node(16 * PAGE - 1),
        right_node=node(16 * PAGE),
    ),
    Case(
        "RETRACTION_PATH",
        "bytes in messages",
        replace(holding(64), paths=(PayloadPath.INLINE, PayloadPath.SHM)),
        replace(holding(64), paths=(PayloadPath.SHM, PayloadPath.INLINE)),
    ),
    Case(
        "RETRACTION_PATH",
        "memory of the client's own",
        replace(holding(64), paths=(PayloadPath.IMPORTED, PayloadPath.SHM)),
        replace(holding(64), paths=(PayloadPath.SHM, PayloadPath.IMPORTED)),
    ),
    Case(
        "RETRACTION_MAMBA",
        "recurrent state",
        stack(KV, MAMBA, retraction=HOLDS, largest_request_tokens=64),
        holding(64),
        kind=UNSUPPORTED,
    ),
    Case(
        "RETRACTION_PURE_SWA",
        "windows only",
        stack(SWA, retraction=HOLDS, largest_request_tokens=64),
        stack(KV, SWA, retraction=HOLDS, largest_request_tokens=64),
    ),
    Case(
        "RETRACTION_STACK",
        "a ring",
        stack(KV, RING, retraction=HOLDS, largest_request_tokens=64, modes=CACHE),
        stack(KV, SWA, retraction=HOLDS, largest_request_tokens=64, modes=CACHE),
    ),
    Case(
        "RETRACTION_STACK",
        "a smaller sidecar",
        stack(KV, replace(INDEXER, host_slots=15), retraction=HOLDS, largest_request_tokens=64),
        stack(KV, INDEXER, retraction=HOLDS, largest_request_tokens=64),
    ),
    Case("RETRACTION_CAPACITY", "an unknown request", holding(0), holding(1), kind=BAD),
    Case(
        "RETRACTION_CAPACITY", "15 pages of 16, two for staging", holding(15 * 64), holding(14 * 64), severity=ADJUSTED
    ),
    Case(
        "RETRACTION_CAPACITY", "a token into the next page", holding(14 * 64 + 1), holding(14 * 64), severity=ADJUSTED
    ),
    Case(
        "RETRACTION_CAPACITY",
        "no room to grow",
        holding(15 * 64),
        holding(14 * 64),
        kind=EXHAUSTED,
        wrong_node=node(16 * PAGE),
    ),
    Case(
        "RETRACTION_CAPACITY",
        "two requests",
        holding(8 * 64, concurrent_receive=True),
        holding(7 * 64, concurrent_receive=True),
        severity=ADJUSTED,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.rule}: {c.what}")
def test_a_row_fails_on_the_wrong_side_only(case: Case) -> None:
    wrong = evaluate(case.wrong, case.wrong_node, case.wrong_protocol)
    hits = [f for f in found(wrong, case.rule) if f.severity is case.severity]
    assert hits, f"{case.rule} did not answer {case.severity.value}: {wrong.findings}"
    assert all(f.kind is case.kind for f in hits) or case.severity is not REFUSED
    holds_only = case.rule.startswith("RETRACTION")
    assert wrong.refused is (case.severity is REFUSED and not holds_only) or case.rule == "RETRACTION_STACK"

    right = evaluate(case.right, case.right_node or case.wrong_node)
    assert not found(right, case.rule), right.findings
    assert right.grant is not None, right.findings


def test_every_row_has_a_boundary_case() -> None:
    assert {rule.id for rule in RULES} == {case.rule for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.rule}: {c.what}")
def test_a_refusal_says_what_was_found_and_what_helps(case: Case) -> None:
    verdict = evaluate(case.wrong, case.wrong_node, case.wrong_protocol)
    for finding in verdict.findings:
        assert finding.subject
        assert finding.message.endswith((".", "none")), finding
        assert finding.remedy or finding.severity is NOTICE, finding


def test_exactly_two_windows_are_one_to_write_and_one_reserved() -> None:
    verdict = evaluate(stack(KV, SWA), node((16 + 2 * W) * PAGE))
    assert verdict.grant is not None
    swa = verdict.grant.pools[1]
    assert (swa.write_slots, swa.read_slots, swa.reserve_slots) == (W, W, W)
    assert not verdict.findings


def test_numbers_of_a_pool_too_small_are_in_the_values() -> None:
    (finding,) = found(evaluate(stack(KV, replace(SWA, host_slots=7)), TIGHT_SWA), "SWA_POOL_TOO_SMALL")
    assert finding.values["asked_tokens"] == 7 * 64
    assert finding.values["needed_tokens"] == 8 * 64
    assert "448 tokens" in finding.message
    assert "512 tokens" in finding.message


def test_a_mode_without_its_sizes_does_not_hide_the_other_rows() -> None:
    bad = stack(KV, RING, replace(INDEXER, host_slots=3), write_policy=WritePolicy.WRITE_BACK, modes=BUFFER)
    rules = {f.rule for f in evaluate(bad, node(PAGE, store_configured=False)).findings}
    assert rules == {
        "SIDECAR_SMALLER_THAN_SOURCE",
        "STORE_REQUIRED",
        "SWA_POOL_REQUIRED",
        "WRITE_BACK_RESOLVED",
        "BUDGET",
    }
