"""Sessions and pools as operators see them."""

from __future__ import annotations

from collections.abc import Sequence

from hoststage.server.contract import PoolFacts, SessionFacts
from hoststage.server.staging.arenas import PoolArena
from hoststage.server.staging.namespaces import NamespaceMemory
from hoststage.server.staging.session import Session


def session_facts(session: Session, now: float) -> SessionFacts:
    """Return what is told of a session at time `now`, in seconds of the engine's clock."""
    core, request = session.core, session.request
    return SessionFacts(
        core.session,
        request.client,
        request.worker,
        request.pid,
        core.namespace.name,
        request.stack.identity.model,
        core.mode.value,
        session.grant.path.value,
        core.state.value,
        session.grant.session_bytes,
        len(core.commits),
        core.read_leases,
        now - session.opened_at,
    )


def read_pool_facts(name: str, space: NamespaceMemory) -> list[PoolFacts]:
    """Return what is told of the read arenas of a namespace."""
    return [
        _facts(name, arena, 0, read.size, read.by_state(), read.reserve)
        for arena, read in zip(space.arenas, space.core.pools, strict=True)
    ]


def write_pool_facts(session: Session, arenas: Sequence[PoolArena]) -> list[PoolFacts]:
    """Return what is told of the write arenas of a session."""
    name = session.core.namespace.name
    return [
        _facts(name, arena, session.session_id, pool.table.size, pool.table.by_state(), 0)
        for arena, pool in zip(arenas, session.core.write, strict=True)
    ]


def _facts(
    namespace: str, arena: PoolArena, session: int, slots: int, states: dict[str, int], reserve: int
) -> PoolFacts:
    return PoolFacts(
        namespace, arena.rule.name, arena.kind, session, arena.rule.stride, slots, states, reserve, arena.pin()
    )
