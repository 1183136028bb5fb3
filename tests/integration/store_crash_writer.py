"""A process that writes, replaces and deletes pages until it is killed, and says what was acknowledged.

Arguments: directory, direct I/O setting, seed. Output lines: ``begin KEY VERSION``, ``stored KEY VERSION``, ``delete KEY``,
``deleted KEY``; version -1 in a later run's eyes is "no page".
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import structlog

from hoststage.server.store import DirectIo, WriteOutcome
from hoststage.server.store.file import FileStore
from tests.store_support import NAMESPACE, commit, content, options, page

KEYS = 24
SIZES = {"kv": 300 * 1024, "swa": 20_000}


def say(*words: object) -> None:
    """Write one line at once, so that what was said is what happened."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def lane(store: FileStore, first: int, rng: random.Random, base: int) -> None:
    """Change every second key, for ever."""
    version = base
    while True:
        n = rng.randrange(first, KEYS, 2)
        key = n.to_bytes(2, "big")
        version += 1
        if rng.random() < 0.15:
            say("delete", n)
            for pool in SIZES:
                await store.delete(NAMESPACE, pool, [key])
            say("deleted", n)
            continue
        say("begin", n, version)
        pages = [
            page(pool, key, content((pool, n, version), SIZES[pool]), commit((n, version))) for pool in ("swa", "kv")
        ]
        results = await store.write_from(NAMESPACE, pages)
        assert all(result.outcome is WriteOutcome.STORED for result in results), results
        say("stored", n, version)


async def main(root: str, direct: str, seed: str) -> None:
    """Write until killed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    store = await FileStore.open(Path(root), options(direct_io=DirectIo(direct), io_threads=4))
    say("open", store.stats().pages)
    rng = random.Random(int(seed))
    base = int(seed) * 1_000_000
    await asyncio.gather(*(lane(store, first, rng, base) for first in range(2)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
