"""`hoststage bench`: measure the daemon, the machine and the peers in one run, and judge the targets."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from hoststage.cli.bench.peers import PeerAbsent
from hoststage.cli.bench.process import BenchError, given_daemon
from hoststage.cli.bench.report import machine_line, print_report
from hoststage.cli.bench.rig import Rig, Settings
from hoststage.cli.bench.rows import Row, machine
from hoststage.client import HostStageError

QUICK_SECONDS = 105.0
"""A quick run starts no case that would end later than this; two minutes are promised."""
DONE, MISSED, UNUSABLE = 0, 1, 2
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size_of(text: str) -> int:
    """Return bytes of "64KiB", "1MiB", "4096" and the like. Raises `typer.BadParameter`."""
    bare = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = bare[-1:] if bare[-1:] in ("k", "m", "g") else ""
    number = bare.removesuffix(unit)
    if not number.strip().isdigit() or int(number) == 0:
        raise typer.BadParameter(f"{text!r} is no size; write for example 64KiB, 1MiB or 4096")
    return int(number) * UNITS[unit]


def bench(
    case: Annotated[list[str] | None, typer.Option(help="A case to run; may repeat. All by default.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and end.")] = False,
    quick: Annotated[bool, typer.Option(help="Two minutes at most: fewer rounds, smaller sizes.")] = False,
    page_size: Annotated[list[str] | None, typer.Option(help="Sweep: 16KiB to 16MiB; may repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sweep: pages of a call.", min=1, max=4096)] = None,
    pools: Annotated[list[int] | None, typer.Option(help="Sweep: pools of the stack.", min=1, max=8)] = None,
    sessions: Annotated[list[int] | None, typer.Option(help="Sweep and fairness: processes.", min=1, max=256)] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Sweep: buffer_only or cache.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Sweep: shm, imported or inline.")] = None,
    store: Annotated[list[str] | None, typer.Option(help="Sweep: file, memory: or none.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every page that is loaded with what was stored.")] = False,
    address: Annotated[str, typer.Option(help="A daemon that runs already, unix:///path; by default its own.")] = "",
    http: Annotated[str, typer.Option(help="host:port of that daemon's metrics.")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Where direct I/O and file peers write; default: the temporary folder.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Most that one combination's arenas may take.")] = "1GiB",
    plots: Annotated[Path | None, typer.Option(help="Folder for plots (needs hoststage[bench]).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of all rows on standard output.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit 1 where a target is missed.")] = False,
) -> None:
    """Measure throughput, latency and cost of the daemon beside memcpy, pings, direct I/O and other products."""
    from hoststage.cli.bench.registry import CASES

    if list_cases:
        for entry in CASES.values():
            print(f"{entry.name:12} {entry.help}")
        raise typer.Exit(DONE)
    wanted = case or list(CASES)
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        _fail(f"--case {unknown[0]}: there is no such case; there are {', '.join(CASES)}")
    _check("--mode", mode, ("buffer_only", "cache"))
    _check("--path", path, ("shm", "imported", "inline"))
    _check("--store", store, ("file", "memory:", "none"))
    if plots is not None:
        _need_plots()
    console = Console(stderr=True)
    try:
        settings = Settings(
            quick=quick,
            node=given_daemon(address, http) if address else None,
            verify=verify,
            page_sizes=tuple(map(size_of, page_size or ())),
            batches=tuple(batch or ()),
            pools=tuple(pools or ()),
            sessions=tuple(sessions or ()),
            modes=tuple(mode or ()),
            paths=tuple(path or ()),
            stores=tuple(store or ()),
            folder=folder,
            most_bytes=size_of(memory),
        )
    except BenchError as error:
        _fail(str(error))
    rows = run(settings, wanted, console)
    if plots is not None:
        from hoststage.cli.bench.plots import draw

        for file in draw(rows, plots):
            console.print(f"wrote {file}", highlight=False)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        print_report(Console(), rows)
    missed = any(row.met is False for row in rows)
    raise typer.Exit(MISSED if strict and missed else DONE)


def run(settings: Settings, cases: list[str], console: Console) -> list[Row]:
    """Run cases one after the other; one that fails is a row that says so."""
    from hoststage.cli.bench.registry import CASES

    began = time.monotonic()
    line = machine_line()
    console.print(line, highlight=False)
    with console.status("") as status:
        rig = Rig(settings, lambda row: status.update(f"{row.case}: {row.subject} {row.operation}"))
        for name in cases:
            case = CASES[name]
            spent = time.monotonic() - began
            if settings.quick and spent + case.quick_seconds > QUICK_SECONDS:
                rig.skip(name, case.help, f"the two minutes of --quick would not do; run it alone with --case {name}")
                continue
            status.update(f"{name}: {case.help}")
            try:
                case.run(rig)
            except (BenchError, PeerAbsent, HostStageError, OSError) as error:
                rig.skip(name, case.help, f"{type(error).__name__}: {error}")
            console.print(f"{name}: {time.monotonic() - began - spent:.1f} s", highlight=False)
    rig.add(machine(f"{line}; {os.getloadavg()[0]:.1f} at the end, {time.monotonic() - began:.0f} s"))
    return rig.rows


def _check(option: str, given: list[str] | None, allowed: tuple[str, ...]) -> None:
    for value in given or ():
        if value not in allowed:
            _fail(f"{option} {value}: pass one of {', '.join(allowed)}")


def _need_plots() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        _fail("--plots needs matplotlib, which is not installed: pip install 'hoststage[bench]'")


def _fail(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    raise typer.Exit(UNUSABLE)
