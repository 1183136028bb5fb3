"""The file store on a real directory: what is written is what is read, or it is a miss."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hoststage.server.store import (
    DirectIo,
    PageRead,
    ReadOutcome,
    Store,
    StoreClosedError,
    SyncPolicy,
    WriteOutcome,
)
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
    names,
    opened,
    outcomes,
    page,
    put,
    segments,
    target,
)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("direct", [DirectIo.AUTO, DirectIo.OFF])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000, MIB])
async def test_a_page_comes_back_as_it_was(tmp_path: Path, size: int, direct: DirectIo, aligned: bool) -> None:
    data = content("page", size)
    async with opened(tmp_path, direct_io=direct) as store:
        assert isinstance(store, Store)
        await put(store, page("kv", b"key", data, commit(1), aligned=aligned))
        result, found = await get(store, "kv", b"key", size, aligned=aligned)
        assert (result.outcome, result.commit_id, found) == (ReadOutcome.HIT, commit(1), data)
        assert await store.exists(NAMESPACE, "kv", [b"key", b"other"]) == [commit(1), None]


async def test_pools_and_namespaces_do_not_meet(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(
            store,
            page("swa", b"k", content("swa", 5 * KIB), commit(1)),
            page("kv", b"k", content("kv", 33 * KIB), commit(1)),
        )
        await put(store, page("kv", b"k", content("other", 33 * KIB), commit(2)), namespace=OTHER)
        assert (await get(store, "swa", b"k", 5 * KIB))[1] == content("swa", 5 * KIB)
        assert (await get(store, "kv", b"k", 33 * KIB))[1] == content("kv", 33 * KIB)
        assert (await get(store, "kv", b"k", 33 * KIB, namespace=OTHER))[1] == content("other", 33 * KIB)
        assert (await store.exists(OTHER, "swa", [b"k"])) == [None]


async def test_a_replaced_page_gives_its_room_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for version in range(20):
            await put(store, page("kv", b"k", content(version, MIB), commit(version)))
            result, found = await get(store, "kv", b"k", MIB)
            assert (result.commit_id, found) == (commit(version), content(version, MIB))
        await store.delete(NAMESPACE, "kv", [b"nothing"])
        assert store.stats().pages == 1
        assert store.stats().bytes == MIB + 4096
    assert blocks(tmp_path) <= 2 * MIB


async def test_a_read_of_another_size_is_a_miss_and_harms_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, 8192), commit(1)))
        result, _ = await get(store, "kv", b"k", 4096)
        assert result.outcome is ReadOutcome.MISS
        assert "8192" in result.detail
        assert (await get(store, "kv", b"k", 8192))[1] == content(1, 8192)


async def test_a_commit_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    async with opened(tmp_path, limit_bytes=4 * MIB) as store:
        await put(store, page("kv", b"k", content("old", 64 * KIB), commit("old")))
        results = await store.write_from(
            NAMESPACE,
            [
                page("kv", b"alone", content("alone", 64 * KIB), commit("other")),
                page("swa", b"k", content("swa", 64 * KIB), commit("new")),
                page("kv", b"k", content("new", 64 * KIB), commit("new")),
                page("kv", b"huge", content("huge", 5 * MIB), commit("new")),
            ],
        )
        assert [result.outcome for result in results] == [
            WriteOutcome.STORED,
            WriteOutcome.FULL,
            WriteOutcome.FULL,
            WriteOutcome.FULL,
        ]
        assert "another page of the commit" in results[1].detail
        assert "limit" in results[3].detail
        assert await store.exists(NAMESPACE, "kv", [b"alone", b"huge"]) == [commit("other"), None]
        assert await store.exists(NAMESPACE, "swa", [b"k"]) == [None]
        assert store.stats().full == 3


async def test_the_last_of_two_pages_of_one_key_in_one_call_wins(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(
            store,
            page("kv", b"k", content(1, 8192), commit(1)),
            page("kv", b"k", content(2, 8192), commit(2)),
        )
        assert (await get(store, "kv", b"k", 8192))[1] == content(2, 8192)
        assert store.stats().pages == 1


async def test_writers_of_one_key_at_once_leave_one_whole_page(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await asyncio.gather(
            *(put(store, page("kv", b"k", content(n, 256 * KIB), commit(n))) for n in range(12)),
        )
        result, found = await get(store, "kv", b"k", 256 * KIB)
        assert any((result.commit_id, found) == (commit(n), content(n, 256 * KIB)) for n in range(12))
        assert store.stats().pages == 1


async def test_deleted_pages_are_gone_and_their_room_is_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, *(page("kv", bytes([n]), content(n, MIB), commit(n)) for n in range(8)))
        keys = [bytes([n]) for n in range(6)]
        assert await store.delete(NAMESPACE, "kv", [*keys, b"absent"]) == 6
        assert store.stats().bytes == 2 * (MIB + 4096)
        assert await outcomes(store, "kv", keys, MIB) == [ReadOutcome.MISS] * 6
        assert await outcomes(store, "kv", [bytes([6]), bytes([7])], MIB) == [ReadOutcome.HIT] * 2
    assert blocks(tmp_path) < 3 * MIB


async def test_clearing_a_namespace_removes_its_files_and_no_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for namespace in (NAMESPACE, OTHER):
            await put(
                store,
                page("kv", b"a", content(1, 8192), commit(1)),
                page("swa", b"a", content(2, 4096), commit(1)),
                namespace=namespace,
            )
        assert await store.clear(NAMESPACE) == 2
        assert {path.parent.parent.name for path in segments(tmp_path)} == {OTHER}
        assert not (tmp_path / "v1" / NAMESPACE).exists()
        assert await store.exists(OTHER, "kv", [b"a"]) == [commit(1)]
        await put(store, page("kv", b"a", content(3, 8192), commit(3)))
        assert (await get(store, "kv", b"a", 8192))[1] == content(3, 8192)


async def test_a_cancelled_write_lets_go_of_its_buffer_before_it_raises(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        writes = [page("kv", bytes([n]), content(n, MIB), commit("one")) for n in range(16)]
        task = asyncio.create_task(store.write_from(NAMESPACE, writes))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for write in writes:
            write.data[:] = bytes(MIB)  # nobody reads it any more
        for n in range(16):
            result, found = await get(store, "kv", bytes([n]), MIB)
            assert result.outcome is ReadOutcome.HIT
            assert found == content(n, MIB)


async def test_the_event_loop_turns_while_pages_are_written_and_read(tmp_path: Path) -> None:
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            longest = max(longest, loop.time() - before)

    async with opened(tmp_path) as store:
        writes = [page("kv", bytes([n]), content(n, 4 * MIB), commit(n)) for n in range(16)]
        ticker = asyncio.create_task(tick())
        for _ in range(3):
            await put(store, *writes)
            await outcomes(store, "kv", [write.key for write in writes], 4 * MIB)
        ticker.cancel()
    assert longest < 2.0


async def test_a_closed_store_refuses_calls_and_closes_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, 4096), commit(1)))
    await store.close()
    with pytest.raises(StoreClosedError):
        await store.exists(NAMESPACE, "kv", [b"k"])
    with pytest.raises(StoreClosedError):
        await store.write_from(NAMESPACE, [])


async def test_close_waits_for_calls_under_way(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        writes = [page("kv", bytes([n]), content(n, MIB), commit(n)) for n in range(16)]
        task = asyncio.create_task(store.write_from(NAMESPACE, writes))
        await asyncio.sleep(0)
    assert {result.outcome for result in await task} == {WriteOutcome.STORED}
    async with opened(tmp_path) as store:
        assert store.stats().pages == 16


@pytest.mark.parametrize(
    ("namespace", "pool", "key"),
    [
        ("../" * 21 + "a", "kv", b"k"),
        (NAMESPACE.upper(), "kv", b"k"),
        (NAMESPACE, "../kv", b"k"),
        (NAMESPACE, "", b"k"),
        (NAMESPACE, "kv", b""),
        (NAMESPACE, "kv", bytes(65)),
    ],
)
async def test_names_that_could_not_be_are_refused(tmp_path: Path, namespace: str, pool: str, key: bytes) -> None:
    async with opened(tmp_path) as store:
        with pytest.raises(ValueError):
            await store.write_from(namespace, [page(pool, key, b"data", commit(1))])
        with pytest.raises(ValueError):
            await store.read_into(namespace, [target(pool, key, 4)])
        with pytest.raises(ValueError):
            read_only = PageRead("kv", b"k", memoryview(b"data"), 0, 4)
            await store.read_into(NAMESPACE, [read_only])


async def test_keys_never_show_in_paths(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        keys = [b"../../etc/passwd", b"\0\xff/", b"a" * 64]
        await put(store, *(page("kv", key, content(key, 4096), commit(1)) for key in keys))
        for key in keys:
            assert (await get(store, "kv", key, 4096))[1] == content(key, 4096)
    assert names(tmp_path) == {"FORMAT", "LOCK", "v1", "INDEX", NAMESPACE, "kv", "000001.seg"}


async def test_direct_io_is_used_on_ext4(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 64 * MIB) as disk:
        async with opened(disk, direct_io=DirectIo.REQUIRED, sync=SyncPolicy.DATA) as store:
            assert store.stats().direct_io
            await put(store, page("kv", b"k", content(1, MIB), commit(1)))
            assert (await get(store, "kv", b"k", MIB))[1] == content(1, MIB)
