"""Bounded room: eviction by key between two watermarks, the free-space floor, and I/O that goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from hoststage.server.store import ReadOutcome, StoreStats, WriteOutcome
from hoststage.server.store.file import FileStore, reclaim
from tests.store_support import (
    KIB,
    MIB,
    NAMESPACE,
    OTHER,
    blocks,
    commit,
    content,
    ext4,
    get,
    mounted,
    opened,
    outcomes,
    page,
    put,
    target,
)

SIZE = 60 * KIB
SLOT = 64 * KIB


def key(n: int) -> bytes:
    return n.to_bytes(4, "big")


async def settled(store: FileStore) -> StoreStats:
    """Wait until the background has nothing left to free."""
    deadline = time.monotonic() + 20
    stats = store.stats()
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        before, stats = stats, store.stats()
        if before.bytes == stats.bytes and stats.bytes <= 0.9 * stats.limit_bytes:
            break
    return stats


async def test_eviction_keeps_between_the_watermarks_and_takes_the_oldest(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=100 * SLOT, high_watermark=0.9, low_watermark=0.5) as store:
        for n in range(90):
            await put(store, page("kv", key(n), content(n, SIZE), commit(n)))
        assert store.stats().evicted_pages == 0
        await put(store, page("kv", key(90), content(90, SIZE), commit(90)))
        stats = await settled(store)
        assert stats.pages == 50
        assert stats.bytes == 50 * SLOT
        assert stats.evicted_pages == 41
        assert await outcomes(store, "kv", [key(n) for n in range(41)], SIZE) == [ReadOutcome.MISS] * 41
        assert await outcomes(store, "kv", [key(n) for n in range(41, 91)], SIZE) == [ReadOutcome.HIT] * 50
        assert blocks(tmp_path) < 100 * SLOT


async def test_a_page_in_use_outlives_one_that_is_not(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=20 * SLOT, high_watermark=0.9, low_watermark=0.5) as store:
        for n in range(60):
            await put(store, page("kv", key(n), content(n, SIZE), commit(n)))
            assert (await get(store, "kv", key(0), SIZE))[0].outcome is ReadOutcome.HIT
        assert store.stats().evicted_pages > 0


async def test_all_pools_of_a_key_go_together(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=40 * SLOT, high_watermark=0.9, low_watermark=0.5) as store:
        for n in range(60):
            await put(
                store,
                page("indexer", key(n), content(("i", n), 4 * KIB), commit(n)),
                page("kv", key(n), content(n, SIZE), commit(n)),
            )
        await settled(store)
        keys = [key(n) for n in range(60)]
        sidecars = await store.exists(NAMESPACE, "indexer", keys)
        assert sidecars == await store.exists(NAMESPACE, "kv", keys)
        assert 0 < sum(found is not None for found in sidecars) < 60


async def test_a_batch_larger_than_what_is_free_makes_its_room_on_demand(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=32 * SLOT, high_watermark=1.0, low_watermark=0.9) as store:
        await put(store, *(page("kv", key(n), content(n, SIZE), commit(n)) for n in range(30)))
        await put(store, *(page("kv", key(n), content(n, SIZE), commit(n)) for n in range(100, 128)))
        assert await outcomes(store, "kv", [key(n) for n in range(100, 128)], SIZE) == [ReadOutcome.HIT] * 28
        assert store.stats().bytes <= 32 * SLOT


async def test_a_batch_larger_than_the_store_is_stored_as_far_as_it_goes(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=8 * SLOT) as store:
        writes = [page("kv", key(n), content(n, SIZE), commit(n)) for n in range(12)]
        results = await store.write_from(NAMESPACE, writes)
        assert [result.outcome for result in results] == [WriteOutcome.STORED] * 8 + [WriteOutcome.FULL] * 4


async def test_readers_and_writers_at_once_never_see_anothers_bytes(tmp_path: Path) -> None:
    hits = 0

    async def write(store: FileStore, lane: int) -> None:
        for turn in range(40):
            n = (turn * 7 + lane * 13) % 40
            await store.write_from(
                NAMESPACE, [page("kv", key(n), content((n, lane, turn), SIZE), commit((n, lane, turn)))]
            )

    async def read(store: FileStore, lane: int) -> None:
        nonlocal hits
        for turn in range(120):
            wanted = [target("kv", key((turn * 3 + lane + i) % 40), SIZE) for i in range(4)]
            for read, result in zip(wanted, await store.read_into(NAMESPACE, wanted), strict=True):
                assert result.outcome in (ReadOutcome.HIT, ReadOutcome.MISS), result
                if result.outcome is ReadOutcome.HIT:
                    hits += 1
                    n = int.from_bytes(read.key, "big")
                    known = {commit((n, w, t)): (n, w, t) for w in range(3) for t in range(40)}
                    assert bytes(read.into) == content(known[result.commit_id], SIZE)

    async with opened(tmp_path, limit_bytes=16 * SLOT, high_watermark=0.8, low_watermark=0.4, io_threads=4) as store:
        await asyncio.gather(*(write(store, n) for n in range(3)), *(read(store, n) for n in range(3)))
        assert hits > 0
        assert store.stats().evicted_pages > 0
        assert store.stats().bytes <= 16 * SLOT


async def test_the_files_of_a_namespace_that_was_evicted_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "_LOOK_SECONDS", 0.05)
    async with opened(tmp_path, limit_bytes=10 * SLOT) as store:
        await put(store, page("kv", key(0), content(0, SIZE), commit(0)))
        for n in range(20):
            await put(store, page("kv", key(n), content(n, SIZE), commit(n)), namespace=OTHER)
        deadline = time.monotonic() + 20
        while (tmp_path / "v1" / NAMESPACE).exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await put(store, page("kv", key(0), content(1, SIZE), commit(1)))
        assert (await get(store, "kv", key(0), SIZE))[1] == content(1, SIZE)


async def test_the_free_space_floor_shrinks_the_store(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as disk:
        async with opened(disk, limit_bytes=64 * MIB, min_free_bytes=8 * MIB) as store:
            assert any("larger than the disk" in notice for notice in store.stats().notices)
            for n in range(20):
                await put(store, page("kv", key(n), content(n, MIB), commit(n)))
            stats = store.stats()
            assert stats.evicted_pages >= 10
            assert stats.bytes <= 8 * MIB
            assert (await get(store, "kv", key(19), MIB))[1] == content(19, MIB)


async def test_a_full_disk_costs_a_counted_drop_and_no_more(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 32 * MIB) as disk:
        async with opened(disk, limit_bytes=64 * MIB) as store:
            await put(store, page("kv", key(0), content(0, MIB), commit(0)))
            fill(disk / "someone-elses")
            await asyncio.sleep(1.1)  # the store looks at the disk once a second at most
            for n in range(1, 4):
                await store.write_from(NAMESPACE, [page("kv", key(n), content(n, 24 * MIB), commit(n))])
            stats = store.stats()
            assert stats.full == 3
            (disk / "someone-elses").unlink()
            await asyncio.sleep(1.1)
            await put(store, page("kv", key(9), content(9, 2 * MIB), commit(9)))
            assert (await get(store, "kv", key(9), 2 * MIB))[1] == content(9, 2 * MIB)


async def test_a_disk_that_fills_between_two_looks_is_an_outcome(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as disk:
        async with opened(disk, limit_bytes=12 * MIB) as store:
            await put(store, page("kv", key(0), content(0, MIB), commit(0)))
            fill(disk / "someone-elses")
            results = await store.write_from(NAMESPACE, [page("kv", key(1), content(1, 4 * MIB), commit(1))])
            assert results[0].outcome is WriteOutcome.FULL, results
            assert (await get(store, "kv", key(0), MIB))[1] == content(0, MIB)
            assert store.stats().full == 1


def fill(path: Path) -> None:
    """Take all the room that is left on a disk."""
    chunk = bytes(64 * KIB)
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                if file.write(chunk) < len(chunk):
                    return
            except OSError:
                return


async def test_at_the_limit_new_pages_find_blocks_and_evicted_ones_stay_away(tmp_path: Path) -> None:
    limit = 320 * SLOT
    async with opened(tmp_path, limit_bytes=limit) as store:
        kept = 0
        for n in range(0, 960, 8):
            await put(store, *(page("kv", key(i), content(i, SIZE), commit(i)) for i in range(n, n + 8)))
            kept = max(kept, store._table.kept_bytes)
            assert store._table.kept_bytes <= limit // 16
        stats = await settled(store)
        assert stats.evicted_pages >= 640
        assert kept > 0
        assert blocks(tmp_path) <= limit + limit // 16 + limit // 32
        gone = [key(n) for n in range(600)]
        assert set(await outcomes(store, "kv", gone, SIZE)) == {ReadOutcome.MISS}
        for n in (959, 800, 700):
            assert (await get(store, "kv", key(n), SIZE))[1] == content(n, SIZE)
    (tmp_path / "v1" / "INDEX").unlink()
    async with opened(tmp_path, limit_bytes=limit) as store:  # by trailers alone, as after a crash
        assert set(await outcomes(store, "kv", gone, SIZE)) == {ReadOutcome.MISS}
        assert (await get(store, "kv", key(959), SIZE))[1] == content(959, SIZE)
        assert await store.delete(NAMESPACE, "kv", [key(n) for n in range(960)]) >= 280
    assert blocks(tmp_path) < limit // 8
