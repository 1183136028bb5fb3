"""What a run of the demo found, as data, as a line and as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, as `--json` prints it. Seconds and bytes."""

    model: str
    mode: str
    path: str
    tokens_identical: bool
    pages_identical: bool
    prefill_seconds: float
    restore_seconds: float
    first_token_seconds: float
    first_token_speedup: float
    store_seconds: float
    load_seconds: float
    load_gb_per_second: float
    pages: int
    bytes: int
    pools: dict[str, dict[str, int]]
    prompt_tokens: int
    new_tokens: int
    pinned: str

    @property
    def proved(self) -> bool:
        return self.tokens_identical and self.pages_identical


@dataclass(frozen=True, slots=True)
class RetractReport:
    """One run of `--retract`, as `--json` prints it. Seconds and bytes. `restore_seconds`: from the hold into a new cache."""

    model: str
    mode: str
    path: str
    retract: bool
    tokens_identical: bool
    pages_identical: bool
    prefill_seconds: float
    hold_seconds: float
    restore_seconds: float
    hold_bytes: int
    pages: int
    bytes: int
    pools: dict[str, dict[str, int]]
    prompt_tokens: int
    new_tokens: int
    retracted_after: int
    other_tokens: int
    other_pages: int
    pinned: str

    @property
    def proved(self) -> bool:
        return self.tokens_identical and self.pages_identical


def line(report: RunReport | RetractReport) -> str:
    """Return one line on a finished run, for logs."""
    word = "proved" if report.proved else "NOT proved"
    return f"{report.model} {report.mode} {report.path}: {word}; prefill {report.prefill_seconds:.2f} s, restore {report.restore_seconds:.2f} s"


def table(reports: list[RunReport]) -> Table:
    """Return the proof as a table, one column a run."""
    out = Table(title=f"{reports[0].model}: prefill worker → daemon → decode worker", title_justify="left")
    out.add_column("")
    for r in reports:
        out.add_column(f"{r.mode}\n{r.path}", justify="right")

    def row(name: str, cell: Callable[[RunReport], str]) -> None:
        out.add_row(name, *(cell(r) for r in reports))

    row("tokens", lambda r: _verdict(r.tokens_identical))
    row("pages", lambda r: _verdict(r.pages_identical))
    for pool in reports[0].pools:
        row(f"{pool} pages", lambda r, p=pool: str(r.pools[p]["pages"]))  # type: ignore[misc]
        row(f"{pool} MB", lambda r, p=pool: f"{r.pools[p]['bytes'] / 1e6:.1f}")  # type: ignore[misc]
    row("prefill s", lambda r: f"{r.prefill_seconds:.2f}")
    row("restore s", lambda r: f"{r.restore_seconds:.2f}")
    row("first token s", lambda r: f"{r.first_token_seconds:.2f}")
    row("first token sooner", lambda r: f"{r.first_token_speedup:.1f}×")
    row("store s", lambda r: f"{r.store_seconds:.3f}")
    row("lookup + load s", lambda r: f"{r.load_seconds:.3f}")
    row("load GB/s", lambda r: f"{r.load_gb_per_second:.2f}")
    row("pinned", lambda r: r.pinned)
    out.caption = (
        f"{reports[0].prompt_tokens} prompt tokens, {reports[0].new_tokens} decoded. store: to the store's acknowledgement. "
        "restore: lookup, load, and the copy into a new cache. Loads of resident pages are zero-copy views."
    )
    out.caption_justify = "left"
    return out


def retract_table(reports: list[RetractReport]) -> Table:
    """Return the proof of a retraction as a table, one column a run."""
    first = reports[0]
    out = Table(title=f"{first.model}: decode → hold → another request → decode on", title_justify="left")
    out.add_column("")
    for r in reports:
        out.add_column(f"{r.mode}\n{r.path}", justify="right")

    def row(name: str, cell: Callable[[RetractReport], str]) -> None:
        out.add_row(name, *(cell(r) for r in reports))

    row("tokens", lambda r: _verdict(r.tokens_identical))
    row("pages", lambda r: _verdict(r.pages_identical))
    for pool in first.pools:
        row(f"{pool} pages", lambda r, p=pool: str(r.pools[p]["pages"]))  # type: ignore[misc]
    row("hold MB", lambda r: f"{r.hold_bytes / 1e6:.1f}")
    row("prefill s", lambda r: f"{r.prefill_seconds:.2f}")
    row("hold s", lambda r: f"{r.hold_seconds:.3f}")
    row("restore s", lambda r: f"{r.restore_seconds:.3f}")
    row("pinned", lambda r: r.pinned)
    out.caption = (
        f"{first.prompt_tokens} prompt tokens, {first.new_tokens} decoded, retracted after {first.retracted_after}. In between another request of "
        f"{first.other_tokens} tokens ran on the same model and stored and loaded {first.other_pages} pages. Sliding layers hold their "
        "trailing window alone."
    )
    out.caption_justify = "left"
    return out


def _verdict(same: bool) -> str:
    return "[green]identical[/green]" if same else "[red]DIFFER[/red]"
