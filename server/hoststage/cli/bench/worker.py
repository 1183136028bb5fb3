"""One of many client processes: opens a session, says that it is ready, works from a common start for a given time, reports."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from hoststage.cli.bench.process import own_cpu_seconds
from hoststage.cli.bench.product import Client, open_session
from hoststage.cli.bench.rows import Shape

RUNS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told. operation: `store` (until stored), `load` into memory, `views` or `lookup`."""

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
    session = open_session(job.address, job.shape, job.tag, job.slots)
    with Client(session, job.shape) as client:
        # Loads and lookups need something to find; storing once also touches all memory before the clock starts.
        client.fill(RUNS)
        print("ready", flush=True)
        start = float(sys.stdin.readline())
        time.sleep(max(0.0, start - time.monotonic()))
        end = start + job.seconds
        before, began = own_cpu_seconds(), time.monotonic()
        times: list[float] = []
        at = 0
        while time.monotonic() < end:
            run = client.runs[at % RUNS]
            at += 1
            if job.operation == "store":
                times.append(client.store_through()[1])
            elif job.operation == "load":
                times.append(client.load(run))
            elif job.operation == "views":
                times.append(client.views(run))
            else:
                times.append(client.lookup(run))
        report = Report(times, own_cpu_seconds() - before, time.monotonic() - began)
        print(json.dumps(asdict(report)), flush=True)


def job_of(text: str) -> Job:
    """Return the job that a parent wrote as JSON."""
    given = json.loads(text)
    return Job(**{**given, "shape": Shape(**given["shape"])})


if __name__ == "__main__":
    work(job_of(sys.argv[1]))
