"""Plots of a run: throughput against page size, latency against load. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hoststage.cli.bench.rows import Kind, Row

FORMATS = ("svg", "png")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plots that the rows have data for; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    swept = [r for r in rows if r.kind is Kind.PRODUCT and r.case == "sweep" and r.sessions == 1 and r.pools == 1]
    flat = [r for r in rows if r.kind is Kind.PRODUCT and r.case == "flatness" and r.operation.endswith("by batch")]
    crowds = [
        r
        for r in rows
        if r.kind is Kind.PRODUCT and (r.case == "fairness" or (r.case == "sweep" and (r.sessions or 1) > 1))
    ]
    files: list[Path] = []
    files += _plot(
        folder / "throughput-by-page-size",
        _series(swept, _operation_and_path, lambda r: r.page_bytes, lambda r: r.gb_per_s),
        ("Throughput against page size", "bytes of a page", "GB/s"),
    )
    files += _plot(
        folder / "cost-by-batch",
        _series(flat, lambda r: r.operation.partition(" ")[0], lambda r: r.batch, _cost_of_page),
        ("Cost of a page against batch (64 KiB pages)", "pages of a call", "µs a page"),
    )
    for name, figure in (("p50", lambda r: r.p50_us), ("p99", lambda r: r.p99_us)):
        files += _plot(
            folder / f"latency-by-sessions-{name}",
            _series(crowds, lambda r: r.operation, lambda r: r.sessions, figure),
            (f"Latency ({name}) against load", "sessions at full load", "µs of a call"),
        )
    return files


def _operation_and_path(row: Row) -> str:
    return f"{row.operation}, {row.path}, {row.mode}, {row.store}"


def _cost_of_page(row: Row) -> float | None:
    return None if row.p50_us is None else row.p50_us / (row.batch or 1)


def _series(
    rows: Sequence[Row],
    label: Callable[[Row], str],
    x: Callable[[Row], float | None],
    y: Callable[[Row], float | None],
) -> dict[str, list[tuple[float, float]]]:
    """Return points by label; lines of one point are left out."""
    out: dict[str, dict[float, float]] = {}
    for row in rows:
        at, value = x(row), y(row)
        if at is not None and value is not None:
            out.setdefault(label(row), {})[at] = value
    return {name: sorted(points.items()) for name, points in out.items() if len(points) > 1}


def _plot(stem: Path, series: dict[str, list[tuple[float, float]]], words: tuple[str, str, str]) -> list[Path]:
    if not series:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    for name, points in series.items():
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(words[0])
    axes.set_xlabel(words[1])
    axes.set_ylabel(words[2])
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    files = [stem.with_suffix(f".{kind}") for kind in FORMATS]
    for file in files:
        figure.savefig(file)
    return files
