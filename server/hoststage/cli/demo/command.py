"""`hoststage demo`: a real model's KV cache moves from one worker process through a daemon into another, and is proved whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from hoststage.cli.demo.models import DemoModel, ModelUnavailableError, locate, prepare
from hoststage.cli.demo.reports import RetractReport, RunReport, line, retract_table, table

PROVED, NOT_PROVED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


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
    # A terminated demo cleans up behind itself like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
                        if not console.is_terminal:
                            console.print(line(report), highlight=False)
    except WorkerFailed as error:
        console.print(f"[red]the proof failed[/red]: {error}", highlight=False)
        _show(reports, as_json=as_json)
        raise typer.Exit(NOT_PROVED) from None
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(reports)} of {len(modes) * len(paths)} runs")
        _show(reports, as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None
    _show(reports, as_json=as_json)
    proved = all(r.proved for r in reports)
    word = "[green]proved[/green]" if proved else "[red]NOT proved[/red]"
    console.print(f"{word}: {len(reports)} runs, tokens and pages compared between processes", highlight=False)
    raise typer.Exit(PROVED if proved else NOT_PROVED)


def _show(reports: list[RunReport | RetractReport], *, as_json: bool) -> None:
    """Print the table of the runs that ended."""
    plain = [r for r in reports if isinstance(r, RunReport)]
    retracted = [r for r in reports if isinstance(r, RetractReport)]
    if reports and not as_json:
        Console().print(table(plain) if plain else retract_table(retracted))


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
        # Two worker threads that spin for each other would fight whoever else wants the cores.
        env = {"OMP_WAIT_POLICY": "passive", **os.environ}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, env=env)
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
