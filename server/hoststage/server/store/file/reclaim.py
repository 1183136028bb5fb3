"""Frees room: evicts ahead of need and on demand, punches freed slots, sets bad slots aside."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import structlog

from hoststage.server.store.file.counters import Counters
from hoststage.server.store.file.index import Entry, Index
from hoststage.server.store.file.pageio import PunchReport, erase_trailer, punch_slots
from hoststage.server.store.file.segment import Segment
from hoststage.server.store.file.space import Space
from hoststage.server.store.file.syscalls import free_bytes
from hoststage.server.store.file.table import SegmentTable

log = structlog.get_logger(__name__)

_PUNCH_BATCH: Final = 128
_EVICT_BATCH: Final = 256
_LOOK_SECONDS: Final = 5.0
_STALE_SECONDS: Final = 1.0


class Reclaimer:
    """One background task; everything but the punching itself happens on the event loop.

    A freed slot goes through ``free``, is punched in the order of freeing (so that of two versions of a page
    the older is gone first), and only then may be handed out again.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        space: Space,
        table: SegmentTable,
        *,
        counters: Counters,
        executor: Executor,
    ) -> None:
        self._root = root
        self._index = index
        self._space = space
        self._table = table
        self._counters = counters
        self._executor = executor
        self._pending: deque[tuple[Segment, int, bool]] = deque()
        self._aside: deque[tuple[Segment, int]] = deque()
        self._queued = 0
        self._punched = 0
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._punching = False
        self._evicting = False
        self._closing = False
        self._looked = float("-inf")
        self.stuck = 0
        """Slots whose old page could not be erased; they are out of use until the store is opened anew."""
        self.punchable = True
        self._task = asyncio.create_task(self._run(), name="hoststage-store-reclaim")

    @property
    def set_aside_slots(self) -> int:
        """Bad slots that are kept from use now."""
        return len(self._aside)

    def let_go(self, entry: Entry, *, evicted: bool = False) -> None:
        """Free the slot of an entry that has left the index, now or after its last reader. evicted: to make room for other pages."""
        if entry.readers:
            entry.doomed = True
        else:
            self.free(entry.segment, entry.slot, evicted=evicted)

    def end_read(self, entry: Entry) -> None:
        """End one read of an entry, and free its slot if it was only waiting for that."""
        entry.readers -= 1
        if entry.doomed and not entry.readers:
            entry.doomed = False
            self.free(entry.segment, entry.slot)

    def free(self, segment: Segment, slot: int, *, evicted: bool = False) -> None:
        """Queue a slot for punching. evicted: others are about to need one, and it may keep its blocks for them."""
        self._pending.append((segment, slot, evicted))
        self._queued += 1
        self._space.pending += segment.header.slot_bytes
        self._wake.set()

    def nudge(self) -> None:
        """Begin to evict if the high watermark has been passed."""
        if self._space.above_high:
            self._wake.set()

    async def set_aside(self, segment: Segment, slot: int) -> None:
        """Erase a bad page's trailer and keep its blocks, and so that place on the medium, out of use."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._executor, erase_trailer, segment, slot):
            self.stuck += 1
            return
        self._aside.append((segment, slot))
        while len(self._aside) > self._space.options.quarantine_slots:
            self.free(*self._aside.popleft())

    async def make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes fit, and say whether they do. Any later ``await`` may undo that."""
        while not self._space.has_room(size):
            lacking = self._space.lacks(size)
            if lacking:
                self._evict(lacking)
            if not self._pending and not self._punching:
                return False
            await self._next_batch()
        return True

    async def settle(self) -> None:
        """Return when all slots that are queued now have been punched."""
        ticket = self._queued
        while self._punched < ticket:
            await self._next_batch()

    async def look(self, *, always: bool = False) -> None:
        """Ask the medium for its free room, unless that was done a moment ago."""
        loop = asyncio.get_running_loop()
        if not always and loop.time() - self._looked < _STALE_SECONDS:
            return
        self._looked = loop.time()
        try:
            free, _ = await loop.run_in_executor(self._executor, free_bytes, self._root)
        except OSError as error:
            log.warning("store_free_room_unknown", path=str(self._root), error=error.strerror)
            return
        self._space.look(free)
        self.nudge()

    async def close(self) -> None:
        """Give back what is set aside, punch what is queued, and end."""
        while self._aside:
            self.free(*self._aside.popleft())
        await self.settle()
        self._closing = True
        self._wake.set()
        await self._task

    async def _next_batch(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    async def _run(self) -> None:
        while not self._closing:
            try:
                await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS)
            except TimeoutError:
                await self.look(always=True)
                try:
                    await self._remove_dead_files()
                except OSError as error:
                    log.warning("store_files_not_removed", path=str(self._root), error=error.strerror)
            self._wake.clear()
            self._evict_ahead()
            while self._pending:
                await self._punch_some()
                self._evict_ahead()
            self._tell_waiters()

    async def _remove_dead_files(self) -> None:
        """Let go of the files of namespaces whose last page has been evicted, such as those of an old model."""
        for namespace in self._table.idle_namespaces():
            if namespace not in self._index:
                await self._table.remove_empty(namespace)

    def _evict_ahead(self) -> None:
        self._evicting = self._evicting or self._space.above_high
        if self._evicting:
            wanted = self._space.above_low
            self._evicting = wanted > 0 and self._evict(wanted)

    def _evict(self, size: int) -> bool:
        evicted = self._index.evict(size, _EVICT_BATCH)
        self._counters.evicted_pages += len(evicted.entries)
        self._counters.evicted_bytes += evicted.bytes
        for entry in evicted.entries:
            self.let_go(entry, evicted=True)
        return bool(evicted.entries)

    async def _punch_some(self) -> None:
        batch, keep = self._next_slots()
        self._punching = True
        try:
            loop = asyncio.get_running_loop()
            report = await loop.run_in_executor(self._executor, punch_slots, batch, keep)
        except Exception:  # a bug; those who wait for room must not wait for ever
            log.exception("store_punch_failed", slots=len(batch))
            report = PunchReport([], batch, self.punchable)
        finally:
            self._punching = False
            self._punched += len(batch)
        self._take_note(report)
        self._tell_waiters()

    def _next_slots(self) -> tuple[list[tuple[Segment, int]], int]:
        """Take the slots that are to be erased next, in the order of freeing, and how many at their beginning may keep their blocks."""
        room = self._space.may_keep - self._table.kept_bytes
        batch: list[tuple[Segment, int]] = []
        keep = 0
        while self._pending and len(batch) < _PUNCH_BATCH:
            segment, slot, evicted = self._pending.popleft()
            room -= segment.header.slot_bytes
            keep += evicted and room >= 0 and keep == len(batch)
            batch.append((segment, slot))
        return batch, keep

    def _take_note(self, report: PunchReport) -> None:
        for segment, slot in report.gone:
            self._space.used -= segment.header.slot_bytes
            self._space.pending -= segment.header.slot_bytes
            self._table.give_back(segment, slot, kept=(segment, slot) in report.kept)
        for segment, slot in report.stuck:
            self._space.pending -= segment.header.slot_bytes
            self.stuck += 1
            log.error("store_slot_not_erased", path=str(segment.path), slot=slot)
        self.punchable = self.punchable and report.punchable

    def _tell_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
