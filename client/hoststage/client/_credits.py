"""Write slots granted ahead of need."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hoststage.v1 import ops


class Credits:
    """Write slots granted ahead, by pool. `wanted`: how many to keep of each."""

    def __init__(self, wanted: Sequence[int] = ()) -> None:
        self.wanted = tuple(wanted)
        self._lock = threading.Lock()
        self._ahead: dict[int, list[tuple[int, int]]] = {}
        # Pools, each as often as a reservation is under way that found too few slots free.
        self._needed: Counter[int] = Counter()

    def add(self, entries: Sequence[ops.PoolSlots]) -> list[ops.PoolSlots]:
        """Take granted slots in; return those beyond what is wanted, which are to be given back.

        The daemon grants as many as a commit took, also where those had been reserved: kept, they would become the whole arena.
        """
        beyond = []
        with self._lock:
            for entry in entries:
                have = self._ahead.setdefault(entry.pool, [])
                pairs = real_pairs(entry)
                wanted = self.wanted[entry.pool] if entry.pool < len(self.wanted) else 0
                room = 0 if self._needed[entry.pool] else max(0, wanted - len(have))
                have.extend(pairs[:room])
                if len(pairs) > room:
                    beyond.append(slots_of(entry.pool, pairs[room:]))
        return beyond

    def held(self, pool: int) -> int:
        """Slots of a pool that are here."""
        return len(self._ahead.get(pool, ()))

    def drain(self, pools: Sequence[int]) -> list[ops.PoolSlots]:
        """Take all slots of those pools out, and keep none of them until `drained`: a grant may be under way."""
        with self._lock:
            self._needed.update(pools)
            return [slots_of(pool, self._ahead.pop(pool)) for pool in pools if self._ahead.get(pool)]

    def drained(self, pools: Sequence[int]) -> None:
        """What they were drained for has been answered."""
        with self._lock:
            self._needed.subtract(pools)

    def take(self, counts: Sequence[tuple[int, int]]) -> tuple[ops.PoolSlots, ...] | None:
        """Return slots for every `(pool, count)`, or None where one pool has too few."""
        with self._lock:
            if any(len(self._ahead.get(pool, ())) < n for pool, n in counts):
                return None
            taken = []
            for pool, n in counts:
                have = self._ahead[pool] if n else []
                pairs, have[len(have) - n :] = have[len(have) - n :], []
                taken.append((pool, pairs))
        return tuple(slots_of(pool, pairs) for pool, pairs in taken)

    def withdraw(self, entries: Sequence[ops.PoolSlots]) -> set[tuple[int, int, int]]:
        """Forget slots that the daemon wants back; return `(pool, slot, generation)` of those that are being written."""
        left: set[tuple[int, int, int]] = set()
        with self._lock:
            for entry in entries:
                wanted = set(real_pairs(entry))
                have = self._ahead.get(entry.pool, [])
                left |= {(entry.pool, *pair) for pair in wanted.difference(have)}
                self._ahead[entry.pool] = [pair for pair in have if pair not in wanted]
        return left

    def lacking(self) -> list[tuple[int, int]]:
        """Return `(pool, count)` of the pools that have less than half of what is wanted."""
        with self._lock:
            have = {p: len(self._ahead.get(p, ())) for p in range(len(self.wanted)) if not self._needed[p]}
        return [(pool, self.wanted[pool] - h) for pool, h in have.items() if 2 * h < self.wanted[pool]]


def slots_of(pool: int, pairs: list[tuple[int, int]]) -> ops.PoolSlots:
    """Return `(slot, generation)` pairs as a list of slots."""
    table = np.array(pairs, dtype=np.uint32).reshape(-1, 2)
    return ops.PoolSlots(pool, np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]))


def real_pairs(entry: ops.PoolSlots) -> list[tuple[int, int]]:
    """Return `(slot, generation)` pairs, without pages that have no slot."""
    pairs = zip(entry.slots.tolist(), entry.generations.tolist(), strict=True)
    return [pair for pair in pairs if pair[0] != ops.NO_SLOT]
