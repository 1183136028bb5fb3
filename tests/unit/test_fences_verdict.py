"""The verdict as a client sees it: which mode is granted, with what, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.fences_stacks import (
    BOTH,
    C4,
    C128,
    HOLDS,
    KV,
    MAMBA,
    PAGE,
    RING,
    SWA,
    W,
    found,
    node,
    refusals,
    stack,
)

from hoststage.core.fences import RETRACTION_SUBJECT, evaluate
from hoststage.core.fences.context import in_words
from hoststage.core.findings import BudgetHolder, Severity
from hoststage.core.stack import (
    Mode,
    ModeWish,
    Parallel,
    PayloadPath,
    Placement,
    Retraction,
    RetractionWish,
    WritePolicy,
    namespace_of,
)


def test_unified_kv_asking_buffer_only_alone_is_refused_with_a_remedy() -> None:
    verdict = evaluate(stack(KV, RING), node())
    assert verdict.refused
    (finding,) = found(verdict, "SWA_POOL_REQUIRED")
    assert finding.severity is Severity.REFUSED
    assert finding.subject == "swa"
    assert "unified_kv" in finding.message
    assert "paged" in finding.remedy


def test_unified_kv_asking_buffer_only_then_cache_gets_cache_and_learns_why() -> None:
    verdict = evaluate(stack(KV, RING, modes=BOTH), node())
    assert verdict.grant is not None
    assert verdict.grant.mode is Mode.CACHE
    assert [p.pool for p in verdict.grant.pools] == ["kv"]
    assert refusals(verdict, Mode.BUFFER_ONLY) == {"SWA_POOL_REQUIRED"}
    assert not refusals(verdict, Mode.CACHE)


def test_a_required_mode_that_is_refused_ends_the_list() -> None:
    modes = (ModeWish(Mode.BUFFER_ONLY, required=True), ModeWish(Mode.CACHE))
    verdict = evaluate(stack(KV, RING, modes=modes), node())
    assert verdict.refused
    assert not refusals(verdict, Mode.CACHE)


def test_the_clients_order_decides_and_the_others_are_judged_too() -> None:
    modes = (ModeWish(Mode.CACHE), ModeWish(Mode.BUFFER_ONLY))
    verdict = evaluate(stack(KV, RING, modes=modes), node())
    assert verdict.grant is not None
    assert verdict.grant.mode is Mode.CACHE
    assert refusals(verdict, Mode.BUFFER_ONLY) == {"SWA_POOL_REQUIRED"}


def test_sidecars_of_a_complete_deepseek_v4_stack_get_their_sources_slots() -> None:
    verdict = evaluate(stack(KV, SWA, C4, C128), node())
    assert verdict.grant is not None
    kv, _, c4, c128 = verdict.grant.pools
    for sidecar in (c4, c128):
        assert (sidecar.write_slots, sidecar.read_slots, sidecar.reserve_slots, sidecar.hold_slots) == (
            kv.write_slots,
            kv.read_slots,
            kv.reserve_slots,
            kv.hold_slots,
        )


def test_a_deepseek_v4_stack_without_the_source_names_both() -> None:
    verdict = evaluate(stack(SWA, C4, C128), node())
    assert verdict.refused
    named = {(f.values["sidecar"], f.values["source"]) for f in found(verdict, "SIDECAR_MAPPING_INCOMPLETE")}
    assert named == {("deepseek_v4_c4", "kv"), ("deepseek_v4_c128", "kv")}


def test_a_deepseek_v4_stack_with_a_smaller_sidecar_names_both_and_their_sizes() -> None:
    verdict = evaluate(stack(KV, SWA, replace(C4, host_slots=12), C128), node())
    assert verdict.refused
    (finding,) = found(verdict, "SIDECAR_SMALLER_THAN_SOURCE")
    for word in ("deepseek_v4_c4", "'kv'", "12", "16"):
        assert word in finding.message


def test_a_pure_swa_stack_is_served_without_holds_and_told_the_way() -> None:
    verdict = evaluate(stack(SWA, retraction=HOLDS, largest_request_tokens=640), node())
    assert verdict.grant is not None
    assert verdict.grant.retraction is Retraction.NONE
    (finding,) = found(verdict, "RETRACTION_PURE_SWA")
    assert finding.subject == RETRACTION_SUBJECT
    assert finding.severity is Severity.REFUSED
    assert "window-only" in finding.remedy


def test_window_only_holds_are_granted_on_opt_in() -> None:
    wish = RetractionWish(Retraction.HOST_POOL, window_only=True)
    verdict = evaluate(stack(SWA, retraction=wish, largest_request_tokens=6400), node())
    assert verdict.grant is not None
    assert verdict.grant.retraction is Retraction.HOST_POOL
    assert verdict.grant.window_only_holds
    assert verdict.grant.pools[0].hold_slots == W + 1


def test_window_only_is_not_forced_upon_a_stack_with_full_attention() -> None:
    wish = RetractionWish(Retraction.HOST_POOL, window_only=True)
    verdict = evaluate(stack(KV, SWA, retraction=wish, largest_request_tokens=640), node())
    assert verdict.grant is not None
    assert not verdict.grant.window_only_holds
    assert [p.hold_slots for p in verdict.grant.pools] == [10, W + 1]


def test_mamba_retraction_is_refused_with_the_cpu_tensor_remedy() -> None:
    verdict = evaluate(stack(KV, MAMBA, retraction=HOLDS, largest_request_tokens=640), node())
    assert verdict.grant is not None
    assert verdict.grant.retraction is Retraction.NONE
    assert not any(p.hold_slots for p in verdict.grant.pools)
    (finding,) = found(verdict, "RETRACTION_MAMBA")
    assert "cpu_tensor" in finding.remedy


def test_required_holds_that_are_refused_refuse_the_session() -> None:
    wish = RetractionWish(Retraction.HOST_POOL, required=True)
    assert evaluate(stack(KV, MAMBA, retraction=wish, largest_request_tokens=640), node()).refused


def test_holds_that_do_not_fit_leave_the_mode_as_it_would_be_without_them() -> None:
    wished = stack(KV, retraction=HOLDS, largest_request_tokens=15 * 64)
    verdict = evaluate(wished, node(16 * PAGE))
    plain = evaluate(stack(KV), node(16 * PAGE))
    assert verdict.grant is not None
    assert plain.grant is not None
    assert verdict.grant.retraction is Retraction.NONE
    assert verdict.grant.pools == plain.grant.pools


def test_cpu_tensor_retraction_needs_nothing_of_the_tier() -> None:
    verdict = evaluate(stack(KV, MAMBA, retraction=RetractionWish(Retraction.CPU_TENSOR)), node())
    assert verdict.grant is not None
    assert verdict.grant.retraction is Retraction.CPU_TENSOR
    assert not verdict.findings


def test_budget_says_who_holds_what_and_what_would_fit() -> None:
    holders = (BudgetHolder("session a", 10 * PAGE), BudgetHolder("session b", 2 * PAGE, reclaimable=True))
    facts = node(22 * PAGE, holders=holders)
    verdict = evaluate(stack(KV), facts)
    assert verdict.refused
    (finding,) = found(verdict, "BUDGET")
    assert finding.values["budget_bytes"] == 22 * PAGE
    assert finding.values["committed_bytes"] == 10 * PAGE
    assert finding.values["needed_bytes"] == 16 * PAGE
    assert "session a" in finding.message
    assert "session b" in finding.message
    slots = int(str(finding.values["fits"]).removeprefix("kv "))
    assert 2 <= slots <= 12
    assert evaluate(stack(replace(KV, host_slots=slots)), facts).grant is not None


MIB = 1 << 20


@pytest.mark.parametrize(
    ("budget", "holders", "said"),
    [
        (48 * MIB, (), "of the node's budget of 48.0 MiB, nothing is held and 48.0 MiB are free."),
        (48 * MIB, (BudgetHolder("gone", 0),), "nothing is held and 48.0 MiB are free."),
        (
            48 * MIB,
            (BudgetHolder("session 1 (w)", 40 * MIB), BudgetHolder("namespace a", 8 * MIB)),
            "48.0 MiB are held (session 1 (w): 40.0 MiB, namespace a: 8.0 MiB) and nothing is free.",
        ),
        (
            48 * MIB,
            (BudgetHolder("idle arenas", 10 * MIB, reclaimable=True),),
            "nothing is held and 48.0 MiB are free, 10.0 MiB of them by giving up what nobody uses now "
            "(idle arenas: 10.0 MiB).",
        ),
        (
            48 * MIB,
            (BudgetHolder("old clients", 60 * MIB), BudgetHolder("idle arenas", 10 * MIB, reclaimable=True)),
            "60.0 MiB are held (old clients: 60.0 MiB) and nothing is free.",
        ),
    ],
)
def test_a_refusal_for_room_reads_as_a_sentence(budget: int, holders: tuple[BudgetHolder, ...], said: str) -> None:
    (finding,) = found(evaluate(stack(replace(KV, host_slots=1 << 20)), node(budget, holders=holders)), "BUDGET")
    assert said in finding.message
    assert ("or end a holder" in finding.remedy) is ("are held" in said)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1 << 20, "1.0 MiB"),
        ((1 << 40) - 1, "1023.9 GiB"),
        (1 << 46, "64.0 TiB"),
        (5 << 49, "2.5 PiB"),
    ],
)
def test_sizes_are_said_in_the_largest_unit(size: int, words: str) -> None:
    assert in_words(size) == words


def test_of_two_clients_racing_for_the_last_bytes_one_gets_them() -> None:
    facts = node(24 * PAGE)
    first = evaluate(stack(KV), facts)
    assert first.grant is not None
    held = first.grant.session_bytes + first.grant.namespace_bytes
    second = stack(KV, parallel=Parallel(tp_rank=1, tp_size=2))
    verdict = evaluate(second, replace(facts, holders=(BudgetHolder("first", held),)))
    assert verdict.refused
    (finding,) = found(verdict, "BUDGET")
    assert "first" in finding.message


def test_a_live_namespace_is_shared_and_not_charged_again() -> None:
    first = evaluate(stack(KV), node(16 * PAGE))
    assert first.grant is not None
    reads = {p.pool: p.read_slots for p in first.grant.pools}
    facts = node(24 * PAGE, holders=(BudgetHolder("all of the first", 16 * PAGE),), live_read_slots=reads)
    second = evaluate(stack(KV), facts)
    assert second.grant is not None
    assert second.grant.session_bytes == 8 * PAGE
    assert second.grant.pools[0].read_slots == reads["kv"]


def test_write_back_is_resolved_in_buffer_only_and_kept_in_cache() -> None:
    wished = stack(KV, write_policy=WritePolicy.WRITE_BACK)
    buffer, cache = evaluate(wished, node()), evaluate(replace(wished, modes=(ModeWish(Mode.CACHE),)), node())
    assert buffer.grant is not None
    assert buffer.grant.write_policy is WritePolicy.WRITE_THROUGH
    assert cache.grant is not None
    assert cache.grant.write_policy is WritePolicy.WRITE_BACK


def test_the_path_is_the_clients_first_that_the_daemon_offers() -> None:
    paths = (PayloadPath.IMPORTED, PayloadPath.INLINE, PayloadPath.SHM)
    verdict = evaluate(stack(KV, paths=paths), node())
    assert verdict.grant is not None
    assert verdict.grant.path is PayloadPath.IMPORTED
    without = evaluate(stack(KV, paths=paths), node(paths=(PayloadPath.SHM, PayloadPath.INLINE)))
    assert without.grant is not None
    assert without.grant.path is PayloadPath.INLINE


def test_the_grant_names_the_namespace_of_the_stack() -> None:
    verdict = evaluate(stack(KV), node())
    assert verdict.grant is not None
    assert verdict.grant.namespace == namespace_of(stack(KV))


def test_a_refusal_about_the_stack_as_such_refuses_every_mode() -> None:
    verdict = evaluate(stack(replace(KV, page_bytes=0), modes=BOTH), node())
    assert verdict.refused
    assert {f.mode for f in found(verdict, "POOL_GEOMETRY")} == {None}


def test_device_only_full_attention_is_said_to_be_missing_for_holds() -> None:
    kv = replace(KV, placement=Placement.DEVICE_ONLY)
    verdict = evaluate(stack(kv, SWA, retraction=HOLDS, largest_request_tokens=64), node())
    (finding,) = found(verdict, "RETRACTION_STACK")
    assert finding.values["missing"] == "kv"
