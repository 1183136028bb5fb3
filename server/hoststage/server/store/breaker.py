"""A circuit breaker around a store: a medium that fails or stalls costs misses and drops, not waiting.

``CircuitBreaker`` is the rule, without a clock; ``BreakerStore`` puts it around any ``Store``.

*Closed*: calls pass. Enough failures in a row, one call that takes far too long, or one still under way for that
long, open the breaker. *Open*: reads miss and writes fail at once, until the cool-down is over. *Half-open*: one call
at a time passes; a success closes the breaker, a failure opens it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hoststage.server.store.base import (
    BreakerState,
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    Store,
    StoreStats,
    WriteOutcome,
)

_MISS = PageReadResult(ReadOutcome.MISS, detail="the circuit breaker is open")
_FAILED = PageWriteResult(WriteOutcome.FAILED, "the circuit breaker is open")

_READ_PROOFS: frozenset[Enum] = frozenset({ReadOutcome.HIT, ReadOutcome.CORRUPT})
_WRITE_PROOFS: frozenset[Enum] = frozenset({WriteOutcome.STORED})


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When to open and when to try again. Times are seconds."""

    failures: int = 5
    """Failed calls in a row that open the breaker; a call fails when one of its pages is answered ``FAILED``."""
    cooldown_seconds: float = 5.0
    """How long it stays open before a call is let through to try."""
    stall_seconds: float = 30.0
    """A call that takes longer than this opens the breaker, even while it is still under way."""


class CallResult(Enum):
    """What a call says about the medium."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"
    """Nothing: all pages missed, or there was no room, which may be known without asking the medium."""


class CircuitBreaker:
    """The state of a breaker. Time is given to every method, as seconds of any steady clock."""

    def __init__(self, options: BreakerOptions | None = None) -> None:
        self._options = options or BreakerOptions()
        self._failures = 0
        self._opened_at: float | None = None
        self._probe: int | None = None
        self._calls: dict[int, float] = {}
        self._next = 0
        self.opened = 0
        """How often the breaker has opened."""

    def state(self, now: float) -> BreakerState:
        """Return the state at ``now``."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        if self._probe is not None or now - self._opened_at >= self._options.cooldown_seconds:
            return BreakerState.HALF_OPEN
        return BreakerState.OPEN

    def begin(self, now: float) -> int | None:
        """Ask to make a call; return its number for ``end``, or ``None`` when it must not be made."""
        if self._is_stalled(now) and self._opened_at is None:
            self._open(now)
        state = self.state(now)
        if state is BreakerState.OPEN or self._probe is not None:
            return None
        if state is BreakerState.HALF_OPEN and self._is_stalled(now):
            return None  # a medium that still hangs needs no second call to prove it
        self._next += 1
        self._calls[self._next] = now
        if state is BreakerState.HALF_OPEN:
            self._probe = self._next
        return self._next

    def end(self, call: int, now: float, result: CallResult) -> None:
        """Report how a call went. Calls from before the breaker opened do not close it."""
        stalled = now - self._calls.pop(call) > self._options.stall_seconds
        probing = call == self._probe
        if probing:
            self._probe = None
        bad = stalled or result is CallResult.BAD
        if probing and bad:
            self._open(now)
        elif probing and result is CallResult.GOOD:
            self._opened_at = None
            self._failures = 0
        elif self._opened_at is None and bad:
            self._failures += 1
            if stalled or self._failures >= self._options.failures:
                self._open(now)
        elif self._opened_at is None and result is CallResult.GOOD:
            self._failures = 0

    def forget(self, call: int) -> None:
        """End a call that raised: it was refused for its arguments, or its caller was cancelled."""
        del self._calls[call]
        if call == self._probe:
            self._probe = None

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._failures = 0
        self.opened += 1

    def _is_stalled(self, now: float) -> bool:
        oldest = next(iter(self._calls.values()), now)
        return now - oldest > self._options.stall_seconds


class BreakerStore:
    """Implements ``Store`` around another one. ``delete``, ``clear`` and ``close`` always pass.

    ``clock`` returns seconds; by default it is that of the event loop.
    """

    def __init__(
        self, store: Store, options: BreakerOptions | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._store = store
        self._breaker = CircuitBreaker(options)
        self._clock = clock or asyncio.get_running_loop().time
        self._rejected_reads = 0
        self._rejected_writes = 0

    async def exists(self, namespace: str, pool: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Ask the store; while the breaker is open, answer that nothing is there."""
        if self._breaker.state(self._clock()) is BreakerState.OPEN:
            return [None] * len(keys)
        return await self._store.exists(namespace, pool, keys)

    async def read_into(self, namespace: str, reads: Sequence[PageRead]) -> list[PageReadResult]:
        """Read; while the breaker is open, answer ``MISS``."""
        call = self._breaker.begin(self._clock())
        if call is None:
            self._rejected_reads += len(reads)
            return [_MISS] * len(reads)
        try:
            results = await self._store.read_into(namespace, reads)
        except BaseException:
            self._breaker.forget(call)
            raise
        outcomes = {result.outcome for result in results}
        self._breaker.end(call, self._clock(), _judge(outcomes, ReadOutcome.FAILED, _READ_PROOFS))
        return results

    async def write_from(self, namespace: str, writes: Sequence[PageWrite]) -> list[PageWriteResult]:
        """Write; while the breaker is open, answer ``FAILED``."""
        call = self._breaker.begin(self._clock())
        if call is None:
            self._rejected_writes += len(writes)
            return [_FAILED] * len(writes)
        try:
            results = await self._store.write_from(namespace, writes)
        except BaseException:
            self._breaker.forget(call)
            raise
        outcomes = {result.outcome for result in results}
        self._breaker.end(call, self._clock(), _judge(outcomes, WriteOutcome.FAILED, _WRITE_PROOFS))
        return results

    async def delete(self, namespace: str, pool: str, keys: Sequence[bytes]) -> int:
        """Delete, whatever the state."""
        return await self._store.delete(namespace, pool, keys)

    async def clear(self, namespace: str) -> int:
        """Clear, whatever the state."""
        return await self._store.clear(namespace)

    def stats(self) -> StoreStats:
        """Return the store's statistics, with those of the breaker and of the pages that it turned away."""
        stats = self._store.stats()
        return replace(
            stats,
            reads=stats.reads + self._rejected_reads,
            misses=stats.misses + self._rejected_reads,
            writes=stats.writes + self._rejected_writes,
            failed=stats.failed + self._rejected_writes,
            breaker=self._breaker.state(self._clock()),
            breaker_opened=self._breaker.opened,
            breaker_rejected=self._rejected_reads + self._rejected_writes,
        )

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()


def _judge(outcomes: Collection[Enum], failed: Enum, proofs: frozenset[Enum]) -> CallResult:
    if failed in outcomes:
        return CallResult.BAD
    return CallResult.GOOD if proofs.intersection(outcomes) else CallResult.NEUTRAL
