"""The write side of one pool: a session's private arena."""

from __future__ import annotations

from hoststage.core.slots import SlotError, Slots, SlotState, SlotTable

_GONE = (SlotState.RESERVED, SlotState.HELD, SlotState.QUARANTINED)


class WritePool:
    """Write slots of one pool of one session.

    `usable` slots serve stores, `holds` further ones serve retracted requests, and neither takes the other's share. `generation`: where
    generations start counting.
    """

    __slots__ = ("ahead", "held", "holds", "table", "usable")

    def __init__(self, usable: int, holds: int = 0, *, generation: int = 0) -> None:
        self.usable = usable
        self.holds = holds
        self.held = 0
        self.table = SlotTable(usable + holds, generation)
        # Of a reserved slot: it was granted ahead, for no page in particular.
        self.ahead: set[int] = set()

    @property
    def room(self) -> int:
        """Slots that a reservation could have now."""
        used = self.table.size - self.table.free - self.held
        return max(0, min(self.table.free, self.usable - used))

    @property
    def credits(self) -> int:
        """Slots that were granted ahead and are not yet committed or given back."""
        return len(self.ahead)

    def reserve(self, n: int, *, ahead: bool = False) -> Slots:
        """Take `n` slots for a store, or ahead of one. Raises `SlotError` where there is no room."""
        if n > self.room:
            raise SlotError(f"{n} write slots wanted, {self.room} of {self.usable} are free")
        slots = self.table.take(n, SlotState.RESERVED)
        if ahead:
            self.ahead.update(slots.tolist())
        return slots

    def commit(self, slots: Slots) -> None:
        """Reserved slots were written and are taken over."""
        self.table.move(slots, SlotState.RESERVED, SlotState.COMMITTED)
        self._used(slots)

    def give_back(self, slots: Slots) -> None:
        """Free reserved slots."""
        self.table.release(slots, SlotState.RESERVED)
        self._used(slots)

    def _used(self, slots: Slots) -> None:
        if self.ahead:
            self.ahead.difference_update(slots.tolist())

    def hold(self, n: int) -> Slots:
        """Take `n` slots for a hold. Raises `SlotError` beyond the capacity promised for holds."""
        if self.held + n > self.holds:
            raise SlotError(f"{n} hold slots wanted, {self.holds - self.held} of {self.holds} are free")
        slots = self.table.take(n, SlotState.HELD)
        self.held += n
        return slots

    def drop_hold(self, slots: Slots) -> None:
        """Free the slots of a hold."""
        self.table.release(slots, SlotState.HELD)
        self.held -= len(slots)

    def begin_hold_io(self, slots: Slots) -> None:
        """The daemon reads or fills the slots of a hold: they are nobody else's until `end_hold_io`, whatever becomes of the owner."""
        self.table.move(slots, SlotState.HELD, SlotState.DRAINING)

    def end_hold_io(self, slots: Slots, *, keep: bool) -> None:
        """The I/O has ended: the slots are the hold's again (`keep`), or free."""
        if keep:
            self.table.move(slots, SlotState.DRAINING, SlotState.HELD)
        else:
            self.table.release(slots, SlotState.DRAINING)
            self.held -= len(slots)

    def abort(self, slots: Slots, generations: Slots) -> None:
        """Free reserved slots. Raises `SlotError` where the reference is stale."""
        self.table.check(slots, generations, SlotState.RESERVED)
        self.give_back(slots)

    def quarantine(self) -> int:
        """Keep what the owner may still write out of use; return how many slots."""
        slots = self.table.in_state(SlotState.RESERVED)
        self.table.move(slots, SlotState.RESERVED, SlotState.QUARANTINED)
        self.ahead.clear()
        return len(slots)

    def owner_gone(self) -> int:
        """The owner cannot write any more: free all that it alone held; return how many slots.

        What it committed is the tier's to finish, and a hold under I/O is the hold table's.
        """
        freed = 0
        self.ahead.clear()
        for state in _GONE:
            slots = self.table.in_state(state)
            self.table.release(slots, state)
            freed += len(slots)
            if state is SlotState.HELD:
                self.held -= len(slots)
        return freed

    @property
    def busy(self) -> int:
        """Slots that are committed and not yet free."""
        return self.table.counts[SlotState.COMMITTED] + self.table.counts[SlotState.DRAINING]
