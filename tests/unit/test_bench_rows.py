"""Figures of the benchmark: percentiles, ratios, targets, costs."""

from __future__ import annotations

import json

import pytest

from hoststage.cli.bench.cases_scale import rise
from hoststage.cli.bench.process import BenchError
from hoststage.cli.bench.rig import in_turns, ratio
from hoststage.cli.bench.rows import (
    Costs,
    Kind,
    Shape,
    at_least,
    at_most,
    measured,
    noise_of,
    percentile,
    skipped,
)


def test_percentiles_take_the_nearest_rank():
    samples = [float(i) for i in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_noise_is_the_spread_over_the_median():
    assert noise_of([1.0] * 9) == 0.0
    assert noise_of([1.0, 2.0, 3.0, 4.0]) == pytest.approx((3 - 1) / 2)


def test_a_row_holds_throughput_latency_and_costs_of_the_bytes_moved():
    shape = Shape(page_bytes=1_000_000, batch=5, pools=2)
    costs = Costs(daemon_cpu_seconds=0.2, client_cpu_seconds=0.1, daemon_copies=1.0, client_copies=1.0)
    row = measured(Kind.PRODUCT, "c", "hoststage", "store", shape, [0.01, 0.02, 0.01], costs)
    assert row.gb_per_s == pytest.approx(1.0)  # 10 MB in 10 ms
    assert row.pages_per_s == pytest.approx(1000)
    assert (row.p50_us, row.p99_us) == (10_000, 20_000)
    assert row.daemon_cpu_s_per_gb == pytest.approx(0.2 / 0.03, rel=1e-3)
    assert row.copies_per_page == 2.0
    assert json.loads(json.dumps(row.to_json()))["kind"] == "product"


def test_ceilings_and_peers_claim_no_mode_path_or_store_of_ours():
    row = measured(Kind.PEER, "c", "Redis", "load", Shape(), [0.1])
    assert (row.mode, row.path, row.store) == (None, None, None)


def test_targets_are_met_on_the_right_side_of_their_bound():
    assert at_least("c", "w", 0.85, 0.85).met
    assert at_least("c", "w", 0.84, 0.85).met is False
    assert at_most("c", "w", 8.0, 8).met
    assert at_most("c", "w", 8.1, 8).met is False


def test_what_was_not_measured_says_why():
    assert skipped("peers", "Redis", "there is none").note == "not measured: there is none"


def test_a_ratio_is_the_median_over_rounds_so_one_disturbed_round_does_not_count():
    quiet, disturbed = [1.0, 1.0], [50.0, 50.0]
    assert ratio([*quiet, *disturbed, *quiet], [0.5] * 6, rounds=3) == pytest.approx(2.0)
    with pytest.raises(BenchError):
        ratio([], [1.0], 1)


def test_subjects_take_turns_and_warm_rounds_do_not_count():
    seen: list[str] = []

    def call(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    times = in_turns({"a": lambda: call("a"), "b": lambda: call("b")}, rounds=2, calls=2, warm=1)
    assert "".join(seen) == "aabbbbaaaabb"
    assert {name: len(found) for name, found in times.items()} == {"a": 4, "b": 4}
    assert min(times["b"]) == 5.0  # the first round was warming up


def test_the_rise_of_a_cost_ignores_what_falls():
    assert rise([10.0, 5.0, 2.0, 2.2]) == pytest.approx(1.1)
    assert rise([4.0, 3.0, 2.0]) == 1.0
    with pytest.raises(BenchError):
        rise([])
