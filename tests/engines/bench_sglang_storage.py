"""Throughput of SGLang's own file backend and of hoststage's, on the same pool and the same batches of 128 pages.

    PYTHONPATH=proto:server:client:. "$(tools/engine_env.sh sglang)" -m tests.engines.bench_sglang_storage [--pages 1024]

Both store to the same file system. SGLang's backend is driven as its controller drives it: one Python copy a page on the way out, two on the way in.
The last row of each is hoststage with `"allocator": "shm"`: SGLang's pools are memfds, which the daemon reads and writes itself.
"Stored" is what the backend says it is: a file in the page cache for SGLang's, the store's acknowledgement for hoststage's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from tests.engines import sglang_support as sg
from tests.integration.daemon import Daemon

BATCH = 128


def _rate(pool: Any, pages: int, move: Callable[[int], None]) -> float:
    """Return MiB a second of moving all pages, batch by batch."""
    began = time.perf_counter()
    for start in range(0, pages, BATCH):
        move(start)
    return pages * len(sg.page_bytes(pool, 0)) / (time.perf_counter() - began) / (1 << 20)


def file_backend(pool: Any, keys: list[str], folder: str) -> tuple[float, float, float]:
    """Return MiB/s of set and get, and microseconds of one exists of all keys."""
    backend = HiCacheFile(sg.config("unix:///nowhere"), folder)

    def put(start: int) -> None:
        pages = [pool.get_data_page((start + i) * pool.page_size) for i in range(BATCH)]
        assert backend.batch_set(keys[start : start + BATCH], pages)

    def take(start: int) -> None:
        targets = [pool.get_dummy_flat_data_page() for _ in range(BATCH)]
        for i, page in enumerate(backend.batch_get(keys[start : start + BATCH], targets)):
            pool.set_from_flat_data_page((start + i) * pool.page_size, page)

    out, back = _rate(pool, len(keys), put), _rate(pool, len(keys), take)
    return out, back, _micros(lambda: backend.batch_exists(keys[:BATCH]))


def hoststage_backend(pool: Any, keys: list[str], address: str) -> tuple[float, float, float]:
    """The same of hoststage's."""
    backend = sg.open_backend(address, pool, section={"slots": {"kv": 4 * BATCH}})

    def put(start: int) -> None:
        assert all(backend.batch_set_v1(keys[start : start + BATCH], sg.ids(pool, list(range(start, start + BATCH)))))

    def take(start: int) -> None:
        assert all(backend.batch_get_v1(keys[start : start + BATCH], sg.ids(pool, list(range(start, start + BATCH)))))

    out, back = _rate(pool, len(keys), put), _rate(pool, len(keys), take)
    exists = _micros(lambda: backend.batch_exists(keys[:BATCH]))
    backend.close()
    return out, back, exists


def _micros(call: Callable[[], Any], times: int = 20) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=1024)
    pages = parser.parse_args().pages // BATCH * BATCH
    # A page is small: torch's own threads cost its copies more than they bring, on a busy machine many times more.
    torch.set_num_threads(1)
    print(f"| layout | page | backend | set MiB/s | get MiB/s | exists of {BATCH} keys, µs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for layout in sg.LAYOUTS:
        pool = sg.mha(layout, heads=8, dim=128, pages=pages, page=16, layers=4)
        sg.fill(pool, 1)
        size = len(sg.page_bytes(pool, 0)) >> 10
        keys = sg.hashes(f"bench/{layout}", pages)
        with tempfile.TemporaryDirectory(prefix="hs") as folder:
            daemon = Daemon(Path(folder), budget="1GiB").start()
            rows = {
                "SGLang file": file_backend(pool, keys, f"{folder}/file"),
                "hoststage": hoststage_backend(pool, keys, daemon.address),
            }
            with sg.allocated_by("shm"):
                shared = sg.mha(layout, heads=8, dim=128, pages=pages, page=16, layers=4)
            sg.fill(shared, 1)
            # Keys of their own: pages that are believed stored would not be moved.
            others = sg.hashes(f"bench/{layout}/memfds", pages)
            rows["hoststage, pools in memfds"] = hoststage_backend(shared, others, daemon.address)
            daemon.kill()
        for name, (out, back, exists) in rows.items():
            print(f"| {layout} | {size} KiB | {name} | {out:.0f} | {back:.0f} | {exists:.0f} |", flush=True)


if __name__ == "__main__":
    main()
