"""What the I/O threads do: write one page with its trailer, read one page and check it, punch free slots."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

from hoststage.server.store.base import (
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    WriteOutcome,
)
from hoststage.server.store.file.index import Entry
from hoststage.server.store.file.layout import BLOCK, Trailer, round_up, unpack_trailer
from hoststage.server.store.file.segment import Segment
from hoststage.server.store.file.syscalls import ThreadBuffers, copy, is_aligned, punch, view_at, zero

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOST: Final = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG})
_buffers = ThreadBuffers()


@dataclass(slots=True)
class WriteJob:
    """One page on its way into a slot. The thread fills in ``checksum`` and ``result``."""

    write: PageWrite
    segment: Segment
    slot: int
    sequence: int
    index: int
    checksum: int = 0
    result: PageWriteResult | None = None


@dataclass(slots=True)
class ReadJob:
    """One page on its way out of a pinned slot. The thread fills in ``result`` and ``lost``."""

    read: PageRead
    entry: Entry
    index: int
    result: PageReadResult | None = None
    lost: bool = False
    """Whether the slot must be set aside."""


def is_no_room(error: OSError) -> bool:
    """Whether an error says that the medium, a quota or a file is full."""
    return error.errno in _NO_ROOM


def write_page(job: WriteJob) -> None:
    """Write one page and its trailer, and say in the job how it went. Never raises for the medium."""
    write, segment = job.write, job.segment
    job.checksum = xxhash.xxh3_64_intdigest(write.data) if write.checksum is None else write.checksum
    block = _buffers.block
    trailer = Trailer(
        segment.header.namespace,
        write.pool,
        write.key,
        write.data.nbytes,
        job.sequence,
        job.checksum,
        write.commit_id,
    )
    block.view[:] = trailer.pack()
    length = round_up(write.data.nbytes)
    expected = length + BLOCK
    try:
        segment.prepare(job.slot)
        done = os.pwritev(segment.fd, [_source(write, length), block.view], segment.offset(job.slot))
    except OSError as error:
        outcome = WriteOutcome.FULL if is_no_room(error) else WriteOutcome.FAILED
        job.result = PageWriteResult(outcome, f"writing: {error.strerror}")
        return
    if done == expected:
        job.result = PageWriteResult(WriteOutcome.STORED)
    else:  # the kernel stops short when the medium or a limit has no room for the rest
        job.result = PageWriteResult(WriteOutcome.FULL, f"wrote only {done} of {expected} bytes")


def _source(write: PageWrite, length: int) -> memoryview:
    if is_aligned(write.address) and write.stride >= length:
        return view_at(write.address, length)
    bounce = _buffers.bounce(length)
    size = write.data.nbytes
    if write.address:
        copy(bounce.address, write.address, size)
    else:
        bounce.view[:size] = write.data.cast("B")
    bounce.view[size:length] = bytes(length - size)
    return bounce.view[:length]


def read_page(job: ReadJob) -> None:
    """Fill the reader's buffer from a pinned slot, and say in the job how it went, errors included."""
    read, entry = job.read, job.entry
    segment = entry.segment
    length = round_up(entry.page_bytes)
    direct = is_aligned(read.address) and read.stride >= length
    target = view_at(read.address, length) if direct else _buffers.bounce(length).view[:length]
    block = _buffers.block.view
    try:
        done = os.preadv(segment.fd, [target, block], segment.offset(entry.slot))
    except OSError as error:
        job.lost = error.errno in _LOST
        job.result = PageReadResult(ReadOutcome.FAILED, detail=f"reading: {error.strerror}")
        return
    problem = (
        f"read only {done} of {length + BLOCK} bytes"
        if done != length + BLOCK
        else _mismatch(entry, read, unpack_trailer(block), target)
    )
    if problem:
        job.lost = True
        job.result = PageReadResult(ReadOutcome.CORRUPT, detail=problem)
        return
    if not direct:
        _deliver(read, target)
    job.result = PageReadResult(ReadOutcome.HIT, entry.commit_id, entry.checksum)


def _mismatch(entry: Entry, read: PageRead, trailer: Trailer | None, page: memoryview) -> str:
    """Return how the page on disk differs from what the index says of it; nothing if it does not."""
    if trailer is None:
        return "the page's trailer is damaged"
    header = entry.segment.header
    if (trailer.namespace, trailer.pool, trailer.key) != (header.namespace, read.pool, read.key):
        return "the slot holds the page of another key"
    if (trailer.sequence, trailer.page_bytes) != (entry.sequence, entry.page_bytes):
        return "the slot holds another version of the page"
    found = xxhash.xxh3_64_intdigest(page[: entry.page_bytes])
    if found != trailer.checksum:
        return f"the page's checksum is {found:016x}, stored was {trailer.checksum:016x}"
    return ""


def _deliver(read: PageRead, page: memoryview) -> None:
    size = read.into.nbytes
    if read.address:
        copy(read.address, _buffers.bounce(size).address, size)
    else:
        read.into.cast("B")[:] = page[:size]


@dataclass(frozen=True, slots=True)
class PunchReport:
    """How erasing went: the slots whose old pages are gone for good, those of them that have kept their blocks, and those for which it failed."""

    gone: list[tuple[Segment, int]]
    stuck: list[tuple[Segment, int]]
    punchable: bool
    kept: frozenset[tuple[Segment, int]] = frozenset()


def punch_slots(slots: Iterable[tuple[Segment, int]], keep: int = 0) -> PunchReport:
    """Give the blocks of slots back to the file system, in the order given; slots that follow each other in one call.

    keep: the first so many keep their blocks and read as zeros, where the file system can do that. To fill a hole a writer takes
    the file's lock, so that pages written to punched slots go out one after the other (measured: at 0.4 to 0.5 of
    what direct I/O does side by side, against 0.8). Where the file system cannot punch holes, the trailer
    alone is overwritten: the old page is gone, the room is not.
    """
    ordered = list(slots)
    kept: set[tuple[Segment, int]] = set()
    for segment, first, count in _runs(ordered[:keep]):
        if zero(segment.fd, segment.offset(first), count * segment.header.slot_bytes) != 0:
            break
        kept.update((segment, slot) for slot in range(first, first + count))
    report = PunchReport(ordered[: len(kept)], [], True)
    punchable = True
    for segment, first, count in _runs(ordered[len(kept) :]):
        run = [(segment, slot) for slot in range(first, first + count)]
        code = punch(segment.fd, segment.offset(first), count * segment.header.slot_bytes)
        if code == 0:
            report.gone.extend(run)
            continue
        punchable = punchable and code not in (errno.EOPNOTSUPP, errno.ENOSYS)
        for item in run:
            (report.gone if erase_trailer(*item) else report.stuck).append(item)
    return PunchReport(report.gone, report.stuck, punchable, frozenset(kept))


def erase_trailer(segment: Segment, slot: int) -> bool:
    """Make a slot's page unknown to recovery, leave its blocks in place, and say whether that worked."""
    at = segment.offset(slot) + segment.header.slot_bytes - BLOCK
    if punch(segment.fd, at, BLOCK) == 0:
        return True
    block = _buffers.block.view
    block[:] = bytes(BLOCK)
    try:
        return os.pwrite(segment.fd, block, at) == BLOCK
    except OSError:
        return False


def read_trailer(segment: Segment, slot: int) -> bytes:
    """Return the trailer block of a slot as it is on disk; empty when it cannot be read."""
    block = _buffers.block.view
    try:
        done = os.preadv(segment.fd, [block], segment.offset(slot) + segment.header.slot_bytes - BLOCK)
    except OSError:
        return b""
    return bytes(block[:done])


def _runs(slots: Iterable[tuple[Segment, int]]) -> Iterable[tuple[Segment, int, int]]:
    """Yield slots in the order given, those that follow their neighbour as one run.

    The order is kept: of two versions of a page the older one was freed first, and must be gone first, or a crash between
    the two would bring it back.
    """
    ordered = list(slots)
    start = 0
    for at in range(1, len(ordered) + 1):
        segment, slot = ordered[at - 1]
        if at < len(ordered) and ordered[at] == (segment, slot + 1):
            continue
        yield segment, ordered[start][1], at - start
        start = at
