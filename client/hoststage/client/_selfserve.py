"""Serving oneself: lookups and copies of resident pages by the daemon's page indexes, without asking the daemon.

A copy is checked afterwards: where a page has left its slot meanwhile, what was copied does not count, and the daemon is asked. The
daemon hears of the hits now and then, so that what is read here is not what it evicts first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hoststage.client._arenas import Arena, Arenas
from hoststage.client._pages import KeyRun, PageRows
from hoststage.client.errors import SessionLost
from hoststage.shm.pageindex import Found, PageIndex
from hoststage.v1 import hoststage_pb2 as pb

_MOST_TOUCHED = 4096


@dataclass(frozen=True, slots=True)
class _Pool:
    """One pool: its index, the pages that lie in its slots, and how many pages at a prefix's end it needs (0: all)."""

    place: int
    index: PageIndex
    pages: Arena
    trailing: int

    def first(self, prefix: int) -> int:
        """The first page that a prefix needs."""
        return max(0, prefix - self.trailing) if self.trailing else 0


class SelfService:
    """The page indexes of one connection."""

    def __init__(self, arenas: Arenas) -> None:
        self._pools = tuple(
            _Pool(place, PageIndex(index.whole(), index.slots), arenas.read[place], index.trailing_pages)
            for place, index in sorted(arenas.index.items())
        )
        self._lock = threading.Lock()
        self._lookups = self._loads = 0
        self._used: dict[int, set[int]] = {}

    def holds(self, run: KeyRun) -> bool:
        """Return whether every page of the run is resident in every pool, so that every prefix of it can be restored."""
        pools = self._pools
        if not pools:
            return False
        for pool in pools:
            found = pool.index.find(run.packed, run.key_bytes)
            if found is None or not pool.index.stands(found):
                return False
        with self._lock:
            self._lookups += 1
        return True

    def copy(self, run: KeyRun, prefix: int, rows: Mapping[int, PageRows]) -> dict[int, int] | None:
        """Copy the pages that a prefix needs; return, per pool, the place of the first one.

        None where a page is not resident, or has left while it was copied: the rows then hold nothing of use.
        """
        found: list[tuple[_Pool, Found]] = []
        pools = self._pools
        if not pools:
            return None
        for pool in pools:
            there = pool.index.find(run.cut(pool.first(prefix), prefix), run.key_bytes)
            if there is None:
                return None
            found.append((pool, there))
        for pool, there in found:
            wanted = rows.get(pool.place)
            if wanted is not None:
                if wanted.count < len(there[0]):
                    return None
                wanted.from_arena(0, pool.pages, np.asarray(there[0], dtype=np.uint32))
        if not all(pool.index.stands(there) for pool, there in found):
            return None
        self._note(found)
        return {pool.place: pool.first(prefix) for pool, _ in found}

    def _note(self, found: Iterable[tuple[_Pool, Found]]) -> None:
        with self._lock:
            self._loads += 1
            for pool, (slots, _) in found:
                used = self._used.setdefault(pool.place, set())
                if len(used) < _MOST_TOUCHED:
                    used.update(slots if isinstance(slots, list) else slots.tolist())

    def close(self) -> None:
        """Let the indexes go, so that they can be unmapped; whoever is reading one right now still holds it."""
        self._pools = ()

    def news(self) -> pb.ClientMessage | None:
        """Return what the daemon has not heard of yet; None where there is nothing."""
        with self._lock:
            lookups, loads, used = self._lookups, self._loads, self._used
            self._lookups, self._loads, self._used = 0, 0, {}
        if not lookups and not loads:
            return None
        slots = [pb.PoolSlots(pool=place, slots=sorted(each)[:_MOST_TOUCHED]) for place, each in used.items()]
        return pb.ClientMessage(touch=pb.Touch(lookups=lookups, loads=loads, slots=slots))


def self_service(arenas: Arenas) -> SelfService | None:
    """Return the means to serve oneself; None where the daemon gave no index to some pool with pages here."""
    if not arenas.index or set(arenas.index) != set(arenas.read):
        return None
    try:
        return SelfService(arenas)
    except (ValueError, SessionLost):
        # Of another layout than we know: the daemon is asked instead.
        return None
