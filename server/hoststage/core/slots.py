"""The slot table: who may use which slot of an arena, and in which generation.

A slot has one state and one generation. The generation grows each time the slot is taken, so that whoever kept
a reference from before is refused. Batches are numpy index arrays; a batch is checked whole before anything of it changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Slots: TypeAlias = NDArray[np.uint32]

NO_SLOT = 0xFFFFFFFF
SMALL = 12
"""Batches up to this size are handled item by item: numpy's fixed cost a call is larger than that."""


class SlotState(IntEnum):
    """Write slots: FREE, RESERVED, COMMITTED, DRAINING, FREE; HELD while a hold owns them.

    Read slots: FREE, FILLING, READY (leased), FREE or RESIDENT (nobody leases it, the page stays). QUARANTINED: the owner vanished and is
    not known dead.
    """

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    DRAINING = 3
    FILLING = 4
    READY = 5
    RESIDENT = 6
    HELD = 7
    QUARANTINED = 8


class SlotError(Exception):
    """A batch names a slot that is out of range, twice, of another generation, or in another state. Nothing was changed."""


class SlotTable:
    """States and generations of `size` slots. All changes go through `take`, `move` and `release`.

    `generation`: where generations start counting. Tables that start apart refuse each other's references.
    """

    __slots__ = ("_free", "_generation", "_state", "counts", "generation", "size", "state", "state_of")

    def __init__(self, size: int, generation: int = 0) -> None:
        self.size = size
        # The same bytes twice: as numpy arrays for batches, and in forms whose single items are cheap for small ones.
        self._state = bytearray(size)
        self._generation = array("I", [generation]) * size
        self.state = np.frombuffer(self._state, dtype=np.uint8)
        self.state_of: Callable[[int], int] = self._state.__getitem__
        self.generation = np.frombuffer(self._generation, dtype=np.uint32)
        self.counts = [0] * len(SlotState)
        self.counts[SlotState.FREE] = size
        # Lowest slots first, so that a small working set stays on few pages of memory.
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, n: int, state: SlotState) -> Slots:
        """Take `n` free slots into `state` under a new generation. Raises `SlotError` where fewer are free."""
        if n > len(self._free):
            raise SlotError(f"{n} slots wanted, {len(self._free)} of {self.size} are free")
        if n == 0:
            return np.empty(0, dtype=np.uint32)
        taken = self._free[-n:]
        del self._free[-n:]
        taken.reverse()
        slots = np.array(taken, dtype=np.uint32)
        if n <= SMALL:
            for slot in taken:
                self._state[slot] = state
                self._generation[slot] = (self._generation[slot] + 1) & 0xFFFFFFFF
        else:
            self.state[slots] = int(state)
            self.generation[slots] += np.uint32(1)
        self.counts[SlotState.FREE] -= n
        self.counts[state] += n
        return slots

    def generations(self, slots: Slots) -> Slots:
        """Return the current generations of slots."""
        if len(slots) == 1:
            return np.array([self._generation[slots[0]]], dtype=np.uint32)
        return self.generation[slots]

    def check(self, slots: Slots, generations: Slots, state: SlotState) -> None:
        """Raise `SlotError` unless every slot exists, is named once, and has that generation and state."""
        n = len(slots)
        if n != len(generations):
            raise SlotError(f"{n} slots come with {len(generations)} generations")
        if n == 0:
            return
        named = slots.tolist()
        if max(named) >= self.size:
            raise SlotError(f"slot {max(named)} is out of range: the arena has {self.size}")
        if n > 1 and len(set(named)) != n:
            raise SlotError("a slot is named twice")
        if n > SMALL:
            wrong = (self.state[slots] != int(state)) | (self.generation[slots] != generations)
            if not np.count_nonzero(wrong):
                return
        states, gens = self._state, self._generation
        for slot, generation in zip(named, generations.tolist(), strict=True):
            if states[slot] != state or gens[slot] != generation:
                raise SlotError(
                    f"slot {slot} is {SlotState(states[slot]).name} in generation {gens[slot]}, "
                    f"not {state.name} in generation {generation}"
                )

    def move(self, slots: Slots, before: SlotState, after: SlotState) -> None:
        """Move slots from one state to another. Raises `SlotError` where one is not in `before`."""
        n = len(slots)
        if n == 0:
            return
        if n <= SMALL:
            states, named = self._state, slots.tolist()
            for slot in named:
                if states[slot] != before:
                    raise SlotError(f"not every slot of {named} is {before.name}")
            for slot in named:
                states[slot] = after
        else:
            # As plain numbers: numpy takes five times as long to compare with a member of an enum.
            if np.count_nonzero(self.state[slots] != int(before)):
                raise SlotError(f"not every slot of {slots.tolist()} is {before.name}")
            self.state[slots] = int(after)
        self.counts[before] -= n
        self.counts[after] += n

    def move_one(self, slot: int, before: SlotState, after: SlotState) -> None:
        """Move a single slot. Raises `SlotError` where it is not in `before`."""
        if self._state[slot] != before:
            raise SlotError(f"slot {slot} is not {before.name}")
        self._state[slot] = after
        self.counts[before] -= 1
        self.counts[after] += 1

    def release(self, slots: Slots, before: SlotState) -> None:
        """Free slots that are in state `before`."""
        self.move(slots, before, SlotState.FREE)
        self._free.extend(reversed(slots.tolist()))

    def in_state(self, state: SlotState) -> Slots:
        """Return the slots in a state, ascending."""
        return np.flatnonzero(self.state == state).astype(np.uint32)

    def by_state(self) -> dict[str, int]:
        """Return the number of slots in each state that occurs."""
        return {SlotState(i).name.lower(): n for i, n in enumerate(self.counts) if n}

    def conserved(self) -> bool:
        """Return whether the counts, the states and the free list agree (for tests and self-checks)."""
        counted = np.bincount(self.state, minlength=len(SlotState)).tolist()
        free = set(self._free)
        return (
            counted == self.counts
            and sum(counted) == self.size
            and len(free) == len(self._free) == counted[SlotState.FREE]
            and all(self.state[i] == SlotState.FREE for i in free)
        )


def as_slots(values: Iterable[int]) -> Slots:
    """Return an index array of slots."""
    return np.array(values if isinstance(values, list) else list(values), dtype=np.uint32)


NO_SLOTS = as_slots(())
"""An index array of no slots; never written to."""
