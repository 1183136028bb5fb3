"""Lease boards: memory in which a session lists resident pages that it reads, so that a lease costs no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hoststage.core.boards import MOST_ENTRIES, Board
from hoststage.core.prefix import PoolRule
from hoststage.server.contract import ArenaFacts
from hoststage.server.staging import indexes
from hoststage.server.staging.arenas import ArenaMaker, PoolArena
from hoststage.shm.fence import full_fence_known
from hoststage.shm.leaseboard import board_bytes, make_board

FEATURE = "lease_board"


@dataclass(frozen=True, slots=True, eq=False)
class SessionBoard:
    """The board of one session. `sections`: the daemon's view of it, by pool."""

    arena: PoolArena
    sections: Mapping[int, Board]

    def facts(self) -> ArenaFacts:
        """What the client is told of it."""
        entries = sum(section.entries for section in self.sections.values())
        return replace(self.arena.facts(), slots=entries, stride=4)


def can_use(features: Sequence[str]) -> bool:
    """Return whether a client knows what to do with a board. It needs the indexes, which say what there is to be listed."""
    return FEATURE in features and indexes.FEATURE in features and full_fence_known()


async def make_arena(maker: ArenaMaker, tenant: str, rules: Sequence[PoolRule]) -> PoolArena:
    """Make the memory of a board, whatever its shares will come to. Raises what the memory layer raises."""
    return await maker.make_board(tenant, rules[0], board_bytes([MOST_ENTRIES] * len(rules)))


def lay_out(arena: PoolArena, shares: Mapping[int, int], pools: int) -> SessionBoard:
    """Make a board of that memory. shares: the most that may be listed, by pool."""
    assert arena.arena is not None
    entries = [shares.get(pool, 0) for pool in range(pools)]
    # It may have been a write arena of the tenant's, or another board: all of it is cleared.
    sections = make_board(arena.arena.view(0, board_bytes(entries)), entries)
    return SessionBoard(arena, {pool: sections[pool] for pool in shares})
