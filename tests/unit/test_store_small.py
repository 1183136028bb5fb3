"""The store layer's small parts: options, addresses, the store in memory, the one that is none, index and space."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store_support import NAMESPACE, commit, get, page, put

from hoststage.server.store import (
    ReadOutcome,
    Store,
    StoreClosedError,
    StoreConfigError,
    StoreOptions,
    WriteOutcome,
    open_store,
)
from hoststage.server.store.base import NO_COMMIT
from hoststage.server.store.file.fanout import fan_out, uninterrupted
from hoststage.server.store.file.index import Entry, Index
from hoststage.server.store.file.layout import BLOCK, SegmentHeader
from hoststage.server.store.file.pageio import PunchReport, punch_slots
from hoststage.server.store.file.segment import Segment, slots_per_segment
from hoststage.server.store.file.space import Space
from hoststage.server.store.memory import MemoryStore

SLOT = 8192


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit_bytes", 0),
        ("io_threads", 0),
        ("segment_bytes", 0),
        ("min_free_bytes", -1),
        ("quarantine_slots", -1),
        ("high_watermark", 1.5),
        ("high_watermark", 0.0),
        ("low_watermark", 0.99),
        ("low_watermark", 0.0),
    ],
)
async def test_an_option_that_cannot_be_is_named(field: str, value: float) -> None:
    with pytest.raises(StoreConfigError) as caught:
        await open_store("memory:", StoreOptions(**{field: value}))  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == (field, str(value))


async def test_no_store_misses_and_never_says_stored() -> None:
    store = await open_store("none")
    assert isinstance(store, Store)
    results = await store.write_from(NAMESPACE, [page("kv", b"k", b"data", commit(1))])
    assert results[0].outcome is WriteOutcome.FULL
    assert (await get(store, "kv", b"k", 4))[0].outcome is ReadOutcome.MISS
    assert await store.exists(NAMESPACE, "kv", [b"k"]) == [None]
    assert (store.stats().full, store.stats().misses) == (1, 1)
    await store.close()
    with pytest.raises(StoreClosedError):
        await store.exists(NAMESPACE, "kv", [b"k"])


async def test_the_store_in_memory_evicts_by_key_and_does_faults_to_order() -> None:
    store = MemoryStore(limit_bytes=10)
    await put(store, page("swa", b"a", b"1", commit(1)), page("kv", b"a", b"1111", commit(1)))
    await put(store, page("kv", b"b", b"22222", commit(2)))
    await put(store, page("kv", b"c", b"3", commit(3)))
    assert await store.exists(NAMESPACE, "swa", [b"a"]) == [None]
    assert await store.exists(NAMESPACE, "kv", [b"a", b"b", b"c"]) == [None, commit(2), commit(3)]
    store.faults.on_read = lambda read: ReadOutcome.CORRUPT if read.key == b"b" else None
    assert (await get(store, "kv", b"b", 5))[0].outcome is ReadOutcome.CORRUPT
    store.faults.on_read = None
    assert (await get(store, "kv", b"b", 5))[0].outcome is ReadOutcome.MISS
    store.faults.on_write = lambda write: WriteOutcome.FAILED if write.pool == "swa" else None
    results = await store.write_from(
        NAMESPACE,
        [
            page("swa", b"d", b"4", commit(4)),
            page("kv", b"d", b"4", commit(4)),
            page("swa", b"e", b"5", NO_COMMIT),
            page("kv", b"e", b"5", NO_COMMIT),
        ],
    )
    assert [result.outcome.value for result in results] == ["failed", "failed", "failed", "stored"]


def segment(slots: int = 8) -> Segment:
    return Segment(1, Path("nowhere"), -1, SegmentHeader(NAMESPACE, "kv", SLOT, slots))


def entry(slot: int, sequence: int = 1) -> Entry:
    return Entry(SEGMENT, slot, 100, sequence, commit(slot), 0)


SEGMENT = segment()


def indexed(count: int) -> Index:
    index = Index()
    for n in range(count):
        group = index.hold(NAMESPACE, bytes([n]))
        index.put(group, "kv", entry(2 * n))
        index.put(group, "swa", entry(2 * n + 1))
        index.release(group)
    return index


def test_eviction_takes_whole_groups_oldest_first() -> None:
    index = indexed(4)
    index.find(NAMESPACE, "kv", bytes([0]))
    evicted = index.evict(SLOT + 1, 100)
    assert (evicted.bytes, [e.slot for e in evicted.entries]) == (2 * SLOT, [2, 3])
    assert index.find(NAMESPACE, "swa", bytes([1])) is None
    assert index.pages == 6


def test_eviction_passes_over_busy_groups_and_stops_after_so_many() -> None:
    index = indexed(4)
    held = index.hold(NAMESPACE, bytes([0]))
    assert [e.slot for e in index.evict(10 * SLOT, 2).entries] == [2, 3, 4, 5]
    assert [e.slot for e in index.evict(10 * SLOT, 9).entries] == [6, 7]
    assert not index.evict(SLOT, 9).entries
    index.release(held)
    assert [e.slot for e in index.evict(10 * SLOT, 9).entries] == [0, 1]
    assert index.pages == 0
    assert index.keys(NAMESPACE) == []


def test_an_older_page_never_replaces_a_newer_one() -> None:
    index = Index()
    group = index.hold(NAMESPACE, b"k")
    newer, older = entry(0, 2), entry(1, 1)
    assert index.put(group, "kv", newer) is None
    assert index.put(group, "kv", older) is older
    assert index.find(NAMESPACE, "kv", b"k") is newer
    newest = entry(2, 3)
    assert index.put(group, "kv", newest) is newer
    assert index.pages == 1


def test_a_page_is_dropped_only_if_it_is_the_one_that_was_meant() -> None:
    index = indexed(1)
    stored = index.find(NAMESPACE, "kv", bytes([0]))
    assert index.drop(NAMESPACE, "kv", bytes([0]), entry(9)) is None
    assert index.drop(NAMESPACE, "kv", bytes([0]), stored) is stored
    assert index.drop(NAMESPACE, "kv", bytes([0])) is None


def test_a_group_that_was_held_but_got_no_page_leaves_nothing() -> None:
    index = Index()
    index.release(index.hold(NAMESPACE, b"k"))
    assert index.group(NAMESPACE, b"k") is None
    assert index.keys(NAMESPACE) == []


def test_slots_are_handed_out_once_and_again_after_they_were_given_back() -> None:
    s = segment(3)
    assert [s.take() for _ in range(3)] == [0, 1, 2]
    assert not s.has_room
    s.give_back(1)
    assert s.has_room
    assert s.take() == 1
    assert s.live == 3
    s.restore({1})
    assert (s.live, s.fresh, s.take(), s.take(), s.has_room) == (1, 2, 0, 2, False)


def test_a_segment_has_at_least_one_slot() -> None:
    assert slots_per_segment(1 << 20, 4096) == 1
    assert slots_per_segment(8192, 4096 + 3 * 8192 + 1) == 3


def test_the_ceiling_follows_the_limit_or_the_disk() -> None:
    space = Space(StoreOptions(limit_bytes=1000, min_free_bytes=100, high_watermark=0.9, low_watermark=0.5))
    space.used = 400
    space.look(free=5000)
    assert space.ceiling == 1000
    space.look(free=300)
    assert (space.ceiling, space.has_room(200), space.has_room(201), space.lacks(250)) == (600, True, False, 50)
    space.look(free=0)
    assert (space.ceiling, space.above_high, space.above_low) == (300, True, 250)
    space.pending = 250
    assert (space.above_high, space.above_low, space.lacks(100)) == (False, 0, 0)


async def test_fan_out_raises_only_after_every_thread_has_let_go() -> None:
    from concurrent.futures import ThreadPoolExecutor

    done: list[int] = []

    def work(job: int) -> None:
        if job == 3:
            raise RuntimeError("three")
        done.append(job)

    with ThreadPoolExecutor(3) as executor:
        await fan_out(executor, [], work, 3)
        await fan_out(executor, range(100, 120), work, 3)
        assert sorted(done) == list(range(100, 120))
        with pytest.raises(RuntimeError, match="three"):
            await fan_out(executor, range(20), work, 3)


async def test_a_cancelled_waiter_waits_for_the_end_and_then_passes_it_on() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        await asyncio.sleep(0.05)
        ended = True

    waiter = asyncio.create_task(uninterrupted(asyncio.create_task(work())))
    await asyncio.sleep(0.01)
    waiter.cancel()
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended


def test_slots_are_punched_in_the_order_in_which_they_were_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    from hoststage.server.store.file import pageio

    calls: list[tuple[int, int]] = []

    def punch(fd: int, offset: int, length: int) -> int:
        calls.append((offset, length))
        return 0

    monkeypatch.setattr(pageio, "punch", punch)
    segment = cast(
        Any, SimpleNamespace(fd=0, number=1, offset=lambda slot: slot * 10, header=SimpleNamespace(slot_bytes=10))
    )
    # Slot 7 held the older version of the page that slot 3 held: it was freed first and must be gone first.
    report = pageio.punch_slots([(segment, 7), (segment, 3), (segment, 4), (segment, 2)])
    assert calls == [(70, 10), (30, 20), (20, 10)]
    assert report.gone == [(segment, 7), (segment, 3), (segment, 4), (segment, 2)]


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_blocks_are_allocated_ahead_before_they_are_needed_and_never_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "000001.seg"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    s = Segment(1, path, fd, SegmentHeader(NAMESPACE, "kv", SLOT, 16))
    os.ftruncate(fd, s.header.file_bytes)
    s.ahead_bytes = 4 * SLOT
    assert s.runs_low
    s.prepare_ahead()
    ahead = allocated_bytes(path)
    assert 4 * SLOT <= ahead < 6 * SLOT
    s.prepare_ahead()
    assert allocated_bytes(path) == ahead
    s.take()
    s.take()
    assert not s.runs_low
    s.take()
    assert s.runs_low
    for _ in range(13):
        s.prepare_ahead()
        if s.has_room:
            s.take()
    s.prepare_ahead()
    assert not s.runs_low
    assert allocated_bytes(path) <= s.header.file_bytes
    s.close()
    s.prepare_ahead()  # late, and so without a file


class Erasing:
    """Calls of the file system, in order, by slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, zeroes: bool = True) -> None:
        from hoststage.server.store.file import pageio

        self.calls: list[tuple[str, int, int]] = []
        self.segment = segment()
        monkeypatch.setattr(pageio, "punch", self._call("punch", 0))
        monkeypatch.setattr(pageio, "zero", self._call("zero", 0 if zeroes else errno.EOPNOTSUPP))

    def _call(self, name: str, code: int) -> Callable[[int, int, int], int]:
        def call(fd: int, offset: int, length: int) -> int:
            self.calls.append((name, (offset - BLOCK) // SLOT, length // SLOT))
            return code

        return call

    def erase(self, slots: list[int], keep: int) -> PunchReport:
        return punch_slots([(self.segment, slot) for slot in slots], keep)


def test_the_first_slots_keep_their_blocks_and_the_order_stays_that_of_freeing(monkeypatch: pytest.MonkeyPatch) -> None:
    erasing = Erasing(monkeypatch)
    report = erasing.erase([7, 3, 4, 5, 2], keep=3)
    assert erasing.calls == [("zero", 7, 1), ("zero", 3, 2), ("punch", 5, 1), ("punch", 2, 1)]
    assert [slot for _, slot in report.gone] == [7, 3, 4, 5, 2]
    assert {slot for _, slot in report.kept} == {7, 3, 4}


def test_where_ranges_cannot_be_zeroed_all_slots_are_punched(monkeypatch: pytest.MonkeyPatch) -> None:
    erasing = Erasing(monkeypatch, zeroes=False)
    report = erasing.erase([7, 3, 4], keep=3)
    assert erasing.calls == [("zero", 7, 1), ("punch", 7, 1), ("punch", 3, 2)]
    assert [slot for _, slot in report.gone] == [7, 3, 4]
    assert not report.kept
    assert report.punchable


def test_blocks_are_kept_only_where_the_medium_has_plenty() -> None:
    options = StoreOptions(limit_bytes=1600, min_free_bytes=100)
    space = Space(options, used=1500)
    space.look(free=500)
    assert space.may_keep == 100
    space.look(free=399)
    assert space.may_keep == 0


def test_a_slot_that_is_handed_out_has_kept_nothing_any_more() -> None:
    s = segment(3)
    for _ in range(3):
        s.take()
    s.give_back(1, kept=True)
    s.give_back(2)
    assert s.kept == {1}
    assert s.take() == 1
    assert not s.kept
