"""A namespace's memory, and what a grant makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from hoststage.core.findings import Finding, Grant, PoolGrant, RefusalKind, Severity
from hoststage.core.prefix import rules_of
from hoststage.core.readpool import ReadPool
from hoststage.core.sessions import NamespaceCore, write_span
from hoststage.core.spans import shape_of
from hoststage.core.stack import Mode, Stack
from hoststage.server.contract import SessionRequest
from hoststage.server.staging.arenas import PoolArena
from hoststage.server.staging.indexes import Indexes


@dataclass(slots=True)
class NamespaceMemory:
    """The read arenas of a namespace, one a pool. `names` and `shapes`: of its pools, in stack order.

    indexes: its page indexes, once pages stay resident and nothing but their presence decides what can be restored.
    used_at: when its last session went, in seconds of the engine's clock. holder: its name in the ledger.
    """

    core: NamespaceCore
    arenas: list[PoolArena]
    tenant: str
    model: str
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    used_at: float
    holder: str
    indexes: Indexes | None = None


def new_namespace(
    request: SessionRequest,
    grant: Grant,
    name: str,
    arenas: list[PoolArena],
    *,
    has_store: bool,
    beliefs: int,
    now: float,
) -> NamespaceMemory:
    """Return the namespace of the first session that asks for it."""
    stack, rules = request.stack, rules_of(request.stack)
    keep = grant.mode is Mode.CACHE
    pools = [_read_pool(g, keep=keep) for g in in_stack_order(stack, grant)]
    core = NamespaceCore(name, rules, pools, keep=keep, has_store=has_store, beliefs=beliefs)
    return NamespaceMemory(
        core,
        arenas,
        stack.identity.tenant,
        stack.identity.model,
        tuple(p.name for p in stack.pools),
        tuple(shape_of(stack, p) for p in stack.pools),
        now,
        space_holder(request, name),
    )


def adapt(space: NamespaceMemory, stack: Stack, grant: Grant) -> None:
    """Another session joins a namespace: keep the larger reserve, and room to publish once somebody does."""
    for pool, granted in zip(space.core.pools, in_stack_order(stack, grant), strict=True):
        pool.reserve = max(pool.reserve, min(granted.reserve_slots, pool.size))
        if grant.mode is Mode.CACHE and not space.core.keep:
            # Until now nothing was published here, and loads had everything.
            pool.write_span = write_span(pool.size, pool.reserve)


def in_stack_order(stack: Stack, grant: Grant) -> list[PoolGrant]:
    """Return one grant a pool of the stack; a pool that stays on the device has no slots."""
    by_name = {g.pool: g for g in grant.pools}
    return [by_name.get(p.name) or PoolGrant(p.name, p.stride, 0, 0) for p in stack.pools]


def _read_pool(grant: PoolGrant, *, keep: bool) -> ReadPool:
    # In buffer_only nothing is published, and loads may have everything.
    span = write_span(grant.read_slots, grant.reserve_slots) if keep else 0
    return ReadPool(grant.read_slots, reserve=grant.reserve_slots, write_span=span, keep=keep)


def space_holder(request: SessionRequest, name: str) -> str:
    """Return the name under which a namespace's read arenas stand in the ledger."""
    return f"namespace {name[:12]} ({request.stack.identity.model})"


def contended(budget: int) -> Finding:
    """Return the finding of a session that lost the race for the budget several times over."""
    return Finding(
        "BUDGET",
        Severity.REFUSED,
        "memory.budget",
        f"others took what was free of the budget of {budget} bytes, again and again, while this session was being opened",
        "try again, or raise memory.budget of the daemon",
        kind=RefusalKind.RESOURCE_EXHAUSTED,
        values={"budget_bytes": budget},
    )
