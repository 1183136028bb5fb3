"""Opening a store: clear errors for people, one holder, and what a clean close leaves for the next start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hoststage.server.store import DirectIo, ReadOutcome, StoreConfigError, open_store
from hoststage.server.store.file import FileStore
from hoststage.server.store.file.directory import StoreDirectory
from hoststage.server.store.file.recovery import recover
from tests.store_support import (
    KIB,
    MIB,
    NAMESPACE,
    commit,
    content,
    get,
    mounted,
    opened,
    options,
    page,
    put,
    segments,
)


async def refused(root: Path, **changes: object) -> StoreConfigError:
    """Return the error with which opening ``root`` is refused."""
    with pytest.raises(StoreConfigError) as caught:
        await FileStore.open(root, options(**changes))
    error = caught.value
    assert error.problem.endswith(".")
    assert error.remedy.endswith((".", ")."))
    assert error.field in str(error)
    return error


async def test_a_missing_directory_is_named_and_created_only_on_request(tmp_path: Path) -> None:
    root = tmp_path / "absent" / "store"
    error = await refused(root)
    assert (error.field, error.value) == ("store.url", str(root))
    assert "does not exist" in error.problem
    async with opened(root, create_directory=True) as store:
        await put(store, page("kv", b"k", b"data", commit(1)))


async def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a directory" in (await refused(tmp_path / "file")).problem


async def test_a_second_opener_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    async with opened(tmp_path):
        error = await refused(tmp_path)
        assert f"in use by pid {os.getpid()}" in error.problem
    async with opened(tmp_path):
        pass


async def test_a_holder_in_another_process_is_named_too(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from hoststage.server.store import DirectIo\n"
        "from hoststage.server.store.file.directory import StoreDirectory\n"
        "held = StoreDirectory(Path(sys.argv[1]), DirectIo.AUTO); print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(  # noqa: ASYNC220 - it only holds a lock
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert f"pid {process.pid}" in (await refused(tmp_path)).problem
        process.kill()
    async with opened(tmp_path):
        pass


@pytest.mark.parametrize(
    ("text", "problem"),
    [("hoststage-file-store 2\n", "format 2"), ("something else\n", "not that of a hoststage store")],
)
async def test_a_directory_of_another_format_is_left_alone(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "FORMAT").write_text(text)
    assert problem in (await refused(tmp_path)).problem
    assert (tmp_path / "FORMAT").read_text() == text
    assert not (tmp_path / "v1").exists()


async def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    with mounted(tmp_path / "view", "-o", "bind,ro", str(real)) as view:
        assert "read-only" in (await refused(view)).problem


@pytest.mark.parametrize("mode", [0o755, 0o333, 0o000])
def test_a_directory_that_the_daemons_user_may_not_use_is_refused(mode: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hoststage.server.store import DirectIo, StoreConfigError\n"
        "from hoststage.server.store.file.directory import StoreDirectory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    StoreDirectory(Path(sys.argv[1]), DirectIo.AUTO)\n"
        "except StoreConfigError as error:\n"
        "    print(error.problem)\n"
    )
    with tempfile.TemporaryDirectory() as base:  # pytest's own folders are closed to other users
        Path(base).chmod(0o755)
        root = Path(base) / "store"
        root.mkdir()
        root.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", script, str(root)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "The daemon's user may not use it.\n", done.stderr


async def test_a_full_disk_is_refused_at_start_only_while_nothing_is_stored(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as disk:
        error = await refused(disk, min_free_bytes=64 * MIB)
        assert error.field == "store.min_free_bytes"
        async with opened(disk) as store:
            await put(store, page("kv", b"k", content(1, MIB), commit(1)))
        with (disk / "someone-elses").open("wb") as file:
            try:
                while True:
                    file.write(bytes(64 * KIB))
                    file.flush()
            except OSError:
                pass
        async with opened(disk, min_free_bytes=64 * KIB) as store:
            assert store.stats().recovered_pages == 1
            assert any("no room" in notice for notice in store.stats().notices)


async def test_a_wholly_full_disk_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        with (disk / "someone-elses").open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
            while True:
                file.write(bytes(4096))
        error = await refused(disk)
        assert "full" in error.problem or "free" in error.problem


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("s3://bucket/prefix", "store.url"),
        ("file://host/path", "store.url"),
        ("file:relative", "store.url"),
        ("/just/a/path", "store.url"),
        ("", "store.url"),
    ],
)
async def test_an_address_without_a_driver_names_those_that_there_are(url: str, field: str) -> None:
    with pytest.raises(StoreConfigError) as caught:
        await open_store(url)
    assert caught.value.field == field
    assert "file:///" in caught.value.remedy


@pytest.mark.parametrize("query", ["read_delay=no", "other=1", "write_delay=-1", "read_delay=nan", "read_delay"])
async def test_a_memory_store_takes_delays_and_nothing_else(query: str) -> None:
    await (await open_store("memory:?read_delay=0.01&write_delay=0")).close()
    with pytest.raises(StoreConfigError, match=r"read_delay=0\.2"):
        await open_store(f"memory:?{query}")


async def test_the_address_of_a_directory_opens_it(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    store = await open_store(f"file://{tmp_path}/with%20space", options())
    assert store.stats().driver == "file"
    await store.close()
    assert (tmp_path / "with space" / "FORMAT").exists()


async def test_a_clean_close_leaves_a_snapshot_that_the_next_start_uses_up(tmp_path: Path) -> None:
    index = tmp_path / "v1" / "INDEX"
    async with opened(tmp_path) as store:
        for n in range(20):
            await put(store, page("kv", bytes([n]), content(n, 8 * KIB), commit(n)))
        await store.delete(NAMESPACE, "kv", [bytes([3])])
    assert index.exists()
    directory = StoreDirectory(tmp_path, DirectIo.AUTO)
    recovered = recover(directory, 2)
    assert recovered.from_snapshot
    assert len(recovered.pages) == 19
    assert not index.exists()
    for segment in recovered.segments:
        segment.close()
    directory.close()
    async with opened(tmp_path) as store:  # the snapshot is used up: this one reads the trailers
        assert store.stats().recovered_pages == 19
        for n in range(20):
            result, found = await get(store, "kv", bytes([n]), 8 * KIB)
            if n == 3:
                assert result.outcome is ReadOutcome.MISS
            else:
                assert (result.commit_id, found) == (commit(n), content(n, 8 * KIB))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other segments"])
async def test_a_snapshot_that_is_not_true_is_not_used(tmp_path: Path, damage: str) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, 8 * KIB), commit(1)))
        await put(store, page("swa", b"k", content(2, 4 * KIB), commit(1)))
    index = tmp_path / "v1" / "INDEX"
    data = bytearray(index.read_bytes())
    if damage == "truncated":
        index.write_bytes(data[:-9])
    elif damage == "flipped":
        data[-20] ^= 1
        index.write_bytes(data)
    else:
        next(path for path in segments(tmp_path) if path.parent.name == "swa").unlink()
    async with opened(tmp_path) as store:
        assert (await get(store, "kv", b"k", 8 * KIB))[1] == content(1, 8 * KIB)
        expected = ReadOutcome.MISS if damage == "other segments" else ReadOutcome.HIT
        assert (await get(store, "swa", b"k", 4 * KIB))[0].outcome is expected


async def test_the_order_of_use_survives_a_clean_close(tmp_path: Path) -> None:
    slot = 12 * KIB
    settings = {"limit_bytes": 10 * slot, "high_watermark": 1.0, "low_watermark": 0.5}
    async with opened(tmp_path, **settings) as store:
        await put(store, *(page("kv", bytes([n]), content(n, 8 * KIB), commit(n)) for n in range(10)))
        await get(store, "kv", bytes([0]), 8 * KIB)
    async with opened(tmp_path, **settings) as store:
        await put(store, page("kv", b"new", content("new", 8 * KIB), commit("new")))
        assert (await get(store, "kv", bytes([0]), 8 * KIB))[0].outcome is ReadOutcome.HIT
        assert (await get(store, "kv", bytes([1]), 8 * KIB))[0].outcome is ReadOutcome.MISS


async def test_a_smaller_limit_is_met_after_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, *(page("kv", bytes([n]), content(n, 60 * KIB), commit(n)) for n in range(40)))
    async with opened(tmp_path, limit_bytes=10 * 64 * KIB) as store:
        await put(store, page("kv", b"new", content("new", 60 * KIB), commit("new")))
        assert store.stats().bytes <= 10 * 64 * KIB


async def test_a_file_that_is_no_segment_does_not_stop_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, page("kv", b"k", content(1, 8 * KIB), commit(1)))
    folder = segments(tmp_path)[0].parent
    (folder / "000099.seg").write_bytes(b"")
    (folder / "notes.seg").write_bytes(bytes(8192))
    (folder / "README").write_text("someone's")
    async with opened(tmp_path) as store:
        assert (await get(store, "kv", b"k", 8 * KIB))[1] == content(1, 8 * KIB)
    assert re.fullmatch(r"\d{6}\.seg", segments(tmp_path)[0].name)
    assert (folder / "README").exists()
