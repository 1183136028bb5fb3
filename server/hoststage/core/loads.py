"""What a load is made of: its parts, and the fetches that it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hoststage.core.slots import Slots

WAITING = -1
MISSING = -2
GROUP_KEYS = 32
"""Keys whose pages are announced together while a load is still under way."""


@dataclass(slots=True, eq=False)
class Fetch:
    """One page under store I/O into a read slot. `waiters`: who wants it, and where."""

    pool: int
    key: bytes
    slot: int
    waiters: list[tuple[Load, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class LoadPart:
    """Pages of one pool: keys `[first, first + len(slots))`; a slot, or WAITING, or MISSING."""

    pool: int
    first: int
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a part's pages are: `hits` are there, those at `fresh` have to be fetched, the others are on their way or missing."""

    pool: int
    first: int
    slots: NDArray[np.int64]
    hits: Slots
    fresh: list[int]

    @property
    def wanted(self) -> int:
        """Slots that the part needs placed."""
        return len(self.fresh)


@dataclass(slots=True, eq=False)
class Load:
    """`silent`: a pin, which holds pages and says nothing. `given`: the client named the ranges itself.

    charged: pages that count against the session's quota. pinned: slots by pool and key that a pin holds for it while it begins.
    parked_since: when it was first seen waiting for room, None before. revoked: its session was asked to give it up.
    """

    load_id: int
    session: int
    keys: list[bytes]
    prefix: int
    needs: list[tuple[int, int, int]]
    deadline: float
    accept_shorter: bool = False
    given: bool = False
    silent: bool = False
    parts: list[LoadPart] = field(default_factory=list)
    outstanding: int = 0
    announced: int = 0
    done: bool = False
    ready: bool = False
    charged: int = 0
    pinned: dict[tuple[int, bytes], int] = field(default_factory=dict)
    parked_since: float | None = None
    revoked: bool = False

    @property
    def pages(self) -> int:
        """Pages that it asks for, or has, once it is ready."""
        if self.ready:
            return sum(len(part.slots) for part in self.parts)
        return sum(count for _, _, count in self.needs)
