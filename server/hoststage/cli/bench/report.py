"""Rows as people read them: the targets first, then every measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoststage.cli.bench.rows import Kind, Row

_COLOURS = {True: "green", False: "red", None: "yellow"}


def machine_line() -> str:
    """Return what the figures were measured on: cores, load, kernel."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} × {cpu}, load {load:.1f} at the start, Linux {platform.release()}, Python {platform.python_version()}"


def print_report(out: Console, rows: Sequence[Row]) -> None:
    """Print both tables, and what was not measured."""
    if not out.is_terminal:
        out = Console(file=out.file, width=200)
    if any(row.kind is Kind.TARGET for row in rows):
        out.print(targets(rows))
    out.print(measurements(rows))
    for row in rows:
        if row.kind is Kind.SKIPPED:
            out.print(Text(f"{row.case}: {row.subject}: {row.note}", style="yellow"))
        elif row.kind is Kind.MACHINE:
            out.print(Text(row.note))


def targets(rows: Sequence[Row]) -> Table:
    """Return the table of targets."""
    table = Table(title="targets", title_justify="left")
    for name in ("case", "what", "measured", "target", "met", "note"):
        table.add_column(name, justify="right" if name in ("measured", "target") else "left")
    for row in rows:
        if row.kind is Kind.TARGET:
            met = {True: "yes", False: "no", None: "?"}[row.met]
            cells = (
                row.case,
                row.operation,
                f"{_number(row.value)} {row.unit}",
                f"{row.relation} {_number(row.bound)}",
            )
            table.add_row(*cells, Text(met, style=_COLOURS[row.met]), row.note)
    return table


def measurements(rows: Sequence[Row]) -> Table:
    """Return the table of everything measured: product, ceilings and peers."""
    table = Table(
        title="measurements (p50, p95, p99 of one call in µs; CPU in core-seconds a GB)", title_justify="left"
    )
    names = (
        "case",
        "subject",
        "operation",
        "shape",
        "GB/s",
        "pages/s",
        "p50",
        "p95",
        "p99",
        "noise",
        "CPU d",
        "CPU c",
        "copies",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("case", "subject", "operation", "shape") else "right")
    for row in rows:
        if row.kind in (Kind.TARGET, Kind.SKIPPED, Kind.MACHINE):
            continue
        table.add_row(
            row.case,
            Text(row.subject, style="" if row.kind is Kind.PRODUCT else "cyan"),
            row.operation,
            shape_text(row),
            *map(_number, (row.gb_per_s, row.pages_per_s, row.p50_us, row.p95_us, row.p99_us)),
            f"{row.noise:.0%}" if row.noise is not None else "",
            *map(_number, (row.daemon_cpu_s_per_gb, row.client_cpu_s_per_gb, row.copies_per_page)),
        )
    return table


def shape_text(row: Row) -> str:
    """Return the parameters of a row in short."""
    size = row.page_bytes or 0
    pages = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
    parts = [f"{pages} × {row.batch}"]
    if (row.pools or 1) > 1:
        parts.append(f"{row.pools} pools")
    if (row.sessions or 1) > 1:
        parts.append(f"{row.sessions} sessions")
    parts += [value for value in (row.mode, row.path, row.store) if value]
    return ", ".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
