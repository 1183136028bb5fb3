"""The read side of one pool: a namespace's arena, filled by the daemon alone.

Loads land here once, however many sessions asked; in `cache` mode commits are published here and stay. The pool keeps the
reserve: publishing holds at most `size - reserve` slots, and loads hold at most `size - write_span`, so that nothing but other
loads can make a load of one window wait, and loads cannot stop publishing for good.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from hoststage.core.slots import SMALL, SlotError, Slots, SlotState, SlotTable, as_slots

# Reaching into an enum's class costs more than what is done with it here.
_RESIDENT = SlotState.RESIDENT


class IndexMirror(Protocol):
    """What follows the index, entry by entry, for others to read. `drop` comes before the slot can be given to another page."""

    def put(self, key: bytes, slot: int) -> None: ...
    def drop(self, slot: int) -> None: ...


class ReadPool:
    """Read slots of one pool of one namespace, with the index of what is in them.

    `keep`: pages stay RESIDENT when nobody leases them (`cache`), else their slots are freed (`buffer_only`).
    `evicted` is called with keys that leave the index for want of room, so that their group can follow.
    `mirror` follows what is indexed, see `mirror_to`.
    """

    __slots__ = (
        "_last_used",
        "_leases",
        "_tick",
        "_victims",
        "commits",
        "draining",
        "evicted",
        "evictions",
        "index",
        "keep",
        "keys",
        "last_used",
        "leases",
        "load_held",
        "mirror",
        "published",
        "published_held",
        "reserve",
        "table",
        "write_span",
    )

    def __init__(self, size: int, *, reserve: int, write_span: int, keep: bool) -> None:
        self.table = SlotTable(size)
        self.reserve = reserve
        self.write_span = write_span
        self.keep = keep
        self.index: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * size
        self.commits: list[bytes] = [b""] * size
        self._leases = array("i", bytes(4 * size))
        self.leases = np.frombuffer(self._leases, dtype=np.int32)
        self.draining = np.zeros(size, dtype=np.bool_)
        self.published = np.zeros(size, dtype=np.bool_)
        self._last_used = array("q", bytes(8 * size))
        self.last_used = np.frombuffer(self._last_used, dtype=np.int64)
        self.published_held = 0
        self.load_held = 0
        self.evictions = 0
        self.evicted: Callable[[Sequence[bytes]], None] = lambda keys: None
        self.mirror: IndexMirror | None = None
        self._tick = 0
        # Candidates, oldest first, with their last use when they were queued: among all pages, and among published ones.
        self._victims: list[deque[tuple[int, int]]] = [deque(), deque()]

    # -------------------------------------------------------------- limits

    @property
    def size(self) -> int:
        return self.table.size

    @property
    def load_limit(self) -> int:
        """Slots that loads may hold together."""
        return self.size - self.write_span

    @property
    def publish_limit(self) -> int:
        """Slots that published pages may hold."""
        return self.size - self.reserve

    @property
    def evictable(self) -> int:
        """Resident pages that nobody leases and that are not being written to the store."""
        resident = self.table.state == SlotState.RESIDENT
        return self.table.counts[SlotState.RESIDENT] - int(np.count_nonzero(resident & self.draining))

    # -------------------------------------------------------------- leases

    def lease(self, slots: Slots) -> None:
        """Lease pages that are there (each named once)."""
        self._tick += 1
        if len(slots) <= SMALL:
            leases, used = self._leases, self._last_used
            for slot in slots.tolist():
                if leases[slot] == 0:
                    self.table.move_one(slot, SlotState.RESIDENT, SlotState.READY)
                    self.load_held += 1
                leases[slot] += 1
                used[slot] = self._tick
            return
        fresh = slots[self.leases[slots] == 0]
        if len(fresh):
            self.table.move(fresh, SlotState.RESIDENT, SlotState.READY)
            self.load_held += len(fresh)
        self.leases[slots] += 1
        self.last_used[slots] = self._tick

    def unleased(self, slots: Slots) -> int:
        """Return how many of these nobody leases."""
        if len(slots) <= SMALL:
            return sum(self._leases[slot] == 0 for slot in slots.tolist())
        return int(np.count_nonzero(self.leases[slots] == 0))

    def release(self, slots: Slots) -> None:
        """Give leases up. A page that nobody leases stays if it is kept and still the one under its key, else its slot is free."""
        if len(slots) <= SMALL:
            self._release_few(slots.tolist())
            return
        self.leases[slots] -= 1
        done = slots[self.leases[slots] == 0]
        if len(done) == 0:
            return
        self.load_held -= len(done)
        # Used until now: what leaves a long lease is not the next to be evicted.
        self._tick += 1
        self.last_used[done] = self._tick
        self.table.move(done, SlotState.READY, SlotState.RESIDENT)
        self._settle(done)

    def _release_few(self, slots: list[int]) -> None:
        leases = self._leases
        done = []
        for slot in slots:
            leases[slot] -= 1
            if leases[slot] == 0:
                done.append(slot)
        if not done:
            return
        self._tick += 1
        for slot in done:
            self.load_held -= 1
            self._last_used[slot] = self._tick
            self.table.move_one(slot, SlotState.READY, SlotState.RESIDENT)
        self._discard([s for s in done if not self.draining[s] and not (self.keep and self._indexed(s))])

    def _settle(self, slots: Slots) -> None:
        """Free those RESIDENT slots that have no reason to stay."""
        go = [s for s in slots.tolist() if not self.draining[s] and not (self.keep and self._indexed(s))]
        self._discard(go)

    def _indexed(self, slot: int) -> bool:
        key = self.keys[slot]
        return key is not None and self.index.get(key) == slot

    def _discard(self, slots: list[int]) -> None:
        for slot in slots:
            key = self.keys[slot]
            if key is not None and self.index.get(key) == slot:
                del self.index[key]
                if self.mirror is not None:
                    self.mirror.drop(slot)
            self.keys[slot] = None
            self.commits[slot] = b""
            if self.published[slot]:
                self.published[slot] = False
                self.published_held -= 1
        if slots:
            self.table.release(as_slots(slots), SlotState.RESIDENT)

    # -------------------------------------------------------------- readers that do not ask

    def mirror_to(self, mirror: IndexMirror) -> None:
        """Let `mirror` follow the index from now on, with all that it has already."""
        self.mirror = mirror
        for key, slot in self.index.items():
            mirror.put(key, slot)

    def touch(self, slots: Iterable[int]) -> None:
        """Somebody who reads by the mirror used these pages. A hint for eviction: what is no page any more is passed over."""
        self._tick += 1
        for slot in slots:
            if slot < self.size and self.table.state_of(slot) == _RESIDENT:
                self._last_used[slot] = self._tick

    # -------------------------------------------------------------- placing

    def place_load(self, n: int) -> Slots | None:
        """Take `n` slots that a load will fill, evicting if need be; None where they must wait."""
        if self.load_held + n > self.load_limit or not self._make_room(n):
            return None
        slots = self.table.take(n, SlotState.FILLING)
        self.load_held += n
        return slots

    @property
    def publish_busy(self) -> int:
        """Published pages that cannot make room now: being copied, or being written to the store."""
        filling = np.count_nonzero(self.published & (self.table.state == SlotState.FILLING))
        return int(filling) + int(np.count_nonzero(self.draining & (self.table.state == SlotState.RESIDENT)))

    def place_publish(self, n: int, *, loads_wait: bool = False) -> Slots | None:
        """Take `n` slots that publishing will fill, evicting if need be; None where there is no room for it.

        While loads wait they come first: publishing then keeps no more than one write span out of their reach.
        """
        if loads_wait and self.publish_busy + n > self.write_span:
            return None
        over = self.published_held + n - self.publish_limit
        if n > self.publish_limit or (over > 0 and not self._evict(over, published_only=True)):
            return None
        if not self._make_room(n):
            return None
        slots = self.table.take(n, SlotState.FILLING)
        self.published[slots] = True
        self.published_held += n
        return slots

    def _make_room(self, n: int) -> bool:
        short = n - self.table.free
        return short <= 0 or self._evict(short, published_only=False)

    def _evict(self, n: int, *, published_only: bool) -> bool:
        """Evict the `n` least recently used pages that may go; False, and nothing is evicted, where there are fewer."""
        chosen: list[int] = []
        seen: set[int] = set()
        state_of, used = self.table.state_of, self._last_used
        for refill in (False, True):
            if refill:
                self._refill(n, published_only)
            victims = self._victims[published_only]
            while victims and len(chosen) < n:
                slot, tick = victims.popleft()
                if used[slot] != tick or state_of(slot) != _RESIDENT or slot in seen or self.draining[slot]:
                    continue
                if self.published[slot] or not published_only:
                    chosen.append(slot)
                    seen.add(slot)
            if len(chosen) == n:
                break
        if len(chosen) < n:
            self._victims[published_only].clear()
            return False
        keys = [k for k in (self.keys[s] for s in chosen) if k is not None]
        self._discard(chosen)
        self.evictions += n
        self.evicted(keys)
        return True

    def _refill(self, n: int, published_only: bool) -> None:
        """Queue the oldest evictable pages, more than are needed now, so that the scan's cost is shared by many evictions."""
        may = (self.table.state == SlotState.RESIDENT) & ~self.draining
        if published_only:
            may &= self.published
        found = np.flatnonzero(may)
        want = max(n, self.size // 64)
        if len(found) > want:
            found = found[np.argpartition(self.last_used[found], want - 1)[:want]]
        order = found[np.argsort(self.last_used[found], kind="stable")]
        self._victims[published_only] = deque(zip(order.tolist(), self.last_used[order].tolist(), strict=True))

    # -------------------------------------------------------------- filling

    def filled(self, slots: Slots, keys: Sequence[bytes], commit_ids: Sequence[bytes], *, load: bool) -> None:
        """FILLING slots hold their pages now and become RESIDENT and indexed.

        What is published takes the place of an older page of its key. What a load fetched does not: a page that is indexed by then was
        published after the fetch began. For a load they must be leased next, by `lease`, or given to `settle`.
        """
        self.table.move(slots, SlotState.FILLING, SlotState.RESIDENT)
        if load:
            self.load_held -= len(slots)
        self._tick += 1
        self.last_used[slots] = self._tick
        for slot, key, commit_id in zip(slots.tolist(), keys, commit_ids, strict=True):
            self.keys[slot] = key
            self.commits[slot] = commit_id
            old = self.index.get(key)
            if load and old is not None:
                continue
            if self.mirror is not None:
                if old is not None:
                    self.mirror.drop(old)
                self.mirror.put(key, slot)
            self.index[key] = slot
            if old is not None:
                self._orphaned(old)

    def settle(self, slots: Slots) -> None:
        """Nobody leased these after `filled`: free them where pages are not kept."""
        idle = slots[self.table.state[slots] == SlotState.RESIDENT]
        self._settle(idle)

    def unfilled(self, slots: Slots, *, load: bool) -> None:
        """Nothing came into these FILLING slots."""
        for slot in slots.tolist():
            if self.published[slot]:
                self.published[slot] = False
                self.published_held -= 1
        if load:
            self.load_held -= len(slots)
        self.table.release(slots, SlotState.FILLING)

    # -------------------------------------------------------------- draining and dropping

    def begin_drain(self, slots: Slots) -> None:
        """These published pages are being written to the store and must not go."""
        self.draining[slots] = True

    def end_drain(self, slots: Slots) -> None:
        """Their store write has ended."""
        self.draining[slots] = False
        self.settle(slots)

    def _orphaned(self, slot: int) -> None:
        """The slot left the index: free it unless somebody still uses it."""
        if self.table.state_of(slot) == _RESIDENT and not self.draining[slot]:
            self._discard([slot])

    def drop(self, keys: Iterable[bytes]) -> int:
        """Take pages out of the index; their slots are free once nobody uses them. Return how many were there."""
        n = 0
        for key in keys:
            slot = self.index.pop(key, None)
            if slot is not None:
                n += 1
                if self.mirror is not None:
                    self.mirror.drop(slot)
                self._orphaned(slot)
        return n

    def drop_idle(self) -> int:
        """Evict every page that nobody uses; return how many."""
        may = np.flatnonzero((self.table.state == SlotState.RESIDENT) & ~self.draining).tolist()
        keys = [k for k in (self.keys[s] for s in may) if k is not None]
        self._discard(may)
        self.evicted(keys)
        return len(may)

    def check(self) -> None:
        """Raise `SlotError` where the books do not balance (for tests and self-checks)."""
        if not self.table.conserved():
            raise SlotError("slots are not conserved")
        ready = self.table.state == SlotState.READY
        if not np.array_equal(ready, self.leases > 0):
            raise SlotError("leased slots and READY slots differ")
        if self.published_held != int(np.count_nonzero(self.published)):
            raise SlotError("the count of published slots is wrong")
        filling = self.table.state == SlotState.FILLING
        if self.load_held != int(np.count_nonzero(ready | (filling & ~self.published))):
            raise SlotError("the count of slots that loads hold is wrong")
        for key, slot in self.index.items():
            if self.keys[slot] != key:
                raise SlotError(f"the index names slot {slot} for a key that it does not hold")
