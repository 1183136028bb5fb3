"""Segments and their free slots: decided on the event loop, without I/O but for the life of the file."""

from __future__ import annotations

import errno
import heapq
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from hoststage.server.store.file.layout import BLOCK, MAX_SLOTS, SegmentHeader
from hoststage.server.store.file.syscalls import allocate

log = structlog.get_logger(__name__)

MOST_AHEAD_BYTES: Final = 128 << 20
LEAST_SEGMENT_BYTES: Final = 64 << 20


class Segment:
    """One open segment file.

    Slots are handed out and taken back on the event loop. ``prepare`` is called from write threads.
    """

    __slots__ = (
        "_free",
        "_lock",
        "_ready",
        "ahead_bytes",
        "fd",
        "fresh",
        "header",
        "kept",
        "live",
        "number",
        "path",
        "retired",
    )

    def __init__(self, number: int, path: Path, fd: int, header: SegmentHeader) -> None:
        self.number = number
        self.path = path
        self.fd = fd
        self.header = header
        self.live = 0
        """Slots that hold a page, are being written, or are not yet punched."""
        self.fresh = 0
        """The first slot that was never handed out; all behind it are fresh too."""
        self.kept: set[int] = set()
        """Free slots that have kept their blocks."""
        self.retired = False
        self.ahead_bytes = 0
        """How far ahead of writing blocks are allocated; the table sets it when it takes a segment in."""
        self._free: list[int] = []
        self._ready = 0
        self._lock = threading.Lock()

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        return BLOCK + slot * self.header.slot_bytes

    @property
    def has_room(self) -> bool:
        """Whether ``take`` would return a slot."""
        return not self.retired and (bool(self._free) or self.fresh < self.header.slots)

    def take(self) -> int:
        """Hand out the lowest free slot, so that what is written together lies together."""
        self.live += 1
        if self._free:
            slot = heapq.heappop(self._free)
            self.kept.discard(slot)
            return slot
        self.fresh += 1
        return self.fresh - 1

    def give_back(self, slot: int, *, kept: bool = False) -> None:
        """Take back a slot whose page has been erased. kept: its blocks are still there."""
        self.live -= 1
        if kept:
            self.kept.add(slot)
        heapq.heappush(self._free, slot)

    def restore(self, used: set[int]) -> None:
        """Set the state of all slots from the set of those that hold a page, or must not be handed out."""
        self.live = len(used)
        self.fresh = max(used, default=-1) + 1
        self._free = [slot for slot in range(self.fresh) if slot not in used]

    def prepare(self, slot: int) -> None:
        """Allocate blocks for this slot and for some behind it, once for many pages.

        Writing into allocated blocks lets writers of one file go on side by side, where filling a hole takes
        the file's lock. Without room, or where the file system cannot, the write itself will tell.
        """
        if slot < self._ready:
            return
        with self._lock:
            if slot >= self._ready:
                self._allocate(slot)

    @property
    def runs_low(self) -> bool:
        """Whether less than half of what is allocated ahead is left."""
        return self._ready < self.header.slots and 2 * (self._ready - self.fresh) < self._ahead_slots

    def prepare_ahead(self) -> None:
        """Do what ``prepare`` would have to do soon, before anyone waits for it.

        The file system lets all writes of the file end before it allocates, and begins none meanwhile: in the middle of a
        batch that costs 1 to 5 ms for each time, and between two of them nothing.
        """
        with self._lock:
            if self.fd >= 0 and self.runs_low:
                self._allocate(max(self._ready, self.fresh))

    @property
    def _ahead_slots(self) -> int:
        return max(1, self.ahead_bytes // self.header.slot_bytes)

    def _allocate(self, slot: int) -> None:
        until = min(slot + self._ahead_slots, self.header.slots)
        if allocate(self.fd, self.offset(slot), self.offset(until) - self.offset(slot)) == 0:
            self._ready = until

    @property
    def allocated(self) -> int:
        """The slot up to which blocks may have been allocated."""
        return max(self._ready, self.fresh)

    def close(self) -> None:
        """Close the file, if it is open. Nothing may be under way in it."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The pages of one pool of one namespace that have the same slot size; they share segments."""

    namespace: str
    pool: str
    slot_bytes: int


def slots_per_segment(slot_bytes: int, segment_bytes: int) -> int:
    """Return how many slots of this size a new segment gets."""
    return max(1, min((segment_bytes - BLOCK) // slot_bytes, MAX_SLOTS))


def create_segment(base: Path, number: int, size_class: SizeClass, slots: int, flags: int) -> Segment:
    """Create the file of a new segment under ``base``. Raises ``OSError``, and then leaves nothing behind."""
    folder = base / size_class.namespace / size_class.pool
    path = folder / f"{number:06d}.seg"
    header = SegmentHeader(size_class.namespace, size_class.pool, size_class.slot_bytes, slots)
    fd = _create(path)
    try:
        os.ftruncate(fd, header.file_bytes)
        if os.pwrite(fd, header.pack(), 0) != BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
        os.close(fd)
        fd = -1
        sync_directory(folder)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    except OSError:
        if fd >= 0:
            os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return Segment(number, path, fd, header)


def _create(path: Path) -> int:
    for attempt in range(3):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder has just been removed for being empty
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def remove_segment(segment: Segment) -> None:
    """Close and unlink a segment that holds nothing, and the folders above it that are then empty.

    A file that cannot be removed now is removed when the store is next opened.
    """
    segment.close()
    try:
        segment.path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("store_segment_not_removed", path=str(segment.path), error=error.strerror)
    for folder in (segment.path.parent, segment.path.parent.parent):
        try:
            folder.rmdir()
        except OSError:  # another segment lives there
            return


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
