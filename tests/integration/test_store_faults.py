"""A medium that answers with errors after the start: outcomes and counters, never an exception, never a leak."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hoststage.server.store import DirectIo, ReadOutcome, SyncPolicy, WriteOutcome
from hoststage.server.store.file import pageio
from tests.store_support import KIB, NAMESPACE, blocks, commit, content, get, opened, page, put

SIZE = 60 * KIB


def failing(code: int) -> Any:
    """Return a system call that fails with ``code``."""

    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.EIO, WriteOutcome.FAILED),
        (errno.EROFS, WriteOutcome.FAILED),
        (errno.ENOSPC, WriteOutcome.FULL),
        (errno.EDQUOT, WriteOutcome.FULL),
    ],
)
async def test_a_write_that_fails_is_counted_and_keeps_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, outcome: WriteOutcome
) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        before = store.stats().bytes
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing(code))
            results = await store.write_from(NAMESPACE, [page("kv", b"k", content(2, SIZE), commit(2))])
        assert results[0].outcome is outcome
        assert os.strerror(code) in results[0].detail
        assert (await get(store, "kv", b"k", SIZE))[1] == content(1, SIZE)
        await store.delete(NAMESPACE, "kv", [])
        stats = store.stats()
        assert (stats.bytes, stats.failed + stats.full) == (before, 1)
        await put(store, page("kv", b"k", content(3, SIZE), commit(3)))


async def test_a_short_write_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(fd, buffers[:1], offset)

    async with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", short)
            results = await store.write_from(NAMESPACE, [page("kv", b"k", content(1, SIZE), commit(1))])
        assert results[0].outcome is WriteOutcome.FULL
        assert await store.exists(NAMESPACE, "kv", [b"k"]) == [None]


async def test_a_page_that_cannot_be_read_fails_once_and_is_then_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing(errno.EIO))
            assert (await get(store, "kv", b"k", SIZE))[0].outcome is ReadOutcome.FAILED
        assert (await get(store, "kv", b"k", SIZE))[0].outcome is ReadOutcome.MISS
        assert (store.stats().read_failed, store.stats().set_aside) == (1, 1)


async def test_a_page_that_cannot_be_synced_is_not_called_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, sync=SyncPolicy.DATA) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing(errno.EIO))
            results = await store.write_from(NAMESPACE, [page("kv", b"k", content(2, SIZE), commit(2))])
        assert results[0].outcome is WriteOutcome.FAILED
        assert (await get(store, "kv", b"k", SIZE))[1] == content(1, SIZE)


async def test_without_hole_punching_a_deleted_page_is_still_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pageio, "punch", lambda *_: errno.EOPNOTSUPP)
    async with opened(tmp_path) as store:
        await put(store, *(page("kv", bytes([n]), content(n, SIZE), commit(n)) for n in range(4)))
        assert await store.delete(NAMESPACE, "kv", [bytes([0]), bytes([2])]) == 2
        assert any("punch" in notice for notice in store.stats().notices)
        assert store.stats().bytes == 2 * (SIZE + 4 * KIB)
    (tmp_path / "v1" / "INDEX").unlink()
    async with opened(tmp_path) as store:
        assert await store.exists(NAMESPACE, "kv", [bytes([n]) for n in range(4)]) == [
            None,
            commit(1),
            None,
            commit(3),
        ]


async def test_a_slot_that_cannot_be_erased_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        with monkeypatch.context() as patch:
            patch.setattr(pageio, "punch", lambda *_: errno.EIO)
            patch.setattr(os, "pwrite", failing(errno.EIO))
            assert await store.delete(NAMESPACE, "kv", [b"k"]) == 1
        assert store.stats().set_aside == 1
        for n in range(3):
            await put(store, page("kv", bytes([n]), content(n, SIZE), commit(n)))
        assert store.stats().bytes == 4 * (SIZE + 4 * KIB)
    assert not (tmp_path / "v1" / "INDEX").exists(), "the next start must look at the disk itself"


def test_a_limit_on_file_size_is_an_outcome(tmp_path: Path) -> None:
    script = (
        "import asyncio, resource, sys; from pathlib import Path\n"
        "from tests.store_support import *\n"
        "async def main():\n"
        "    async with opened(Path(sys.argv[1]), segment_bytes=1 << 20) as store:\n"
        "        await put(store, page('kv', b'a', content(1, 300_000), commit(1)))\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (122 * 4096, 122 * 4096))\n"
        "        writes = [page('kv', b'b', content(2, 300_000), commit(2)),\n"
        "                  page('new', b'b', content(2, 3000), commit(3))]\n"
        "        for result in await store.write_from(NAMESPACE, writes):\n"
        "            print(result.outcome.value)\n"
        "        print((await get(store, 'kv', b'a', 300_000))[1] == content(1, 300_000))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith("20")]
    assert said == ["full", "full", "True"], done
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 122 * 4096


async def test_what_was_allocated_ahead_is_given_back_on_close(tmp_path: Path) -> None:
    async with opened(tmp_path, direct_io=DirectIo.AUTO) as store:
        await put(store, page("kv", b"k", content(1, SIZE), commit(1)))
        assert blocks(tmp_path) > 2 * (SIZE + 4 * KIB)
    assert blocks(tmp_path) < 2 * (SIZE + 4 * KIB)
