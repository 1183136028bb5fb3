"""The command line of the benchmark, its report and its plots."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hoststage.cli.bench import registry
from hoststage.cli.bench.cases_sweep import shapes, sweep
from hoststage.cli.bench.command import run, size_of
from hoststage.cli.bench.peers import PeerAbsent, foreign, redis
from hoststage.cli.bench.process import BenchError
from hoststage.cli.bench.registry import Case
from hoststage.cli.bench.report import print_report, shape_text
from hoststage.cli.bench.rig import Rig, Settings
from hoststage.cli.bench.rows import Kind, Shape, at_least, measured, skipped
from hoststage.cli.main import app


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.mark.parametrize(("text", "size"), [("16KiB", 16384), ("1MiB", 1 << 20), ("4096", 4096), ("2 GiB", 2 << 30)])
def test_sizes_are_read_as_people_write_them(text: str, size: int):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1KiB", "0", "1.5MiB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(typer.BadParameter, match="is no size"):
        size_of(text)


def test_the_list_names_every_case():
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in registry.CASES)


@pytest.mark.parametrize(
    "arguments",
    [["--case", "speed"], ["--mode", "fast"], ["--path", "wire"], ["--store", "s3"], ["--address", "host:1"]],
)
def test_unusable_options_end_with_status_2(arguments: list[str]):
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2


def test_a_case_that_fails_is_a_row_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch):
    def broken(rig: Rig) -> None:
        """Breaks."""
        raise BenchError("no such luck")

    def whole(rig: Rig) -> None:
        """Works."""
        rig.add(measured(Kind.CEILING, "whole", "memcpy", "copy", Shape(), [0.1]))

    cases = {c.name: c for c in (Case("broken", broken, 0), Case("whole", whole, 0))}
    monkeypatch.setattr(registry, "CASES", cases)
    rows = run(Settings(), ["broken", "whole"], quiet())
    assert [r.kind for r in rows] == [Kind.SKIPPED, Kind.CEILING, Kind.MACHINE]
    assert "no such luck" in rows[0].note


def test_a_quick_run_leaves_out_what_two_minutes_cannot_hold(monkeypatch: pytest.MonkeyPatch):
    def never(rig: Rig) -> None:
        """Takes long."""
        raise AssertionError("it ran")

    monkeypatch.setattr(registry, "CASES", {"long": Case("long", never, 500.0)})
    rows = run(Settings(quick=True), ["long"], quiet())
    assert rows[0].kind is Kind.SKIPPED
    assert "--case long" in rows[0].note


def test_the_sweep_measures_every_combination_that_is_asked_for():
    rig = Rig(Settings(page_sizes=(16384, 65536), batches=(1, 128), pools=(1, 8), paths=("shm", "inline")))
    found = list(shapes(rig))
    assert len(set(found)) == len(found) == 16
    assert Shape(65536, 128, 8, path="inline") in found


def test_the_sweep_of_all_axes_covers_16_kib_to_16_mib_on_both_paths():
    found = list(shapes(Rig(Settings())))
    for path in ("shm", "inline"):
        sizes = {s.page_bytes for s in found if s.path == path}
        assert {16 << 10, 16 << 20} <= sizes


def test_the_sweep_says_what_it_cannot_measure():
    rig = Rig(Settings(page_sizes=(16 << 20,), batches=(128,), modes=("cache",), stores=("none",)))
    sweep(rig)
    rig2 = Rig(Settings(modes=("buffer_only",), stores=("none",)))
    sweep(rig2)
    assert "raise --memory" in rig.rows[0].note
    assert "needs a store" in rig2.rows[0].note


def test_the_report_shows_targets_figures_and_what_is_missing():
    rows = [
        measured(Kind.PRODUCT, "c", "hoststage", "store", Shape(page_bytes=65536, pools=2, sessions=3), [0.01]),
        at_least("c", "store over memcpy", 0.5, 0.85),
        skipped("peers", "Mooncake's client", "no CUDA"),
    ]
    out = io.StringIO()
    print_report(Console(file=out), rows)
    text = out.getvalue()
    for wanted in ("store over memcpy", "0.85", "Mooncake's client", "not measured: no CUDA", "64 KiB × 1"):
        assert wanted in text
    assert shape_text(rows[0]) == "64 KiB × 1, 2 pools, 3 sessions, buffer_only, shm, memory:"


def test_a_peer_that_is_not_installed_says_what_would_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PeerAbsent, match="apt-get install redis-server"):
        redis.RedisPeer()
    monkeypatch.setattr(foreign, "_CACHES", ())
    monkeypatch.delenv(foreign.SGLANG_PYTHON, raising=False)
    with pytest.raises(PeerAbsent, match="run tools"):
        foreign.open_sglang(None)
    monkeypatch.delenv(foreign.LMCACHE_PYTHON, raising=False)
    with pytest.raises(PeerAbsent, match="run tools"):
        foreign.open_lmcache("zmq")
    monkeypatch.delenv(foreign.MOONCAKE_PYTHON, raising=False)
    with pytest.raises(PeerAbsent, match="run tools"):
        foreign.open_mooncake("shm")


def test_a_foreign_peer_that_breaks_tells_its_last_words(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(foreign.SGLANG_PYTHON, "/bin/false")
    with pytest.raises(PeerAbsent, match="did not start"):
        foreign.open_sglang(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plots_are_written_for_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    from hoststage.cli.bench.plots import draw

    rows = [
        measured(Kind.PRODUCT, "sweep", "hoststage", "load into memory", Shape(page_bytes=size), [0.01, 0.02])
        for size in (16384, 65536)
    ]
    files = draw(rows, tmp_path / "plots")
    assert sorted(f.name for f in files) == ["throughput-by-page-size.png", "throughput-by-page-size.svg"]
    assert all(f.stat().st_size > 1000 for f in files)
    assert draw([], tmp_path / "none") == []
