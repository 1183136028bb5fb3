"""Runs in SGLang's own environment: drives its file backend for hicache with pages of our own. Imports nothing of ours."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def sync(folder: str, keys: list[str], *, forget: bool) -> None:
    """Write the files of keys to the device; forget: drop them from the kernel's page cache."""
    for key in keys:
        for file in Path(folder).glob(f"{key}*"):
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            if forget:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def main(folder: str) -> None:
    """Answer one request a line: ["store", "store synced", "load" or "load cold", pages, bytes of a page] → {"seconds": …}."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    torch.set_num_threads(1)
    wanted: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
    }
    wanted |= {
        "is_mla_model": False,
        "is_page_first_layout": False,
        "enable_storage_metrics": False,
        "model_name": "bench",
    }
    fields = HiCacheStorageConfig.__dataclass_fields__
    backend = HiCacheFile(HiCacheStorageConfig(**{k: v for k, v in wanted.items() if k in fields}), folder)
    pages: dict[tuple[int, int], Any] = {}
    last: dict[tuple[int, int], list[str]] = {}
    count = 0
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        operation, batch, page_bytes = json.loads(line)
        shape = (batch, page_bytes)
        if shape not in pages:
            pages[shape] = torch.randint(0, 256, shape, dtype=torch.uint8)
        rows = list(pages[shape])
        if operation.startswith("store"):
            for old in last.get(shape, []):
                for file in Path(folder).glob(f"{old}*"):
                    file.unlink()
            last[shape] = [f"page{count + i}x" for i in range(batch)]
            count += batch
            started = time.perf_counter()
            done: Any = backend.batch_set(last[shape], rows)
            if operation == "store synced":
                sync(folder, last[shape], forget=False)
        else:
            if operation == "load cold":
                sync(folder, last[shape], forget=True)
            started = time.perf_counter()
            done = all(backend.get(key, row) is not None for key, row in zip(last[shape], rows, strict=True))
        seconds = time.perf_counter() - started
        if not done:
            raise SystemExit(f"{operation} of {batch} pages failed")
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main(sys.argv[1])
