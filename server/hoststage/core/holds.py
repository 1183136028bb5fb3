"""Holds: a retracted request's pages, parked until restore or discard.

A hold has capacity of its own (`hold_slots` of the grant), which neither stores nor loads can take. An ordinary hold lives
in its session's write arena and dies with it. A durable one is there only until the store has all of it: while the daemon
reads its slots it is MOVING, and then neither the owner's death nor a discard frees them before that I/O has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from hoststage.core.effects import Outcome, PartSlots, ReserveResult
from hoststage.core.sessions import SessionCore, SessionState
from hoststage.core.slots import Slots

HoldName: TypeAlias = tuple[str, bytes, str, int]
"""Namespace, owner token, request, attempt."""


class HoldExists(Exception):
    """A hold of that name is there already."""


class HoldMissing(Exception):
    """There is no hold of that name (any more), or it is another session's, or it is not in the state needed."""


class HoldBusy(Exception):
    """The hold is being moved between its slots and the store, or is sealed already."""


class HoldState(Enum):
    """OPEN: its owner writes it. MOVING: the daemon copies it to or from the store. SEALED: it can be restored."""

    OPEN = "open"
    MOVING = "moving"
    SEALED = "sealed"


@dataclass(slots=True, eq=False)
class HeldPages:
    """Pages of one hold. `note` is the client's own. `gone`: nobody wants it any more, its slots are free once I/O has ended."""

    session: int
    slots: list[tuple[int, Slots]]
    durable: bool = False
    ttl: float = 0.0
    note: bytes = b""
    state: HoldState = HoldState.OPEN
    gone: bool = False

    @property
    def pages(self) -> int:
        """Pages in all pools."""
        return sum(len(slots) for _, slots in self.slots)


@dataclass(slots=True)
class HoldTable:
    """All holds that are in slots. `copies`: durable holds that a session restored into hold slots of its own."""

    holds: dict[HoldName, HeldPages] = field(default_factory=dict)
    copies: dict[tuple[int, HoldName], HeldPages] = field(default_factory=dict)
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)

    # -------------------------------------------------------------- taking and sealing

    def hold(
        self,
        session: SessionCore,
        name: HoldName,
        wants: Sequence[tuple[int, int]],
        *,
        durable: bool = False,
        ttl: float = 0.0,
    ) -> ReserveResult:
        """Take hold slots, `(pool, pages)` each. Raises `HoldExists`."""
        if name in self.holds:
            raise HoldExists(f"request {name[2]!r}, attempt {name[3]} is held already")
        refusal = self._refuse(session, wants)
        if refusal is not None:
            return self._count(refusal)
        held = HeldPages(session.session, self._take(session, wants), durable, ttl)
        self.holds[name] = held
        return self._count(ReserveResult(Outcome.ACCEPTED, self._parts(session, held.slots)))

    def _count(self, result: ReserveResult) -> ReserveResult:
        self.counters["hold", result.outcome.name.lower()] += 1
        return result

    @staticmethod
    def _refuse(session: SessionCore, wants: Sequence[tuple[int, int]]) -> ReserveResult | None:
        for pool, n in wants:
            write = session.write[pool]
            label = session.namespace.rules.pools[pool].name
            if n > write.holds:
                detail = f"{n} pages of pool {label} can never be held: the grant has {write.holds} hold slots"
                return ReserveResult(Outcome.OVERSIZE, detail=detail)
            if write.held + n > write.holds:
                detail = f"{n} hold slots of pool {label} wanted, {write.holds - write.held} of {write.holds} are free"
                return ReserveResult(Outcome.POOL_FULL, detail=detail)
        return None

    @staticmethod
    def _take(session: SessionCore, wants: Sequence[tuple[int, int]]) -> list[tuple[int, Slots]]:
        return [(pool, session.write[pool].hold(n)) for pool, n in wants]

    @staticmethod
    def _parts(session: SessionCore, taken: Sequence[tuple[int, Slots]]) -> tuple[PartSlots, ...]:
        return tuple(PartSlots(pool, 0, s, session.write[pool].table.generations(s)) for pool, s in taken)

    def own(self, session: SessionCore, name: HoldName) -> HeldPages:
        """Return a hold of this session. Raises `HoldMissing`."""
        held = self.holds.get(name)
        if held is None or held.session != session.session:
            raise HoldMissing(f"request {name[2]!r}, attempt {name[3]} is not held by this session")
        return held

    def seal(self, session: SessionCore, name: HoldName, note: bytes) -> None:
        """The pages of an ordinary hold are written. Raises `HoldMissing`, `HoldBusy`."""
        held = self.own(session, name)
        if held.state is HoldState.MOVING or held.durable:
            raise HoldBusy(f"request {name[2]!r}, attempt {name[3]} is being stored")
        held.note, held.state = note, HoldState.SEALED
        self.counters["hold_seal", "sealed"] += 1

    # -------------------------------------------------------------- I/O between slots and store

    def begin_move(self, session: SessionCore, name: HoldName) -> HeldPages:
        """The daemon reads the slots of an open durable hold from now on. Raises `HoldMissing`, `HoldBusy`."""
        held = self.own(session, name)
        if held.state is not HoldState.OPEN:
            raise HoldBusy(f"request {name[2]!r}, attempt {name[3]} is {held.state.value} already")
        self._begin_io(session, held)
        return held

    def begin_copy(
        self, session: SessionCore, name: HoldName, wants: Sequence[tuple[int, int]]
    ) -> tuple[HeldPages | None, ReserveResult]:
        """Take hold slots that the daemon fills from the store. Raises `HoldBusy` where it is doing so already."""
        if (session.session, name) in self.copies:
            raise HoldBusy(f"request {name[2]!r}, attempt {name[3]} is being restored by this session")
        refusal = self._refuse(session, wants)
        if refusal is not None:
            return None, refusal
        held = HeldPages(session.session, self._take(session, wants), durable=True)
        self.copies[session.session, name] = held
        self._begin_io(session, held)
        return held, ReserveResult(Outcome.ACCEPTED)

    @staticmethod
    def _begin_io(session: SessionCore, held: HeldPages) -> None:
        for pool, slots in held.slots:
            session.write[pool].begin_hold_io(slots)
        held.state = HoldState.MOVING

    def end_move(self, session: SessionCore, name: HoldName, held: HeldPages, after: HoldState | None) -> bool:
        """The I/O has ended. `after`: the hold's state from now on; None frees it. Return whether anybody still wanted it."""
        wanted = not held.gone
        keep = wanted and after is not None and session.state is not SessionState.ENDING
        for pool, slots in held.slots:
            session.write[pool].end_hold_io(slots, keep=keep)
        if keep:
            assert after is not None
            held.state = after
            return True
        held.gone = True
        if self.holds.get(name) is held:
            del self.holds[name]
        if self.copies.get((session.session, name)) is held:
            del self.copies[session.session, name]
        return wanted

    # -------------------------------------------------------------- restoring and ending

    def restore(self, session: SessionCore, name: HoldName) -> tuple[tuple[PartSlots, ...], bytes] | None:
        """Return the pages of a sealed hold and its note, None where there is none. It stays until it is discarded."""
        held = self.copies.get((session.session, name)) or self.holds.get(name)
        if held is None or held.session != session.session or held.state is not HoldState.SEALED:
            return None
        return self._parts(session, held.slots), held.note

    def discard(self, session: SessionCore, name: HoldName) -> HeldPages:
        """Free a hold, at once or when its I/O has ended; return it. Raises `HoldMissing`."""
        held = self.own(session, name)
        del self.holds[name]
        self._drop(session, held)
        self.counters["hold_ended", "discarded"] += 1
        return held

    def discard_copy(self, session: SessionCore, name: HoldName) -> bool:
        """Free what a session restored of a durable hold into slots of its own; return whether there was any."""
        held = self.copies.pop((session.session, name), None)
        if held is None:
            return False
        self._drop(session, held)
        return True

    @staticmethod
    def _drop(session: SessionCore, held: HeldPages) -> None:
        held.gone = True
        if held.state is not HoldState.MOVING:
            for pool, slots in held.slots:
                session.write[pool].drop_hold(slots)

    def session_gone(self, session: int) -> int:
        """Forget the holds of a session whose slots are freed elsewhere, or when their I/O has ended; return how many."""
        gone = [name for name, held in self.holds.items() if held.session == session]
        for name in gone:
            held = self.holds.pop(name)
            # A durable hold that is on its way into the store gets there: its owner had sealed it.
            held.gone = not (held.durable and held.state is HoldState.MOVING)
        for key in [k for k in self.copies if k[0] == session]:
            self.copies.pop(key).gone = True
        self.counters["hold_ended", "session_gone"] += len(gone)
        return len(gone)
