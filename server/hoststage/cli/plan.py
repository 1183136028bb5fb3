"""`hoststage plan`: what a model's processes need from a node's host tier, with the arithmetic."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hoststage.cli import options as opt
from hoststage.cli.check import finding_mapping
from hoststage.cli.inputs import Subject, parse_size, resolve
from hoststage.cli.judge import assumed_budget, budget_note
from hoststage.cli.plan_config import render_config
from hoststage.cli.plan_report import ModePlan, Need, least_terms, plan_modes
from hoststage.cli.room import room_finding
from hoststage.core.fences.context import at_least, in_words
from hoststage.core.findings import Finding, NodeFacts, Severity
from hoststage.core.sizing import Term
from hoststage.core.stack import PoolKind, Stack, ceil_div
from hoststage.models import stack_to_mapping

STORE_URL = "file:///var/lib/hoststage"
"""The daemon's default, so that a file that `plan` writes and a daemon without one use the same store."""

PLANNED, TOO_SMALL = 0, 1

GIB = 1 << 30


def plan(
    *,
    command: opt.Command = None,
    config: opt.Config = None,
    preset: opt.PresetName = "",
    stack: opt.StackPath = None,
    overrides: opt.Overrides = None,
    kv_layout: opt.Layout = None,
    swa_pool: opt.SwaPool = None,
    mode: opt.Modes = None,
    window_only_holds: opt.WindowOnly = False,
    budget: opt.Budget = "",
    store: opt.Store = True,
    ranks: opt.Ranks = 0,
    engines: Annotated[
        int, typer.Option(min=1, max=4096, help="Engines of this model on one node.", rich_help_panel=opt.NODE)
    ] = 1,
    as_json: opt.AsJson = False,
    config_out: Annotated[
        Path | None,
        typer.Option(
            "--write", "--config-out", help="Write the file for `hoststage serve` here.", rich_help_panel=opt.OUTPUT
        ),
    ] = None,
    stack_out: Annotated[
        Path | None,
        typer.Option(help="Write the stack of the first process here, as JSON.", rich_help_panel=opt.OUTPUT),
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite files that are there.", rich_help_panel=opt.OUTPUT)] = False,
    tp_size: opt.TpSize = "",
    pp_size: opt.PpSize = "",
    dcp_size: opt.DcpSize = "",
    page_size: opt.PageSize = "",
    kv_cache_dtype: opt.KvDtype = "",
    swa_full_tokens_ratio: opt.SwaRatio = "",
    hicache_host_memory_mode: opt.HostMode = "",
    hicache_ratio: opt.HostRatio = "",
    hicache_size: opt.HostSize = "",
    hicache_write_policy: opt.WritePolicyFlag = "",
    max_total_tokens: opt.MaxTokens = "",
    context_length: opt.ContextLength = "",
    disaggregation_mode: opt.DisaggMode = "",
    retraction_backup: opt.RetractionBackup = "",
) -> None:
    """Show what a model needs from the host tier: bytes per page, smallest pools, node totals, and kernel settings.

    Exit status: 0 planned; 1 the budget given is too small for every mode, and no file is written; 2 unusable input.
    """
    request = opt.request_of(
        config=config,
        preset=preset,
        stack=stack,
        overrides=overrides,
        kv_layout=kv_layout,
        modes=mode,
        command=command,
        window_only=window_only_holds,
        requires_pinned=False,
        swa_pool=swa_pool,
        ranks=ranks,
        flags={
            "--tp-size": tp_size,
            "--pp-size": pp_size,
            "--dcp-size": dcp_size,
            "--page-size": page_size,
            "--kv-cache-dtype": kv_cache_dtype,
            "--swa-full-tokens-ratio": swa_full_tokens_ratio,
            "--hicache-host-memory-mode": hicache_host_memory_mode,
            "--hicache-ratio": hicache_ratio,
            "--hicache-size": hicache_size,
            "--hicache-write-policy": hicache_write_policy,
            "--max-total-tokens": max_total_tokens,
            "--context-length": context_length,
            "--disaggregation-mode": disaggregation_mode,
            "--disaggregation-decode-retraction-backup": retraction_backup,
        },
    )
    try:
        subject = resolve(request)
        subject = replace(subject, holders=tuple(replace(h, bytes=h.bytes * engines) for h in subject.holders))
        assumed = assumed_budget(subject.stacks) * engines + subject.held_bytes
        budget_bytes = parse_size(budget) if budget else assumed
        if not budget:
            subject = replace(subject, notes=(*subject.notes, budget_note(budget_bytes)))
    except opt.UnusableInput as error:
        opt.unusable(error)
    plans = plan_modes(subject.stacks, engines, budget_bytes, subject.holders)
    room = room_findings(subject, engines, budget_bytes) if budget else ()
    text = config_text(subject, plans, given=bool(budget), budget_bytes=budget_bytes, store=store)
    fits = _fits(subject.stacks[0], room)
    if fits:
        _write(config_out, text, force=force)
        _write(stack_out, json.dumps(stack_to_mapping(subject.stacks[0]), indent=2) + "\n", force=force)
    if as_json:
        typer.echo(json.dumps(as_mapping(subject, plans, engines, text, room), indent=2))
    else:
        typer.echo("\n".join(report(subject, plans, engines, text, room)))
    raise typer.Exit(PLANNED if fits else TOO_SMALL)


def room_findings(subject: Subject, engines: int, budget_bytes: int) -> tuple[Finding, ...]:
    """Return, for each mode asked for, what stands in the way of all processes having it in the budget given."""
    facts = NodeFacts(budget_bytes=budget_bytes, holders=subject.holders)
    modes = dict.fromkeys(wish.mode for wish in subject.stacks[0].modes)
    found = (room_finding(subject.stacks, engines, facts, mode) for mode in modes)
    return tuple(f for f in found if f is not None)


def _fits(stack: Stack, room: Sequence[Finding]) -> bool:
    """Whether a mode that the stack accepts has room: those behind a required one count for nothing."""
    refused = {f.mode for f in room if f.severity is Severity.REFUSED}
    for wish in stack.modes:
        if wish.mode not in refused:
            return True
        if wish.required:
            return False
    return not stack.modes


def _write(path: Path | None, text: str, *, force: bool) -> None:
    if path is None:
        return
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        typer.echo(f"{path}: is there already.\n  Give another path, or --force to overwrite it.", err=True)
        raise typer.Exit(opt.UNUSABLE) from error
    except OSError as error:
        typer.echo(f"{path}: cannot be written: {error.strerror}.\n  Give a writable path.", err=True)
        raise typer.Exit(opt.UNUSABLE) from error


def config_text(subject: Subject, plans: Sequence[ModePlan], *, given: bool, budget_bytes: int, store: bool) -> str:
    """Return the file for `hoststage serve`: the given budget, else what the greediest mode takes, in whole GiB."""
    needed = max(plan.chosen.total for plan in plans) + subject.held_bytes
    budget = budget_bytes if given else ceil_div(needed, GIB) * GIB
    return render_config(
        title=subject.title,
        budget_bytes=budget,
        huge_pages=True,
        store_url=STORE_URL if store else "none",
    )


def report(
    subject: Subject, plans: Sequence[ModePlan], engines: int, config: str, room: Sequence[Finding] = ()
) -> list[str]:
    """Return the plan as lines of text: every number with the sum that it comes from."""
    lines = [subject.title, ""]
    for stack, pools in subject.shards:
        stage = f" of stage {stack.parallel.pp_rank}" if len(subject.shards) > 1 else ""
        lines.append(f"Pools of one process{stage}")
        known = {d.pool.name: d for d in pools}
        for pool in stack.pools:
            described = known.get(pool.name)
            lines.append(f"  {pool.name} ({pool.kind.value}, {pool.layers} layers)")
            terms = described.terms if described else (Term("page", "as given", pool.page_bytes, "bytes"),)
            lines += [f"    {term}" for term in terms]
            if pool.kind is not PoolKind.MAMBA and not (described and described.token_bytes):
                each = ceil_div(pool.page_bytes, max(1, pool.page_tokens))
                lines.append(f"    token = {pool.page_bytes} / {pool.page_tokens} tokens, rounded up = {each} bytes")
            lines.append(f"    slot = {pool.page_bytes} aligned to 4096 = {pool.stride} bytes")
        lines.append("")
    for plan in plans:
        lines += _mode_lines(plan, len(subject.stacks), engines)
    for holder in subject.holders:
        size = f"{holder.bytes} bytes ({in_words(holder.bytes)})"
        lines += [f"Beside the arenas, in the kernel's limits too: {holder.name} in the daemon's memory = {size}", ""]
    findings = (*room, *subject.engine, *subject.notes)
    if findings:
        lines.append("Findings and assumptions")
        lines += [line for f in findings for line in _finding_lines(f)]
        lines.append("")
    if not _fits(subject.stacks[0], room):
        return [*lines, "No configuration for hoststage serve: the budget given is too small."]
    return [*lines, "Configuration for hoststage serve", "", config.rstrip()]


def _finding_lines(f: Finding) -> list[str]:
    """Return a finding, wrapped to the terminal or to `$COLUMNS`."""
    mode = f" ({f.mode.value})" if f.mode is not None else ""
    text = f"{f.severity.value} {f.rule} {f.subject}{mode}: {f.message}{f' → {f.remedy}' if f.remedy else ''}"
    width = max(40, shutil.get_terminal_size((120, 24)).columns)
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sized(term: Term) -> str:
    """Return a line of a total, with bytes in words that suffice: what is printed can be given as a budget."""
    return f"{term} ({at_least(term.value)})" if term.unit == "bytes" and term.value >= 1 << 20 else str(term)


def _mode_lines(plan: ModePlan, processes: int, engines: int) -> list[str]:
    lines = [f"Mode {plan.mode.value}, {processes} processes × {engines} engines on the node"]
    for rank, sizing in plan.sizings:
        for pool in sizing.pools:
            name = f"stage {rank} {pool.pool}" if len(plan.sizings) > 1 else pool.pool
            lines.append(f"  smallest pool {name}")
            lines += [f"    {term}" for term in least_terms(pool)]
    for title, need in (("least", plan.least), ("with the sizes asked for or chosen", plan.chosen)):
        lines.append(f"  node, {title}")
        lines += [f"    {_sized(term)}" for term in (*need.terms, *need.settings())]
        lines.append(
            f"    systemd: LimitMEMLOCK={need.memlock_bytes}; shell: ulimit -l {ceil_div(need.memlock_bytes, 1024)}"
        )
    return [*lines, ""]


def as_mapping(
    subject: Subject, plans: Sequence[ModePlan], engines: int, config: str, room: Sequence[Finding] = ()
) -> dict[str, Any]:
    """Return the plan as plain data."""
    return {
        "model": subject.title,
        "processes": len(subject.stacks),
        "engines": engines,
        "pools": [
            {
                "name": pool.name,
                "pp_rank": stack.parallel.pp_rank,
                "kind": pool.kind.value,
                "layers": pool.layers,
                "page_bytes": pool.page_bytes,
                "page_tokens": pool.page_tokens,
                "token_bytes": next((d.token_bytes for d in pools if d.pool.name == pool.name), 0) or None,
                "window_pages": pool.window_pages,
                "stride": pool.stride,
                "arithmetic": [str(t) for d in pools if d.pool.name == pool.name for t in d.terms],
            }
            for stack, pools in subject.shards
            for pool in stack.pools
        ],
        "modes": [_mode_mapping(plan) for plan in plans],
        "findings": [finding_mapping(f) for f in (*room, *subject.engine, *subject.notes)],
        "config": config,
    }


def _mode_mapping(plan: ModePlan) -> dict[str, Any]:
    return {
        "mode": plan.mode.value,
        "smallest": [
            {
                "pool": pool.pool,
                "pp_rank": rank,
                "window_pages": pool.window_pages,
                "slots": pool.least_slots,
                "write_slots": pool.needed_write,
                "read_slots": pool.needed_read,
                "hold_slots": pool.hold_slots,
                "bytes": pool.least_slots * pool.stride,
            }
            for rank, sizing in plan.sizings
            for pool in sizing.pools
        ],
        "least": _need_mapping(plan.least),
        "chosen": _need_mapping(plan.chosen),
    }


def _need_mapping(need: Need) -> dict[str, Any]:
    return {
        "bytes": need.total,
        "nr_hugepages": need.huge_pages,
        "memlock_bytes": need.memlock_bytes,
        "arithmetic": [str(term) for term in (*need.terms, *need.settings())],
    }
