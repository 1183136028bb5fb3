"""Finds out what a directory holds: from the snapshot of a clean close, else from the trailers on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from hoststage.server.store.file import snapshot
from hoststage.server.store.file.directory import StoreDirectory
from hoststage.server.store.file.layout import BLOCK, Trailer, round_up, unpack_segment, unpack_trailer
from hoststage.server.store.file.pageio import punch_slots
from hoststage.server.store.file.segment import Segment, remove_segment
from hoststage.server.store.file.syscalls import AlignedBuffer, punch

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """One page with a whole trailer, and where it lies."""

    segment: Segment
    slot: int
    pool: str
    key: bytes
    page_bytes: int
    sequence: int
    commit_id: bytes
    checksum: int


@dataclass(slots=True)
class Recovered:
    """What a directory holds. ``pages`` are in the order of their last use, as far as that is known."""

    segments: list[Segment] = field(default_factory=list)
    pages: list[FoundPage] = field(default_factory=list)
    from_snapshot: bool = False
    discarded: int = 0
    """Slots that were torn, or held a page that another has replaced; they have been punched."""

    @property
    def next_sequence(self) -> int:
        """A sequence number above all that are in use."""
        return max((page.sequence for page in self.pages), default=0) + 1

    @property
    def last_number(self) -> int:
        """The highest segment number in use."""
        return max((segment.number for segment in self.segments), default=0)


def recover(directory: StoreDirectory, threads: int) -> Recovered:
    """Open all segments and find their pages. Blocking. Raises ``OSError`` when the directory cannot be read.

    The snapshot is gone, durably, when this returns: it is true only until the first write.
    """
    loaded = snapshot.load(directory.base)
    snapshot.invalidate(directory.base)
    segments: list[Segment] = []
    try:
        for segment in _open_segments(directory):
            segments.append(segment)
        return _find_pages(segments, loaded, threads)
    except BaseException:
        for segment in segments:
            segment.close()
        raise


def _find_pages(segments: list[Segment], loaded: snapshot.Snapshot | None, threads: int) -> Recovered:
    result = _from_snapshot(segments, loaded) if loaded is not None else None
    if result is None:
        result = _from_trailers(segments, threads)
    used: dict[Segment, set[int]] = {segment: set() for segment in segments}
    for page in result.pages:
        used[page.segment].add(page.slot)
    for segment in segments:
        segment.restore(used[segment])
        if not segment.live:
            remove_segment(segment)
        elif not result.from_snapshot:
            _give_back_tail(segment)
    result.segments = [segment for segment in segments if segment.live]
    return result


def _open_segments(directory: StoreDirectory) -> Iterable[Segment]:
    """Open the segment files that are ours and whole; one without a whole header never held a page."""
    buffer = AlignedBuffer(BLOCK)
    for path in sorted(directory.base.glob("*/*/*.seg")):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | directory.open_flags)
        try:
            header = unpack_segment(buffer.view) if os.preadv(fd, [buffer.view], 0) == BLOCK else None
            number = int(path.stem) if path.stem.isdecimal() else -1
            ours = header is not None and (header.namespace, header.pool) == _names(path) and number >= 0
            if header is not None and ours and os.fstat(fd).st_size == header.file_bytes:
                yield Segment(number, path, fd, header)
                fd = -1
            else:
                log.warning("store_segment_discarded", path=str(path))
                path.unlink()
        finally:
            if fd >= 0:
                os.close(fd)


def _names(path: Path) -> tuple[str, str]:
    return path.parent.parent.name, path.parent.name


def _from_snapshot(segments: list[Segment], loaded: snapshot.Snapshot) -> Recovered | None:
    """Match a snapshot with the files; ``None`` when they are not those that it speaks of."""
    by_number = {segment.number: segment for segment in segments}
    if len(by_number) != len(segments) or loaded.headers != {s.number: s.header for s in segments}:
        log.warning("store_snapshot_does_not_match")
        return None
    pages = [
        FoundPage(
            by_number[record.segment],
            record.slot,
            by_number[record.segment].header.pool,
            record.key,
            record.page_bytes,
            record.sequence,
            record.commit_id,
            record.checksum,
        )
        for record in loaded.records
    ]
    return Recovered(segments, pages, from_snapshot=True)


def _from_trailers(segments: list[Segment], threads: int) -> Recovered:
    newest: dict[tuple[str, str, bytes], FoundPage] = {}
    doomed: list[tuple[Segment, int]] = []
    with ThreadPoolExecutor(threads, "hoststage-store-scan") as executor:
        for pages, torn in executor.map(_scan, segments):
            doomed.extend(torn)
            for page in pages:
                name = (page.segment.header.namespace, page.pool, page.key)
                other = newest.get(name)
                if other is None or other.sequence < page.sequence:
                    newest[name], page_out = page, other
                else:
                    page_out = page
                if page_out is not None:
                    doomed.append((page_out.segment, page_out.slot))
        if doomed:
            report = executor.submit(punch_slots, doomed).result()
            if report.stuck:
                raise OSError(errno.EIO, "Torn pages cannot be erased")
    ordered = sorted(newest.values(), key=lambda page: page.sequence)
    return Recovered(segments, ordered, discarded=len(doomed))


def _scan(segment: Segment) -> tuple[list[FoundPage], list[tuple[Segment, int]]]:
    """Return the pages of a segment, and its slots that hold something else than a page or a hole."""
    header = segment.header
    buffer = AlignedBuffer(BLOCK)
    pages: list[FoundPage] = []
    torn: list[tuple[Segment, int]] = []
    slot = 0
    while slot < header.slots:
        try:
            data = os.lseek(segment.fd, segment.offset(slot), os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            raise
        slot = (data - BLOCK) // header.slot_bytes
        at = segment.offset(slot) + header.slot_bytes - BLOCK
        trailer = unpack_trailer(buffer.view) if os.preadv(segment.fd, [buffer.view], at) == BLOCK else None
        if trailer is not None and _belongs(trailer, segment):
            pages.append(
                FoundPage(
                    segment,
                    slot,
                    trailer.pool,
                    trailer.key,
                    trailer.page_bytes,
                    trailer.sequence,
                    trailer.commit_id,
                    trailer.checksum,
                )
            )
        else:
            torn.append((segment, slot))
        slot += 1
    return pages, torn


def _belongs(trailer: Trailer, segment: Segment) -> bool:
    header = segment.header
    fits = round_up(trailer.page_bytes) + BLOCK == header.slot_bytes
    return fits and (trailer.namespace, trailer.pool) == (header.namespace, header.pool)


def _give_back_tail(segment: Segment) -> None:
    """Free the blocks that were allocated ahead of writing. Failing that, they are used by later pages."""
    start = segment.offset(segment.fresh)
    if start < segment.header.file_bytes:
        punch(segment.fd, start, segment.header.file_bytes - start)
