"""Page indexes: what lets a session look up and copy resident pages without asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hoststage.core.prefix import PoolRule
from hoststage.core.readpool import ReadPool
from hoststage.core.stack import HitPolicy
from hoststage.server.contract import ArenaFacts
from hoststage.server.staging.arenas import ArenaMaker, PoolArena
from hoststage.shm.pageindex import PageIndexWriter, index_bytes

KIND = "index"
FEATURE = "page_index"


@dataclass(slots=True, eq=False)
class Indexes:
    """The page indexes of a namespace, one for each pool that has read slots."""

    arenas: list[PoolArena]
    _writers: list[tuple[ReadPool, PageIndexWriter]]

    def facts(self) -> list[ArenaFacts]:
        """What a client is told of them."""
        return [replace(a.facts(), trailing_pages=_trailing(a.rule)) for a in self.arenas]

    def close(self) -> None:
        """The namespace's pages may be overwritten from now on; to be called before its read arenas are given back."""
        for pool, writer in self._writers:
            pool.mirror = None
            writer.close()
        self._writers = []


async def make_indexes(maker: ArenaMaker, tenant: str, rules: Sequence[PoolRule], pools: Sequence[ReadPool]) -> Indexes:
    """Make the indexes of a namespace and let them follow its pools. Raises what the memory layer raises."""
    arenas = await maker.make_indexes(tenant, rules, [(pool.size, index_bytes(pool.size)) for pool in pools])
    writers = []
    for made in arenas:
        assert made.arena is not None
        # Its memory may have been another index of the tenant's: nobody reads it any more.
        writer = PageIndexWriter(made.arena.view(0, index_bytes(made.slots)), made.slots)
        pools[made.pool].mirror_to(writer)
        writers.append((pools[made.pool], writer))
    return Indexes(arenas, writers)


def _trailing(rule: PoolRule) -> int:
    return rule.trailing if rule.policy is HitPolicy.TRAILING_PAGES else 0
