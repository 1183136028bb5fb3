"""One of many client processes: opens a session, says that it is ready, works from a common start for a given time, reports."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from hoststage.cli.bench.ceilings import Memcpy
from hoststage.cli.bench.process import own_cpu_seconds
from hoststage.cli.bench.product import Client, open_session
from hoststage.cli.bench.rows import Shape

RUNS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told. operation: `store` (until stored), `load` into memory, `views`, `lookup`, or `memcpy` without any session."""

    address: str
    operation: str
    tag: str
    slots: int
    seconds: float
    shape: Shape


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker did: seconds of each call, its CPU, and how long it worked in all."""

    times: list[float]
    cpu_seconds: float
    elapsed: float


def work(job: Job) -> None:
    """Run one worker; lines on standard output are `ready` and the report, a line on standard input is the start (monotonic seconds)."""
    if job.operation == "memcpy":
        memcpy = Memcpy(job.shape.page_bytes, RUNS * job.shape.batch)
        target = np.ones((job.shape.batch, job.shape.page_bytes), dtype=np.uint8)
        _repeat(job, lambda at: memcpy.copy_out(target))
        return
    session = open_session(job.address, job.shape, job.tag, job.slots)
    with Client(session, job.shape) as client:
        # Loads and lookups need something to find; storing once also touches all memory before the clock starts.
        runs = client.fill(RUNS)
        calls: dict[str, Callable[[int], float]] = {
            "store": lambda at: client.store_through()[1],
            "load": lambda at: client.load(runs[at % RUNS]),
            "views": lambda at: client.views(runs[at % RUNS]),
            "lookup": lambda at: client.lookup(runs[at % RUNS]),
        }
        _repeat(job, calls[job.operation])


def _repeat(job: Job, call: Callable[[int], float]) -> None:
    """Say that all is ready, call from the common start to the common end, and report."""
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    time.sleep(max(0.0, start - time.monotonic()))
    end = start + job.seconds
    before, began = own_cpu_seconds(), time.monotonic()
    times: list[float] = []
    while time.monotonic() < end:
        times.append(call(len(times)))
    report = Report(times, own_cpu_seconds() - before, time.monotonic() - began)
    print(json.dumps(asdict(report)), flush=True)


def job_of(text: str) -> Job:
    """Return the job that a parent wrote as JSON."""
    given = json.loads(text)
    return Job(**{**given, "shape": Shape(**given["shape"])})


if __name__ == "__main__":
    work(job_of(sys.argv[1]))
