"""What a run of the benchmark yields: rows, each with every parameter and every figure that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a row tells about: the product, a bound of the machine, another product, a target, a thing that was not measured, or the machine."""

    PRODUCT = "product"
    CEILING = "ceiling"
    PEER = "peer"
    TARGET = "target"
    SKIPPED = "skipped"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a measurement. `batch`: pages of each pool in one call. `path`, `mode`, `store` as the daemon knows them."""

    page_bytes: int = 1 << 20
    batch: int = 1
    pools: int = 1
    sessions: int = 1
    mode: str = "buffer_only"
    path: str = "shm"
    store: str = "memory:"
    verify: bool = False

    @property
    def pages(self) -> int:
        """Pages of one call, all pools together."""
        return self.batch * self.pools

    @property
    def bytes(self) -> int:
        """Bytes of one call."""
        return self.pages * self.page_bytes

    def but(self, **changes: Any) -> Shape:
        """Return the shape with some parameters changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Costs:
    """What calls cost besides time. CPU in core-seconds, memory in bytes, copies per page moved; None: not measured."""

    daemon_cpu_seconds: float | None = None
    client_cpu_seconds: float | None = None
    daemon_copies: float | None = None
    client_copies: float | None = None
    daemon_rss_bytes: int | None = None
    client_rss_bytes: int | None = None


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. Times are of one call, in microseconds; `noise` is the interquartile range over the median.

    gb_per_s: 10^9 bytes of pages a second at the median call. daemon_cpu_s_per_gb, client_cpu_s_per_gb: core-seconds a GB of pages. copies_per_page: by
    daemon and client together. A target's row has `value`, its `bound` (value must be at least or at most that, see `relation`) and `met`.
    """

    kind: Kind
    case: str
    subject: str
    operation: str
    page_bytes: int | None = None
    batch: int | None = None
    pools: int | None = None
    sessions: int | None = None
    mode: str | None = None
    path: str | None = None
    store: str | None = None
    verify: bool | None = None
    calls: int = 0
    gb_per_s: float | None = None
    pages_per_s: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    noise: float | None = None
    daemon_cpu_s_per_gb: float | None = None
    client_cpu_s_per_gb: float | None = None
    daemon_copies_per_page: float | None = None
    client_copies_per_page: float | None = None
    copies_per_page: float | None = None
    daemon_rss_bytes: int | None = None
    client_rss_bytes: int | None = None
    value: float | None = None
    unit: str | None = None
    relation: str | None = None
    bound: float | None = None
    met: bool | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return every field, None included."""
        return asdict(self)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest rank. Raises `ValueError` without samples."""
    if not samples:
        raise ValueError("a percentile of nothing; measure at least once")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100).__int__() - 1))]


def noise_of(samples: Sequence[float]) -> float:
    """Return the interquartile range as a part of the median: how much the machine disturbed the measurement."""
    middle = percentile(samples, 50)
    return (percentile(samples, 75) - percentile(samples, 25)) / middle if middle > 0 else 0.0


def measured(
    kind: Kind,
    case: str,
    subject: str,
    operation: str,
    shape: Shape,
    seconds: Sequence[float],
    costs: Costs = NO_COSTS,
    note: str = "",
) -> Row:
    """Return the row of a series of calls, each of `shape.pages` pages that took `seconds[i]`."""
    middle = statistics.median(seconds)
    moved = shape.bytes * len(seconds) / 1e9
    copies = None
    if costs.daemon_copies is not None and costs.client_copies is not None:
        copies = costs.daemon_copies + costs.client_copies

    def per_gb(value: float | None) -> float | None:
        return None if value is None else _round(value / moved)

    return Row(
        kind=kind,
        case=case,
        subject=subject,
        operation=operation,
        page_bytes=shape.page_bytes,
        batch=shape.batch,
        pools=shape.pools,
        sessions=shape.sessions,
        mode=shape.mode if kind is Kind.PRODUCT else None,
        path=shape.path if kind is Kind.PRODUCT else None,
        store=shape.store if kind is Kind.PRODUCT else None,
        verify=shape.verify,
        calls=len(seconds),
        gb_per_s=_round(shape.bytes * shape.sessions / middle / 1e9),
        pages_per_s=_round(shape.pages * shape.sessions / middle),
        p50_us=_round(middle * 1e6),
        p95_us=_round(percentile(seconds, 95) * 1e6),
        p99_us=_round(percentile(seconds, 99) * 1e6),
        noise=_round(noise_of(seconds)),
        daemon_cpu_s_per_gb=per_gb(costs.daemon_cpu_seconds),
        client_cpu_s_per_gb=per_gb(costs.client_cpu_seconds),
        daemon_copies_per_page=_round(costs.daemon_copies),
        client_copies_per_page=_round(costs.client_copies),
        copies_per_page=_round(copies),
        daemon_rss_bytes=costs.daemon_rss_bytes,
        client_rss_bytes=costs.client_rss_bytes,
        note=note,
    )


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def at_least(case: str, what: str, value: float, bound: float, unit: str = "×", note: str = "") -> Row:
    """Return the row of a target that is met by `value >= bound`."""
    return _target(case, what, value, bound, unit, "≥", value >= bound, note)


def at_most(case: str, what: str, value: float, bound: float, unit: str = "×", note: str = "") -> Row:
    """Return the row of a target that is met by `value <= bound`."""
    return _target(case, what, value, bound, unit, "≤", value <= bound, note)


def _target(case: str, what: str, value: float, bound: float, unit: str, relation: str, met: bool, note: str) -> Row:
    return Row(
        Kind.TARGET,
        case,
        "hoststage",
        what,
        value=_round(value),
        unit=unit,
        relation=relation,
        bound=bound,
        met=met,
        note=note,
    )


def skipped(case: str, subject: str, reason: str) -> Row:
    """Return the row of what was not measured, and why."""
    return Row(Kind.SKIPPED, case, subject, "", note=f"not measured: {reason}")


def machine(note: str) -> Row:
    """Return the row that tells what the figures were measured on."""
    return Row(Kind.MACHINE, "machine", "machine", "", note=note)
