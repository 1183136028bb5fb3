"""A worker that does at random what engines do, checks every byte that it loads, and reports what it saw when it is told to stop.

Arguments: address, model, mode, a name, a seed, a file to report to (written anew now and then, so that a killed worker's work counts).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.chaos.imported import ImportedWorker
from tests.life_support import KV, WINDOW_PAGES, WrongBytes, check_loaded, keys_of, page, pages, stack, writer_of

from hoststage.client import (
    HostStageError,
    Mode,
    Outcome,
    PayloadPath,
    RequestRejected,
    Retraction,
    RetractionWish,
    Session,
    connect,
)

RUNS = 40
LONGEST = 24
POOLS = ("kv", "indexer", "swa")


class Worker:
    """One life of a worker."""

    def __init__(self, session: Session, name: str, rng: random.Random, counts: Counter[str]) -> None:
        self.session, self.name, self.rng, self.counts = session, name, rng, counts
        self.kept: list[object] = []

    def run(self) -> tuple[list[bytes], int]:
        """Keys of one of the runs that all workers share, and a length."""
        run = self.rng.randrange(RUNS)
        return keys_of(LONGEST, f"chaos/{run}"), self.rng.randint(1, LONGEST)

    def store(self) -> None:
        keys, n = self.run()
        keys = keys[:n]
        # Each worker makes other bytes of a key, so that mixing two of them would show.
        made = {pool: pages(pool, keys, self.name) for pool in ("kv", "indexer")}
        made["swa"] = pages("swa", keys[-WINDOW_PAGES:], self.name)
        ticket = self.session.store(keys, made, timeout=5)
        if self.rng.random() < 0.5:
            outcome = ticket.wait(10).outcome
            self.counts[f"store_{outcome.name.lower()}"] += 1

    def abort(self) -> None:
        keys, n = self.run()
        batch = self.session.reserve(keys[:n], {"kv": n, "indexer": n}, timeout=5)
        if batch:
            for view in batch.views["kv"]:
                if view is not None:
                    view[: KV // 2] = b"x" * (KV // 2)
            if self.rng.random() < 0.3 and len(self.kept) < 3:
                self.kept.append(batch)
            else:
                batch.abort()

    def load(self) -> None:
        keys, n = self.run()
        pin = self.session.lookup(keys[:n], pin_seconds=2, timeout=5) if self.rng.random() < 0.7 else None
        if pin is not None and not pin:
            self.counts["misses"] += 1
            return
        prefix = pin.longest if pin is not None else n
        loaded = self.session.load(keys, prefix, pin=pin or 0, accept_shorter=self.rng.random() < 0.5, timeout=5)
        if not loaded:
            self.counts["misses" if loaded.outcome is Outcome.MISS else loaded.outcome.name.lower()] += 1
            if pin is not None and pin.pin and loaded.outcome is Outcome.MISS and self.session.connected:
                self.counts["pinned_misses"] += 1
            return
        self.counts["pages_checked"] += check_loaded(loaded, keys)
        if self.rng.random() < 0.2 and len(self.kept) < 3:
            self.kept.append(loaded)
        else:
            loaded.release()

    def stream(self) -> None:
        keys, n = self.run()
        stream = self.session.load_groups(keys, n, accept_shorter=True, timeout=5)
        for group in stream:
            for pool, views in group.pages.items():
                for i, data in enumerate(views):
                    writer_of(data, pool, keys[group.first[pool] + i])
                    self.counts["pages_checked"] += 1
            if self.rng.random() < 0.2:
                return
        if stream.loaded:
            self.counts["pages_checked"] += check_loaded(stream.loaded, keys)
        stream.loaded.release()

    def drop(self) -> None:
        if self.kept:
            held = self.kept.pop(self.rng.randrange(len(self.kept)))
            getattr(held, "abort", getattr(held, "release", None))()  # type: ignore[misc]

    def hold(self) -> None:
        name = f"request-{self.rng.randrange(1000)}"
        key = name.encode().ljust(32, b".")
        with self.session.hold(self.name.encode(), name, 1, dict.fromkeys(POOLS, 2), timeout=5) as hold:
            if not hold:
                self.counts[f"hold_{hold.outcome.name.lower()}"] += 1
                return
            for pool, views in hold.views.items():
                for view in views:
                    view[:] = page(pool, key, self.name)
            hold.seal(b"n")
        found = self.session.restore(self.name.encode(), name, 1, timeout=5)
        if found:
            for pool, views in found.views.items():
                for view in views:
                    writer_of(view, pool, key)
                    self.counts["pages_checked"] += 1
            self.counts["holds_restored"] += 1
            found.discard()

    def step(self) -> None:
        """Do one thing."""
        work = self.rng.choices(
            (self.store, self.load, self.stream, self.abort, self.drop, self.hold), (4, 6, 2, 1, 2, 1)
        )[0]
        if work == self.hold and self.session.stack.retraction.retraction.value != "host_pool":
            work = self.load
        self.counts["operations"] += 1
        self.counts[f"op_{work.__name__}"] += 1
        work()


def main() -> None:
    """Work until SIGTERM."""
    address, model, mode, name, seed, report = sys.argv[1:]
    counts: Counter[str] = Counter()
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    rng = random.Random(int(seed))
    path = Path(report)

    def tell() -> None:
        path.with_suffix(".new").write_text(json.dumps(counts))
        path.with_suffix(".new").replace(path)

    paths = ({0: PayloadPath.INLINE, 1: PayloadPath.IMPORTED}.get(int(seed) % 5, PayloadPath.SHM),)
    wish = RetractionWish(Retraction.HOST_POOL if paths[0] is PayloadPath.SHM else Retraction.NONE)
    spec = stack(
        model, Mode(mode), pools=POOLS, slots=96, paths=paths, retraction=wish, largest_request_tokens=16 * LONGEST
    )
    session: Session | None = None
    worker: Worker | ImportedWorker
    told = 0.0
    while not stop:
        try:
            if session is None:
                session = connect(address, stack=spec, worker=name, timeout=5, credits=int(seed) % 3 * 4)
                if paths[0] is PayloadPath.IMPORTED:
                    worker = ImportedWorker(session, name, rng, counts, RUNS, LONGEST)
                else:
                    worker = Worker(session, name, rng, counts)
            if paths[0] is PayloadPath.INLINE:
                rng.choice((worker.store, worker.load, worker.load))()
                counts["operations"] += 1
            else:
                worker.step()
        except HostStageError as error:
            counts[f"error_{type(error).__name__}"] += 1
            if isinstance(error, RequestRejected) and "SESSION_OVER" not in str(error):
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            worker_kept = [] if session is None else worker.kept
            worker_kept.clear()
            time.sleep(0.05)
        except WrongBytes as error:
            counts["wrong_bytes"] += 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        if time.monotonic() - told > 0.1:
            tell()
            told = time.monotonic()
    if session is not None:
        worker.kept.clear()
        session.close()
    tell()
    os._exit(0)


if __name__ == "__main__":
    main()
