"""What cases share: daemons, rows, timing in turns, and the costs of a stretch of calls."""

from __future__ import annotations

import contextlib
import os
import statistics
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hoststage.cli.bench.process import BenchError, CpuTime, Node, own_cpu_seconds, own_daemon, resident_bytes
from hoststage.cli.bench.product import CLIENT_COPIES, NO_CLIENT_COPIES, Client, open_session, slots_for
from hoststage.cli.bench.rows import NO_COSTS, Costs, Kind, Row, Shape, measured, skipped

MIB = 1 << 20
Call = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is asked for. `node`: a daemon that runs already. Lists are empty where the case's own choice counts."""

    quick: bool = False
    node: Node | None = None
    verify: bool = False
    page_sizes: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    pools: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    folder: Path | None = None
    most_bytes: int = 1 << 30

    def pick(self, quick: int, full: int) -> int:
        """Return the number for a quick run or for a whole one."""
        return quick if self.quick else full


@dataclass(slots=True)
class Rig:
    """One run: its settings, and the rows so far."""

    settings: Settings
    on_row: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        """Take rows."""
        for row in rows:
            self.rows.append(row)
            self.on_row(row)

    def skip(self, case: str, subject: str, reason: str) -> None:
        """Say that something was not measured."""
        self.add(skipped(case, subject, reason))

    @contextlib.contextmanager
    def daemon(
        self, store: str, *, budget: int = 0, store_limit: int = 0, settings: tuple[str, ...] = ()
    ) -> Iterator[Node]:
        """Yield the daemon to measure: the given one, or one of our own with that store. Raises `BenchError`."""
        if self.settings.node is not None:
            yield self.settings.node
            return
        with own_daemon(store, budget or self.settings.most_bytes, store_limit or (1 << 30), settings) as node:
            yield node

    @contextlib.contextmanager
    def client(
        self, node: Node, shape: Shape, *, write: int, read: int = 0, credits: int = 0, copy_threads: int = 1
    ) -> Iterator[Client]:
        """Yield a client in a namespace of its own. write, read: pages that each side of every pool must have room for."""
        asked = slots_for(shape, write, read)
        with Client(
            open_session(node.address, shape, uuid.uuid4().hex[:12], asked, credits, copy_threads), shape
        ) as client:
            yield client

    def shape(self, **values: object) -> Shape:
        """Return a shape with the run's own choice of verification."""
        return Shape(verify=self.settings.verify).but(**values)


class Meter:
    """Costs of a stretch of calls: CPU of daemon and client, copies, memory."""

    def __init__(self, node: Node, operation: str, shape: Shape) -> None:
        self._node = node
        self._operation = operation
        self._shape = shape
        self._daemon = CpuTime(0.0, 0.0)
        self._client = 0.0
        self._copies: float | None = None
        self._daemon_used = self._client_used = 0.0

    def __enter__(self) -> Meter:
        self._copies = self._node.copies()
        self._daemon, self._client = CpuTime.of(self._node.pid), own_cpu_seconds()
        return self

    def __exit__(self, *exc: object) -> None:
        self._daemon_used = CpuTime.of(self._node.pid).since(self._daemon)
        self._client_used = own_cpu_seconds() - self._client

    def costs(self, calls: int, pages: int = 0) -> Costs:
        """Return the costs, with copies over `pages` (by default those of `calls` calls)."""
        after = self._node.copies()
        moved = pages or calls * self._shape.pages
        copies = None if after is None or self._copies is None else (after - self._copies) / moved
        known = NO_CLIENT_COPIES if self._shape.path != "shm" else CLIENT_COPIES
        return Costs(
            daemon_cpu_seconds=self._daemon_used,
            client_cpu_seconds=self._client_used,
            daemon_copies=copies,
            client_copies=known.get(self._operation),
            daemon_rss_bytes=resident_bytes(self._node.pid),
            client_rss_bytes=resident_bytes(os.getpid()),
        )


def in_turns(subjects: Mapping[str, Call], rounds: int, calls: int = 1, warm: int = 1) -> dict[str, list[float]]:
    """Call subjects in turns, so that noise of the machine falls on all of them alike.

    Each round calls every subject `calls` times in a row; the first `warm` rounds do not count. Returns seconds by subject.
    """
    out: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for turn in range(rounds + warm):
        # Whoever goes second finds the caches as the first has left them: the order changes each round.
        for name in order if turn % 2 == 0 else reversed(order):
            found = [subjects[name]() for _ in range(calls)]
            if turn >= warm:
                out[name] += found
    return out


def ratio(over: Sequence[float], under: Sequence[float], rounds: int) -> float:
    """Return the median over rounds of the ratio of both medians in that round."""
    if not over or not under or rounds < 1:
        raise BenchError("a ratio of nothing; measure both subjects in the same rounds")
    a, b = len(over) // rounds, len(under) // rounds
    parts = [
        statistics.median(over[i * a : (i + 1) * a]) / statistics.median(under[i * b : (i + 1) * b])
        for i in range(rounds)
    ]
    return statistics.median(parts)


def cycle(runs: Sequence[list[bytes]]) -> Callable[[], list[bytes]]:
    """Return a function that hands out runs in turn."""
    at = -1

    def take() -> list[bytes]:
        nonlocal at
        at = (at + 1) % len(runs)
        return runs[at]

    return take


def ceiling(case: str, subject: str, operation: str, shape: Shape, seconds: Sequence[float], note: str = "") -> Row:
    """Return the row of a bound of the machine."""
    return measured(Kind.CEILING, case, subject, operation, shape, seconds, note=note)


def product(
    case: str, operation: str, shape: Shape, seconds: Sequence[float], costs: Costs = NO_COSTS, note: str = ""
) -> Row:
    """Return the row of the product."""
    return measured(Kind.PRODUCT, case, "hoststage", operation, shape, seconds, costs, note)
