"""A client that stores from, or loads into, memory of its own without end, until it is killed."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from hoststage.client import Identity, ImportedPages, PayloadPath, PoolKind, PoolSpec, StackSpec, connect

PAGE = 64 << 10
PAGES = 64


def main() -> None:
    """Run `store` or `load` (argument 1) against the daemon at an address (argument 2)."""
    stage, address = sys.argv[1:3]
    fd = os.memfd_create("victim")
    os.ftruncate(fd, PAGE * PAGES)
    memory = mmap.mmap(fd, PAGE * PAGES)
    memory[:] = os.urandom(PAGE * PAGES)
    pool = PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=3 * PAGES)
    stack = StackSpec(Identity("victim"), (pool,), paths=(PayloadPath.IMPORTED,))
    session = connect(address, stack=stack, worker="victim")
    offsets = np.arange(PAGES, dtype=np.int64)[:, None] * PAGE
    pages = ImportedPages(session.import_memory(fd), offsets, np.array([PAGE], dtype=np.int64))

    def keys(n: int) -> list[bytes]:
        return [n.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(PAGES)]

    session.store(keys(0), {"kv": pages}).wait()
    print("ready", flush=True)
    n = 0
    while True:
        n += 1
        if stage == "store":
            session.store(keys(n), {"kv": pages})
        else:
            session.load(keys(0), into={"kv": pages})


if __name__ == "__main__":
    main()
