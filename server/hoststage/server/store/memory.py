"""A store in this process's own memory, with faults to order: for tests, and for trying things out."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from hoststage.server.store.base import (
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    StoreStats,
    WriteOutcome,
    check_namespace,
    check_pool,
    check_read,
    check_write,
    refuse_broken_commits,
)
from hoststage.server.store.errors import StoreClosedError

_STORED = PageWriteResult(WriteOutcome.STORED)


@dataclass(slots=True)
class Faults:
    """What a ``MemoryStore`` is to do wrong; change the fields at any time.

    Delays are seconds that every call of that kind sleeps. ``on_read`` and ``on_write`` are asked for each
    page, and what they return, unless ``None``, is the page's outcome (a write that ends so stores nothing).
    """

    read_delay: float = 0.0
    write_delay: float = 0.0
    on_read: Callable[[PageRead], ReadOutcome | None] | None = None
    on_write: Callable[[PageWrite], WriteOutcome | None] | None = None


@dataclass(frozen=True, slots=True)
class _Page:
    data: bytes
    commit_id: bytes
    checksum: int


class MemoryStore:
    """Implements ``Store`` over a dict, with LRU eviction by key once ``limit_bytes`` of page bytes are
    held."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.faults = Faults()
        self._limit = limit_bytes
        self._groups: OrderedDict[tuple[str, bytes], dict[str, _Page]] = OrderedDict()
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._closed = False

    async def exists(self, namespace: str, pool: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the commit id of each key that is held."""
        self._check(namespace)
        check_pool(pool)
        found: list[bytes | None] = []
        for key in keys:
            page = self._groups.get((namespace, key), {}).get(pool)
            found.append(page.commit_id if page else None)
        return found

    async def read_into(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        """Copy each page that is held into its buffer, after ``faults.read_delay``."""
        self._check(namespace)
        for read in reads:
            check_read(read)
        if self.faults.read_delay:
            await asyncio.sleep(self.faults.read_delay)
        return [self._read(namespace, read) for read in reads]

    def _read(self, namespace: str, read: PageRead) -> PageReadResult:
        self._counts["reads"] += 1
        page = self._groups.get((namespace, read.key), {}).get(read.pool)
        fault = self.faults.on_read(read) if self.faults.on_read else None
        if fault is ReadOutcome.CORRUPT and page is not None:
            self._drop(namespace, read.key, read.pool)
        if fault is not None and fault is not ReadOutcome.HIT:
            self._counts["read_failed" if fault is ReadOutcome.FAILED else fault.value] += 1
            return PageReadResult(fault, detail="a fault was ordered")
        if page is None or len(page.data) != read.into.nbytes:
            self._counts["miss"] += 1
            return PageReadResult(ReadOutcome.MISS)
        read.into.cast("B")[:] = page.data
        self._groups.move_to_end((namespace, read.key))
        self._counts["hit"] += 1
        self._counts["read_bytes"] += len(page.data)
        return PageReadResult(ReadOutcome.HIT, page.commit_id, page.checksum)

    async def write_from(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        """Keep a copy of each page, after ``faults.write_delay``; commits are kept whole or not at all."""
        self._check(namespace)
        for write in writes:
            check_write(write)
        if self.faults.write_delay:
            await asyncio.sleep(self.faults.write_delay)
        results = [self._admit(write) for write in writes]
        refuse_broken_commits(writes, results)
        for write, result in zip(writes, results, strict=True):
            self._counts["writes"] += 1
            self._counts[result.outcome.value] += 1
            if result.outcome is WriteOutcome.STORED:
                self._keep(namespace, write)
        return results

    def _admit(self, write: PageWrite) -> PageWriteResult:
        fault = self.faults.on_write(write) if self.faults.on_write else None
        if fault is not None and fault is not WriteOutcome.STORED:
            return PageWriteResult(fault, "a fault was ordered")
        if write.data.nbytes > self._limit:
            return PageWriteResult(WriteOutcome.FULL, "the page is larger than the store")
        return _STORED

    def _keep(self, namespace: str, write: PageWrite) -> None:
        self._drop(namespace, write.key, write.pool)
        data = bytes(write.data)
        checksum = xxhash.xxh3_64_intdigest(data) if write.checksum is None else write.checksum
        group = self._groups.setdefault((namespace, write.key), {})
        group[write.pool] = _Page(data, write.commit_id, checksum)
        self._groups.move_to_end((namespace, write.key))
        self._bytes += len(data)
        self._counts["written_bytes"] += len(data)
        while self._bytes > self._limit and len(self._groups) > 1:
            _, pages = self._groups.popitem(last=False)
            for page in pages.values():
                self._bytes -= len(page.data)
                self._counts["evicted_pages"] += 1
                self._counts["evicted_bytes"] += len(page.data)

    async def delete(self, namespace: str, pool: str, keys: Sequence[bytes]) -> int:
        """Forget these keys' pages in one pool."""
        self._check(namespace)
        check_pool(pool)
        count = sum(self._drop(namespace, key, pool) for key in keys)
        self._counts["deleted_pages"] += count
        return count

    async def clear(self, namespace: str) -> int:
        """Forget all pages of a namespace."""
        self._check(namespace)
        doomed = [(key, pool) for (held, key), pages in self._groups.items() if held == namespace for pool in pages]
        for key, pool in doomed:
            self._drop(namespace, key, pool)
        self._counts["deleted_pages"] += len(doomed)
        return len(doomed)

    def stats(self) -> StoreStats:
        """Return counters and gauges."""
        count = self._counts
        return StoreStats(
            driver="memory",
            pages=sum(len(pages) for pages in self._groups.values()),
            bytes=self._bytes,
            limit_bytes=self._limit,
            free_bytes=self._limit - self._bytes,
            reads=count["reads"],
            writes=count["writes"],
            hits=count["hit"],
            misses=count["miss"],
            corrupt=count["corrupt"],
            read_failed=count["read_failed"],
            read_bytes=count["read_bytes"],
            stored=count["stored"],
            written_bytes=count["written_bytes"],
            full=count["full"],
            failed=count["failed"],
            evicted_pages=count["evicted_pages"],
            evicted_bytes=count["evicted_bytes"],
            deleted_pages=count["deleted_pages"],
        )

    async def close(self) -> None:
        """Forget everything and refuse further calls."""
        self._closed = True
        self._groups.clear()
        self._bytes = 0

    def _drop(self, namespace: str, key: bytes, pool: str) -> bool:
        group = self._groups.get((namespace, key))
        page = group.pop(pool, None) if group is not None else None
        if page is None:
            return False
        self._bytes -= len(page.data)
        if not group:
            del self._groups[namespace, key]
        return True

    def _check(self, namespace: str) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        check_namespace(namespace)
