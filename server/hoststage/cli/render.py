"""Tables for people."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hoststage.cli.inputs import Subject
from hoststage.cli.judge import NodeVerdict
from hoststage.cli.sglang_rules import builds_no_host_tier, is_engine_rule
from hoststage.core.findings import Finding, Severity
from hoststage.core.stack import namespace_of

STYLES = {Severity.REFUSED: "bold red", Severity.ADJUSTED: "yellow", Severity.NOTICE: "cyan"}
ORDER = {Severity.REFUSED: 0, Severity.ADJUSTED: 1, Severity.NOTICE: 2}


def size_text(size: int) -> str:
    """Return a size as people read it, with the bytes where that would round."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size} B"


def console() -> Console:
    """Return a console that wraps to the terminal, or to `$COLUMNS`, and to 120 columns where there is neither."""
    own = Console()
    return own if own.is_terminal or os.environ.get("COLUMNS") else Console(width=120)


def show_check(subject: Subject, verdict: NodeVerdict, findings: Sequence[Finding], *, granted: bool) -> None:
    """Print the verdict, the pools and all findings."""
    out = console()
    out.print(Text(subject.title, style="bold"))
    out.print(_pools(subject, verdict))
    if findings:
        out.print(_findings(findings))
    out.print(_outcome(subject, verdict, granted=granted))


def _pools(subject: Subject, verdict: NodeVerdict) -> Table:
    # Nine columns have to fit a terminal of 80: no lines between them.
    table = Table(
        title="pools of one process (from window on, in pages)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    stages = len(subject.shards) > 1
    for name in (
        *(("stage",) if stages else ()),
        "pool",
        "page",
        "tokens",
        "window",
        "host",
        "write",
        "read",
        "reserve",
        "hold",
    ):
        # A long name may break; a number may not.
        left, long = name in ("stage", "pool", "host"), name == "pool"
        table.add_column(name, justify="left" if left else "right", no_wrap=not long, overflow="fold")
    for shard, _ in subject.shards:
        grant = next((g for g in verdict.grants if g.namespace == namespace_of(shard)), None)
        slots = {p.pool: p for p in grant.pools} if grant else {}
        for pool in shard.pools:
            given = slots.get(pool.name)
            counts = (given.write_slots, given.read_slots, given.reserve_slots, given.hold_slots) if given else None
            host = "device only" if not pool.has_host_pool else "yes"
            if pool.indices_from_pool:
                host = f"as {pool.indices_from_pool}"
            table.add_row(
                *((str(shard.parallel.pp_rank),) if stages else ()),
                pool.name,
                size_text(pool.page_bytes),
                str(pool.page_tokens),
                str(pool.window_pages) if pool.window_pages else "",
                host,
                *(map(str, counts) if counts else ("", "", "", "")),
            )
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="findings", title_justify="left", show_lines=True)
    table.add_column("severity")
    table.add_column("rule", overflow="fold")
    table.add_column("finding", overflow="fold")
    modes: dict[tuple[str, Severity, str, str, str], list[str]] = {}
    for f in findings:
        said = modes.setdefault((f.rule, f.severity, f.subject, f.message, f.remedy), [])
        said += [f.mode.value] if f.mode is not None else []
    for f in sorted(findings, key=lambda f: ORDER[f.severity]):
        # What is said of several modes alike is said once.
        told = modes.pop((f.rule, f.severity, f.subject, f.message, f.remedy), None)
        if told is None:
            continue
        about = f" ({', '.join(told)})" if told else ""
        text = Text(f"{f.subject}{about}: {f.message}")
        if f.remedy:
            text.append(f"\n→ {f.remedy}", style="green")
        table.add_row(Text(f.severity.value, style=STYLES[f.severity]), f.rule, text)
    return table


def _outcome(subject: Subject, verdict: NodeVerdict, *, granted: bool) -> Text:
    mode = verdict.mode.value if verdict.mode else ""
    if granted and builds_no_host_tier(subject.engine):
        return Text(
            f"hoststage would grant {mode}, but SGLang builds no host tier for these flags and would not use it: "
            "add --enable-hierarchical-cache",
            style="bold yellow",
        )
    if granted:
        return Text(f"granted: {mode}, retraction {verdict.retraction.value}", style="bold green")
    rules = ", ".join(
        dict.fromkeys(f.rule for f in subject.engine if is_engine_rule(f) and f.severity is Severity.REFUSED)
    )
    if subject.engine_refuses and mode:
        return Text(f"refused by SGLang's own rules ({rules}); hoststage would grant {mode}", style="bold red")
    if subject.engine_refuses:
        return Text(f"refused by hoststage, and by SGLang's own rules ({rules})", style="bold red")
    return Text("refused by hoststage", style="bold red")
