"""The product under measurement: a session of one shape, with pages to store and runs to load."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from hoststage.cli.bench.memfd_rows import MemfdRows
from hoststage.cli.bench.process import BenchError
from hoststage.cli.bench.rows import Shape
from hoststage.client import (
    Identity,
    Mode,
    ModeWish,
    Outcome,
    PayloadPath,
    PoolKind,
    PoolSpec,
    Session,
    StackSpec,
    StoreTicket,
    WriteBatch,
    connect,
)

Pages = npt.NDArray[np.uint8]
Keys = list[bytes]
PAGE_TOKENS = 16
CALL_SECONDS = 120.0
STAGING_BYTES = 16 << 20
CLIENT_COPIES = {"store": 1.0, "load": 1.0, "views": 0.0, "lookup": 0.0}
"""Copies that the client makes of each page over shm: into a write slot, out of a read slot, or none."""
NO_CLIENT_COPIES = {"store": 0.0, "load": 0.0}
"""Elsewhere it makes none: on a data connection the kernel copies between socket and memory, imported memory the daemon reads and writes itself."""

_names = itertools.count()
_RUN = os.urandom(12)


def fresh_keys(count: int) -> Keys:
    """Return keys of 32 bytes that nobody has used."""
    return [_RUN + next(_names).to_bytes(8, "little") + b"hoststage-be" for _ in range(count)]


def pool_names(pools: int) -> list[str]:
    """Return the names of the pools of a stack: `kv`, and sidecars that follow its slots."""
    return ["kv", *(f"sidecar{i}" for i in range(1, pools))]


def stack_of(shape: Shape, tag: str, slots: int) -> StackSpec:
    """Return the stack of a shape. tag: namespaces of different tags never meet; slots: host pages of each pool, 0 leaves them to the daemon."""
    pools = [
        PoolSpec(
            name=name,
            kind=PoolKind.KV if name == "kv" else PoolKind.SIDECAR,
            page_bytes=shape.page_bytes,
            page_tokens=PAGE_TOKENS,
            host_slots=slots,
            indices_from_pool="" if name == "kv" else "kv",
        )
        for name in pool_names(shape.pools)
    ]
    return StackSpec(
        identity=Identity(model="bench", tenant=f"bench-{tag}"),
        pools=tuple(pools),
        modes=(ModeWish(Mode(shape.mode), required=True),),
        paths=(PayloadPath(shape.path),),
    )


def slots_for(shape: Shape, write_pages: int, read_pages: int) -> int:
    """Return host pages to ask for so that each side has at least that many, as the daemon divides them."""
    if shape.mode == "buffer_only":
        return 2 * max(write_pages, read_pages)
    # The write side gets an eighth, or as much as staging needs (16 MiB); a span of the read side is kept for loads.
    stride = -(-shape.page_bytes // 4096) * 4096 * shape.pools
    depth = max(2, -(-STAGING_BYTES // stride))
    return max(8 * min(write_pages, depth), read_pages + depth) + 8


def open_session(address: str, shape: Shape, tag: str, slots: int, credits: int = 0, copy_threads: int = 1) -> Session:
    """Open a session of that shape. Raises `BenchError` where another path was granted."""
    session = connect(
        address,
        stack=stack_of(shape, tag, slots),
        worker="bench",
        client="hoststage bench",
        timeout=CALL_SECONDS,
        credits=credits,
        copy_threads=copy_threads,
    )
    if session.grant.path.value != shape.path:
        session.close()
        raise BenchError(
            f"path {shape.path} was asked for and {session.grant.path.value} granted; run on the daemon's host"
        )
    return session


class Client:
    """One session with rows of memory for one batch, which it stores under fresh keys and loads again."""

    def __init__(self, session: Session, shape: Shape) -> None:
        self.session = session
        self.shape = shape
        generator = np.random.default_rng(len(_RUN))
        self.names = pool_names(shape.pools)
        size = (shape.batch, shape.page_bytes)
        self.source: dict[str, Pages] = {name: generator.integers(0, 256, size, dtype=np.uint8) for name in self.names}
        self.target: dict[str, Pages] = {name: np.ones(size, dtype=np.uint8) for name in self.names}
        self._shared: tuple[MemfdRows, MemfdRows] | None = None
        if shape.path == PayloadPath.IMPORTED.value:
            given = {name: self.source[name] for name in self.names}
            out, back = (MemfdRows(session, self.names, *size) for _ in range(2))
            self._shared, self.source, self.target = (out, back), out.arrays, back.arrays
            for name, rows in given.items():
                self.source[name][:] = rows
        self._ring = self.target
        self._at = 0
        self.runs: list[Keys] = []
        self._stamps: dict[bytes, int] = {}

    # -------------------------------------------------------------- calls, each timed alone

    def store(self) -> tuple[float, StoreTicket]:
        """Store one batch under fresh keys; return seconds until it was handed over, and the ticket."""
        keys = self._stamped()
        started = time.perf_counter()
        ticket = self.session.store(keys, self._shared[0].pages if self._shared else self.source)
        return time.perf_counter() - started, ticket

    def store_accepted(self) -> tuple[float, float, StoreTicket]:
        """Store one batch; return seconds until it was handed over, and until the daemon had accepted it."""
        keys = self._stamped()
        started = time.perf_counter()
        ticket = self.session.store(keys, self._shared[0].pages if self._shared else self.source)
        handed_over = time.perf_counter() - started
        ticket.wait_accepted(CALL_SECONDS)
        return handed_over, time.perf_counter() - started, ticket

    def store_through(self) -> tuple[float, float]:
        """Store one batch; return seconds until accepted, and until stored. The run is kept for loads."""
        started = time.perf_counter()
        _, accepted, ticket = self.store_accepted()
        self.settle(ticket)
        return accepted, time.perf_counter() - started

    def place_accepted(self) -> tuple[float, float, StoreTicket]:
        """Store one batch whose pages are written in place; return what `store_accepted` returns, the writing left out of the seconds.

        Raises `BenchError` where no slots are granted.
        """
        keys = self._stamped()
        started = time.perf_counter()
        with self.session.reserve(keys, dict.fromkeys(self.names, len(keys)), wait=CALL_SECONDS) as batch:
            reserving = time.perf_counter() - started
            self._write_into(batch)
            started = time.perf_counter() - reserving
            ticket = batch.commit(CALL_SECONDS)
            handed_over = time.perf_counter() - started
            ticket.wait_accepted(CALL_SECONDS)
            return handed_over, time.perf_counter() - started, ticket

    def _write_into(self, batch: WriteBatch) -> None:
        if not batch:
            raise BenchError(f"no slots were granted: {batch.outcome.name}: {batch.detail}")
        for name, views in batch.views.items():
            for row, view in zip(self.source[name], views, strict=True):
                if view is not None:
                    np.copyto(np.frombuffer(view, dtype=np.uint8), row)

    def drain(self) -> float:
        """Write one batch in place and commit it; return seconds from the commit until stored. Raises `BenchError` where no slots are granted."""
        keys = self._stamped()
        with self.session.reserve(keys, dict.fromkeys(self.names, len(keys)), wait=CALL_SECONDS) as batch:
            self._write_into(batch)
            started = time.perf_counter()
            self.settle(batch.commit(CALL_SECONDS))
        return time.perf_counter() - started

    def settle(self, ticket: StoreTicket) -> None:
        """Wait for a ticket. Raises `BenchError` where its pages were not stored."""
        result = ticket.wait(CALL_SECONDS)
        if result.outcome not in (Outcome.STORED, Outcome.RESIDENT):
            raise BenchError(f"a store ended with {result.outcome.name}: {result.detail}")

    def spread(self, rows: int) -> None:
        """Let loads go to ever other places of memory of that many rows, so that small batches gain nothing by the CPU's caches.

        Imported memory stays as it is: the daemon writes it, with caches of its own.
        """
        if self._shared:
            return
        size = (max(rows, self.shape.batch), self.shape.page_bytes)
        self._ring = {name: np.ones(size, dtype=np.uint8) for name in self.names}

    def _next_target(self) -> None:
        room = len(self._ring[self.names[0]]) // self.shape.batch
        self._at = (self._at + 1) % room
        low = self._at * self.shape.batch
        self.target = {name: rows[low : low + self.shape.batch] for name, rows in self._ring.items()}

    def load(self, run: Keys) -> float:
        """Load a run into the caller's memory; return seconds."""
        if self._ring is not self.target:
            self._next_target()
        started = time.perf_counter()
        loaded = self.session.load(run, into=self._shared[1].pages if self._shared else self.target)
        seconds = time.perf_counter() - started
        if not loaded:
            raise BenchError(f"a load of {len(run)} pages ended with {loaded.outcome.name}: {loaded.detail}")
        if self.shape.verify:
            self._check(run, {name: list(rows) for name, rows in self.target.items()})
        return seconds

    def views(self, run: Keys) -> float:
        """Load a run as zero-copy views and release them; return seconds."""
        started = time.perf_counter()
        loaded = self.session.load(run)
        seconds = time.perf_counter() - started
        if not loaded:
            raise BenchError(f"a load of {len(run)} pages ended with {loaded.outcome.name}: {loaded.detail}")
        if self.shape.verify:
            self._check(run, {n: [np.frombuffer(p, dtype=np.uint8) for p in loaded.pages(n)] for n in self.names})
        started = time.perf_counter()
        loaded.release()
        return seconds + time.perf_counter() - started

    def lookup(self, run: Keys) -> float:
        """Look a run up; return seconds. Raises `BenchError` where it is not whole."""
        started = time.perf_counter()
        match = self.session.lookup(run)
        seconds = time.perf_counter() - started
        if match.longest != len(run):
            raise BenchError(f"a lookup found {match.longest} of {len(run)} pages")
        return seconds

    def readable_after(self) -> float:
        """Store one batch; return seconds until a lookup finds it."""
        started = time.perf_counter()
        keys = self.store_keys()
        while self.session.lookup(keys).longest != len(keys):
            if time.perf_counter() - started > CALL_SECONDS:
                raise BenchError("a stored batch did not become readable")
        return time.perf_counter() - started

    def store_keys(self) -> Keys:
        """Store one batch without waiting and return its keys."""
        self.store()
        return self.runs[-1]

    # -------------------------------------------------------------- contents

    def fill(self, runs: int) -> list[Keys]:
        """Store that many batches to the end and return their keys."""
        first = len(self.runs)
        for _ in range(runs):
            self.store_through()
        return self.runs[first:]

    def _stamped(self) -> Keys:
        """Take fresh keys and make the contents differ from every earlier batch, at both ends of each page."""
        keys = fresh_keys(self.shape.batch)
        stamp = len(self.runs) + 1
        for rows in self.source.values():
            words = rows.view(np.uint64)
            words[:, 0] = words[:, -1] = stamp
        self.runs.append(keys)
        self._stamps[keys[0]] = stamp
        return keys

    def _check(self, run: Keys, found: dict[str, Sequence[Pages] | list[Pages]]) -> None:
        """Compare what was loaded with what was stored under those keys. Raises `BenchError`."""
        stamp = self._stamps[run[0]]
        for name, pages in found.items():
            if len(pages) != len(run):
                raise BenchError(f"{len(pages)} pages of pool {name} came, {len(run)} were stored")
            for row, page in zip(self.source[name], pages, strict=True):
                words, wanted = page.view(np.uint64), row.view(np.uint64)
                same = words[0] == words[-1] == stamp and np.array_equal(words[1:-1], wanted[1:-1])
                if not same:
                    raise BenchError(f"a page of pool {name} came back with other bytes than were stored")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()


class Stores:
    """Stores one batch after the other, each to the end; a call returns seconds until the daemon had accepted it. in_place: the pages lie in slots already."""

    def __init__(self, client: Client, *, in_place: bool = False) -> None:
        self._client = client
        self._store = client.place_accepted if in_place else client.store_accepted
        self.handed_over: list[float] = []
        self.stored: list[float] = []

    def __call__(self) -> float:
        started = time.perf_counter()
        handed_over, accepted, ticket = self._store()
        self._client.settle(ticket)
        self.handed_over.append(handed_over)
        self.stored.append(time.perf_counter() - started)
        return accepted
