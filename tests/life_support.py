"""Pages that tell whose they are, workers that die at a given moment, and what a daemon says of its slots."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hoststage.client import HitPolicy, Identity, Mode, ModeWish, PayloadPath, PoolKind, PoolSpec, StackSpec
from tests.integration.daemon import ROOT, Daemon, environment

KV, INDEXER, SWA = 8192, 1024, 5000
SIZES = {"kv": KV, "indexer": INDEXER, "swa": SWA}
WINDOW_PAGES = 4
_MAGIC = b"page"
_HEAD = 64


class WrongBytes(AssertionError):
    """A loaded page is not a page of its key and pool."""


def stack(
    model: str, mode: Mode = Mode.BUFFER_ONLY, *, pools: Sequence[str] = ("kv",), slots: int = 160, **changes: object
) -> StackSpec:
    """Return a stack of some of the pools `kv`, `indexer` (a sidecar of kv) and `swa` (a window of four pages)."""
    known = {
        "kv": PoolSpec("kv", PoolKind.KV, KV, 16, host_slots=slots),
        "indexer": PoolSpec("indexer", PoolKind.SIDECAR, INDEXER, 16, indices_from_pool="kv"),
        "swa": PoolSpec(
            "swa",
            PoolKind.SWA,
            SWA,
            16,
            sliding_window=16 * WINDOW_PAGES,
            hit_policy=HitPolicy.TRAILING_PAGES,
            host_slots=slots,
        ),
    }
    changes.setdefault("paths", (PayloadPath.SHM,))
    return StackSpec(Identity(model), tuple(known[p] for p in pools), modes=(ModeWish(mode, True),), **changes)  # type: ignore[arg-type]


def keys_of(n: int, seed: object) -> list[bytes]:
    """Return `n` keys that follow from a seed."""
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]


def page(pool: str, key: bytes, writer: str) -> bytes:
    """Return the page of a key in a pool, as this writer makes it."""
    name = hashlib.sha256(writer.encode()).digest()[:12]
    head = _MAGIC + pool.encode().ljust(16, b"\0") + key + name
    assert len(head) == _HEAD
    return head + hashlib.shake_128(head).digest(SIZES[pool] - _HEAD)


def pages(pool: str, keys: Sequence[bytes], writer: str) -> list[bytes]:
    """Return the pages of several keys."""
    return [page(pool, key, writer) for key in keys]


def writer_of(data: bytes | memoryview, pool: str, key: bytes) -> bytes:
    """Return who wrote a page, having checked every byte of it. Raises `WrongBytes`."""
    found = bytes(data)
    head = found[:_HEAD]
    if head[: _HEAD - 12] != _MAGIC + pool.encode().ljust(16, b"\0") + key:
        raise WrongBytes(f"the page of {key.hex()[:12]} in {pool} begins with {head.hex()}")
    if len(found) != SIZES[pool] or found[_HEAD:] != hashlib.shake_128(head).digest(SIZES[pool] - _HEAD):
        raise WrongBytes(f"the page of {key.hex()[:12]} in {pool} is torn")
    return head[_HEAD - 12 :]


def check_loaded(loaded: object, keys: Sequence[bytes]) -> int:
    """Check every page of a load, and that a sidecar is of its source's writer; return how many pages there were."""
    n = 0
    writers: dict[tuple[str, bytes], bytes] = {}
    for pool in loaded.pools:  # type: ignore[attr-defined]
        first = loaded.first(pool)  # type: ignore[attr-defined]
        for i, data in enumerate(loaded.pages(pool)):  # type: ignore[attr-defined]
            writers[pool, keys[first + i]] = writer_of(data, pool, keys[first + i])
            n += 1
    for (pool, key), writer in writers.items():
        if pool == "indexer" and writers[("kv", key)] != writer:
            raise WrongBytes(f"the sidecar of {key.hex()[:12]} is of another writer than its source")
    return n


# -------------------------------------------------------------- daemons


def slots_in_use(daemon: Daemon) -> dict[str, int]:
    """Return slots that are neither free nor resident, by arena kind, pool and state."""
    out: dict[str, int] = {}
    for facts in daemon.status()["pools"]:
        for state, n in facts["by_state"].items():
            if state not in ("free", "resident") and n:
                name = f"{facts['kind']}/{facts['pool']}/{state}"
                out[name] = out.get(name, 0) + n
    return out


def sessions(daemon: Daemon) -> dict[int, dict]:
    """Return the daemon's sessions by number."""
    return {s["session"]: s for s in daemon.status()["sessions"]}


def counter(daemon: Daemon, name: str, label: str = "") -> int:
    """Return one of the tier's counters."""
    found = [c["value"] for c in daemon.status()["counters"] if (c["name"], c["label"]) == (name, label)]
    return int(found[0]) if found else 0


def seconds_until(check: Callable[[], bool], most: float) -> float:
    """Return how long it took until `check` held. Raises `AssertionError` where that was longer than `most` seconds."""
    start = time.monotonic()
    while not check():
        if time.monotonic() - start > most:
            raise AssertionError(f"not within {most} s")
        time.sleep(0.005)
    return time.monotonic() - start


def shared_files() -> set[str]:
    """Return the names in /dev/shm, without those of engines that are tested on this machine at the same time."""
    return {p.name for p in Path("/dev/shm").iterdir() if not p.name.startswith("lmcache")}


def no_new_shared_files(before: set[str]) -> None:
    """Check that nothing was left in /dev/shm; what other programs of this machine have there for a while is not ours."""
    seconds_until(lambda: shared_files() <= before, 20)


# -------------------------------------------------------------- workers


@contextmanager
def worker(stage: str, *arguments: str, module: str = "tests.integration.life_worker") -> Iterator[subprocess.Popen]:
    """Run a worker until it says `ready`; in the end it and its children are killed."""
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(ROOT)
    command = [sys.executable, "-m", module, stage, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, start_new_session=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == b"ready\n", f"{stage}: the worker said {said!r}"
        yield process
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
