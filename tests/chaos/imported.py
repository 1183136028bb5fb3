"""A worker whose pages lie in memory of its own: it uses that memory again the moment a call has ended, however it ended, and looks for late writes."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from random import Random

import numpy as np
from tests.life_support import SIZES, WINDOW_PAGES, WrongBytes, check_loaded, keys_of, page

from hoststage.client import Imported, ImportedPages, Loaded, Outcome, Session

IDLE = 0xA5


class Area:
    """Places of pages of each pool, with a byte that stands for nothing everywhere between calls."""

    def __init__(self, longest: int) -> None:
        self.counts = {"kv": longest, "indexer": longest, "swa": WINDOW_PAGES}
        self.begins, size = {}, 0
        for pool, count in self.counts.items():
            self.begins[pool] = size
            size += count * SIZES[pool]
        self.fd = os.memfd_create("chaos")
        os.posix_fallocate(self.fd, 0, size)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)
        self.bytes[:] = IDLE

    def places(self, imported: Imported, pool: str, count: int) -> ImportedPages:
        offsets = self.begins[pool] + np.arange(count, dtype=np.int64)[:, None] * SIZES[pool]
        return ImportedPages(imported, offsets, np.array([SIZES[pool]], dtype=np.int64))

    def row(self, pool: str, i: int) -> np.ndarray:
        begin = self.begins[pool] + i * SIZES[pool]
        return self.bytes[begin : begin + SIZES[pool]]

    def clear(self) -> None:
        self.bytes[:] = IDLE

    def check_idle(self) -> None:
        """Raise `WrongBytes` where somebody wrote though no call was under way."""
        if not (self.bytes == IDLE).all():
            self.clear()
            raise WrongBytes("memory was written after the call for it had ended")


class Found:
    """What a load brought, as `check_loaded` reads it."""

    def __init__(self, loaded: Loaded, area: Area) -> None:
        self.pools = loaded.pools
        self.first = loaded.first
        self._prefix, self._area = loaded.prefix, area

    def pages(self, pool: str) -> list[bytes]:
        return [self._area.row(pool, i).tobytes() for i in range(self._prefix - self.first(pool))]


class ImportedWorker:
    """Stores from one area and loads into another."""

    def __init__(self, session: Session, name: str, rng: Random, counts: Counter[str], runs: int, longest: int) -> None:
        self.session, self.name, self.rng, self.counts = session, name, rng, counts
        self.kept: list[object] = []
        self._runs, self._longest = runs, longest
        self._out, self._back = Area(longest), Area(longest)
        self._sources = session.import_memory(self._out.fd, name="out")
        self._targets = session.import_memory(self._back.fd, name="back")

    def step(self) -> None:
        """Do one thing."""
        keys = keys_of(self._longest, f"chaos/{self.rng.randrange(self._runs)}")
        keys = keys[: self.rng.randint(1, self._longest)]
        self._out.check_idle()
        self._back.check_idle()
        self.counts["operations"] += 1
        self.counts["op_imported"] += 1
        self._store(keys) if self.rng.random() < 0.4 else self._load(keys)

    def _store(self, keys: list[bytes]) -> None:
        counts = {"kv": len(keys), "indexer": len(keys), "swa": min(WINDOW_PAGES, len(keys))}
        for pool, n in counts.items():
            for i, key in enumerate(keys[len(keys) - n :]):
                self._out.row(pool, i)[:] = np.frombuffer(page(pool, key, self.name), dtype=np.uint8)
        places = {pool: self._out.places(self._sources, pool, n) for pool, n in counts.items()}
        try:
            ticket = self.session.store(keys, places, timeout=self.rng.choice((0.02, 5)))
        finally:
            self._out.clear()
        if self.rng.random() < 0.5:
            self.counts[f"store_{ticket.wait(10).outcome.name.lower()}"] += 1

    def _load(self, keys: list[bytes]) -> None:
        into = {pool: self._back.places(self._targets, pool, n) for pool, n in self._back.counts.items()}
        try:
            loaded = self.session.load(
                keys, into=into, accept_shorter=self.rng.random() < 0.5, timeout=self.rng.choice((0.02, 5))
            )
            if loaded:
                self.counts["pages_checked"] += check_loaded(Found(loaded, self._back), keys)
            else:
                self._back.check_idle()
                self.counts["misses" if loaded.outcome is Outcome.MISS else loaded.outcome.name.lower()] += 1
        finally:
            self._back.clear()
