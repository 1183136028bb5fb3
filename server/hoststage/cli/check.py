"""`hoststage check`: the verdict on a model and an engine's flags, before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from hoststage.cli import options as opt
from hoststage.cli.inputs import Subject, parse_size, resolve
from hoststage.cli.judge import NodeVerdict, assumed_budget, budget_note, judge
from hoststage.cli.negotiate import NegotiateError, negotiate
from hoststage.core.findings import Finding, Grant
from hoststage.core.stack import Retraction, namespace_of

GRANTED, REFUSED = 0, 1


def check(
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
    require_pinned: opt.Pinned = False,
    budget: opt.Budget = "",
    store: opt.Store = True,
    ranks: opt.Ranks = 0,
    daemon: Annotated[
        str, typer.Option(help="Ask a running daemon, such as unix:///run/hoststage/hoststage.sock.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the daemon.", min=0.001)] = 5.0,
    as_json: opt.AsJson = False,
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
    """Judge a model and an engine's flags against every fence, before anything is loaded.

    Exit status: 0 granted; 1 refused, by hoststage or by the engine's own rules (rules named SGLANG_…); 2 unusable input.
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
        requires_pinned=require_pinned,
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
        verdict, notes = _verdict(subject, budget, store, daemon, timeout)
    except opt.UnusableInput as error:
        opt.unusable(error)
    except NegotiateError as error:
        typer.echo(f"NegotiateError: {error.target}: {error.problem}.\n  {error.remedy}.", err=True)
        raise typer.Exit(opt.UNUSABLE) from error
    said = (f for f in verdict.findings if f.rule not in subject.settled)
    findings = (*subject.engine, *said, *subject.notes, *notes)
    granted = verdict.mode is not None and not subject.engine_refuses
    if as_json:
        typer.echo(json.dumps(as_mapping(subject, verdict, findings, granted=granted), indent=2))
    else:
        from hoststage.cli.render import show_check

        show_check(subject, verdict, findings, granted=granted)
    raise typer.Exit(GRANTED if granted else REFUSED)


def _verdict(
    subject: Subject, budget: str, store: bool, daemon: str, timeout: float
) -> tuple[NodeVerdict, tuple[Finding, ...]]:
    """Return the verdict, from the daemon where one is named, and what was assumed of the node."""
    if daemon:
        return _ask(subject, daemon, timeout), ()
    size = parse_size(budget) if budget else assumed_budget(subject.stacks) + subject.held_bytes
    verdict = judge(subject.stacks, opt.node_facts(size, store=store, holders=subject.holders))
    return verdict, () if budget else (budget_note(size),)


def _ask(subject: Subject, daemon: str, timeout: float) -> NodeVerdict:
    """Ask a daemon about every distinct shard. It judges each alone: nothing is taken without a session."""
    verdicts = [negotiate(daemon, stack, timeout) for stack, _ in subject.shards]
    findings: list[Finding] = []
    for verdict in verdicts:
        findings += [f for f in verdict.findings if f not in findings]
    grants = tuple(v.grant for v in verdicts if v.grant is not None)
    modes = {grant.mode for grant in grants}
    if len(grants) < len(verdicts) or len(modes) != 1:
        return NodeVerdict(None, Retraction.NONE, (), tuple(findings))
    retractions = {grant.retraction for grant in grants}
    retraction = retractions.pop() if len(retractions) == 1 else Retraction.NONE
    return NodeVerdict(modes.pop(), retraction, grants, tuple(findings))


def as_mapping(
    subject: Subject, verdict: NodeVerdict, findings: Sequence[Finding], *, granted: bool
) -> dict[str, object]:
    """Return the verdict as plain data. `granted` is null where hoststage or the engine refuses; the findings tell which."""
    return {
        "granted": verdict.mode.value if granted and verdict.mode is not None else None,
        "retraction": verdict.retraction.value if granted else None,
        "findings": [finding_mapping(f) for f in findings],
        "pools": pools_mapping(subject, verdict),
    }


def finding_mapping(f: Finding) -> dict[str, object]:
    """Return a finding as plain data; the mode that it is about, if any, is among its values."""
    values: dict[str, int | str] = dict(f.values)
    if f.mode is not None:
        values["mode"] = f.mode.value
    return {
        "rule": f.rule,
        "severity": f.severity.value,
        "subject": f.subject,
        "message": f.message,
        "remedy": f.remedy,
        "values": values,
    }


def pools_mapping(subject: Subject, verdict: NodeVerdict) -> list[dict[str, object]]:
    """Return the pools of every distinct shard, with the slots that one process is granted (null where refused)."""
    pools: list[dict[str, object]] = []
    for shard, _ in subject.shards:
        grant = grant_of(namespace_of(shard), verdict.grants)
        for pool in shard.pools:
            given = next((p for p in grant.pools if p.pool == pool.name), None) if grant else None
            pools.append(
                {
                    "name": pool.name,
                    "kind": pool.kind.value,
                    "pp_rank": shard.parallel.pp_rank,
                    "page_bytes": pool.page_bytes,
                    "page_tokens": pool.page_tokens,
                    "layers": pool.layers,
                    "sliding_window": pool.sliding_window,
                    "window_pages": pool.window_pages,
                    "host_pool": pool.has_host_pool,
                    "replicated": pool.replicated,
                    "indices_from_pool": pool.indices_from_pool or None,
                    "asked_slots": pool.host_slots,
                    "stride": pool.stride,
                    "write_slots": given.write_slots if given else None,
                    "read_slots": given.read_slots if given else None,
                    "reserve_slots": given.reserve_slots if given else None,
                    "hold_slots": given.hold_slots if given else None,
                }
            )
    return pools


def grant_of(namespace: str, grants: Sequence[Grant]) -> Grant | None:
    """Return the first grant in a namespace."""
    return next((grant for grant in grants if grant.namespace == namespace), None)
