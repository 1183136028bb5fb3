"""Options that `check` and `plan` share.

Those spelled as SGLang's flags stand for the flag; the same flag in the command after `--` wins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hoststage.cli.inputs import InputError, Request
from hoststage.cli.sglang_args import CommandLineError
from hoststage.core.findings import BudgetHolder, NodeFacts
from hoststage.core.stack import KvLayout
from hoststage.models import ModelError

UNUSABLE = 2
"""Exit status for input that cannot be used."""

MODEL, ENGINE, NODE, OUTPUT = "Model", "Engine flags", "Node", "Output"

Command = Annotated[
    list[str] | None,
    typer.Argument(help="The engine's launch command as it stands, after `--`.", metavar="-- COMMAND"),
]
Config = Annotated[Path | None, typer.Option(help="A model's config.json, or its directory.", rich_help_panel=MODEL)]
PresetName = Annotated[str, typer.Option(help="A built-in model, such as llama-3.1-8b.", rich_help_panel=MODEL)]
StackPath = Annotated[Path | None, typer.Option("--stack", help="A stack file, .toml or .json.", rich_help_panel=MODEL)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a field of the config: FIELD=VALUE. May repeat.", rich_help_panel=MODEL),
]
Layout = Annotated[KvLayout | None, typer.Option(help="The KV layout, which no flag shows.", rich_help_panel=MODEL)]
SwaPool = Annotated[
    bool | None,
    typer.Option(
        "--swa-pool/--no-swa-pool",
        help="Whether the engine keeps window layers in a pool of their own.",
        rich_help_panel=MODEL,
    ),
]
Modes = Annotated[
    list[str] | None,
    typer.Option(
        "--mode",
        help="buffer_only or cache, in order of preference; a trailing ! requires it. May repeat.",
        rich_help_panel=NODE,
    ),
]
WindowOnly = Annotated[
    bool, typer.Option("--window-only-holds", help="Accept holds of the window alone.", rich_help_panel=NODE)
]
Pinned = Annotated[bool, typer.Option("--require-pinned", help="Require pinned memory.", rich_help_panel=NODE)]
Budget = Annotated[str, typer.Option(help="The node's budget for host memory, such as 64GiB.", rich_help_panel=NODE)]
Store = Annotated[
    bool, typer.Option("--store/--no-store", help="Whether the daemon has a store.", rich_help_panel=NODE)
]
Ranks = Annotated[
    int, typer.Option(min=0, max=4096, help="Processes on one node; 0 takes them from the sizes.", rich_help_panel=NODE)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]

TpSize = Annotated[
    str,
    typer.Option("--tp-size", "--tensor-parallel-size", help="Ranks that share each layer.", rich_help_panel=ENGINE),
]
PpSize = Annotated[
    str, typer.Option("--pp-size", "--pipeline-parallel-size", help="Pipeline stages.", rich_help_panel=ENGINE)
]
DcpSize = Annotated[str, typer.Option("--dcp-size", help="Ranks that share a decode context.", rich_help_panel=ENGINE)]
PageSize = Annotated[str, typer.Option("--page-size", help="Tokens of a page.", rich_help_panel=ENGINE)]
KvDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="Type of KV data, such as auto or fp8_e4m3.", rich_help_panel=ENGINE)
]
SwaRatio = Annotated[
    str,
    typer.Option(
        "--swa-full-tokens-ratio", help="Window tokens for each token of full attention.", rich_help_panel=ENGINE
    ),
]
HostMode = Annotated[
    str, typer.Option("--hicache-host-memory-mode", help="cache or buffer_only.", rich_help_panel=ENGINE)
]
HostRatio = Annotated[
    str, typer.Option("--hicache-ratio", help="Host pool as a multiple of the device pool.", rich_help_panel=ENGINE)
]
HostSize = Annotated[
    str, typer.Option("--hicache-size", help="Host pool of a rank, in GB; wins over the ratio.", rich_help_panel=ENGINE)
]
WritePolicyFlag = Annotated[
    str,
    typer.Option(
        "--hicache-write-policy", help="write_through, write_through_selective or write_back.", rich_help_panel=ENGINE
    ),
]
MaxTokens = Annotated[
    str, typer.Option("--max-total-tokens", help="Tokens of the device pool.", rich_help_panel=ENGINE)
]
ContextLength = Annotated[
    str, typer.Option("--context-length", help="Tokens of the largest request.", rich_help_panel=ENGINE)
]
DisaggMode = Annotated[
    str, typer.Option("--disaggregation-mode", help="null, prefill or decode.", rich_help_panel=ENGINE)
]
RetractionBackup = Annotated[
    str,
    typer.Option("--disaggregation-decode-retraction-backup", help="cpu_tensor or host_pool.", rich_help_panel=ENGINE),
]


def request_of(
    *,
    config: Path | None,
    preset: str,
    stack: Path | None,
    overrides: list[str] | None,
    kv_layout: KvLayout | None,
    modes: list[str] | None,
    command: list[str] | None,
    window_only: bool,
    requires_pinned: bool,
    swa_pool: bool | None,
    ranks: int,
    flags: dict[str, str],
) -> Request:
    """Return the options of one call as a request. flags: the options that are spelled as SGLang's, by flag."""
    return Request(
        config=config,
        preset=preset,
        stack=stack,
        overrides=tuple(overrides or ()),
        kv_layout=kv_layout,
        modes=tuple(modes or ()),
        window_only=window_only,
        requires_pinned=requires_pinned,
        swa_pool=swa_pool,
        engine_flags=tuple(f"{flag}={value}" for flag, value in flags.items() if value),
        command=tuple(command or ()),
        ranks=ranks,
    )


def node_facts(budget_bytes: int, *, store: bool, holders: tuple[BudgetHolder, ...] = ()) -> NodeFacts:
    """Return a node that nobody but `holders` uses yet. What it can pin is known only to a daemon, so pinning is taken as possible."""
    return NodeFacts(budget_bytes=budget_bytes, holders=holders, store_configured=store, pinned="mlock")


UnusableInput = (InputError, CommandLineError, ModelError)
"""What ends a call with status 2; each names what is wrong and the remedy."""


def unusable(error: InputError | CommandLineError | ModelError) -> NoReturn:
    """Say on standard error what is wrong and what to do, and exit with status 2."""
    name = type(error).__name__
    subject = error.field if isinstance(error, ModelError) else getattr(error, "flag", getattr(error, "subject", ""))
    typer.echo(f"{name}: {subject}: {error.problem}.\n  {error.remedy}.", err=True)
    raise typer.Exit(UNUSABLE)
