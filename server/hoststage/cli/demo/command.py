"""`hoststage demo`: a real model's KV cache moves from one worker process through a daemon into another, and is proved whole."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from hoststage.cli.demo.models import DemoModel, ModelUnavailableError, locate, prepare

PROVED, NOT_PROVED, UNUSABLE = 0, 1, 2


class ModeChoice(StrEnum):
    """Modes to run."""

    BUFFER_ONLY = "buffer_only"
    CACHE = "cache"
    ALL = "all"


class PathChoice(StrEnum):
    """Payload paths to run."""

    SHM = "shm"
    INLINE = "inline"
    ALL = "all"


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


class WorkerFailed(Exception):
    """A worker process did not end well; the message holds its last words."""


def demo(
    model: Annotated[DemoModel, typer.Option(help="The pretrained model.")] = DemoModel.SMOLLM2,
    mode: Annotated[ModeChoice, typer.Option(help="Host memory's mode, or all.")] = ModeChoice.ALL,
    path: Annotated[PathChoice, typer.Option(help="Payload path, or all.")] = PathChoice.ALL,
    address: Annotated[
        str, typer.Option(help="A daemon that runs already, e.g. unix:///run/hoststage/hoststage.sock.")
    ] = "",
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=64, max=8000)] = 2200,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.", min=2, max=512)] = 24,
    keep: Annotated[bool, typer.Option(help="Keep the daemon's folder (store, log) and say where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run on standard output.")] = False,
    retract: Annotated[
        bool,
        typer.Option("--retract", help="Retract a decoding request into a hold, and restore it after another one."),
    ] = False,
) -> None:
    """Prove that pages cross unharmed: the tokens of a restored run are those of an uninterrupted one."""
    console = Console(stderr=True)
    modes = [m for m in ModeChoice if m is not ModeChoice.ALL] if mode is ModeChoice.ALL else [mode]
    paths: list[PathChoice] = [p for p in PathChoice if p is not PathChoice.ALL] if path is PathChoice.ALL else [path]
    if retract:
        paths = _paths_with_holds(paths, console)
    try:
        locate(model)
    except ModelUnavailableError as error:
        _fail(str(error))
    reports: list[RunReport | RetractReport] = []
    once = run_retract if retract else run
    try:
        with _progress(console) as bars:
            _prepare(model, bars)
            with _daemon(address, keep, console) as where:
                for one_mode in modes:
                    for one_path in paths:
                        report = once(where, model, one_mode, one_path, prompt_tokens, new_tokens, bars)
                        reports.append(report)
                        if as_json:
                            print(json.dumps(asdict(report)), flush=True)
    except WorkerFailed as error:
        console.print(f"[red]the proof failed[/red]: {error}", highlight=False)
        raise typer.Exit(NOT_PROVED) from None
    if not as_json:
        plain = [r for r in reports if isinstance(r, RunReport)]
        Console().print(table(plain) if plain else retract_table([r for r in reports if isinstance(r, RetractReport)]))
    proved = all(r.proved for r in reports)
    word = "[green]proved[/green]" if proved else "[red]NOT proved[/red]"
    console.print(f"{word}: {len(reports)} runs, tokens and pages compared between processes", highlight=False)
    raise typer.Exit(PROVED if proved else NOT_PROVED)


def _paths_with_holds(paths: list[PathChoice], console: Console) -> list[PathChoice]:
    """Holds live in memory that the worker maps: over the inline path the handshake grants none."""
    if PathChoice.SHM not in paths:
        _fail(
            "holds live in shared memory, and the inline path has none (RETRACTION_PATH); use --path shm with --retract"
        )
    if PathChoice.INLINE in paths:
        console.print("the inline path has no holds (RETRACTION_PATH): shm alone is run", highlight=False)
    return [PathChoice.SHM]


def _fail(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    raise typer.Exit(UNUSABLE)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _prepare(model: DemoModel, bars: Progress) -> None:
    """Convert the model's weights once; later runs find them."""
    bar = bars.add_task(f"prepare {model.value}", total=None)

    def report(phase: str, done: int, total: int) -> None:
        bars.update(bar, description=f"prepare {model.value}: {phase}", completed=done, total=total or None)

    prepare(model, report)
    bars.remove_task(bar)


@contextlib.contextmanager
def _daemon(address: str, keep: bool, console: Console) -> Iterator[str]:
    """Yield the address of a daemon: the given one, or one of our own on a file store in a temporary folder."""
    if address:
        yield address
        return
    folder = Path(tempfile.mkdtemp(prefix="hoststage-demo-"))
    (folder / "store").mkdir()
    log = folder / "daemon.log"
    command = [
        *(sys.executable, "-m", "hoststage.cli.main", "serve", "--socket", str(folder / "hoststage.sock")),
        *("--set", "http.listen=", "--store", f"file://{folder / 'store'}", "--log-format", "json"),
        *("--set", "store.min_free=256MiB", "--set", "memory.budget=2GiB"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _wait_ready(process, log)
        yield f"unix://{folder / 'hoststage.sock'}"
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while b'"daemon.ready"' not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise WorkerFailed(f"the daemon did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def run(
    address: str,
    model: DemoModel,
    mode: ModeChoice,
    path: PathChoice,
    prompt_tokens: int,
    new_tokens: int,
    bars: Progress,
) -> RunReport:
    """Run both workers once. Raises `WorkerFailed`."""
    label = f"{model.value} {mode.value} {path.value}"
    with tempfile.TemporaryDirectory(prefix="hoststage-run-") as folder:
        arguments = _arguments(address, model, mode, path, prompt_tokens, new_tokens, Path(folder))
        first = _worker("worker", "prefill", arguments, label, bars)
        second = _worker("worker", "decode", arguments, label, bars)
    traffic = second["traffic"]
    size = sum(t["bytes"] for t in traffic.values())
    uninterrupted = first["prefill_seconds"]
    return RunReport(
        model=model.value,
        mode=mode.value,
        path=path.value,
        tokens_identical=first["tokens"] == second["tokens"],
        pages_identical=bool(second["pages_identical"]),
        prefill_seconds=round(uninterrupted, 4),
        restore_seconds=round(second["restore_seconds"], 4),
        first_token_seconds=round(second["first_token_seconds"], 4),
        first_token_speedup=round(uninterrupted / second["first_token_seconds"], 2),
        store_seconds=round(first["transfer_seconds"], 4),
        load_seconds=round(second["transfer_seconds"], 4),
        load_gb_per_second=round(size / second["transfer_seconds"] / 1e9, 3),
        pages=sum(t["pages"] for t in traffic.values()),
        bytes=size,
        pools=traffic,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        pinned=second["pinned"],
    )


def run_retract(
    address: str,
    model: DemoModel,
    mode: ModeChoice,
    path: PathChoice,
    prompt_tokens: int,
    new_tokens: int,
    bars: Progress,
) -> RetractReport:
    """Run the uninterrupted worker and the one that retracts once. Raises `WorkerFailed`."""
    label = f"{model.value} {mode.value} {path.value}"
    with tempfile.TemporaryDirectory(prefix="hoststage-run-") as folder:
        arguments = _arguments(address, model, mode, path, prompt_tokens, new_tokens, Path(folder))
        first = _worker("retract", "whole", arguments, label, bars)
        second = _worker("retract", "retract", arguments, label, bars)
    traffic = second["traffic"]
    size = sum(t["bytes"] for t in traffic.values())
    return RetractReport(
        model=model.value,
        mode=mode.value,
        path=path.value,
        retract=True,
        tokens_identical=first["tokens"] == second["tokens"],
        pages_identical=bool(second["pages_identical"]),
        prefill_seconds=round(first["prefill_seconds"], 4),
        hold_seconds=round(second["hold_seconds"], 4),
        restore_seconds=round(second["restore_seconds"], 4),
        hold_bytes=size,
        pages=sum(t["pages"] for t in traffic.values()),
        bytes=size,
        pools=traffic,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        retracted_after=second["retracted_after"],
        other_tokens=second["other_tokens"],
        other_pages=second["other_pages"],
        pinned=second["pinned"],
    )


def _arguments(
    address: str,
    model: DemoModel,
    mode: ModeChoice,
    path: PathChoice,
    prompt_tokens: int,
    new_tokens: int,
    folder: Path,
) -> list[str]:
    """Return what both workers of a run are told."""
    return [
        *("--address", address, "--model", model.value, "--mode", mode.value, "--path", path.value),
        *("--run", uuid.uuid4().hex[:12], "--notes", str(folder / "first.json")),
        *("--prompt-tokens", str(prompt_tokens), "--new-tokens", str(new_tokens)),
    ]


def _worker(module: str, role: str, arguments: list[str], label: str, bars: Progress) -> dict[str, Any]:
    """Run one worker process, show its progress and return its result."""
    command = [sys.executable, "-m", f"hoststage.cli.demo.{module}", role, *arguments]
    bar = bars.add_task(f"{label}: {role}", total=None)
    result: dict[str, Any] | None = None
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                result = _event(line, bars, bar, f"{label}: {role}") or result
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        words.seek(0)
        last = words.read().decode(errors="replace").strip()[-2000:]
    bars.remove_task(bar)
    if status or result is None:
        raise WorkerFailed(f"the {role} worker ended with {status}:\n{last}")
    return result


def _event(line: str, bars: Progress, bar: TaskID, label: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    if event.get("event") == "progress":
        bars.update(
            bar, description=f"{label}: {event['phase']}", completed=event["done"], total=event["total"] or None
        )
        return None
    found: dict[str, Any] | None = event.get("result")
    return found


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
