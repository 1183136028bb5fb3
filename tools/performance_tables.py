"""Prints the tables of docs/performance.md from results of the benchmark.

    hoststage bench --json > result.json
    python tools/performance_tables.py result.json [more.json ...]

Of a case that several results have, the last one counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def number(value: float | None) -> str:
    """Return a figure with three digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def targets(rows: Sequence[Row]) -> str:
    """Return what was asked and what was reached."""
    cells = []
    for row in rows:
        if row["kind"] == "target":
            met = {True: "yes", False: "**no**", None: "?"}[row["met"]]
            value, bound = f"{number(row['value'])} {row['unit']}", f"{row['relation']} {number(row['bound'])}"
            cells.append((f"`{row['case']}`", row["operation"], value, bound, met))
    return table(("case", "what", "measured", "target", "met"), cells)


def peers(rows: Sequence[Row]) -> str:
    """Return GB/s of the median call beside every peer."""
    found: dict[tuple[str, int, int], dict[str, str]] = {}
    names: dict[str, None] = {"hoststage": None}
    ours = {
        "store to accepted": "store",
        "store in place": "store in place",
        "load into memory": "load",
        "load as views": "load as views",
    }
    for row in rows:
        if row["case"] != "peers" or row["kind"] not in ("product", "peer"):
            continue
        operation = str(row["operation"])
        if row["kind"] == "product":
            operation = ours.get(operation, operation)
        if row["kind"] == "peer" or row["operation"] in ours:
            names[row["subject"]] = None
            found.setdefault((operation, row["page_bytes"], row["batch"]), {})[row["subject"]] = number(row["gb_per_s"])
    cells = [
        (f"{operation} {size >> 20} MiB × {batch}", *(each.get(name, "") for name in names))
        for (operation, size, batch), each in sorted(found.items(), key=lambda item: item[0][0], reverse=True)
    ]
    return table(("what", *names), cells)


def measurements(rows: Sequence[Row]) -> str:
    """Return every measurement but those beside peers."""
    cells = []
    for row in rows:
        if row["kind"] in ("product", "ceiling", "peer") and row["case"] != "peers":
            noise = f"{row['noise']:.0%}" if row["noise"] is not None else ""
            figures = map(number, (row["gb_per_s"], row["p50_us"], row["p99_us"]))
            cells.append(
                (
                    f"`{row['case']}`",
                    row["subject"],
                    row["operation"],
                    *figures,
                    noise,
                    number(row["daemon_cpu_s_per_gb"]),
                )
            )
    return table(("case", "subject", "operation", "GB/s", "p50 µs", "p99 µs", "noise", "daemon CPU s/GB"), cells)


def main(files: Sequence[str]) -> None:
    """Print the three tables."""
    by_case: dict[str, list[Row]] = {}
    for file in files:
        fresh: dict[str, list[Row]] = {}
        for row in json.loads(Path(file).read_text()):
            fresh.setdefault(row["case"], []).append(row)
            if row["kind"] in ("machine", "skipped"):
                print(f"{row['kind']}: {row['case']}: {row['subject']}: {row['note']}", file=sys.stderr)
        by_case |= fresh
    rows = [row for each in by_case.values() for row in each]
    print("\n\n".join((targets(rows), peers(rows), measurements(rows))))


if __name__ == "__main__":
    main(sys.argv[1:])
