"""Fences about the stack as such: protocol, geometry, sidecar mappings. They hold for any mode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hoststage.core.fences.context import Context, ProtocolRanges, Report, listed
from hoststage.core.findings import Finding, RefusalKind
from hoststage.core.spans import asked_slots, shape_of
from hoststage.core.stack import HitPolicy, Parallel, Pool, PoolKind

_NAME = re.compile(r"[a-z0-9_]{1,64}")

BAD = RefusalKind.INVALID_ARGUMENT


def protocol(ctx: Context) -> Iterator[Finding]:
    """Both sides must speak a common protocol version and share a payload path."""
    report = Report("PROTOCOL", ctx.mode)
    if ctx.protocol.common is None:
        yield no_common_version(ctx.protocol)
    offered, accepted = ctx.facts.paths, ctx.stack.paths
    if not any(path in offered for path in accepted):
        yield report.refused(
            "paths",
            f"The client accepts the payload paths [{listed_paths(accepted)}], the daemon offers "
            f"[{listed_paths(offered)}].",
            "Let the client accept one that the daemon offers; `inline` works everywhere.",
            RefusalKind.UNIMPLEMENTED,
            client_paths=listed_paths(accepted),
            server_paths=listed_paths(offered),
        )


def no_common_version(p: ProtocolRanges) -> Finding:
    """Return the finding that both sides' protocol versions have none in common."""
    older = "client library" if p.client_max < p.server_min else "daemon"
    return Report("PROTOCOL", None).refused(
        "protocol",
        f"The client speaks protocol versions {p.client_min} to {p.client_max}, the daemon {p.server_min} to "
        f"{p.server_max}: they have none in common.",
        f"Upgrade the {older}.",
        RefusalKind.FAILED_PRECONDITION,
        client_min=p.client_min,
        client_max=p.client_max,
        server_min=p.server_min,
        server_max=p.server_max,
    )


def listed_paths(paths: tuple[object, ...]) -> str:
    return ", ".join(str(getattr(p, "value", p)) for p in paths)


def pool_geometry(ctx: Context) -> Iterator[Finding]:
    """Sizes must be positive and consistent, and equal to those of a live namespace of the same fingerprint."""
    report, stack = Report("POOL_GEOMETRY", ctx.mode), ctx.stack
    if not any(p.has_host_pool for p in stack.pools):
        yield report.refused(
            "pools",
            f"None of the stack's {len(stack.pools)} pools has a host pool, so there is nothing to stage.",
            "Describe at least one pool with placement host_pool.",
            BAD,
            pools=len(stack.pools),
        )
    if not stack.modes:
        yield report.refused(
            "modes", "The stack asks for no mode.", "Ask for buffer_only, cache, or both in order.", BAD
        )
    for name, count in Counter(p.name for p in stack.pools).items():
        if count > 1:
            yield report.refused(
                name,
                f"{count} pools are named {name!r}.",
                "Give each pool a name of its own.",
                BAD,
                pools=count,
            )
    for pool in stack.pools:
        yield from _pool(ctx, report, pool)
    for field in ("largest_request_tokens", "prefetch_threshold_tokens"):
        value = int(getattr(stack, field))
        if value < 0:
            yield report.refused(
                field, f"{field} is {value}.", "Give zero or a positive number of tokens.", BAD, value=value
            )
    yield from _live_shapes(ctx, report)
    yield from _parallel(report, stack.parallel)


def _pool(ctx: Context, report: Report, pool: Pool) -> Iterator[Finding]:
    def bad(what: str, remedy: str, **values: int | str) -> Finding:
        return report.refused(pool.name, f"Pool {pool.name!r}: {what}", remedy, BAD, **values)

    if not _NAME.fullmatch(pool.name):
        yield bad("the name is not 1 to 64 characters of a-z, 0-9 and _.", "Rename the pool.")
    for field in ("page_bytes", "page_tokens", "layers"):
        value = int(getattr(pool, field))
        if value <= 0:
            yield bad(f"{field} is {value}.", f"Give a positive {field}.", field=field, value=value)
    for field in ("sliding_window", "trailing_pages", "group_pages", "host_slots", "device_slots"):
        value = int(getattr(pool, field))
        if value < 0:
            yield bad(
                f"{field} is {value}.",
                f"Give zero or a positive {field}.",
                field=field,
                value=value,
            )
    if pool.kind is PoolKind.SWA and pool.sliding_window == 0:
        yield bad("it is a window pool without a window.", "Give sliding_window in tokens.", sliding_window=0)
    if pool.pieces and (sum(pool.pieces) != pool.page_bytes or min(pool.pieces) <= 0):
        yield bad(
            f"its {len(pool.pieces)} pieces sum to {sum(pool.pieces)} bytes, a page has {pool.page_bytes}.",
            "List the size of every piece of one page, each positive.",
            pieces=len(pool.pieces),
            pieces_bytes=sum(pool.pieces),
            page_bytes=pool.page_bytes,
        )
    if pool.hit_policy is HitPolicy.BLOCK_GROUPS and pool.group_pages == 0:
        yield bad(
            "its hit policy is block_groups, and group_pages is 0.",
            "Give the pages of one group.",
            group_pages=0,
        )
    if 0 < pool.trailing_pages < pool.window_pages:
        yield bad(
            f"trailing_pages is {pool.trailing_pages}, but a window of {pool.sliding_window} tokens is "
            f"{pool.window_pages} whole "
            f"pages of {pool.page_tokens} tokens.",
            f"Give at least {pool.window_pages} trailing pages, or 0 to have the window's.",
            trailing_pages=pool.trailing_pages,
            window_pages=pool.window_pages,
        )
    yield from _live(ctx, report, pool)


def _live_shapes(ctx: Context, report: Report) -> Iterator[Finding]:
    """All sessions of a namespace meet in one read arena a pool, found by place: they must describe the same pools."""
    live = ctx.facts.live_shapes
    here = tuple(shape_of(ctx.stack, p) for p in ctx.stack.pools)
    if live and live != here:
        yield report.refused(
            "pools",
            f"The stack has the pools {listed(here)}; the live namespace of the same fingerprint has {listed(live)}.",
            "Describe the same pools in the same order, or make the identity tell the two apart (layout, model), or end "
            "the sessions of the other.",
            BAD,
            pools=listed(here),
            live_pools=listed(live),
        )


def _live(ctx: Context, report: Report, pool: Pool) -> Iterator[Finding]:
    live = ctx.facts.live_page_bytes.get(pool.name)
    if live is not None and live != pool.page_bytes and pool.has_host_pool:
        yield report.refused(
            pool.name,
            f"Pool {pool.name!r}: a page has {pool.page_bytes} bytes here and {live} bytes in the live namespace "
            "of the same "
            "fingerprint.",
            "Make the identity tell the two apart (dtype, quantization, layout), or end the sessions of the other.",
            BAD,
            page_bytes=pool.page_bytes,
            live_page_bytes=live,
        )


def _parallel(report: Report, p: Parallel) -> Iterator[Finding]:
    for axis in ("tp", "pp", "cp", "dp", "dcp"):
        rank, size = getattr(p, f"{axis}_rank"), int(getattr(p, f"{axis}_size"))
        if size < 1 or (rank is not None and not 0 <= rank < size):
            yield report.refused(
                f"{axis}_rank",
                f"{axis}_rank {rank} is not a rank of {size}.",
                f"Give {axis}_size of at least 1 and {axis}_rank in [0, {axis}_size).",
                BAD,
                rank=-1 if rank is None else rank,
                size=size,
            )


def sidecar_mapping(ctx: Context) -> Iterator[Finding]:
    """A sidecar and the pool whose slot ids it reuses must both have host pools in the stack."""
    report = Report("SIDECAR_MAPPING_INCOMPLETE", ctx.mode)
    for pool in ctx.sidecars:
        if ctx.source(pool) is not None:
            continue
        source = pool.indices_from_pool or "(none named)"
        if not pool.indices_from_pool:
            why = "it names no source pool"
        elif not pool.has_host_pool:
            why = "the sidecar itself has no host pool"
        elif ctx.stack.pool(pool.indices_from_pool) is None:
            why = f"the stack has no pool {source!r}"
        else:
            why = f"pool {source!r} has no host slots of its own to share"
        yield report.refused(
            pool.name,
            f"Sidecar {pool.name!r} reuses the slots of {source!r}, but {why}.",
            f"Describe both {pool.name!r} and {source!r} with host pools, or leave the sidecar out.",
            BAD,
            sidecar=pool.name,
            source=source,
        )


def sidecar_smaller(ctx: Context) -> Iterator[Finding]:
    """A sidecar must have a slot for every slot id of its source."""
    report = Report("SIDECAR_SMALLER_THAN_SOURCE", ctx.mode)
    for pool, root, slots, needed in smaller_sidecars(ctx):
        yield report.refused(
            pool.name,
            f"Sidecar {pool.name!r} has {slots} host slots, its source {root.name!r} has {needed}: the source's "
            "slot ids "
            f"would point past its end.",
            f"Give {pool.name!r} at least {needed} slots, or 0 to have as many as {root.name!r}.",
            BAD,
            sidecar=pool.name,
            sidecar_slots=slots,
            source=root.name,
            source_slots=needed,
        )


def smaller_sidecars(ctx: Context) -> Iterator[tuple[Pool, Pool, int, int]]:
    """Yield sidecar, source, sidecar slots and source slots of each sidecar that is too small, asked for or live."""
    for pool in ctx.sidecars:
        root = ctx.source(pool)
        if root is None:
            continue
        asked = asked_slots(ctx.stack, root)
        live, live_root = (ctx.facts.live_read_slots.get(p.name, 0) for p in (pool, root))
        if 0 < pool.host_slots < asked:
            yield pool, root, pool.host_slots, asked
        elif 0 < live < live_root:
            yield pool, root, live, live_root
