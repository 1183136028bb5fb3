"""Counters and latencies of the wire: how many requests of which kind came by which road, and how long they took.

Labels are bounded: roads, operations and reasons all come from the code, never from a client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Road: TypeAlias = Literal["stream", "lane", "data"]

BUCKETS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds; a lane's round trip is tens of microseconds, a load from a slow store seconds."""


class Latency:
    """How long requests of one kind took. `observe` costs less than a microsecond."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one request."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        out, seen = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            seen += count
            out.append((bound, float(seen)))
        return out


class WireMetrics(Collector):
    """One for the daemon; touched on the event loop alone."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.handshakes: Counter[str] = Counter()
        self.fd_requests: Counter[str] = Counter()
        self.closed: Counter[tuple[str, str]] = Counter()
        self.streams = 0
        self.lanes = 0
        self.data = 0
        self._latencies: dict[tuple[Road, str], Latency] = {}

    def latency(self, road: Road, operation: str) -> Latency:
        """Return the place where requests of that kind are counted."""
        found = self._latencies.get((road, operation))
        if found is None:
            found = self._latencies[road, operation] = Latency()
        return found

    def describe(self) -> Iterable[Metric]:
        """Nothing at registration: the first scrape tells."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        took = HistogramMetricFamily(
            "hoststage_request_seconds", "From a request's arrival to its answer", labels=["road", "operation"]
        )
        for (road, operation), latency in sorted(self._latencies.items()):
            took.add_metric([road, operation], latency.buckets(), latency.total)
        yield took
        yield _counted("hoststage_request_errors", "Requests that failed as a whole", "reason", self.errors)
        yield _counted("hoststage_handshakes", "Handshakes by result", "result", self.handshakes)
        yield _counted("hoststage_fd_requests", "Requests on the fd socket by result", "result", self.fd_requests)
        closed = CounterMetricFamily(
            "hoststage_connections_closed", "Connections that the daemon closed", labels=["road", "reason"]
        )
        for key, n in self.closed.items():
            closed.add_metric(list(key), n)
        yield closed
        open_now = GaugeMetricFamily("hoststage_connections", "Open connections", labels=["road"])
        open_now.add_metric(["stream"], self.streams)
        open_now.add_metric(["lane"], self.lanes)
        open_now.add_metric(["data"], self.data)
        yield open_now


def _counted(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, n in counts.items():
        family.add_metric([value], n)
    return family
