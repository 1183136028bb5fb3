"""What a fence sees, and the row that registers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from hoststage.core.findings import Finding, NodeFacts, RefusalKind, Severity
from hoststage.core.sizing import Sizing
from hoststage.core.spans import source_of
from hoststage.core.stack import Mode, PayloadPath, Pool, PoolKind, Retraction, Stack, ceil_div

RETRACTION_SUBJECT = "retraction"
"""Subject of every finding about retraction: such a refusal takes the holds away, not the session (unless required)."""

INT64_MAX = (1 << 63) - 1

UNITS = ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


class Applies(Enum):
    """When a row is evaluated: once for the stack, for each mode, or for each mode where holds are wished for."""

    STACK = "stack"
    EACH_MODE = "each mode"
    BUFFER_ONLY = "buffer_only"
    RETRACTION = "retraction"


@dataclass(frozen=True, slots=True)
class ProtocolRanges:
    """Protocol versions that both sides speak, inclusive. The defaults meet."""

    client_min: int = 1
    client_max: int = 1
    server_min: int = 1
    server_max: int = 1

    @property
    def common(self) -> int | None:
        """The highest version that both speak, or None."""
        low, high = max(self.client_min, self.server_min), min(self.client_max, self.server_max)
        return high if low <= high else None


@dataclass(frozen=True, slots=True)
class Context:
    """What a fence may look at. `mode` is None for rows about the stack as such.

    staging: the sizes without holds. with_holds: the sizes with holds for retracted requests, or the
    same where none are wished for.
    """

    stack: Stack
    facts: NodeFacts
    protocol: ProtocolRanges
    mode: Mode | None
    staging: Sizing
    with_holds: Sizing

    @property
    def wants_holds(self) -> bool:
        return self.stack.retraction.retraction is Retraction.HOST_POOL

    @property
    def swa_pools(self) -> tuple[Pool, ...]:
        """Window pools with slots of their own, the first being the stack's SWA component and the others auxiliary."""
        return tuple(p for p in self.stack.of_kind(PoolKind.SWA) if not p.is_sidecar)

    @property
    def sidecars(self) -> tuple[Pool, ...]:
        return tuple(p for p in self.stack.pools if p.is_sidecar)

    def source(self, pool: Pool) -> Pool | None:
        """Return the pool whose slots `pool` counts in, or None where the mapping is broken."""
        return source_of(self.stack, pool)


Check = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: its id, when it applies, what it demands in short, and the function that judges it."""

    id: str
    applies: Applies
    demand: str
    check: Check


@dataclass(frozen=True, slots=True)
class Report:
    """Makes the findings of one row, so that its id and mode are said once."""

    rule: str
    mode: Mode | None

    def refused(self, subject: str, message: str, remedy: str, kind: RefusalKind, **values: int | str) -> Finding:
        return Finding(self.rule, Severity.REFUSED, subject, message, remedy, self.mode, kind, _bounded(values))

    def adjusted(self, subject: str, message: str, remedy: str = "", **values: int | str) -> Finding:
        return Finding(self.rule, Severity.ADJUSTED, subject, message, remedy, self.mode, values=_bounded(values))

    def notice(self, subject: str, message: str, remedy: str = "", **values: int | str) -> Finding:
        return Finding(self.rule, Severity.NOTICE, subject, message, remedy, self.mode, values=_bounded(values))


def _bounded(values: dict[str, int | str]) -> dict[str, int | str]:
    """Clamp numbers to 64 signed bits: a stack may be absurd, the wire's integers are not."""
    return {
        name: max(-INT64_MAX, min(INT64_MAX, value)) if isinstance(value, int) else value
        for name, value in values.items()
    }


def in_words(size: int, *, up: bool = False) -> str:
    """Return a size in words: bytes below a MiB, else the largest unit with one decimal, rounded down unless `up`."""
    if abs(size) < 1 << 20:
        return f"{size} bytes"
    unit, name = next((unit, name) for unit, name in UNITS if abs(size) >= unit)
    tenths = ceil_div(abs(size) * 10, unit) if up else abs(size) * 10 // unit
    whole, tenth = divmod(tenths, 10)
    return f"{'-' if size < 0 else ''}{whole}.{tenth} {name}"


def at_least(size: int) -> str:
    """Return a size in words, rounded up, for a remedy that must suffice."""
    return in_words(size, up=True)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Join names for a message, naming at most `most` and counting the rest."""
    every = list(names)
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def granted_path(ctx: Context) -> PayloadPath:
    """Return the first path in the client's order that the daemon offers; `PROTOCOL` has refused a stack without any."""
    return next((p for p in ctx.stack.paths if p in ctx.facts.paths), PayloadPath.INLINE)
