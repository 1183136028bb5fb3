"""The client when room is short, when it is interrupted, and with pools that have no host pages."""

import hashlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hoststage.client import (
    HostStageError,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Outcome,
    PayloadPath,
    Placement,
    PoolKind,
    PoolSpec,
    RequestRejected,
    StackSpec,
    connect,
)
from tests.integration.daemon import Daemon, environment, eventually

PAGE = 8192
KV = PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=64)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d")).start()
    yield made
    made.stop()


def stack(model, *more, mode=Mode.BUFFER_ONLY):
    return StackSpec(Identity(model), (KV, *more), modes=(ModeWish(mode, True),), paths=(PayloadPath.SHM,))


def keys_of(n, seed):
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]


def pages(n):
    return {"kv": np.ones((n, PAGE), dtype=np.uint8)}


def write_slots(session):
    return session.grant.pools[0].write_slots


def test_slots_kept_ahead_never_starve_a_store_of_the_whole_arena(daemon):
    with connect(daemon.address, stack=stack("credits"), timeout=5, credits=8) as session:
        most = write_slots(session)
        # Each commit is granted as many slots as it took; kept, they would soon be the whole arena.
        for i, n in enumerate([most // 2, most // 3, most // 2, most - 2, 5, most]):
            assert session.store(keys_of(n, f"c{i}"), pages(n)).wait(10).outcome is Outcome.STORED


def test_slots_kept_ahead_are_there_for_who_needs_them_beside_what_is_being_written(daemon):
    with connect(daemon.address, stack=stack("beside"), timeout=5, credits=8) as session:
        most = write_slots(session)
        with session.reserve(keys_of(most - 10, "long"), {"kv": most - 10}) as long:
            assert long
            for i in range(4):
                # Two slots are free and eight kept ahead, or again so.
                eventually(lambda: session._core.link.credits.held(0) == 8)
                with session.reserve(keys_of(9, f"b{i}"), {"kv": 9}) as batch:
                    assert batch, batch.detail
                eventually(lambda: session._core.link.credits.held(0) == 8)
                assert session.store(keys_of(9, f"s{i}"), pages(9)).wait(5).outcome is Outcome.STORED


def test_a_store_without_room_is_a_dropped_store_and_no_error(daemon):
    with connect(daemon.address, stack=stack("full"), timeout=5) as session:
        most = write_slots(session)
        batch = session.reserve(keys_of(most, "all"), {"kv": most})
        assert batch
        assert session.store(keys_of(4, "late"), pages(4), timeout=0.5).wait(5).outcome is Outcome.POOL_FULL
        batch.abort()
        assert session.store(keys_of(most, "then"), pages(most)).wait(10).outcome is Outcome.STORED


def test_a_pool_that_stays_on_the_device_needs_no_memory_here(daemon):
    ring = PoolSpec(
        "swa",
        PoolKind.SWA,
        PAGE,
        16,
        sliding_window=64,
        layout=KvLayout.UNIFIED_KV,
        placement=Placement.DEVICE_ONLY,
    )
    with connect(daemon.address, stack=stack("ring", ring, mode=Mode.CACHE), timeout=5) as session:
        assert session.store(keys_of(3, "ring"), pages(3)).wait(10).outcome is Outcome.STORED


class Interrupt(BaseException):
    """What a signal handler raises, in place of `KeyboardInterrupt`, which pytest would take for its own."""


@pytest.fixture
def interrupt_in():
    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_leaks_no_slots_and_leaves_other_threads_served(daemon, interrupt_in):
    with connect(daemon.address, stack=stack("interrupt"), timeout=5) as session:
        most = write_slots(session)
        stop, wrong = threading.Event(), []

        def look():
            while not stop.is_set():
                try:
                    session.lookup(keys_of(2, "none"))
                except HostStageError as error:
                    # The one error allowed: an interruption in the few microseconds of reading ends the connection, openly.
                    if "interrupted" not in str(error) and "away" not in str(error):
                        wrong.append(error)
                        return

        batch = session.reserve(keys_of(most, "all"), {"kv": most})
        assert batch
        other = threading.Thread(target=look)
        other.start()
        interrupted = 0
        for i in range(15):
            try:
                interrupt_in(0.02)
                session.store(keys_of(10, f"i{i}"), pages(10), timeout=1.0)
            except Interrupt:
                interrupted += 1
            except HostStageError as error:
                assert "interrupted" in str(error) or "away" in str(error)  # noqa: PT017 - any other is the bug
            finally:
                interrupt_in(0)
        stop.set()
        other.join(10)
        assert not other.is_alive()
        assert interrupted
        assert not wrong
        batch.abort()
        del batch
        deadline = time.monotonic() + 10
        outcome = None
        while outcome is not Outcome.STORED and time.monotonic() < deadline:
            # What the interrupted reservations queued for comes, is given back, and all of the arena is there again.
            outcome = session.store(keys_of(most, "end"), pages(most), timeout=3).wait(5).outcome
        assert outcome is Outcome.STORED


def test_a_store_from_credits_that_is_rejected_says_so_by_its_ticket_and_loses_no_slot(daemon):
    with connect(daemon.address, stack=stack("rejected"), timeout=5, credits=8) as session:
        free = write_slots(session)
        key = keys_of(1, "twice")[0]
        ticket = session.store([key, key], pages(2))
        with pytest.raises(RequestRejected, match="twice"):
            ticket.wait(5)
        ticket.wait_accepted(5)
        assert ticket.outcome is Outcome.CANCELLED
        # Nothing was taken: the whole arena can be had again.
        assert session.store(keys_of(free, "after"), pages(free)).wait(10).outcome is Outcome.STORED


def test_a_store_from_credits_is_accepted_before_it_is_stored(daemon):
    with connect(daemon.address, stack=stack("accepted"), timeout=5, credits=8) as session:
        for i in range(20):
            ticket = session.store(keys_of(4, f"a{i}"), pages(4))
            ticket.wait_accepted(5)
            assert ticket.outcome in (Outcome.PENDING, Outcome.STORED)
            assert ticket.wait(10).outcome is Outcome.STORED


def test_stores_from_credits_that_a_draining_daemon_refuses_give_their_slots_back(tmp_path):
    made = Daemon(tmp_path).start()
    try:
        with connect(made.address, stack=stack("drains"), timeout=5, credits=8) as session:
            command = [sys.executable, "-m", "hoststage.cli.main", "drain", "--socket", str(made.socket)]
            subprocess.run(command, env=environment(), check=True, timeout=60, capture_output=True)
            for i in range(6):
                assert session.store(keys_of(4, f"d{i}"), pages(4)).wait(5).outcome is Outcome.DRAINING
            eventually(lambda: reserved(made) == 0)
    finally:
        made.stop()


def reserved(made):
    """Write slots that the sessions hold."""
    return sum(p["by_state"].get("reserved", 0) for p in made.status()["pools"] if p["session"])
