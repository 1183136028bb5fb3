"""The store of a daemon that has none: every read misses, and no write is ever acknowledged as stored."""

from __future__ import annotations

from collections.abc import Sequence

from hoststage.server.store.base import (
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    StoreStats,
    WriteOutcome,
    check_namespace,
    check_read,
    check_write,
)
from hoststage.server.store.errors import StoreClosedError

_NO_STORE = PageWriteResult(WriteOutcome.FULL, "this daemon has no store")


class NullStore:
    """Implements ``Store`` without keeping anything; writes answer ``FULL``, since nothing was stored."""

    def __init__(self) -> None:
        self._closed = False
        self._reads = 0
        self._writes = 0

    async def exists(self, namespace: str, pool: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return ``None`` for every key."""
        self._check(namespace)
        return [None] * len(keys)

    async def read_into(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        """Answer ``MISS`` to every read."""
        self._check(namespace)
        for read in reads:
            check_read(read)
        self._reads += len(reads)
        return [PageReadResult(ReadOutcome.MISS)] * len(reads)

    async def write_from(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        """Answer ``FULL`` to every write."""
        self._check(namespace)
        for write in writes:
            check_write(write)
        self._writes += len(writes)
        return [_NO_STORE] * len(writes)

    async def delete(self, namespace: str, pool: str, keys: Sequence[bytes]) -> int:
        """Return 0: there was nothing to delete."""
        self._check(namespace)
        return 0

    async def clear(self, namespace: str) -> int:
        """Return 0: there was nothing to delete."""
        self._check(namespace)
        return 0

    def stats(self) -> StoreStats:
        """Return how many pages were asked for and offered."""
        return StoreStats(
            driver="none",
            reads=self._reads,
            misses=self._reads,
            writes=self._writes,
            full=self._writes,
        )

    async def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _check(self, namespace: str) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        check_namespace(namespace)
