"""`hoststage status`: sessions, pools and the store of a running daemon; `hoststage top` keeps showing them."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hoststage.cli.health import DEFAULT_HTTP, NOT_READY, fetch

Http = Annotated[str, typer.Option(help="host:port of the daemon's http.listen.", envvar="HOSTSTAGE_HTTP_LISTEN")]


def _gib(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def _read(http: str) -> dict[str, Any]:
    where = http.replace("0.0.0.0", "127.0.0.1", 1)
    try:
        _, body = fetch(where, "/status.json", 5.0)
        found: dict[str, Any] = json.loads(body)
    except (OSError, ValueError) as error:
        print(f"no daemon answers at http://{where}: {error}", file=sys.stderr)
        raise typer.Exit(NOT_READY) from None
    return found


def _view(s: dict[str, Any]) -> Group:
    head = Text(f"hoststage {s['about']['version']} at {s['about']['socket']}  ")
    head.append("; ".join(s["problems"]) or "ready", style="red" if s["problems"] else "green")
    head.append(f"\nbudget {_gib(s['granted_bytes'])} of {_gib(s['budget_bytes'])}")
    if s["store"]:
        store = s["store"]
        head.append(f"   store {store['pages']} pages, {_gib(store['bytes'])} of {_gib(store['limit_bytes'])}")
    sessions = Table(title="sessions", title_justify="left")
    for column in ("id", "worker", "model", "mode", "path", "state", "write memory", "commits", "leases"):
        sessions.add_column(column)
    for x in s["sessions"]:
        sessions.add_row(
            str(x["session"]),
            x["worker"] or x["client"],
            x["model"],
            x["mode"],
            x["path"],
            x["state"],
            _gib(x["write_bytes"]),
            str(x["open_commits"]),
            str(x["read_leases"]),
        )
    pools = Table(title="pools", title_justify="left")
    for column in ("namespace", "pool", "arena", "slots", "states", "reserve", "pinned"):
        pools.add_column(column)
    for p in s["pools"]:
        states = ", ".join(f"{k} {v}" for k, v in p["by_state"].items())
        kind = p["kind"] + (f" of {p['session']}" if p["session"] else "")
        pools.add_row(
            p["namespace"][:12], p["pool"], kind, str(p["slots"]), states, str(p["reserve_slots"]), p["pin"]["level"]
        )
    return Group(head, sessions, pools)


def status(
    http: Http = DEFAULT_HTTP, as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False
) -> None:
    """Show what a daemon holds now."""
    found = _read(http)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(_view(found))


def top(
    http: Http = DEFAULT_HTTP, every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0
) -> None:
    """Keep showing what a daemon holds, until interrupted."""
    with Live(_view(_read(http)), refresh_per_second=4, screen=sys.stdout.isatty()) as live:
        try:
            while True:
                time.sleep(every)
                live.update(_view(_read(http)))
        except KeyboardInterrupt:
            return
