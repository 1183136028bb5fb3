"""The circuit breaker: when it opens, what it answers meanwhile, and how it closes again."""

from __future__ import annotations

import pytest

from hoststage.server.store import (
    BreakerOptions,
    BreakerState,
    BreakerStore,
    PageRead,
    PageWrite,
    ReadOutcome,
    Store,
    WriteOutcome,
)
from hoststage.server.store.breaker import CallResult, CircuitBreaker
from hoststage.server.store.memory import MemoryStore

NAMESPACE = "0f" * 32
OPTIONS = BreakerOptions(failures=3, cooldown_seconds=10.0, stall_seconds=30.0)


def fail(breaker: CircuitBreaker, now: float) -> None:
    call = breaker.begin(now)
    assert call is not None
    breaker.end(call, now, CallResult.BAD)


def opened(at: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(OPTIONS)
    for _ in range(OPTIONS.failures):
        fail(breaker, at)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(OPTIONS)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    call = breaker.begin(0.0)
    assert call is not None
    breaker.end(call, 0.0, CallResult.GOOD)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    fail(breaker, 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert breaker.begin(0.0) is None
    assert breaker.opened == 1


def test_misses_say_nothing_about_the_medium() -> None:
    breaker = CircuitBreaker(OPTIONS)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    call = breaker.begin(0.0)
    assert call is not None
    breaker.end(call, 0.0, CallResult.NEUTRAL)
    fail(breaker, 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_half_open_lets_one_call_through_and_closes_on_its_success() -> None:
    breaker = opened()
    assert breaker.begin(9.9) is None
    probe = breaker.begin(10.0)
    assert probe is not None
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    assert breaker.begin(10.0) is None
    breaker.end(probe, 10.1, CallResult.GOOD)
    assert breaker.state(10.1) is BreakerState.CLOSED


def test_half_open_opens_again_on_a_failure_and_waits_the_whole_cooldown() -> None:
    breaker = opened()
    fail(breaker, 10.0)
    assert breaker.state(19.9) is BreakerState.OPEN
    assert breaker.state(20.0) is BreakerState.HALF_OPEN
    assert breaker.opened == 2


def test_a_neutral_probe_leaves_it_half_open_for_the_next() -> None:
    breaker = opened()
    probe = breaker.begin(10.0)
    assert probe is not None
    breaker.end(probe, 10.0, CallResult.NEUTRAL)
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    assert breaker.begin(10.0) is not None


def test_a_probe_that_raised_does_not_block_the_next() -> None:
    breaker = opened()
    probe = breaker.begin(10.0)
    assert probe is not None
    breaker.forget(probe)
    assert breaker.begin(10.0) is not None


def test_a_call_still_under_way_for_too_long_opens_it_and_keeps_it_open() -> None:
    breaker = CircuitBreaker(OPTIONS)
    hanging = breaker.begin(0.0)
    assert hanging is not None
    assert breaker.begin(30.0) is not None
    assert breaker.begin(30.1) is None
    assert breaker.begin(50.0) is None, "the cool-down is over, but the medium still hangs"
    breaker.end(hanging, 60.0, CallResult.GOOD)


def test_a_slow_success_counts_as_a_stall() -> None:
    breaker = CircuitBreaker(OPTIONS)
    call = breaker.begin(0.0)
    assert call is not None
    breaker.end(call, 31.0, CallResult.GOOD)
    assert breaker.state(31.0) is BreakerState.OPEN


def write(key: bytes) -> PageWrite:
    return PageWrite("kv", key, bytes(16), memoryview(b"page"), 0, 4)


def read(key: bytes) -> PageRead:
    return PageRead("kv", key, memoryview(bytearray(4)), 0, 4)


async def test_an_open_breaker_answers_without_the_store_and_counts_it() -> None:
    inner = MemoryStore()
    now = [0.0]
    store = BreakerStore(inner, OPTIONS, clock=lambda: now[0])
    assert isinstance(store, Store)
    await store.write_from(NAMESPACE, [write(b"k")])
    inner.faults.on_read = lambda _: ReadOutcome.FAILED
    for _ in range(3):
        assert (await store.read_into(NAMESPACE, [read(b"k")]))[0].outcome is ReadOutcome.FAILED
    assert (await store.read_into(NAMESPACE, [read(b"k")]))[0].outcome is ReadOutcome.MISS
    assert (await store.write_from(NAMESPACE, [write(b"k")]))[0].outcome is WriteOutcome.FAILED
    assert await store.exists(NAMESPACE, "kv", [b"k"]) == [None]
    stats = store.stats()
    assert (stats.breaker, stats.breaker_opened, stats.breaker_rejected) == (BreakerState.OPEN, 1, 2)
    assert stats.reads == 4
    assert inner.stats().reads == 3
    inner.faults.on_read = None
    now[0] = 10.0
    assert (await store.read_into(NAMESPACE, [read(b"k")]))[0].outcome is ReadOutcome.HIT
    assert store.stats().breaker is BreakerState.CLOSED


async def test_misuse_passes_through_and_does_not_open_it() -> None:
    store = BreakerStore(MemoryStore(), BreakerOptions(failures=1))
    for _ in range(3):
        with pytest.raises(ValueError, match="namespace"):
            await store.read_into("nonsense", [read(b"k")])
    assert store.stats().breaker is BreakerState.CLOSED


async def test_a_full_store_does_not_open_it() -> None:
    inner = MemoryStore()
    inner.faults.on_write = lambda _: WriteOutcome.FULL
    store = BreakerStore(inner, BreakerOptions(failures=1))
    for _ in range(3):
        assert (await store.write_from(NAMESPACE, [write(b"k")]))[0].outcome is WriteOutcome.FULL
    assert store.stats().breaker is BreakerState.CLOSED
