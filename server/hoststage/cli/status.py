"""`hoststage status`: sessions, pools and the store of a running daemon."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hoststage.cli.remote import http_base, look


def human(n: float) -> str:
    """Return bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def _add(table: Table, head: str) -> None:
    """Add a column whose head is never cut in a word, however narrow the terminal; what stands below it breaks."""
    table.add_column(head, overflow="fold", min_width=max(map(len, head.split())))


def view(s: dict[str, Any], *between: RenderableType) -> Group:
    """Return what `/status.json` says, for a terminal; `between`: what stands between the head and the tables."""
    head = Text(f"hoststage {s['about']['version']} at {s['about']['socket']}  ")
    head.append("; ".join(s["problems"]) or "ready", style="red" if s["problems"] else "green")
    head.append(f"\nbudget {human(s['granted_bytes'])} of {human(s['budget_bytes'])}")
    if s["store"]:
        store = s["store"]
        head.append(f"   store {store['pages']} pages, {human(store['bytes'])} of {human(store['limit_bytes'])}")
    sessions = Table(title="sessions", title_justify="left")
    for column in ("id", "worker", "model", "mode", "path", "state", "write memory", "commits", "leases"):
        _add(sessions, column)
    for x in s["sessions"]:
        sessions.add_row(
            str(x["session"]),
            x["worker"] or x["client"],
            x["model"],
            x["mode"],
            x["path"],
            x["state"],
            human(x["write_bytes"]),
            str(x["open_commits"]),
            str(x["read_leases"]),
        )
    pools = Table(title="pools", title_justify="left")
    for column in ("namespace", "pool", "arena", "slots", "states", "reserve", "pinned"):
        _add(pools, column)
    for p in s["pools"]:
        states = ", ".join(f"{k} {v}" for k, v in p["by_state"].items())
        kind = p["kind"] + (f" of {p['session']}" if p["session"] else "")
        pools.add_row(
            p["namespace"][:12], p["pool"], kind, str(p["slots"]), states, str(p["reserve_slots"]), p["pin"]["level"]
        )
    return Group(head, *between, sessions, pools)


def status(
    http: Annotated[str, typer.Option(help="host:port of the operators' port. \\[default: http.listen]")] = "",
    config: Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Show what a daemon holds now."""
    found = look(http_base(http, config))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(view(found))
