"""A minimal run of the benchmark, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hoststage.cli.bench.rows import Row
from tests.integration.daemon import Daemon, environment


def bench(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "hoststage.cli.main", "bench", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(150)
def test_a_minimal_run_reports_every_parameter_and_figure_of_each_row():
    rows = bench(
        *("--quick", "--verify", "--case", "lookup_ping", "--case", "sweep"),
        *("--page-size", "16KiB", "--batch", "4", "--sessions", "1", "--sessions", "2"),
    )
    assert all(set(row) == set(Row.__dataclass_fields__) for row in rows)
    kinds = {row["kind"] for row in rows}
    assert kinds == {"product", "ceiling", "target", "machine"}, [r["note"] for r in rows if r["kind"] == "skipped"]
    swept = [r for r in rows if r["case"] == "sweep"]
    assert {r["operation"] for r in swept} == {
        "store to accepted",
        "store to stored",
        "load into memory",
        "load as views",
    }
    assert {r["sessions"] for r in swept} == {1, 2}
    for row in swept:
        assert row["verify"] is True
        assert row["page_bytes"] == 16384
        assert 0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"]
        assert row["gb_per_s"] > 0
        assert row["pages_per_s"] > 0
    stored = next(r for r in swept if r["operation"] == "store to stored" and r["sessions"] == 1)
    assert stored["daemon_copies_per_page"] == 0  # buffer_only over shm: from the client's slot to the store
    assert stored["client_copies_per_page"] == 1
    assert stored["daemon_cpu_s_per_gb"] is not None
    assert stored["client_cpu_s_per_gb"] > 0
    assert stored["daemon_rss_bytes"] > 1 << 20
    target = next(r for r in rows if r["kind"] == "target")
    assert target["met"] is (target["value"] <= target["bound"])
    ping = next(r for r in rows if r["kind"] == "ceiling")
    assert ping["subject"] == "raw ping"


@pytest.mark.timeout(150)
def test_a_daemon_that_runs_already_is_measured_and_left_running(tmp_path):
    daemon = Daemon(tmp_path).start()
    try:
        rows = bench(
            *("--quick", "--address", daemon.address, "--http", daemon.http, "--case", "sweep"),
            *("--page-size", "16KiB", "--batch", "2", "--store", "file"),
        )
        found = [r for r in rows if r["kind"] == "product"]
        assert found, [r["note"] for r in rows]
        assert all(r["daemon_rss_bytes"] for r in found if r["operation"] == "store to stored")
        assert daemon.process is not None
        assert daemon.process.poll() is None
        assert daemon.status()["sessions"] == []
    finally:
        daemon.stop()
