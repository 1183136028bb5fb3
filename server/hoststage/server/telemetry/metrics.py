"""Prometheus metrics, collected from the tier and the store at each scrape. Labels are of bounded cardinality."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hoststage.server.contract import TierFacts
from hoststage.server.store.base import BreakerState, Store, StoreStats

# Counter of the core: (metric, help, label or "").
_COUNTERS = {
    "reserve": ("hoststage_reservations", "Reservations of write slots by outcome", "outcome"),
    "commit": ("hoststage_commits", "Commits by the answer they got", "outcome"),
    "commit_ended": ("hoststage_commits_ended", "Accepted commits by how they ended", "outcome"),
    "pages_ended": ("hoststage_commit_pages", "Pages of accepted commits by how they ended", "outcome"),
    "load": ("hoststage_loads", "Loads by how they ended", "outcome"),
    "lookup": ("hoststage_lookups", "Lookups by result", "result"),
    "fetched_pages": ("hoststage_fetched_pages", "Pages read from the store by result", "result"),
    "store_retries": ("hoststage_store_retries", "Store writes tried again by reason", "reason"),
    "believed_pages": ("hoststage_believed_pages", "Pages not stored again because they were believed stored", ""),
    "beliefs_healed": ("hoststage_beliefs_healed", "Beliefs dropped after a miss", ""),
    "published_pages": ("hoststage_published_pages", "Pages published in host memory", ""),
    "publish_skipped": ("hoststage_publishes_skipped", "Commits not published for want of room", ""),
    "quarantined_slots": ("hoststage_quarantined_slots", "Write slots that went into quarantine", ""),
    "daemon_copies": ("hoststage_page_copies", "Pages that the daemon copied", ""),
    "single_flight_joins": ("hoststage_single_flight_joins", "Page loads that joined a fetch under way", ""),
    "hold": ("hoststage_hold_requests", "Requests for hold slots by outcome", "outcome"),
    "hold_seal": ("hoststage_hold_seals", "Holds sealed, or not, by outcome", "outcome"),
    "hold_restore": ("hoststage_hold_restores", "Restores of holds by outcome", "outcome"),
    "hold_ended": ("hoststage_holds_ended", "Holds by how they ended", "reason"),
    "revocations": ("hoststage_revocations", "Loads that clients were asked to give up because others waited", ""),
    "arena_lease": ("hoststage_arena_leases", "Arenas leased whole by whether they were populated before", "memory"),
    "evictions": ("hoststage_evicted_pages", "Resident pages evicted", ""),
    "listed_kept": (
        "hoststage_listed_pages_kept",
        "Pages that stayed in their slots because a lease board listed them",
        "",
    ),
}
_STORE_COUNTERS = (
    ("reads", "pages asked for"),
    ("hits", "pages found"),
    ("misses", "pages not found"),
    ("corrupt", "pages that did not match their checksum"),
    ("read_failed", "reads that failed"),
    ("read_bytes", "bytes read"),
    ("stored", "pages stored"),
    ("written_bytes", "bytes written"),
    ("full", "writes refused for want of room"),
    ("failed", "writes that failed"),
    ("evicted_pages", "pages evicted"),
    ("breaker_rejected", "requests rejected while the breaker was open"),
)


class TierCollector(Collector):
    """Turns facts into metrics."""

    def __init__(self, facts: Callable[[], TierFacts], store: Store | None, version: str) -> None:
        self._facts = facts
        self._store = store
        self._version = version

    def describe(self) -> Iterable[Metric]:
        """Nothing at registration: the first scrape tells."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        facts = self._facts()
        yield InfoMetricFamily("hoststage", "Version of the daemon", value={"version": self._version})
        yield _gauge("hoststage_budget_bytes", "Most that all arenas may take", facts.budget_bytes)
        yield _gauge("hoststage_granted_bytes", "Bytes of arenas, idle ones included", facts.granted_bytes)
        yield _gauge("hoststage_undrainable_commits", "Commits being retried", facts.undrainable_commits)
        yield from self._sessions(facts)
        yield from self._slots(facts)
        yield from self._holds(facts)
        yield from self._imports(facts)
        yield from self._counters(facts)
        if self._store is not None:
            yield from _store_metrics(self._store.stats())

    @staticmethod
    def _sessions(facts: TierFacts) -> Iterable[Metric]:
        sessions = GaugeMetricFamily("hoststage_sessions", "Sessions", labels=["state", "mode", "path"])
        counts: dict[tuple[str, str, str], int] = {}
        for s in facts.sessions:
            key = (s.state, s.mode, s.path)
            counts[key] = counts.get(key, 0) + 1
        for key, n in counts.items():
            sessions.add_metric(list(key), n)
        yield sessions
        yield _gauge("hoststage_read_leases", "Pages leased", sum(s.read_leases for s in facts.sessions))
        yield _gauge("hoststage_open_commits", "Commits not yet stored", sum(s.open_commits for s in facts.sessions))

    @staticmethod
    def _slots(facts: TierFacts) -> Iterable[Metric]:
        slots = GaugeMetricFamily("hoststage_slots", "Slots by state", labels=["pool", "arena", "state"])
        pinned = GaugeMetricFamily("hoststage_arena_bytes", "Bytes of arenas by pinning", labels=["arena", "pinned"])
        reserve = GaugeMetricFamily("hoststage_reserve_slots", "Slots that publishing never takes", labels=["pool"])
        by_state: dict[tuple[str, str, str], int] = {}
        by_pin: dict[tuple[str, str], int] = {}
        by_pool: dict[str, int] = {}
        for p in facts.pools:
            for state, n in p.by_state.items():
                key = (p.pool, p.kind, state)
                by_state[key] = by_state.get(key, 0) + n
            pin = (p.kind, p.pin.level)
            by_pin[pin] = by_pin.get(pin, 0) + p.slots * p.stride
            by_pool[p.pool] = by_pool.get(p.pool, 0) + p.reserve_slots
        for key, n in by_state.items():
            slots.add_metric(list(key), n)
        for pin, n in by_pin.items():
            pinned.add_metric(list(pin), n)
        for pool, n in by_pool.items():
            reserve.add_metric([pool], n)
        yield from (slots, pinned, reserve)

    @staticmethod
    def _holds(facts: TierFacts) -> Iterable[Metric]:
        holds = GaugeMetricFamily("hoststage_holds", "Holds by kind", labels=["kind"])
        holds.add_metric(["ordinary"], facts.holds.ordinary)
        holds.add_metric(["durable"], facts.holds.durable)
        slots = GaugeMetricFamily("hoststage_hold_slots", "Slots promised for holds", labels=["state"])
        slots.add_metric(["held"], facts.holds.slots_held)
        slots.add_metric(["free"], facts.holds.slots - facts.holds.slots_held)
        yield from (holds, slots)

    @staticmethod
    def _imports(facts: TierFacts) -> Iterable[Metric]:
        imports = facts.imports
        yield _gauge("hoststage_imported_bytes", "Memory of clients that is read and written in place", imports.bytes)
        yield _gauge("hoststage_imported_descriptors", "Descriptors kept for it", imports.descriptors)
        yield _gauge("hoststage_imported_descriptors_limit", "Descriptors that may be kept for it", imports.limit)

    @staticmethod
    def _counters(facts: TierFacts) -> Iterable[Metric]:
        for name, (metric, text, label) in _COUNTERS.items():
            family = CounterMetricFamily(metric, text, labels=[label] if label else [])
            found = {value: n for (counter, value), n in facts.counters.items() if counter == name}
            for value, n in (found or ({} if label else {"": 0})).items():
                family.add_metric([value] if label else [], n)
            yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _store_metrics(stats: StoreStats) -> Iterable[Metric]:
    yield _gauge("hoststage_store_pages", "Pages stored", stats.pages)
    yield _gauge("hoststage_store_bytes", "Room that they take", stats.bytes)
    yield _gauge("hoststage_store_limit_bytes", "Room that they may take", stats.limit_bytes)
    yield _gauge("hoststage_store_free_bytes", "Free room of the medium", stats.free_bytes)
    for field, text in _STORE_COUNTERS:
        metric = f"hoststage_store_{field}" if field.endswith("bytes") else f"hoststage_store_{field}_pages"
        yield CounterMetricFamily(
            metric.replace("_pages_pages", "_pages"), f"Store: {text}", value=getattr(stats, field)
        )
    breaker = GaugeMetricFamily("hoststage_store_breaker", "State of the store's circuit breaker", labels=["state"])
    for state in BreakerState:
        breaker.add_metric([state.value], stats.breaker is state)
    yield breaker


def make_registry(facts: Callable[[], TierFacts], store: Store | None, version: str) -> CollectorRegistry:
    """Return a registry with the daemon's own metrics and those of its process."""
    registry = CollectorRegistry()
    registry.register(TierCollector(facts, store, version))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry
