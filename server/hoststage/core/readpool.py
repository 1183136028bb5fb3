"""The read side of one pool: a namespace's arena, filled by the daemon alone.

Loads land here once, however many sessions asked; in `cache` mode commits are published here and stay. The pool keeps the
reserve: publishing holds at most `size - reserve` slots, and loads hold at most `size - write_span`, both less what sessions may list on boards, so
that nothing but other loads can make a load of one window wait, and neither loads nor boards can stop publishing for good.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hoststage.core.boards import Board, Boards, IndexMirror, board_room, board_share
from hoststage.core.slots import SMALL, SlotError, Slots, SlotState, SlotTable, as_slots

# Reaching into an enum's class costs more than what is done with it here.
_RESIDENT = SlotState.RESIDENT


class ReadPool:
    """Read slots of one pool of one namespace, with the index of what is in them.

    `keep`: pages stay RESIDENT when nobody leases them (`cache`), else their slots are freed (`buffer_only`).
    `evicted` is called with keys that leave the index for want of room, so that their group can follow.
    `mirror` follows what is indexed, see `mirror_to`. `boards`: where sessions list pages that they read by it.
    """

    __slots__ = (
        "_last_used",
        "_leases",
        "_tick",
        "_victims",
        "boards",
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
        self.boards = Boards()
        self._tick = 0
        # Candidates, oldest first, with their last use when they were queued: among all pages, and among published ones.
        self._victims: list[deque[tuple[int, int]]] = [deque(), deque()]

    # -------------------------------------------------------------- limits

    @property
    def size(self) -> int:
        return self.table.size

    @property
    def load_limit(self) -> int:
        """Slots that loads may hold together. What boards may list is not among them, so that it cannot be in their way."""
        limit = self.size - self.write_span
        return max(limit - self.boards.entries, min(limit, self.reserve))

    @property
    def publish_limit(self) -> int:
        """Slots that published pages may hold. As many as boards may list are left to them, beside the reserve."""
        return self.size - self.reserve - self.boards.entries

    def next_board(self) -> int:
        """Return how many slots one more session may list on a board, 0 where it gets none.

        None where pages do not stay or nobody can see which do, and none while publishing is too busy to give way.
        """
        if not self.keep or self.mirror is None:
            return 0
        room = board_room(self.size, self.reserve, self.write_span)
        share = board_share(room, self.boards.entries)
        # Those that loads lease too are published pages in use as soon as they are released.
        busy = self._publish_filling + int(np.count_nonzero(self.draining))
        return share if busy <= self.publish_limit - share else 0

    @property
    def evictable(self) -> int:
        """Resident pages that nobody leases and that are not being written to the store. Boards may list some of them."""
        return int(np.count_nonzero(self._idle()))

    def _idle(self) -> NDArray[np.bool_]:
        """Return which slots have a page that is indexed and that nobody leases or writes to the store."""
        idle: NDArray[np.bool_] = (self.table.state == SlotState.RESIDENT) & ~self.draining
        if self.boards.lingering:
            idle[list(self.boards.lingering)] = False
        return idle

    def by_state(self) -> dict[str, int]:
        """Return the number of slots in each state that occurs, those that linger apart from resident pages."""
        states = self.table.by_state()
        if lingering := len(self.boards.lingering):
            states["resident"] -= lingering
            states["lingering"] = lingering
        return states

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
        self._settle(done.tolist())

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
        self._settle(done)

    def _settle(self, slots: list[int]) -> None:
        """Free those RESIDENT slots that have no reason to stay."""
        self._let_go([s for s in slots if not self.draining[s] and not (self.keep and self._indexed(s))])

    def _indexed(self, slot: int) -> bool:
        key = self.keys[slot]
        return key is not None and self.index.get(key) == slot

    def _let_go(self, slots: list[int]) -> None:
        """Take pages out of the index, where they are still there, and free their slots: at once, or when no board lists them any more."""
        if self.boards and slots:
            # Those that linger already are left to the next look.
            slots = [s for s in slots if s not in self.boards.lingering]
            for slot in slots:
                self._unindex(slot)
            if listed := self.boards.listed(slots, self.mirror):
                self.boards.honoured += len(listed)
                self.boards.lingering |= listed
                slots = [s for s in slots if s not in listed]
        self._discard(slots)

    def _unindex(self, slot: int) -> None:
        key = self.keys[slot]
        if key is not None and self.index.get(key) == slot:
            del self.index[key]
            if self.mirror is not None:
                self.mirror.drop(slot)

    def _discard(self, slots: Sequence[int]) -> None:
        """Free slots that no board lists."""
        for slot in slots:
            self._unindex(slot)
            self.keys[slot] = None
            self.commits[slot] = b""
            if self.published[slot]:
                self.published[slot] = False
                self.published_held -= 1
        if slots:
            self.table.release(as_slots(slots), SlotState.RESIDENT)

    # -------------------------------------------------------------- boards

    def add_board(self, board: Board) -> None:
        """A session may list pages that it reads from now on."""
        self.boards.add(board)

    def remove_board(self, board: Board) -> None:
        """A session's board is gone, and with it all that it listed."""
        self.boards.remove(board)
        self.sweep()

    def sweep(self) -> int:
        """Free the slots that linger and that no board lists any more; return how many."""
        lingering = self.boards.lingering
        if not lingering:
            return 0
        gone = lingering - self.boards.listed(lingering, self.mirror)
        lingering -= gone
        self._discard(sorted(gone))
        return len(gone)

    def _unlisted(self, slots: list[int]) -> list[int]:
        """Suspend indexed pages in the mirror, and return those that no board lists; the others stand again."""
        if not self.boards or not slots:
            return slots
        assert self.mirror is not None
        self.mirror.suspend(slots)
        listed = self.boards.listed(slots, self.mirror)
        if not listed:
            return slots
        self.mirror.resume(listed)
        self.boards.honoured += len(listed)
        self._tick += 1
        for slot in listed:
            self._last_used[slot] = self._tick
        return [slot for slot in slots if slot not in listed]

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
        return self._publish_filling + int(np.count_nonzero(self.draining & (self.table.state == SlotState.RESIDENT)))

    @property
    def _publish_filling(self) -> int:
        return int(np.count_nonzero(self.published & (self.table.state == SlotState.FILLING)))

    def place_publish(self, n: int, *, loads_wait: bool = False) -> Slots | None:
        """Take `n` slots that publishing will fill, evicting if need be; None where there is no room for it.

        While loads wait they come first: publishing then keeps no more than one write span out of their reach.
        """
        if loads_wait and self.publish_busy + n > self.write_span:
            return None
        if self.boards.lingering and self.published_held + n > self.publish_limit:
            self.sweep()
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
        if self.boards.lingering and n > self.table.free:
            self.sweep()
        short = n - self.table.free
        return short <= 0 or self._evict(short, published_only=False)

    def _evict(self, n: int, *, published_only: bool) -> bool:
        """Evict the `n` least recently used pages that may go; False, and nothing is evicted, where there are fewer."""
        chosen: list[int] = []
        seen: set[int] = set()
        refilled = False
        while len(chosen) < n:
            found = self._candidates(n - len(chosen), seen, published_only)
            if found:
                unlisted = self._unlisted(found)
                chosen += unlisted
                # Where boards list some of what a refill brought, another one brings others.
                refilled &= len(unlisted) == len(found)
            elif not refilled:
                self._refill(n + len(seen), published_only)
                refilled = True
            else:
                break
        if len(chosen) < n:
            self._victims[published_only].clear()
            if self.boards and self.mirror is not None:
                self.mirror.resume(chosen)
            return False
        keys = [k for k in (self.keys[s] for s in chosen) if k is not None]
        self._discard(chosen)
        self.evictions += n
        self.evicted(keys)
        return True

    def _candidates(self, n: int, seen: set[int], published_only: bool) -> list[int]:
        """Take up to `n` pages off the queue that may go, but for those `seen`, to which they are added."""
        found: list[int] = []
        victims = self._victims[published_only]
        state_of, used, lingering = self.table.state_of, self._last_used, self.boards.lingering
        while victims and len(found) < n:
            slot, tick = victims.popleft()
            if used[slot] != tick or state_of(slot) != _RESIDENT or slot in seen or self.draining[slot]:
                continue
            if slot not in lingering and (self.published[slot] or not published_only):
                found.append(slot)
                seen.add(slot)
        return found

    def _refill(self, n: int, published_only: bool) -> None:
        """Queue the oldest evictable pages, more than are needed now, so that the scan's cost is shared by many evictions."""
        may = self._idle()
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
        replaced: list[int] = []
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
                replaced.append(old)
        self._orphaned(replaced)

    def settle(self, slots: Slots) -> None:
        """Nobody leased these after `filled`: free them where pages are not kept."""
        idle = slots[self.table.state[slots] == SlotState.RESIDENT]
        self._settle(idle.tolist())

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

    def _orphaned(self, slots: list[int]) -> None:
        """These left the index: free them unless somebody still uses them."""
        if slots:
            self._let_go([s for s in slots if self.table.state_of(s) == _RESIDENT and not self.draining[s]])

    def drop(self, keys: Iterable[bytes]) -> int:
        """Take pages out of the index; their slots are free once nobody uses them. Return how many were there."""
        gone: list[int] = []
        for key in keys:
            slot = self.index.pop(key, None)
            if slot is not None:
                gone.append(slot)
                if self.mirror is not None:
                    self.mirror.drop(slot)
        self._orphaned(gone)
        return len(gone)

    def drop_idle(self) -> int:
        """Evict every page that nobody uses, boards included; return how many."""
        may = self._unlisted(np.flatnonzero(self._idle()).tolist())
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
        for slot in self.boards.lingering:
            if self.table.state_of(slot) != _RESIDENT or self._indexed(slot):
                raise SlotError(f"slot {slot} lingers, though its page is indexed or in use")
        for key, slot in self.index.items():
            if self.keys[slot] != key:
                raise SlotError(f"the index names slot {slot} for a key that it does not hold")
