"""Bytes that rot on disk are a miss, once said aloud, and are never delivered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoststage.server.store import DirectIo, ReadOutcome
from tests.store_support import KIB, NAMESPACE, commit, content, get, opened, page, put, segments

SIZE = 100 * KIB


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def swap_slots(path: Path, size: int) -> None:
    """Exchange the first two slots of a segment, as a disk might that writes to the wrong place."""
    with path.open("r+b") as file:
        file.seek(4096)
        first, second = file.read(size), file.read(size)
        file.seek(4096)
        file.write(second + first)


@pytest.mark.parametrize("offset", [4096, 4096 + SIZE // 2, 4096 + SIZE - 1], ids=["first", "middle", "last"])
async def test_a_flipped_bit_in_a_page_is_corrupt_then_a_miss(tmp_path: Path, offset: int) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        await put(store, page("kv", b"good", content(2, SIZE), commit(2)))
        flip(segments(tmp_path)[0], offset)
        result, _ = await get(store, "kv", b"k", SIZE)
        assert result.outcome is ReadOutcome.CORRUPT
        assert "checksum" in result.detail
        assert (await get(store, "kv", b"k", SIZE))[0].outcome is ReadOutcome.MISS
        assert await store.exists(NAMESPACE, "kv", [b"k"]) == [None]
        assert (await get(store, "kv", b"good", SIZE))[1] == content(2, SIZE)
        stats = store.stats()
        assert (stats.corrupt, stats.misses, stats.hits, stats.set_aside, stats.pages) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("offset", [0, 8, 24, 40, 56, 120])
async def test_a_flipped_bit_in_a_trailer_is_corrupt(tmp_path: Path, offset: int) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        flip(segments(tmp_path)[0], 4096 + SIZE + offset)
        assert (await get(store, "kv", b"k", SIZE))[0].outcome is ReadOutcome.CORRUPT
        assert (await get(store, "kv", b"k", SIZE))[0].outcome is ReadOutcome.MISS


async def test_a_page_in_the_wrong_place_is_corrupt(tmp_path: Path) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF) as store:
        await put(store, page("kv", b"a", content(1, SIZE), commit(1)))
        await put(store, page("kv", b"b", content(2, SIZE), commit(2)))
        swap_slots(segments(tmp_path)[0], SIZE + 4096)
        for key in (b"a", b"b"):
            result, _ = await get(store, "kv", key, SIZE)
            assert result.outcome is ReadOutcome.CORRUPT
            assert "another key" in result.detail


async def test_a_bad_page_leaves_a_note_and_its_slot_is_not_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF, quarantine_slots=2) as store:
        for n in range(3):
            await put(store, page("kv", bytes([n]), content(n, SIZE), commit(n)))
            flip(segments(tmp_path)[0], 4096 + n * (SIZE + 4096))
        for n in range(3):
            assert (await get(store, "kv", bytes([n]), SIZE))[0].outcome is ReadOutcome.CORRUPT
        notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("v1/quarantine/*.json"))]  # noqa: ASYNC240
        assert [(note["key"], note["pool"]) for note in notes] == [("00", "kv"), ("01", "kv"), ("02", "kv")]
        assert all("checksum" in note["problem"] and note["trailer"] for note in notes)
        await store.delete(NAMESPACE, "kv", [b"absent"])  # returns when all that waits has been freed
        assert store.stats().set_aside == 2, "the oldest has made room"
        assert store.stats().bytes == 2 * (SIZE + 4096)
    async with opened(tmp_path) as store:
        assert store.stats().pages == 0
        assert store.stats().set_aside == 0


async def test_a_bad_page_does_not_come_back_after_a_crash(tmp_path: Path) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        flip(segments(tmp_path)[0], 4096)
        await get(store, "kv", b"k", SIZE)
    (tmp_path / "v1" / "INDEX").unlink()
    async with opened(tmp_path) as store:
        assert await store.exists(NAMESPACE, "kv", [b"k"]) == [None]


async def test_a_good_page_written_over_a_bad_one_is_served(tmp_path: Path) -> None:
    async with opened(tmp_path, direct_io=DirectIo.OFF) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        flip(segments(tmp_path)[0], 4096)
        await get(store, "kv", b"k", SIZE)
        await put(store, page("kv", b"k", content(2, SIZE), commit(2)))
        assert (await get(store, "kv", b"k", SIZE))[1] == content(2, SIZE)
