"""A daemon killed at any moment: what was acknowledged is there, whole, and nothing else is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hoststage.server.store import ReadOutcome
from hoststage.server.store.file import FileStore
from tests.integration.store_crash_writer import KEYS, SIZES
from tests.store_support import NAMESPACE, commit, content, get, mounted, opened, page, put, segments

WRITER = Path(__file__).with_name("store_crash_writer.py")
Possible = dict[int, set[int | None]]


def run_and_kill(root: Path, direct: str, seed: int, seconds: float) -> list[str]:
    """Start a writer, kill it with SIGKILL after a while, and return what it had said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(WRITER), str(root), direct, str(seed)]
    log = root.parent / f"said-{seed}"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=environment) as writer,
    ):
        deadline = time.monotonic() + 60
        while b"stored" not in log.read_bytes():
            assert time.monotonic() < deadline
            assert writer.poll() is None, writer.stderr.read() if writer.stderr else ""
            time.sleep(0.01)
        time.sleep(seconds)
        assert writer.poll() is None, writer.stderr.read() if writer.stderr else ""
        writer.kill()
    return log.read_text().splitlines()


def replay(said: list[str], before: dict[int, int | None]) -> Possible:
    """Return the versions (``None``: no page) that each key may have after these lines."""
    possible: Possible = {n: {version} for n, version in before.items()}
    for line in said:
        word, *rest = line.split()
        if word == "open":
            continue
        n = int(rest[0])
        match word:
            case "begin":
                possible[n].add(int(rest[1]))
            case "stored":
                possible[n] = {int(rest[1])}
            case "delete":
                possible[n].add(None)
            case "deleted":
                possible[n] = {None}
    return possible


async def version_of(store: FileStore, n: int, pool: str, possible: set[int | None]) -> int | None:
    """Return which version of a page is stored, having checked every byte of it."""
    key = n.to_bytes(2, "big")
    (known,) = await store.exists(NAMESPACE, pool, [key])
    result, found = await get(store, pool, key, SIZES[pool])
    if known is None:
        assert result.outcome is ReadOutcome.MISS
        return None
    assert result.outcome is ReadOutcome.HIT, f"a page that exists must be whole: {result}"
    (version,) = [v for v in possible if v is not None and commit((n, v)) == known]
    assert result.commit_id == known
    assert found == content((pool, n, version), SIZES[pool])
    return version


async def crash_rounds(root: Path, direct: str, rounds: int, pause: float) -> None:
    rng = random.Random(rounds)
    state: dict[str, dict[int, int | None]] = {pool: dict.fromkeys(range(KEYS)) for pool in SIZES}
    for seed in range(1, rounds + 1):
        said = run_and_kill(root, direct, seed, rng.uniform(0.0, pause))
        async with opened(root) as store:
            assert store.stats().corrupt == 0
            for pool in SIZES:
                possible = replay(said, state[pool])
                for n in range(KEYS):
                    version = await version_of(store, n, pool, possible[n])
                    assert version in possible[n], (pool, n, version, possible[n])
                    state[pool][n] = version
            assert any(version is not None for version in state["kv"].values())
        if seed % 2:  # let every other start do without the snapshot
            (root / "v1" / "INDEX").unlink()


@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_after_sigkill_every_page_is_whole_and_every_acknowledged_one_is_there(
    tmp_path: Path, direct: str
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    await crash_rounds(root, direct, 5, 0.5)


async def test_the_same_holds_where_pages_live_in_the_page_cache_alone(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=96m", "tmpfs") as disk:
        await crash_rounds(disk, "off", 3, 0.3)


async def test_a_page_without_its_trailer_is_discarded_and_its_room_given_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(4):
            await put(store, page("kv", bytes([n]), content(n, 1 << 20), commit(n)))
    (tmp_path / "v1" / "INDEX").unlink()
    path = segments(tmp_path)[0]
    with path.open("r+b") as file:
        file.seek(4096 + 2 * ((1 << 20) + 4096) - 4096)
        file.write(bytes(4096))  # the second page's trailer never arrived
    before = path.stat().st_blocks
    async with opened(tmp_path) as store:
        assert store.stats().recovered_pages == 3
        assert path.stat().st_blocks * 512 <= before * 512 - (1 << 20)
        for n in (0, 2, 3):
            assert (await get(store, "kv", bytes([n]), 1 << 20))[1] == content(n, 1 << 20)
        await put(store, page("kv", b"new", content("new", 1 << 20), commit("new")))
        assert len(segments(tmp_path)) == 1


async def test_of_two_versions_the_newer_survives(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, 8192), commit(1)))
        with segments(tmp_path)[0].open("rb") as file:
            file.seek(4096)
            older = file.read(8192 + 4096)
        await put(store, page("kv", b"k", content(2, 8192), commit(2)))
        await store.delete(NAMESPACE, "kv", [b"absent"])
    (tmp_path / "v1" / "INDEX").unlink()
    with segments(tmp_path)[0].open("r+b") as file:  # as if the crash had come before the older one was punched
        file.seek(4096)
        assert file.read(4096) == bytes(4096)
        file.seek(4096)
        file.write(older)
    async with opened(tmp_path) as store:
        assert store.stats().pages == 1
        assert (await get(store, "kv", b"k", 8192))[1] == content(2, 8192)
