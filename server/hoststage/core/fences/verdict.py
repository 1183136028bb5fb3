"""The verdict: every fence for every mode, and the grant of the first acceptable one."""

from __future__ import annotations

from collections.abc import Iterable

from hoststage.core.fences.context import RETRACTION_SUBJECT, Applies, Context, ProtocolRanges, granted_path
from hoststage.core.fences.retraction import pure_swa
from hoststage.core.fences.table import RULES
from hoststage.core.findings import Finding, Grant, NodeFacts, Severity, Verdict
from hoststage.core.sizing import Sizing, size_pools
from hoststage.core.stack import Mode, Retraction, Stack, WritePolicy, namespace_of


def evaluate(stack: Stack, facts: NodeFacts, protocol: ProtocolRanges | None = None) -> Verdict:
    """Judge `stack` on a node with these `facts` and return all findings and the grant.

    Every row is evaluated for every mode that the client lists, also those behind a mode that is granted. Findings
    about the stack as such have no mode and refuse all of them. The first acceptable mode is granted; a required mode
    that is refused ends the list. A refusal with the subject `retraction` takes away only the holds, unless they are required.
    Nothing raises, whatever numbers the stack gives.
    """
    ranges = protocol or ProtocolRanges()
    modes = tuple(dict.fromkeys(wish.mode for wish in stack.modes))
    contexts = {mode: _context(stack, facts, ranges, mode) for mode in modes}
    general = _findings(_context(stack, facts, ranges, None), {Applies.STACK})
    by_mode = {mode: _findings(ctx, _applicable(ctx)) for mode, ctx in contexts.items()}
    findings = (*general, *(f for mode in modes for f in by_mode[mode]))
    if _refused(general):
        return Verdict(grant=None, findings=findings)
    for wish in stack.modes:
        grant = _grant(contexts[wish.mode], by_mode[wish.mode])
        if grant is not None or wish.required:
            return Verdict(grant=grant, findings=findings)
    return Verdict(grant=None, findings=findings)


def _context(stack: Stack, facts: NodeFacts, protocol: ProtocolRanges, mode: Mode | None) -> Context:
    sized_for = mode or Mode.BUFFER_ONLY
    staging = size_pools(stack, facts, sized_for, holds=False)
    wished = stack.retraction.retraction is Retraction.HOST_POOL
    with_holds = size_pools(stack, facts, sized_for, holds=True) if wished else staging
    return Context(stack, facts, protocol, mode, staging, with_holds)


def _applicable(ctx: Context) -> set[Applies]:
    applies = {Applies.EACH_MODE}
    if ctx.mode is Mode.BUFFER_ONLY:
        applies.add(Applies.BUFFER_ONLY)
    if ctx.wants_holds:
        applies.add(Applies.RETRACTION)
    return applies


def _findings(ctx: Context, applies: set[Applies]) -> tuple[Finding, ...]:
    return tuple(f for rule in RULES if rule.applies in applies for f in rule.check(ctx))


def _refused(findings: Iterable[Finding], *, retraction: bool = False) -> bool:
    """Whether the findings refuse the mode, or the holds where `retraction` is set."""
    return any(f.severity is Severity.REFUSED and (f.subject == RETRACTION_SUBJECT) is retraction for f in findings)


def _grant(ctx: Context, findings: tuple[Finding, ...]) -> Grant | None:
    """Return the grant for the context's mode, or None where a finding stands in the way."""
    wish = ctx.stack.retraction
    no_holds = ctx.wants_holds and _refused(findings, retraction=True)
    if ctx.mode is None or _refused(findings) or (no_holds and wish.required):
        return None
    granted = Retraction.NONE if no_holds else wish.retraction
    sizing: Sizing = ctx.with_holds if granted is Retraction.HOST_POOL else ctx.staging
    policy = ctx.stack.write_policy
    if ctx.mode is Mode.BUFFER_ONLY and policy is WritePolicy.WRITE_BACK:
        policy = WritePolicy.WRITE_THROUGH
    return Grant(
        mode=ctx.mode,
        path=granted_path(ctx),
        retraction=granted,
        window_only_holds=granted is Retraction.HOST_POOL and pure_swa(ctx),
        pools=tuple(p.grant for p in sizing.pools),
        namespace=namespace_of(ctx.stack),
        write_policy=policy,
    )
