"""Fences about holds in the host pool for retracted decode requests.

A refusal here takes the holds away, not the session, unless the client requires them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hoststage.core.fences.context import RETRACTION_SUBJECT, Context, Report, at_least, granted_path, in_words, listed
from hoststage.core.fences.geometry import smaller_sidecars
from hoststage.core.findings import Finding, RefusalKind
from hoststage.core.spans import held_requests
from hoststage.core.stack import PayloadPath, PoolKind

FALLBACK = "use CPU-tensor backup (--disaggregation-decode-retraction-backup cpu_tensor)"


def pure_swa(ctx: Context) -> bool:
    """Whether the stack has window pools and no full-attention pool."""
    return bool(ctx.swa_pools) and not ctx.stack.of_kind(PoolKind.KV)


def retraction_path(ctx: Context) -> Iterator[Finding]:
    """Holds are written and read in place, in memory that the client maps.

    Bytes in messages are refused rather than served: a whole request would cross the stream twice to be parked on the
    other side of it, where the worker's own CPU tensors cost one copy and no message. Imported memory is the worker's own already.
    """
    path = granted_path(ctx)
    if path is not PayloadPath.SHM:
        yield Report("RETRACTION_PATH", ctx.mode).refused(
            RETRACTION_SUBJECT,
            f"Holds live in the daemon's shared memory, and the payload path of this session is {path.value}: it could "
            "neither fill nor read them.",
            f"Use the path shm (the daemon's sockets and this client on one host). Or {FALLBACK}.",
            RefusalKind.FAILED_PRECONDITION,
            path=path.value,
        )


def retraction_mamba(ctx: Context) -> Iterator[Finding]:
    """Recurrent state cannot be parked in the host pool yet."""
    pools = ctx.stack.of_kind(PoolKind.MAMBA)
    if pools:
        names = listed(p.name for p in pools)
        yield Report("RETRACTION_MAMBA", ctx.mode).refused(
            RETRACTION_SUBJECT,
            f"The model has recurrent state ({names}), which changes with every token and is not held in the host "
            "pool.",
            f"For now {FALLBACK}.",
            RefusalKind.UNIMPLEMENTED,
            pools=names,
        )


def retraction_pure_swa(ctx: Context) -> Iterator[Finding]:
    """A pure-SWA model has no full-attention pool to back up; its window alone is held on opt-in."""
    if not pure_swa(ctx):
        return
    report = Report("RETRACTION_PURE_SWA", ctx.mode)
    names = listed(p.name for p in ctx.swa_pools)
    if ctx.stack.retraction.window_only:
        yield report.notice(
            RETRACTION_SUBJECT,
            f"The stack has window pools only ({names}): holds keep a request's trailing window, as the client agreed.",
            pools=names,
        )
        return
    yield report.refused(
        RETRACTION_SUBJECT,
        f"The stack has window pools only ({names}) and no full-attention pool that a retracted request could be "
        "backed up to.",
        f"Opt in to window-only holds: the trailing window is all that such a request needs to resume. Or {FALLBACK}.",
        RefusalKind.FAILED_PRECONDITION,
        pools=names,
        full_pools=0,
    )


def retraction_stack(ctx: Context) -> Iterator[Finding]:
    """Every pool that a request lives in must have a host pool, and sidecars a slot for each of their source's."""
    report, stack = Report("RETRACTION_STACK", ctx.mode), ctx.stack
    missing = [p.name for p in (*stack.of_kind(PoolKind.KV), *ctx.swa_pools) if not p.has_host_pool]
    if not stack.of_kind(PoolKind.KV) and not ctx.swa_pools:
        missing.append("kv")
    if missing:
        yield report.refused(
            RETRACTION_SUBJECT,
            f"A retracted request cannot be backed up: host pools are missing for {listed(missing)}.",
            f"Give each of them a host pool. Or {FALLBACK}.",
            RefusalKind.FAILED_PRECONDITION,
            missing=listed(missing),
        )
    for pool, root, slots, needed in smaller_sidecars(ctx):
        yield report.refused(
            RETRACTION_SUBJECT,
            f"A retracted request cannot be backed up: sidecar {pool.name!r} has {slots} slots, its source "
            f"{root.name!r} {needed}.",
            f"Give {pool.name!r} at least {needed} slots, or 0 to have as many as {root.name!r}.",
            RefusalKind.FAILED_PRECONDITION,
            sidecar=pool.name,
            sidecar_slots=slots,
            source=root.name,
            source_slots=needed,
        )
    for pool in ctx.sidecars:
        if ctx.source(pool) is None:
            yield report.refused(
                RETRACTION_SUBJECT,
                f"A retracted request cannot be backed up: sidecar {pool.name!r} or its source "
                f"{pool.indices_from_pool!r} has no host pool.",
                "Give both a host pool.",
                RefusalKind.FAILED_PRECONDITION,
                sidecar=pool.name,
                source=pool.indices_from_pool,
            )


def retraction_capacity(ctx: Context) -> Iterator[Finding]:
    """Holds must have room for one largest request, two where one may be received while another is retracted."""
    report, stack, sized = Report("RETRACTION_CAPACITY", ctx.mode), ctx.stack, ctx.with_holds
    requests = held_requests(stack)
    if stack.largest_request_tokens <= 0:
        yield report.refused(
            RETRACTION_SUBJECT,
            f"The largest request has {stack.largest_request_tokens} tokens, so that the holds cannot be sized.",
            "Give largest_request_tokens (the engine's context length).",
            RefusalKind.INVALID_ARGUMENT,
            largest_request_tokens=stack.largest_request_tokens,
        )
        return
    values: dict[str, int | str] = {
        "largest_request_tokens": stack.largest_request_tokens,
        "requests": requests,
        "stack_bytes": sized.charged_bytes,
        "free_bytes": ctx.facts.free_bytes,
    }
    need = f"{requests} largest request{'s' if requests > 1 else ''} of {stack.largest_request_tokens} tokens"
    if not sized.fits:
        yield report.refused(
            RETRACTION_SUBJECT,
            f"Holding {need} brings the stack to {in_words(sized.charged_bytes)}, and "
            f"{in_words(ctx.facts.free_bytes)} of the node's budget are free.",
            f"Raise the budget to {at_least(ctx.facts.committed_bytes + sized.charged_bytes)} or more, or lower the "
            "largest request. "
            f"Or {FALLBACK}.",
            RefusalKind.RESOURCE_EXHAUSTED,
            **values,
        )
        return
    for pool in sized.pools:
        if pool.pool == pool.source and not pool.shared and 0 < pool.asked_slots < pool.least_slots:
            yield report.adjusted(
                RETRACTION_SUBJECT,
                f"Pool {pool.pool!r} asks for {pool.asked_slots} slots; staging and holds for {need} need "
                f"{pool.least_slots}. It was "
                f"grown to that.",
                f"Ask for {pool.least_slots} slots.",
                **values,
                pool=pool.pool,
                asked_slots=pool.asked_slots,
                needed_slots=pool.least_slots,
                hold_slots=pool.hold_slots,
                granted_slots=pool.slots,
            )
