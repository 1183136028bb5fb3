"""Many client processes at once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hoststage.cli.bench.process import BenchError, CpuTime, Node, resident_bytes
from hoststage.cli.bench.rows import Costs, Kind, Row, Shape, measured
from hoststage.cli.bench.worker import Job, Report

STARTERS = 8
"""Workers that start at a time: importing is CPU work, and 64 interpreters at once only wait for one another."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """What many sessions did together."""

    shape: Shape
    reports: tuple[Report, ...]
    daemon_cpu_seconds: float = 0.0
    daemon_rss_bytes: int | None = None

    @property
    def rates(self) -> list[float]:
        """Calls a second of each session."""
        return [len(r.times) / r.elapsed for r in self.reports]

    @property
    def pages_per_s(self) -> float:
        return sum(self.rates) * self.shape.pages

    @property
    def least_share(self) -> float:
        """What the slowest session got, as a part of its fair share."""
        return min(self.rates) / (sum(self.rates) / len(self.rates))

    def row(self, case: str, operation: str, kind: Kind = Kind.PRODUCT, subject: str = "hoststage") -> Row:
        """Return the row; throughput is the whole crowd's."""
        times = [t for r in self.reports for t in r.times]
        costs = Costs(
            daemon_cpu_seconds=self.daemon_cpu_seconds,
            client_cpu_seconds=sum(r.cpu_seconds for r in self.reports),
            daemon_rss_bytes=self.daemon_rss_bytes,
        )
        row = measured(kind, case, subject, operation, self.shape, times, costs)
        rate = self.pages_per_s
        note = f"slowest session {self.least_share:.2f} of its fair share"
        return replace(
            row, pages_per_s=round(rate, 1), gb_per_s=round(rate * self.shape.page_bytes / 1e9, 4), note=note
        )


def crowd(node: Node | None, shape: Shape, operation: str, tag: str, slots: int, seconds: float) -> Crowd:
    """Run `shape.sessions` workers for some seconds, all from the same moment; node: None where they do without. Raises `BenchError` where one fails."""
    job = json.dumps(asdict(Job(node.address if node else "", operation, tag, slots, seconds, shape)))
    command = [sys.executable, "-m", "hoststage.cli.bench.worker", job]
    with contextlib.ExitStack() as stack:
        workers: list[subprocess.Popen[str]] = []
        while len(workers) < shape.sessions:
            fresh = [_start(command, stack) for _ in range(min(STARTERS, shape.sessions - len(workers)))]
            for worker in fresh:
                if _line(worker) != "ready":
                    raise BenchError("a worker process did not start")
            workers += fresh
        start = time.monotonic() + 0.2
        before = CpuTime.of(node.pid) if node else None
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{start}\n")
            worker.stdin.flush()
        reports = tuple(Report(**json.loads(_line(worker))) for worker in workers)
        if node is None or before is None:
            return Crowd(shape, _all_worked(reports))
        used = CpuTime.of(node.pid).since(before)
        return Crowd(shape, _all_worked(reports), used, resident_bytes(node.pid))


def _all_worked(reports: Sequence[Report]) -> tuple[Report, ...]:
    if not all(r.times for r in reports):
        raise BenchError("a session made no call at all in its time")
    return tuple(reports)


def _start(command: list[str], stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()

    stack.callback(end)
    return worker


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise BenchError(f"a worker process ended early with {worker.wait(20)}; what it said is above")
    return line.strip()
