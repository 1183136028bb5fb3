"""The contract of a store: where pages live when they are not in host memory.

The life of a page in a store
-----------------------------
1. *Absent.* ``exists`` answers ``None`` and ``read_into`` answers ``MISS``.
2. *Being written.* ``write_from`` has taken the caller's buffer. Nothing is visible yet: readers still see
   the page that the key had before, or a miss. The caller leaves the buffer alone until the call returns.
3. *Stored.* The outcome ``STORED`` says that the page survives the death of the daemon. It became visible in
   one step; a reader sees the old page or the new one, whole, never a mixture.
4. *Being read.* ``read_into`` pins the page for as long as it fills the caller's buffer: eviction, deletion
   and replacement leave it alone until then. Its bytes are checked against the checksum taken when it was
   written.
5. *Gone*: evicted (together with the pages of all other pools under the same key), deleted, cleared, replaced
   by a newer page, or set aside because it no longer matched its checksum (``CORRUPT``, from then on
   ``MISS``).

Who calls what from which thread
--------------------------------
Every coroutine is called, and every outcome delivered, on the one event loop on which the store was opened.
The loop is never blocked: drivers do their I/O and their hashing in threads or connections that they own.
``stats`` is synchronous, touches memory only, and is called on the loop as well. Buffers are read and filled
by the driver's threads while the call runs. If the caller's task is cancelled in the middle of a call, the
I/O already begun goes on, and the driver raises ``CancelledError`` only after the last thread has let go of
the caller's buffers.

What a store never does
-----------------------
After it is open it raises no exception for a condition of the medium (full, failing, read-only, gone): that
is an outcome, counted in ``stats``. Misuse by the caller (a key of no bytes, a malformed namespace, a closed
store) raises ``ValueError`` or ``StoreClosedError``, for it is a bug. Errors that a person must put right at
start are ``StoreConfigError`` (see ``errors``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

MAX_KEY_BYTES: Final = 64
COMMIT_ID_BYTES: Final = 16
ALIGNMENT: Final = 4096
NO_COMMIT: Final = bytes(COMMIT_ID_BYTES)

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_POOL = re.compile(r"[a-z0-9_]{1,64}")


class WriteOutcome(Enum):
    """What became of one page given to ``write_from``."""

    STORED = "stored"
    FULL = "full"
    """There was no room, even after eviction, or the free-space floor was reached."""
    FAILED = "failed"
    """The medium answered with an error, or the circuit breaker is open."""


class ReadOutcome(Enum):
    """What became of one page asked of ``read_into``; everything but ``HIT`` is a miss to the reader."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"
    """The page no longer matched its checksum or header. It was set aside: the next read is a ``MISS``."""
    FAILED = "failed"
    """The medium answered with an error, or the circuit breaker is open."""


class BreakerState(Enum):
    """The state of the circuit breaker around a store; a store without one is always ``CLOSED``."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class PageWrite:
    """One page to be stored.

    ``data`` is exactly the page's bytes, without padding. ``address`` is where they lie in this process and
    ``stride`` the length up to which the memory behind them may be read: when both are multiples of
    ``ALIGNMENT`` the page is written from there without a copy (the padding is written too, and means
    nothing). ``address`` 0 says that it is unknown, and the driver copies. ``checksum`` is the xxh3_64 of
    ``data`` where it is known; otherwise the driver computes it in a thread. ``commit_id`` is
    ``COMMIT_ID_BYTES`` long.
    """

    pool: str
    key: bytes
    commit_id: bytes
    data: memoryview
    address: int
    stride: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class PageRead:
    """One page to be read into the caller's memory.

    ``into`` is writable and exactly as long as the page. ``address`` and ``stride`` are as for ``PageWrite``,
    with the difference that the whole stride may be overwritten. Unless the outcome is ``HIT`` the content of
    the buffer means nothing afterwards.
    """

    pool: str
    key: bytes
    into: memoryview
    address: int
    stride: int


@dataclass(frozen=True, slots=True)
class PageReadResult:
    """The answer to one ``PageRead``; ``commit_id`` and ``checksum`` have a meaning only for a ``HIT``."""

    outcome: ReadOutcome
    commit_id: bytes = NO_COMMIT
    checksum: int = 0
    detail: str = ""


class PageWriteResult(NamedTuple):
    """The answer to one ``PageWrite``; ``detail`` says in words why a page was not stored."""

    outcome: WriteOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters (since the store was opened) and gauges of one store. Bytes are bytes, not pages."""

    driver: str
    pages: int = 0
    """Pages stored now."""
    bytes: int = 0
    """Room taken by them now, headers and padding included, with that of pages being written or freed."""
    limit_bytes: int = 0
    """The room that the store may take; 0 says that it has no limit of its own."""
    free_bytes: int = 0
    """Free room of the medium at the last look; 0 where there is no such thing."""
    reads: int = 0
    writes: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    read_failed: int = 0
    read_bytes: int = 0
    stored: int = 0
    written_bytes: int = 0
    full: int = 0
    failed: int = 0
    """Writes that ended in ``FAILED``."""
    evicted_pages: int = 0
    evicted_bytes: int = 0
    deleted_pages: int = 0
    set_aside: int = 0
    """Corrupt or unreadable pages that are set aside now and hold room."""
    recovered_pages: int = 0
    """Pages found when the store was opened."""
    direct_io: bool = False
    breaker: BreakerState = BreakerState.CLOSED
    breaker_opened: int = 0
    """How often the breaker has opened."""
    breaker_rejected: int = 0
    """Pages that were answered at once, as a miss or a failed write, because the breaker was open."""
    notices: tuple[str, ...] = ()
    """What an operator should know about this store, in whole sentences."""


@runtime_checkable
class Store(Protocol):
    """A place where pages outlive the host memory; see the module's text for the rules that bind every
    driver.

    ``namespace`` is the fingerprint of a namespace, 64 lower-case hexadecimal digits; a pool's name matches
    ``[a-z0-9_]{1,64}``; a key has 1 to ``MAX_KEY_BYTES`` bytes. Results come in the order of the arguments.
    """

    async def exists(self, namespace: str, pool: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the commit id of each key's page where the store holds one, else ``None``."""
        ...

    async def read_into(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        """Fill each buffer with its page. Checksums are verified before a ``HIT`` is answered."""
        ...

    async def write_from(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        """Store pages, and publish them in the order given.

        The caller puts sidecars before their source and the anchor pool last. The pages of one key are also
        written in that order. The pages of one commit in one call are published together or not at all: when
        one of them cannot be stored, none is, and each says why. Commits in the same call do not depend on
        each other.
        """
        ...

    async def delete(self, namespace: str, pool: str, keys: Sequence[bytes]) -> int:
        """Delete these keys' pages in one pool, for good, and return how many there were."""
        ...

    async def clear(self, namespace: str) -> int:
        """Delete all pages of a namespace, for good, and return how many there were."""
        ...

    def stats(self) -> StoreStats:
        """Return counters and gauges, without any I/O."""
        ...

    async def close(self) -> None:
        """Let running calls end, refuse new ones with ``StoreClosedError``, and let go of the medium.

        Idempotent.
        """
        ...


def check_namespace(namespace: str) -> None:
    """Raise ``ValueError`` unless ``namespace`` is a fingerprint; it becomes part of a path."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"namespace must be 64 lower-case hexadecimal digits, not {namespace!r}")


def check_pool(pool: str) -> None:
    """Raise ``ValueError`` unless ``pool`` is a pool's name; it becomes part of a path."""
    if not _POOL.fullmatch(pool):
        raise ValueError(f"pool must match [a-z0-9_]{{1,64}}, not {pool!r}")


def check_key(key: bytes) -> None:
    """Raise ``ValueError`` unless ``key`` has a length that a key may have."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def check_read(read: PageRead) -> None:
    """Raise ``ValueError`` unless ``read`` names a page and a buffer that could hold it."""
    check_pool(read.pool)
    check_key(read.key)
    if read.into.readonly or not read.into.nbytes:
        raise ValueError("into must be a writable buffer of at least one byte")
    _check_stride(read.address, read.stride, read.into.nbytes)


def check_write(write: PageWrite) -> None:
    """Raise ``ValueError`` unless ``write`` is a page that can be stored."""
    check_pool(write.pool)
    check_key(write.key)
    if len(write.commit_id) != COMMIT_ID_BYTES:
        raise ValueError(f"commit_id must have {COMMIT_ID_BYTES} bytes, not {len(write.commit_id)}")
    if not write.data.nbytes:
        raise ValueError("data must have at least one byte")
    _check_stride(write.address, write.stride, write.data.nbytes)


def _check_stride(address: int, stride: int, size: int) -> None:
    if address and stride < size:
        raise ValueError(f"stride must be at least the page's size of {size} bytes, not {stride}")


def refuse_broken_commits(writes: Sequence[PageWrite], results: list[PageWriteResult]) -> None:
    """Make every page of a commit share the fate of the first page of it that could not be stored.

    ``results`` is changed in place. Pages with the id ``NO_COMMIT`` stand for themselves.
    """
    broken: dict[bytes, PageWriteResult] = {}
    for write, result in zip(writes, results, strict=True):
        if result.outcome is not WriteOutcome.STORED and write.commit_id != NO_COMMIT:
            broken.setdefault(write.commit_id, result)
    for index, write in enumerate(writes):
        cause = broken.get(write.commit_id)
        if cause is not None and results[index].outcome is WriteOutcome.STORED:
            detail = f"another page of the commit was not stored: {cause.detail}"
            results[index] = PageWriteResult(cause.outcome, detail)
