"""`hoststage top`: a running daemon, live."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from hoststage.cli.remote import http_base, look
from hoststage.cli.status import human, view

_RATES = (
    ("commits accepted", ("commit", "accepted")),
    ("commits stored", ("commit_ended", "stored")),
    ("pages stored", ("pages_ended", "stored")),
    ("lookup hits", ("lookup", "hit")),
    ("loads ready", ("load", "ready")),
    ("pages fetched", ("fetched_pages", "hit")),
)


def top(
    http: Annotated[str, typer.Option(help="host:port of the operators' port. \\[default: http.listen]")] = "",
    config: Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")] = "",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Watch sessions, pools and rates; end with Ctrl-C."""
    base = http_base(http, config)
    console = Console()
    before = look(base)
    if once:
        console.print(_screen(before, before, 1.0))
        return
    seen = time.monotonic()
    with Live(_screen(before, before, 1.0), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                now, data = time.monotonic(), look(base)
                live.update(_screen(data, before, now - seen), refresh=True)
                before, seen = data, now
        except KeyboardInterrupt:
            return


def _counters(data: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(c["name"], c["label"].lower()): c["value"] for c in data["counters"]}


def _screen(data: dict[str, Any], before: dict[str, Any], seconds: float) -> Group:
    return view(data, _rates(data, before, seconds))


def _rates(data: dict[str, Any], before: dict[str, Any], seconds: float) -> Table:
    new, old = _counters(data), _counters(before)
    per = max(seconds, 1e-3)
    rates = [(f"{name}/s", f"{(new.get(key, 0) - old.get(key, 0)) / per:.0f}") for name, key in _RATES]
    store, was = data.get("store"), before.get("store")
    if store and was:
        for name, field in (("store read/s", "read_bytes"), ("store written/s", "written_bytes")):
            rates.append((name, human((store[field] - was[field]) / per)))
    # Two rates a line: all of them side by side are wider than a terminal of 80 columns.
    table = Table.grid(padding=(0, 3, 0, 0))
    for justify in ("left", "right") * 2:
        table.add_column(justify=justify, no_wrap=True)
    for left, right in zip(rates[::2], rates[1::2], strict=True):
        table.add_row(*left, *right)
    return table
