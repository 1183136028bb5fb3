"""Durable holds: into the store, found there again by whoever knows the name, and deleted when their time is over."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from hoststage.core.effects import Outcome
from hoststage.core.holds import HoldName
from hoststage.server.staging.hold_records import (
    ENTRY_POOL,
    MANIFEST_POOL,
    NOTE_BYTES,
    NOTE_POOL,
    RECORD_BYTES,
    HoldRecord,
    decode,
    digest_of,
    hold_space,
    index_space,
)
from hoststage.server.store.base import PageRead, PageWrite, ReadOutcome, Store, WriteOutcome

log = structlog.get_logger(__name__)

_BATCH_PAGES: Final = 64
_ATTEMPTS: Final = 3
_SWEEP_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 30.0
_OUTCOME: Final = {WriteOutcome.FULL: Outcome.STORE_FULL, WriteOutcome.FAILED: Outcome.STORE_FAILED}

Page = tuple[str, int, memoryview, int, int]
"""A page of a hold: pool, index, bytes, address, stride."""


@dataclass(frozen=True, slots=True)
class HoldOptions:
    """What an operator may set about durable holds. Seconds. `identity`: names this daemon's index in a store that it shares."""

    ttl: float = 600.0
    max_ttl: float = 86_400.0
    max_durable: int = 4096
    identity: str = "embedded"


class IndexFull(Exception):
    """As many durable holds as this daemon may keep are there."""


@dataclass(slots=True, eq=False)
class _Known:
    """A durable hold in this daemon's index. `until`: seconds of the monotonic clock. `dead`: it is being deleted."""

    number: int
    record: HoldRecord
    until: float
    dead: bool = False
    deleting: bool = False


class DurableHolds:
    """The durable holds of one daemon. `forget` is told of records whose pages must not be found in host memory any more."""

    def __init__(
        self,
        store: Store | None,
        options: HoldOptions,
        forget: Callable[[HoldRecord], None],
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.expired = 0
        self._store = store
        self._forget = forget
        self._wall = wall
        self._monotonic = monotonic
        self._space = index_space(options.identity)
        self._known: dict[tuple[str, bytes], _Known] = {}
        self._free = list(range(options.max_durable))
        self._recovered = False
        self._recovering = asyncio.Lock()

    def __len__(self) -> int:
        return sum(not k.dead for k in self._known.values())

    @property
    def pages(self) -> int:
        """Pages of all durable holds known here."""
        return sum(k.record.pages for k in self._known.values() if not k.dead)

    # -------------------------------------------------------------- writing

    async def exists(self, name: HoldName) -> bool:
        """Return whether a durable hold of that name is sealed and alive."""
        return (await self.find(name))[0] is not None

    async def write(
        self,
        name: HoldName,
        pools: Sequence[tuple[str, int]],
        pages: Sequence[Page],
        note: bytes,
        ttl: float,
        wanted: Callable[[], bool],
    ) -> tuple[Outcome, str]:
        """Store a hold whole. Return STORED once the store has acknowledged every page and the manifest.

        Else nothing of it can be found, and the outcome is STORE_FULL, STORE_FAILED, or CANCELLED where it was not `wanted` any more.
        pages: in store order. Raises `IndexFull`, and `OSError` where the index of an earlier daemon cannot be read.
        """
        await self.recover()
        if not self._free:
            raise IndexFull(f"{len(self._known)} durable holds are there, as many as this daemon keeps")
        number = heapq.heappop(self._free)
        now = self._now_ms()
        record = HoldRecord(
            name[0],
            digest_of(name),
            os.urandom(16),
            now,
            now + max(1, int(ttl * 1000)),
            tuple(pools),
            len(note),
            note,
        )
        known = _Known(number, record.without_note(), self._monotonic() + ttl)
        # Known before its first byte is stored, so that whatever happens it is cleared away one day.
        outcome, detail = await self._write_all(number, record, pages, wanted)
        if outcome is Outcome.STORED and wanted():
            self._known[record.namespace, record.digest] = known
            return outcome, detail
        await self._delete(known)
        return (Outcome.CANCELLED, "discarded meanwhile") if outcome is Outcome.STORED else (outcome, detail)

    async def _write_all(
        self, number: int, record: HoldRecord, pages: Sequence[Page], wanted: Callable[[], bool]
    ) -> tuple[Outcome, str]:
        entry = memoryview(record.without_note().encode())
        todo: list[tuple[str, list[PageWrite]]] = [
            (self._space, [PageWrite(ENTRY_POOL, _entry_key(number), record.seal_id, entry, 0, RECORD_BYTES)])
        ]
        writes = [
            PageWrite(pool, record.key(i), record.seal_id, data, address, stride)
            for pool, i, data, address, stride in pages
        ]
        todo += [(record.space, writes[at : at + _BATCH_PAGES]) for at in range(0, len(writes), _BATCH_PAGES)]
        if record.note_apart:
            padded = memoryview((record.note or b"").ljust(NOTE_BYTES, b"\x00"))
            todo.append((record.space, [PageWrite(NOTE_POOL, record.key(0), record.seal_id, padded, 0, NOTE_BYTES)]))
        manifest = memoryview(record.encode())
        todo.append(
            (record.space, [PageWrite(MANIFEST_POOL, record.digest, record.seal_id, manifest, 0, RECORD_BYTES)])
        )
        for space, batch in todo:
            if not wanted():
                return Outcome.CANCELLED, "discarded meanwhile"
            outcome, detail = await self._write_batch(space, batch)
            if outcome is not Outcome.STORED:
                return outcome, detail
        return Outcome.STORED, ""

    async def _write_batch(self, space: str, batch: list[PageWrite]) -> tuple[Outcome, str]:
        assert self._store is not None
        outcome, detail = Outcome.STORED, ""
        for attempt in range(_ATTEMPTS):
            results = await self._store.write_from(space, batch)
            bad = [r for r in results if r.outcome is not WriteOutcome.STORED]
            if not bad:
                return Outcome.STORED, ""
            outcome, detail = _OUTCOME[bad[0].outcome], bad[0].detail
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(0.1 * 3**attempt)
        return outcome, detail

    # -------------------------------------------------------------- finding

    async def find(self, name: HoldName) -> tuple[HoldRecord | None, str]:
        """Return the record of a sealed hold that has not expired, with its note unless that is lost; else None and why.

        Raises `OSError` where the store could not say.
        """
        if self._store is None:
            return None, "no store is configured"
        digest = digest_of(name)
        known = self._known.get((name[0], digest))
        if known is not None and known.until <= self._monotonic():
            return None, "it has expired"
        block = bytearray(RECORD_BYTES)
        record = await self._read_record(hold_space(name[0]), MANIFEST_POOL, digest, block)
        if record is None:
            return None, "no sealed hold of that name"
        # For its own holds a daemon trusts the monotonic clock; those of another it must judge by the wall clock.
        if known is None and record.remaining(self._now_ms()) <= 0:
            return None, "it has expired"
        return record, ""

    async def note_of(self, record: HoldRecord) -> bytes | None:
        """Return the note of a hold, None where the store has lost it."""
        if record.note is not None:
            return record.note
        assert self._store is not None
        block = bytearray(NOTE_BYTES)
        read = PageRead(NOTE_POOL, record.key(0), memoryview(block), 0, NOTE_BYTES)
        [result] = await self._store.read_into(record.space, [read])
        return bytes(block[: record.note_bytes]) if result.outcome is ReadOutcome.HIT else None

    async def _read_record(self, space: str, pool: str, key: bytes, block: bytearray) -> HoldRecord | None:
        assert self._store is not None
        [result] = await self._store.read_into(space, [PageRead(pool, key, memoryview(block), 0, RECORD_BYTES)])
        if result.outcome is ReadOutcome.FAILED:
            raise OSError(result.detail or "the store failed")
        if result.outcome is not ReadOutcome.HIT:
            return None
        try:
            return decode(block)
        except (ValueError, UnicodeDecodeError) as error:
            log.warning("hold.record_unreadable", pool=pool, error=str(error))
            return None

    # -------------------------------------------------------------- deleting

    async def discard(self, name: HoldName) -> bool:
        """Delete a hold for good; return whether there was one. Raises `OSError` where the store could not say."""
        known = self._known.get((name[0], digest_of(name)))
        if known is not None:
            await self._delete(known)
            return True
        # It may be another daemon's, in a store that both use: its entry there expires by itself.
        record, _ = await self.find(name)
        if record is not None:
            await self._delete_pages(record)
        return record is not None

    async def clear(self, namespace: str) -> int:
        """Delete every durable hold of a namespace that is known here; return how many pages."""
        mine = [k for k in self._known.values() if k.record.namespace == namespace and not k.dead]
        for known in mine:
            await self._delete(known)
        return sum(k.record.pages for k in mine)

    async def _delete(self, known: _Known) -> None:
        """Delete a hold and, once nothing of it is left, its entry; else it stays in the index, dead, to be tried again."""
        assert self._store is not None
        known.dead = known.deleting = True
        # From now on under a key that no name has, so that the name is free for a new hold.
        key = (known.record.namespace, known.record.digest)
        if self._known.get(key) is known:
            del self._known[key]
        grave = (known.record.namespace, known.record.digest + known.record.seal_id)
        self._known[grave] = known
        try:
            gone = await self._delete_pages(known.record)
            if gone:
                await self._store.delete(self._space, ENTRY_POOL, [_entry_key(known.number)])
                del self._known[grave]
                heapq.heappush(self._free, known.number)
        finally:
            known.deleting = False
            known.until = self._monotonic() + _RETRY_SECONDS

    async def _delete_pages(self, record: HoldRecord) -> bool:
        """Delete what the store has of a hold, the manifest first; return whether nothing is left, as far as it says."""
        assert self._store is not None
        store, space = self._store, record.space
        self._forget(record)
        [there] = await store.exists(space, MANIFEST_POOL, [record.digest])
        # A newer hold of the same name has a manifest of its own.
        if there == record.seal_id:
            await store.delete(space, MANIFEST_POOL, [record.digest])
            [there] = await store.exists(space, MANIFEST_POOL, [record.digest])
        gone = there != record.seal_id
        for pool, n in record.pools:
            keys = [record.key(i) for i in range(n)]
            await store.delete(space, pool, keys)
            gone = gone and not any(await store.exists(space, pool, keys))
        await store.delete(space, NOTE_POOL, [record.key(0)])
        return gone

    # -------------------------------------------------------------- time

    def _now_ms(self) -> int:
        return int(self._wall() * 1000)

    async def recover(self) -> None:
        """Read the index that an earlier daemon left. Raises `OSError` where the store cannot be read."""
        if self._store is None or self._recovered:
            return
        async with self._recovering:
            if not self._recovered:
                await self._recover(self._store)
                self._recovered = True

    async def _recover(self, store: Store) -> None:
        numbers = list(self._free)
        found = await store.exists(self._space, ENTRY_POOL, [_entry_key(n) for n in numbers])
        for number in [n for n, there in zip(numbers, found, strict=True) if there is not None]:
            record = await self._read_record(self._space, ENTRY_POOL, _entry_key(number), bytearray(RECORD_BYTES))
            if record is None or number not in self._free:
                continue
            self._free.remove(number)
            known = _Known(number, record, self._monotonic() + record.remaining(self._now_ms()))
            [manifest] = await store.exists(record.space, MANIFEST_POOL, [record.digest])
            # Without its manifest the hold was never sealed: its daemon died on the way.
            known.dead = manifest != record.seal_id
            key = record.digest + (record.seal_id if known.dead else b"")
            self._known[record.namespace, key] = known
            if known.dead:
                known.until = 0.0
        heapq.heapify(self._free)
        if self._known:
            log.info("holds.recovered", durable=len(self._known))

    async def sweep(self) -> int:
        """Delete the holds whose time is over; return how many."""
        now = self._monotonic()
        late = [k for k in self._known.values() if k.until <= now and not k.deleting]
        for known in late:
            if not known.dead:
                self.expired += 1
                log.info("hold.expired", namespace=known.record.namespace[:12], pages=known.record.pages)
            await self._delete(known)
        return len(late)

    async def sweeping(self) -> None:
        """Recover, then sweep, for as long as the daemon lives; to be supervised."""
        while True:
            try:
                await self.recover()
            except OSError as error:
                log.warning("holds.not_recovered", error=str(error))
            await self.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)


def _entry_key(number: int) -> bytes:
    return b"entry" + number.to_bytes(4, "little")
