"""A daemon that is killed, stopped and started again, under workers that come, go and stay."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from hoststage.client import HostStageError, Mode, Outcome, RequestRejected, SessionLost, connect
from hoststage.v1 import ops
from tests.integration.daemon import Daemon, eventually
from tests.life_support import (
    check_loaded,
    keys_of,
    no_new_shared_files,
    pages,
    sessions,
    shared_files,
    slots_in_use,
    stack,
    worker,
)

POOLS = ("kv", "indexer", "swa")


@pytest.fixture
def daemon(tmp_path):
    before = shared_files()
    made = Daemon(tmp_path).start()
    yield made
    if made.process.poll() is None:
        made.stop()
    no_new_shared_files(before)


def everything(keys, writer, swa_from=None):
    n = len(keys) - 4 if swa_from is None else swa_from
    return {
        "kv": pages("kv", keys, writer),
        "indexer": pages("indexer", keys, writer),
        "swa": pages("swa", keys[n:], writer),
    }


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_what_one_worker_stored_another_finds_though_the_daemon_was_killed_between(daemon, mode):
    model = f"between-{mode.value}"
    keys = keys_of(12, model)
    spec = stack(model, mode, pools=POOLS)
    with connect(daemon.address, stack=spec, timeout=20) as first:
        assert first.store(keys, everything(keys, "first")).wait(20).outcome is Outcome.STORED
    daemon.kill()
    daemon.start()
    with connect(daemon.address, stack=spec, timeout=20) as second:
        match = second.lookup(keys, pin_seconds=5)
        assert match.longest == 12
        with second.load(keys, pin=match) as loaded:
            assert check_loaded(loaded, keys) == 12 + 12 + 4
    assert not slots_in_use(daemon)


@pytest.mark.parametrize("stop", ["kill", "stop"])
def test_a_client_outlives_its_daemon_with_typed_errors_and_without_a_new_object(daemon, stop):
    model = f"outlive-{stop}"
    with connect(daemon.address, stack=stack(model, pools=POOLS), timeout=5) as session:
        keys = keys_of(8, model)
        assert session.store(keys, everything(keys, "one")).wait(20).ok
        stopping = threading.Event()
        strange, slowest, errors = [], [0.0], [0]

        def work():
            while not stopping.is_set():
                start = time.monotonic()
                try:
                    with session.load(keys, timeout=2) as loaded:
                        if loaded:
                            check_loaded(loaded, keys)
                except HostStageError:
                    errors[0] += 1
                    time.sleep(0.01)
                except BaseException as error:
                    strange.append(error)
                    return
                slowest[0] = max(slowest[0], time.monotonic() - start)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        getattr(daemon, stop)()
        eventually(lambda: errors[0] > 3)
        daemon.start()
        eventually(lambda: session.connected and session.reconnects)
        with session.load(keys, timeout=5) as loaded:
            assert check_loaded(loaded, keys) == 20
        stopping.set()
        for thread in threads:
            thread.join(10)
        assert not strange
        # The deadline is 2 seconds; the rest is a loaded machine's.
        assert slowest[0] < 6
    assert not slots_in_use(daemon)


def test_slots_and_generations_of_before_are_refused(daemon):
    model = "stale"
    with connect(daemon.address, stack=stack(model), timeout=10) as session:
        keys = keys_of(3, model)
        old = session.reserve(keys, {"kv": 3})
        slots = old._slots
        daemon.kill()
        daemon.start()
        eventually(lambda: session.connected and session.reconnects)
        with pytest.raises(HostStageError):
            old.commit(timeout=5)
        # Whoever sends them all the same, over the new connection, is refused too; even where the same slots are reserved again.
        new = session.reserve(keys, {"kv": 3})
        assert new
        span = ops.Span(b"".join(keys), 32, (ops.PoolRange(0, 0, 3),))
        link = session._core.link
        with pytest.raises(RequestRejected, match="generation"):
            link.call(ops.Commit(span, slots), ops.CommitReply, session._core.deadline(5))
        new.abort()
        assert not session.lookup(keys)
        eventually(lambda: not slots_in_use(daemon))


def test_memory_that_clients_of_a_killed_daemon_still_map_counts(daemon):
    model = "retained"
    keys = keys_of(8, model)
    with connect(daemon.address, stack=stack(model), timeout=10) as session:
        assert session.store(keys, {"kv": pages("kv", keys, "w")}).wait(20).ok
        loaded = session.load(keys)
        views = loaded.pages("kv")
        daemon.kill()
        daemon.start()
        eventually(lambda: session.connected and session.reconnects)
        held = session.retained_bytes
        assert held > 0
        mine = sessions(daemon)[session.session_id]
        assert daemon.status()["granted_bytes"] >= held + mine["write_bytes"]
        assert [bytes(v) for v in views] == pages("kv", keys, "w")
        del views
        loaded.release()


def test_sigterm_stores_what_was_accepted(tmp_path):
    """Commits that were answered ACCEPTED are in the files after a clean stop, however slowly the client asks."""
    daemon = Daemon(tmp_path, flags=["staging.drain_pages=4"]).start()
    try:
        model = "drain"
        batches = [keys_of(4, f"{model}/{i}") for i in range(12)]
        with connect(daemon.address, stack=stack(model), timeout=20) as session:
            tickets = [session.store(keys, {"kv": pages("kv", keys, "w")}) for keys in batches]
            daemon.process.send_signal(signal.SIGTERM)
            for ticket in tickets:
                # The daemon may end before the last word was read; what it had accepted is stored all the same.
                with suppress(SessionLost):
                    assert ticket.wait(20).outcome is Outcome.STORED
            assert daemon.process.wait(40) == 0
        daemon.start()
        with connect(daemon.address, stack=stack(model), timeout=20) as session:
            for keys in batches:
                with session.load(keys) as loaded:
                    assert check_loaded(loaded, keys) == 4
    finally:
        daemon.stop()


def test_a_store_that_cannot_end_does_not_hold_up_a_stop_beyond_its_grace(tmp_path):
    daemon = Daemon(tmp_path, store="memory:?write_delay=60", flags=["shutdown.grace=1"]).start()
    session = connect(daemon.address, stack=stack("stuck"), timeout=10)
    keys = keys_of(2, "stuck")
    ticket = session.store(keys, {"kv": pages("kv", keys, "w")})
    start = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    try:
        # The grace of a second, and ten for what does not end: then without ceremony.
        assert daemon.process.wait(25) == 1
        assert time.monotonic() - start < 20
        with pytest.raises(HostStageError):
            ticket.wait(5)
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
        session.close()


def test_a_daemon_killed_under_workers_at_every_point_comes_back_whole(daemon):
    """Workers with reservations, half-written slots, loads and leases see the daemon die; the next one is empty and consistent."""
    model = "under"
    there = keys_of(8, f"{model}/there")
    with connect(daemon.address, stack=stack(model), timeout=10) as session:
        assert session.store(there, {"kv": pages("kv", there, "w")}).wait(20).ok
        with worker("everything", daemon.address, model, "buffer_only") as victim:
            daemon.kill()
            daemon.start()
            # The worker's housekeeper comes back by itself, with the views of its old load still mapped.
            eventually(lambda: sorted(s["worker"] for s in sessions(daemon).values()) == ["", "everything"])
            assert not slots_in_use(daemon)
            for name in ("reserved", "half_copied"):
                assert not session.lookup(keys_of(5, f"{model}/{name}"), timeout=10)
            with session.load(there, timeout=10) as loaded:
                assert check_loaded(loaded, there) == 8
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait(10)
            eventually(lambda: len(sessions(daemon)) == 1)
    assert not slots_in_use(daemon)
