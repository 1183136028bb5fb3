"""Holds: a retracted request's pages, parked until restore or discard.

A hold has capacity of its own (`hold_slots` of the grant), which neither stores nor loads can take. An ordinary hold lives
in its session's write arena and dies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hoststage.core.effects import Outcome, PartSlots, ReserveResult
from hoststage.core.sessions import SessionCore
from hoststage.core.slots import Slots

HoldName: TypeAlias = tuple[str, bytes, str, int]
"""Namespace, owner token, request, attempt."""


class HoldExists(Exception):
    """A hold of that name is there already."""


class HoldMissing(Exception):
    """There is no hold of that name (any more), or it is another session's, or it is not in the state needed."""


@dataclass(slots=True)
class HeldPages:
    """Pages of one hold. `note` is the client's own. It can be restored once it is `sealed`."""

    session: int
    slots: list[tuple[int, Slots]]
    note: bytes = b""
    sealed: bool = False


@dataclass(slots=True)
class HoldTable:
    """All ordinary holds of a daemon."""

    holds: dict[HoldName, HeldPages] = field(default_factory=dict)

    def hold(self, session: SessionCore, name: HoldName, wants: Sequence[tuple[int, int]]) -> ReserveResult:
        """Take hold slots, `(pool, pages)` each. Raises `HoldExists`."""
        if name in self.holds:
            raise HoldExists(f"request {name[2]!r}, attempt {name[3]} is held already")
        for pool, n in wants:
            write = session.write[pool]
            label = session.namespace.rules.pools[pool].name
            if n > write.holds:
                detail = f"{n} pages of pool {label} can never be held: the grant has {write.holds} hold slots"
                return ReserveResult(Outcome.OVERSIZE, detail=detail)
            if write.held + n > write.holds:
                detail = f"{n} hold slots of pool {label} wanted, {write.holds - write.held} of {write.holds} are free"
                return ReserveResult(Outcome.POOL_FULL, detail=detail)
        taken = [(pool, session.write[pool].hold(n)) for pool, n in wants]
        self.holds[name] = HeldPages(session.session, taken)
        return ReserveResult(Outcome.ACCEPTED, self._parts(session, taken))

    @staticmethod
    def _parts(session: SessionCore, taken: Sequence[tuple[int, Slots]]) -> tuple[PartSlots, ...]:
        return tuple(PartSlots(pool, 0, s, session.write[pool].table.generations(s)) for pool, s in taken)

    def _own(self, session: SessionCore, name: HoldName) -> HeldPages:
        held = self.holds.get(name)
        if held is None or held.session != session.session:
            raise HoldMissing(f"request {name[2]!r}, attempt {name[3]} is not held by this session")
        return held

    def seal(self, session: SessionCore, name: HoldName, note: bytes) -> None:
        """The pages are written. Raises `HoldMissing`."""
        held = self._own(session, name)
        held.note, held.sealed = note, True

    def restore(self, session: SessionCore, name: HoldName) -> tuple[tuple[PartSlots, ...], bytes] | None:
        """Return the pages of a sealed hold and its note, None where there is none. It stays until it is discarded."""
        held = self.holds.get(name)
        if held is None or held.session != session.session or not held.sealed:
            return None
        return self._parts(session, held.slots), held.note

    def discard(self, session: SessionCore, name: HoldName) -> None:
        """Free a hold. Raises `HoldMissing`."""
        held = self._own(session, name)
        del self.holds[name]
        for pool, slots in held.slots:
            session.write[pool].drop_hold(slots)

    def session_gone(self, session: int) -> int:
        """Forget the holds of a session whose slots are freed elsewhere; return how many."""
        gone = [name for name, held in self.holds.items() if held.session == session]
        for name in gone:
            del self.holds[name]
        return len(gone)
