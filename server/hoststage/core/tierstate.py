"""What the parts of the tier share: sessions, namespaces, the queue for the store, and what is to be done outside."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from hoststage.core.commits import DrainPolicy, DrainQueue
from hoststage.core.effects import Effect
from hoststage.core.sessions import NamespaceCore, SessionCore, SessionLimits


@dataclass(slots=True)
class TierState:
    """The state of a tier. `epoch`: 8 bytes, new at each start, the first half of every commit id."""

    epoch: bytes
    limits: SessionLimits = field(default_factory=SessionLimits)
    policy: DrainPolicy = field(default_factory=DrainPolicy)
    sessions: dict[int, SessionCore] = field(default_factory=dict)
    namespaces: dict[str, NamespaceCore] = field(default_factory=dict)
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)
    draining: bool = False
    drains: DrainQueue = field(init=False)
    _effects: list[Effect] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.drains = DrainQueue(self.policy)

    def effects(self) -> list[Effect]:
        """Return what is to be done outside since the last call, in order."""
        out, self._effects = self._effects, []
        return out
