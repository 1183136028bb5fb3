"""The file store itself: takes the calls, decides on the event loop, and sends the I/O to its threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import structlog

from hoststage.server.store.base import (
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    StoreStats,
    WriteOutcome,
    check_key,
    check_namespace,
    check_pool,
    check_read,
    check_write,
    refuse_broken_commits,
)
from hoststage.server.store.errors import StoreClosedError
from hoststage.server.store.file import snapshot
from hoststage.server.store.file.counters import Counters
from hoststage.server.store.file.directory import StoreDirectory
from hoststage.server.store.file.fanout import fan_out, uninterrupted
from hoststage.server.store.file.index import Entry, Group
from hoststage.server.store.file.layout import slot_bytes_for
from hoststage.server.store.file.opening import Opened, open_directory, sync_segments, trim_segments
from hoststage.server.store.file.pageio import ReadJob, WriteJob, is_no_room, read_page, write_page
from hoststage.server.store.file.quarantine import write_note
from hoststage.server.store.file.reclaim import Reclaimer
from hoststage.server.store.file.segment import Segment, SizeClass
from hoststage.server.store.file.table import SegmentTable
from hoststage.server.store.options import StoreOptions, SyncPolicy

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
_NOT_WRITTEN = PageWriteResult(WriteOutcome.STORED)


class FileStore:
    """Implements ``Store`` in a directory; see ``layout`` for the bytes and ``open`` for the one way to make
    one.

    All state lives on the event loop and changes in synchronous steps; threads are given a slot that nobody
    else has (to write) or that is pinned (to read). A page becomes visible by one assignment in the index.
    """

    def __init__(self, opened: Opened, options: StoreOptions) -> None:
        self._options = options
        self._directory: StoreDirectory = opened.directory
        self._readers = ThreadPoolExecutor(options.io_threads, "hoststage-store-read")
        self._writers = ThreadPoolExecutor(options.io_threads, "hoststage-store-write")
        self._helpers = ThreadPoolExecutor(2, "hoststage-store-space")
        self._counters = Counters()
        self._index = opened.index
        self._space = opened.space
        recovered = opened.recovered
        self._table = SegmentTable(opened.directory, options, self._helpers, recovered.last_number)
        self._sequence = recovered.next_sequence
        self._recovered_pages = len(recovered.pages)
        for segment in recovered.segments:
            self._table.add(segment)
        self._reclaimer = Reclaimer(
            opened.directory.root,
            self._index,
            self._space,
            self._table,
            counters=self._counters,
            executor=self._helpers,
        )
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._reclaimer.nudge()

    @classmethod
    async def open(cls, root: Path, options: StoreOptions | None = None) -> FileStore:
        """Lock the directory ``root``, find its pages, and return the store. Raises ``StoreConfigError``."""
        options = options or StoreOptions()
        options.check()
        opened = await asyncio.to_thread(open_directory, root, options)
        store = cls(opened, options)
        log.info(
            "store_opened",
            path=str(root),
            pages=store._recovered_pages,
            bytes=store._space.used,
            discarded=opened.recovered.discarded,
            from_snapshot=opened.recovered.from_snapshot,
            direct_io=opened.directory.direct_io,
        )
        for notice in opened.directory.notices:
            log.warning("store_notice", path=str(root), notice=notice)
        return store

    # --- the protocol ---------------------------------------------------------------------------------------

    async def exists(self, namespace: str, pool: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the commit id of each key that is stored; this counts as a use."""
        self._check_open(namespace)
        check_pool(pool)
        entries = [self._index.find(namespace, pool, key) for key in keys]
        return [entry.commit_id if entry is not None else None for entry in entries]

    async def read_into(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        """Fill each buffer with its page, verified."""
        self._check_open(namespace)
        for read in reads:
            check_read(read)
        return await self._finish(self._read(namespace, reads))

    async def write_from(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        """Write pages to free slots, then publish them in order, each commit whole or not at all."""
        self._check_open(namespace)
        for write in writes:
            check_write(write)
        return await self._finish(self._write(namespace, writes))

    async def delete(self, namespace: str, pool: str, keys: Sequence[bytes]) -> int:
        """Delete pages, and return when they are gone from the disk (one being read goes after that)."""
        self._check_open(namespace)
        check_pool(pool)
        for key in keys:
            check_key(key)
        return await self._finish(self._delete(namespace, [(pool, key) for key in keys]))

    async def clear(self, namespace: str) -> int:
        """Delete a namespace's pages and its files."""
        self._check_open(namespace)
        return await self._finish(self._clear(namespace))

    def stats(self) -> StoreStats:
        """Return counters and gauges."""
        notices = list(self._directory.notices)
        if not self._reclaimer.punchable:
            notices.append("The file system cannot punch holes: deleted pages keep their room until reused.")
        if self._reclaimer.stuck:
            notices.append(f"{self._reclaimer.stuck} slots could not be erased and are out of use.")
        return StoreStats(
            driver="file",
            pages=self._index.pages,
            bytes=self._space.used,
            limit_bytes=self._options.limit_bytes,
            free_bytes=self._space.free,
            set_aside=self._reclaimer.set_aside_slots + self._reclaimer.stuck,
            recovered_pages=self._recovered_pages,
            direct_io=self._directory.direct_io,
            notices=tuple(notices),
            **asdict(self._counters),
        )

    async def close(self) -> None:
        """Let running calls end, write the index snapshot, and unlock the directory."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="hoststage-store-close")
        await uninterrupted(self._closing)

    # --- reading --------------------------------------------------------------------------------------------

    async def _read(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        results = [PageReadResult(ReadOutcome.MISS)] * len(reads)
        jobs: list[ReadJob] = []
        for at, read in enumerate(reads):
            entry = self._index.find(namespace, read.pool, read.key)
            if entry is None:
                continue
            if entry.page_bytes != read.into.nbytes:
                detail = f"the stored page has {entry.page_bytes} bytes, wanted were {read.into.nbytes}"
                results[at] = PageReadResult(ReadOutcome.MISS, detail=detail)
                continue
            entry.readers += 1
            jobs.append(ReadJob(read, entry, at))
        try:
            await fan_out(self._readers, jobs, read_page, self._options.io_threads)
            for job in jobs:
                if job.lost:
                    await self._set_aside(namespace, job)
        finally:
            for job in jobs:
                self._reclaimer.end_read(job.entry)
        for job in jobs:
            assert job.result is not None
            results[job.index] = job.result
        self._count_reads(reads, results)
        return results

    async def _set_aside(self, namespace: str, job: ReadJob) -> None:
        """Take a bad page out of the index, leave a note, and keep its slot from use."""
        read, entry = job.read, job.entry
        dropped = self._index.drop(namespace, read.pool, read.key, entry)
        if dropped is None:  # somebody else was faster: it is set aside, replaced, deleted or evicted
            return
        detail = job.result.detail if job.result is not None else ""
        log.error("store_page_set_aside", path=str(entry.segment.path), slot=entry.slot, problem=detail)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._helpers, write_note, self._directory.base, entry, read.pool, read.key, detail)
        await self._reclaimer.set_aside(entry.segment, entry.slot)

    def _count_reads(self, reads: Sequence[PageRead], results: Sequence[PageReadResult]) -> None:
        count = self._counters
        count.reads += len(reads)
        for read, result in zip(reads, results, strict=True):
            match result.outcome:
                case ReadOutcome.HIT:
                    count.hits += 1
                    count.read_bytes += read.into.nbytes
                case ReadOutcome.MISS:
                    count.misses += 1
                case ReadOutcome.CORRUPT:
                    count.corrupt += 1
                case ReadOutcome.FAILED:
                    count.read_failed += 1

    # --- writing --------------------------------------------------------------------------------------------

    async def _write(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        groups = {key: self._index.hold(namespace, key) for key in {write.key for write in writes}}
        jobs: list[WriteJob] = []
        settled = 0
        try:
            await self._reclaimer.look()
            results = await self._reserve(namespace, writes, jobs)
            refuse_broken_commits(writes, results)
            wanted = [job for job in jobs if results[job.index].outcome is WriteOutcome.STORED]
            chains: dict[bytes, list[WriteJob]] = {}
            for job in wanted:
                chains.setdefault(job.write.key, []).append(job)
            await fan_out(self._writers, chains.values(), _write_chain, self._options.io_threads)
            for job in wanted:
                assert job.result is not None
                results[job.index] = job.result
            await self._sync(wanted, results)
            refuse_broken_commits(writes, results)
            while settled < len(jobs):
                settled += 1
                self._settle_job(groups, jobs[settled - 1], results)
        finally:
            for job in jobs[settled:]:
                self._reclaimer.free(job.segment, job.slot)
            for group in groups.values():
                self._index.release(group)
        self._count_writes(writes, results)
        self._table.prepare_ahead({job.segment for job in jobs}, self._space.free)
        self._reclaimer.nudge()
        return results

    async def _reserve(
        self, namespace: str, writes: Sequence[PageWrite], jobs: list[WriteJob]
    ) -> list[PageWriteResult]:
        """Find a slot for every page, and add a job for each that got one."""
        results: list[PageWriteResult] = []
        for at, write in enumerate(writes):
            size_class = SizeClass(namespace, write.pool, slot_bytes_for(write.data.nbytes))
            found = await self._take_slot(size_class)
            if isinstance(found, PageWriteResult):
                results.append(found)
                continue
            self._sequence += 1
            jobs.append(WriteJob(write, found[0], found[1], self._sequence, at))
            results.append(_NOT_WRITTEN)
        return results

    async def _take_slot(self, size_class: SizeClass) -> tuple[Segment, int] | PageWriteResult:
        size = size_class.slot_bytes
        while True:
            segment = self._table.find(size_class)
            if segment is None:
                try:
                    made = await self._table.grow(size_class)
                    self._table.prepare_ahead((made,), self._space.free)
                except OSError as error:
                    outcome = WriteOutcome.FULL if is_no_room(error) else WriteOutcome.FAILED
                    return PageWriteResult(outcome, f"creating a segment file: {error.strerror}")
            elif self._space.has_room(size):
                self._space.used += size
                return segment, self._table.take(segment)
            elif not await self._reclaimer.make_room(size):
                return PageWriteResult(WriteOutcome.FULL, self._why_full(size))

    def _why_full(self, size: int) -> str:
        if self._space.ceiling < self._options.limit_bytes:
            return f"no room for {size} bytes: the disk has {self._space.free} bytes free, of which " + (
                f"{self._options.min_free_bytes} are left to others"
            )
        return f"no room for {size} bytes within the limit of {self._options.limit_bytes}"

    async def _sync(self, jobs: Sequence[WriteJob], results: list[PageWriteResult]) -> None:
        if self._options.sync is SyncPolicy.NONE:
            return
        stored = [job for job in jobs if results[job.index].outcome is WriteOutcome.STORED]
        segments = {job.segment for job in stored}
        loop = asyncio.get_running_loop()
        failed = await loop.run_in_executor(self._writers, sync_segments, segments)
        for job in stored:
            if job.segment in failed:
                results[job.index] = PageWriteResult(WriteOutcome.FAILED, f"syncing: {failed[job.segment].strerror}")

    def _settle_job(self, groups: dict[bytes, Group], job: WriteJob, results: Sequence[PageWriteResult]) -> None:
        """Publish one written page, or free its slot."""
        if results[job.index].outcome is not WriteOutcome.STORED:
            self._reclaimer.free(job.segment, job.slot)
            return
        write = job.write
        entry = Entry(job.segment, job.slot, write.data.nbytes, job.sequence, bytes(write.commit_id), job.checksum)
        replaced = self._index.put(groups[write.key], write.pool, entry)
        if replaced is not None:
            self._reclaimer.let_go(replaced)

    def _count_writes(self, writes: Sequence[PageWrite], results: Sequence[PageWriteResult]) -> None:
        count = self._counters
        count.writes += len(writes)
        for write, result in zip(writes, results, strict=True):
            match result.outcome:
                case WriteOutcome.STORED:
                    count.stored += 1
                    count.written_bytes += write.data.nbytes
                case WriteOutcome.FULL:
                    count.full += 1
                case WriteOutcome.FAILED:
                    count.failed += 1

    # --- deleting and closing -------------------------------------------------------------------------------

    async def _delete(self, namespace: str, pages: Iterable[tuple[str, bytes]]) -> int:
        count = 0
        for pool, key in pages:
            entry = self._index.drop(namespace, pool, key)
            if entry is not None:
                count += 1
                self._reclaimer.let_go(entry)
        self._counters.deleted_pages += count
        await self._reclaimer.settle()
        return count

    async def _clear(self, namespace: str) -> int:
        count = 0
        keys = self._index.keys(namespace)
        for start in range(0, len(keys), 1024):
            pages = [
                (pool, key)
                for key in keys[start : start + 1024]
                if (group := self._index.group(namespace, key)) is not None
                for pool in group.pages
            ]
            count += await self._delete(namespace, pages)
        await self._table.remove_empty(namespace)
        return count

    async def _close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        await self._reclaimer.close()
        await asyncio.to_thread(self._close_files)
        for executor in (self._readers, self._writers, self._helpers):
            executor.shutdown(wait=True)
        log.info("store_closed", path=str(self._directory.root), pages=self._index.pages)

    def _close_files(self) -> None:
        segments = list(self._table)
        try:
            trim_segments(segments)
            if not self._reclaimer.stuck:
                snapshot.save(
                    self._directory.base,
                    {segment.number: segment.header for segment in segments},
                    (
                        snapshot.PageRecord(
                            entry.segment.number,
                            entry.slot,
                            entry.page_bytes,
                            entry.sequence,
                            entry.checksum,
                            entry.commit_id,
                            group.key,
                        )
                        for group, _, entry in self._index.oldest_first()
                    ),
                )
        except OSError as error:
            log.warning("store_snapshot_not_written", path=str(self._directory.base), error=error.strerror)
        for segment in segments:
            segment.close()
        self._directory.close()

    # --- helpers --------------------------------------------------------------------------------------------

    def _check_open(self, namespace: str) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        check_namespace(namespace)

    async def _finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a call to its end even if the caller is cancelled: threads may be using its buffers."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await uninterrupted(task)


def _write_chain(jobs: list[WriteJob]) -> None:
    """Write the pages of one key in their order; those behind one that fails share its outcome."""
    cause: PageWriteResult | None = None
    for job in jobs:
        if cause is None:
            write_page(job)
            assert job.result is not None
            if job.result.outcome is not WriteOutcome.STORED:
                cause = job.result
        else:
            detail = f"a page of the same key before it was not stored: {cause.detail}"
            job.result = PageWriteResult(cause.outcome, detail)
