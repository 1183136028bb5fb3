"""All segments of a store, and which of them have free slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor

from hoststage.server.store.file.directory import StoreDirectory
from hoststage.server.store.file.segment import (
    LEAST_SEGMENT_BYTES,
    MOST_AHEAD_BYTES,
    Segment,
    SizeClass,
    create_segment,
    remove_segment,
    slots_per_segment,
)
from hoststage.server.store.options import StoreOptions

_AMPLE = 16
"""How many times the room that is allocated ahead must be free for it to be done before it is needed."""


class SegmentTable:
    """Used on the event loop; files are created and removed in ``executor``."""

    def __init__(self, directory: StoreDirectory, options: StoreOptions, executor: Executor, last_number: int) -> None:
        self._directory = directory
        # Punching holds up all other I/O in the same file, so that a small store needs several files, too.
        self._segment_bytes = min(options.segment_bytes, max(LEAST_SEGMENT_BYTES, options.limit_bytes // 16))
        # What is allocated ahead counts towards no limit, so it must be small beside it.
        self._ahead_bytes = min(MOST_AHEAD_BYTES, options.limit_bytes // 32)
        self._executor = executor
        self._number = last_number
        self._all: dict[int, Segment] = {}
        self._roomy: dict[SizeClass, dict[Segment, None]] = {}
        self._growing: dict[SizeClass, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all.values())

    def add(self, segment: Segment) -> None:
        """Take in an open segment."""
        self._all[segment.number] = segment
        segment.ahead_bytes = self._ahead_bytes
        if segment.has_room:
            self._roomy.setdefault(_class_of(segment), {})[segment] = None

    def find(self, size_class: SizeClass) -> Segment | None:
        """Return a segment with a free slot of this class, if one is open."""
        return next(iter(self._roomy.get(size_class, {})), None)

    def take(self, segment: Segment) -> int:
        """Hand out a slot of a segment that ``find`` returned."""
        slot = segment.take()
        if not segment.has_room:
            del self._roomy[_class_of(segment)][segment]
        return slot

    def give_back(self, segment: Segment, slot: int, *, kept: bool = False) -> None:
        """Take back a slot whose page has been erased. kept: its blocks are still there."""
        segment.give_back(slot, kept=kept)
        self._roomy.setdefault(_class_of(segment), {})[segment] = None

    async def grow(self, size_class: SizeClass) -> Segment:
        """Return a segment with a free slot, a new one if need be. Raises ``OSError``."""
        lock = self._growing.setdefault(size_class, asyncio.Lock())
        async with lock:
            found = self.find(size_class)
            if found is not None:
                return found
            self._number += 1
            segment = await asyncio.get_running_loop().run_in_executor(
                self._executor,
                create_segment,
                self._directory.base,
                self._number,
                size_class,
                slots_per_segment(size_class.slot_bytes, self._segment_bytes),
                self._directory.open_flags,
            )
            self.add(segment)
            return segment

    @property
    def kept_bytes(self) -> int:
        """Bytes of free slots that have kept their blocks."""
        return sum(len(s.kept) * s.header.slot_bytes for s in self._all.values())

    def prepare_ahead(self, segments: Iterable[Segment], free: int) -> None:
        """Have blocks allocated ahead in these segments, where they run low. free: room of the medium; where it is short, it is for pages."""
        if self._ahead_bytes * _AMPLE > free:
            return
        for segment in segments:
            if segment.runs_low:
                self._executor.submit(segment.prepare_ahead)

    def idle_namespaces(self) -> set[str]:
        """Return the namespaces that have a file which holds nothing."""
        return {s.header.namespace for s in self._all.values() if not s.live}

    async def remove_empty(self, namespace: str) -> None:
        """Remove the files of a namespace that hold nothing and in which nothing is under way."""
        idle = [s for s in self._all.values() if s.header.namespace == namespace and not s.live]
        for segment in idle:
            segment.retired = True
            del self._all[segment.number]
            self._roomy.get(_class_of(segment), {}).pop(segment, None)
        for segment in idle:
            await asyncio.get_running_loop().run_in_executor(self._executor, remove_segment, segment)


def _class_of(segment: Segment) -> SizeClass:
    return SizeClass(segment.header.namespace, segment.header.pool, segment.header.slot_bytes)
