"""Fences about staging: what a mode needs of a stack's pools."""

from __future__ import annotations

from collections.abc import Iterator

from hoststage.core.fences.context import Context, Report, at_least, in_words, listed
from hoststage.core.findings import Finding, RefusalKind
from hoststage.core.sizing import PoolSizing
from hoststage.core.spans import arena_group, span_pages
from hoststage.core.stack import Mode, Pool, PoolKind, Role, WritePolicy

EXHAUSTED = RefusalKind.RESOURCE_EXHAUSTED
PRECONDITION = RefusalKind.FAILED_PRECONDITION


def store_required(ctx: Context) -> Iterator[Finding]:
    """In `buffer_only` all data lives in the store, so there must be one."""
    if not ctx.facts.store_configured:
        yield Report("STORE_REQUIRED", ctx.mode).refused(
            "store",
            "buffer_only keeps nothing in host memory, and no store is configured for the namespace: every page "
            "would be lost.",
            "Configure a store in the daemon (the built-in `file` store needs a directory only), or allow mode cache.",
            PRECONDITION,
        )


def swa_pool_required(ctx: Context) -> Iterator[Finding]:
    """The SWA component must have a host staging pool."""
    for pool in ctx.swa_pools[:1]:
        yield from _without_host_pool(Report("SWA_POOL_REQUIRED", ctx.mode), pool)


def swa_pool_too_small(ctx: Context) -> Iterator[Finding]:
    """The SWA pool must hold two windows: one staging, one reserved for loads."""
    for pool in ctx.swa_pools[:1]:
        yield from _two_windows(ctx, Report("SWA_POOL_TOO_SMALL", ctx.mode), pool)


def auxiliary_swa(ctx: Context) -> Iterator[Finding]:
    """Every further window pool is held to the same two rules."""
    report = Report("AUXILIARY_SWA", ctx.mode)
    for pool in ctx.swa_pools[1:]:
        yield from _without_host_pool(report, pool)
        yield from _two_windows(ctx, report, pool)


def _without_host_pool(report: Report, pool: Pool) -> Iterator[Finding]:
    if pool.has_host_pool:
        return
    yield report.refused(
        pool.name,
        f"Pool {pool.name!r} has a window of {pool.sliding_window} tokens and no host staging pool: in the "
        f"{pool.layout.value} "
        "layout as given it is a device-only ring that is never offloaded, so no prefix could be restored from "
        "the store.",
        "Launch with a non-unified (paged) KV layout, or with the SWA pool offloaded to a host pool, or allow "
        "mode cache.",
        RefusalKind.UNIMPLEMENTED,
        layout=pool.layout.value,
        placement=pool.placement.value,
        sliding_window=pool.sliding_window,
    )


def _two_windows(ctx: Context, report: Report, pool: Pool) -> Iterator[Finding]:
    sized = ctx.staging.pool(pool.name)
    if sized is None or sized.shared:
        return
    yield from too_small(
        ctx,
        report,
        sized,
        "two windows, one of write arena and one reserved in the read arena; below that no write that carries a window "
        "could ever stage and the pool's coverage would be silently zero",
    )


def pool_too_small(ctx: Context) -> Iterator[Finding]:
    """Any other pool must hold the least that serves the mode."""
    report = Report("POOL_TOO_SMALL", ctx.mode)
    covered = {p.name for p in ctx.swa_pools} if ctx.mode is Mode.BUFFER_ONLY else set()
    for sized in ctx.staging.pools:
        if sized.source != sized.pool or sized.pool in covered or (sized.shared and ctx.mode is Mode.BUFFER_ONLY):
            continue
        need = "one span of write arena and one reserved in the read arena"
        if ctx.mode is Mode.CACHE:
            need += ", and one more that publishing may fill"
        yield from too_small(ctx, report, sized, need)


def too_small(ctx: Context, report: Report, sized: PoolSizing, need: str) -> Iterator[Finding]:
    """Judge one pool against its least: grown within the budget, else refused with both numbers."""
    values: dict[str, int | str] = {
        "asked_slots": sized.asked_slots,
        "needed_slots": sized.least_slots,
        "asked_tokens": sized.asked_slots * sized.page_tokens,
        "needed_tokens": sized.least_slots * sized.page_tokens,
        "span_pages": sized.span_pages,
        "page_tokens": sized.page_tokens,
    }
    yield from live_too_small(report, sized)
    if sized.shared or not 0 < sized.asked_slots < sized.least_slots:
        return
    least, asked = sized.least_slots, sized.asked_slots
    found = (
        f"Pool {sized.pool!r} asks for {asked} slots ({asked * sized.page_tokens} tokens); it needs {least} "
        f"({least * sized.page_tokens} tokens): {need}."
    )
    if ctx.staging.fits:
        yield report.adjusted(
            sized.pool,
            f"{found} It was grown to {least} slots.",
            f"Ask for {least} slots.",
            **values,
            granted_slots=sized.slots,
        )
        return
    yield report.refused(
        sized.pool,
        f"{found} Growing it would bring the stack to {in_words(ctx.staging.charged_bytes)}, and "
        f"{in_words(ctx.facts.free_bytes)} of the "
        f"node's budget are free.",
        f"Give pool {sized.pool!r} at least {least} slots and the daemon a budget of "
        f"{at_least(ctx.facts.committed_bytes + ctx.staging.charged_bytes)} or more.",
        EXHAUSTED,
        **values,
        stack_bytes=ctx.staging.charged_bytes,
        free_bytes=ctx.facts.free_bytes,
    )


def live_too_small(report: Report, sized: PoolSizing) -> Iterator[Finding]:
    """A live read arena is taken as it is: never grown, so it must hold what this stack needs of it."""
    if 0 < sized.live_read_slots < sized.needed_read:
        yield report.refused(
            sized.pool,
            f"The live namespace's read arena has {sized.live_read_slots} slots of pool {sized.pool!r}; this "
            "stack needs "
            f"{sized.needed_read}.",
            "End the sessions of that namespace, so that its read arena is built anew, or ask for a mode that "
            "needs less.",
            PRECONDITION,
            live_read_slots=sized.live_read_slots,
            needed_read_slots=sized.needed_read,
        )


def shared_arena_too_small(ctx: Context) -> Iterator[Finding]:
    """An arena shared by window pools and the full pool must hold two of the smallest transfers of them all."""
    report = Report("SHARED_ARENA_TOO_SMALL", ctx.mode)
    seen: set[tuple[str, ...]] = set()
    for swa in ctx.swa_pools:
        sized = ctx.staging.pool(swa.name)
        group = arena_group(ctx.stack, swa)
        names = tuple(p.name for p in group)
        if sized is None or not sized.shared or names in seen:
            continue
        seen.add(names)
        members = [s for s in (ctx.staging.pool(n) for n in names) if s is not None]
        one = sum(span_pages(ctx.stack, p) * p.stride for p in group)
        for member in members:
            yield from live_too_small(report, member)
        asked = sum(s.asked_slots * s.stride for s in members)
        if asked >= 2 * one:
            continue
        values: dict[str, int | str] = {
            "arena_bytes": asked,
            "transfer_bytes": one,
            "needed_bytes": 2 * one,
            "pools": listed(names),
        }
        found = (
            f"The arena shared by {listed(names)} has {asked} bytes; two of the smallest transfers, one staging a "
            "write and one "
            f"reserved for loads, need {2 * one} bytes."
        )
        if ctx.staging.fits:
            yield report.adjusted(
                swa.name, f"{found} It was grown to that.", f"Ask for {2 * one} bytes or more.", **values
            )
        else:
            yield report.refused(
                swa.name,
                f"{found} The node's budget has {in_words(ctx.facts.free_bytes)} free, the stack would need "
                f"{in_words(ctx.staging.charged_bytes)}.",
                f"Give the arena at least {2 * one} bytes and the daemon the budget for it.",
                EXHAUSTED,
                **values,
                stack_bytes=ctx.staging.charged_bytes,
                free_bytes=ctx.facts.free_bytes,
            )


def sidecar_unsupported(ctx: Context) -> Iterator[Finding]:
    """The client must be able to map sidecars, where the stack has any."""
    if ctx.sidecars and not ctx.stack.maps_sidecars:
        names = listed(p.name for p in ctx.sidecars)
        yield Report("SIDECAR_UNSUPPORTED", ctx.mode).refused(
            ctx.sidecars[0].name,
            f"The stack has sidecar pools ({names}), and the client says that it cannot map them.",
            "Use a client that maps sidecars, or allow mode cache.",
            RefusalKind.UNIMPLEMENTED,
            sidecars=names,
        )


def mamba_state(ctx: Context) -> Iterator[Finding]:
    """Recurrent state must have a host pool, and the client must hand it over with the span."""
    report = Report("MAMBA_STATE_UNSUPPORTED", ctx.mode)
    for pool in ctx.stack.of_kind(PoolKind.MAMBA):
        if not pool.has_host_pool:
            yield report.refused(
                pool.name,
                f"The model has recurrent state, and its pool {pool.name!r} has no host pool: a prefix without "
                "its state cannot "
                "be resumed.",
                "Give the state pool a host pool; one state per span is enough.",
                RefusalKind.UNIMPLEMENTED,
                placement=pool.placement.value,
            )
        elif not ctx.stack.hands_over_state:
            yield report.refused(
                pool.name,
                f"The client says that it cannot hand over the state of pool {pool.name!r} with its span.",
                "Use a client that does (one trailing slot at the span's end), or allow mode cache.",
                RefusalKind.UNIMPLEMENTED,
            )


def write_back_resolved(ctx: Context) -> Iterator[Finding]:
    """In `buffer_only` there is no host tier to write back to."""
    if ctx.stack.write_policy is WritePolicy.WRITE_BACK:
        yield Report("WRITE_BACK_RESOLVED", ctx.mode).adjusted(
            "write_policy",
            "write_back needs pages resident in host memory, and buffer_only keeps none: the policy in force is "
            "write_through.",
            "Ask for write_through, or for mode cache.",
            asked=WritePolicy.WRITE_BACK.value,
            granted=WritePolicy.WRITE_THROUGH.value,
        )


def decode_role(ctx: Context) -> Iterator[Finding]:
    """Decode sessions are served; SGLang itself refuses the flags, and the operator should know the way."""
    if ctx.stack.role is Role.DECODE:
        yield Report("DECODE_ROLE", ctx.mode).notice(
            "role",
            "A decode session is served in buffer_only. SGLang itself refuses --hicache-host-memory-mode "
            "buffer_only on a decode "
            "instance.",
            "With SGLang leave that flag out on decode instances and use hoststage's external linker, which on a decode instance "
            "needs --disaggregation-decode-enable-radix-cache. Instead of it, "
            "--disaggregation-decode-enable-offload-kvcache with hoststage's storage backend stores what they decode.",
            role=Role.DECODE.value,
        )


def dcp_unsupported(ctx: Context) -> Iterator[Finding]:
    """Under decode context parallelism every shard must be told apart, in any mode: else their pages would mix."""
    p = ctx.stack.parallel
    if p.dcp_size > 1 and p.dcp_rank is None:
        yield Report("DCP_UNSUPPORTED", ctx.mode).refused(
            "dcp_rank",
            f"Decode context parallelism splits each page over {p.dcp_size} shards, and the client does not say "
            "which of them it is: "
            "all would store different bytes under one key.",
            f"Give dcp_rank in [0, {p.dcp_size}), or run without decode context parallelism.",
            RefusalKind.UNIMPLEMENTED,
            dcp_size=p.dcp_size,
        )
