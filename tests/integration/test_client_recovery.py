"""What a client sees when its daemon dies, comes back or stops reading, and what a daemon sees when a client does."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hoststage.client import (
    DaemonUnavailable,
    DeadlineExceeded,
    ForkedSession,
    HostStageError,
    Outcome,
    PayloadPath,
    SessionLost,
    connect,
)
from tests.integration.daemon import Daemon, environment, eventually
from tests.integration.test_client_session import PAGE, keys_of, rows_of, stack

PATHS = pytest.mark.parametrize("path", [PayloadPath.SHM, PayloadPath.INLINE])


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
        made.stop()


def until_served(session, seconds=15.0):
    """Ping until it answers; every failure on the way must be a typed one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return session.ping(b"x", timeout=2)
        except HostStageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@PATHS
def test_a_restarted_daemon_serves_the_same_session_object(daemon, path):
    keys, kv = keys_of(6, "restart"), rows_of(6)
    with connect(daemon.address, stack=stack("restart", path=path), timeout=10) as session:
        assert session.store(keys, {"kv": kv}).wait(20).ok
        before = session.session_id, session._core.link.welcome.boot_epoch
        daemon.kill()
        started = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            while True:
                session.lookup(keys, timeout=5)
        assert time.monotonic() - started < 10
        assert not session.connected
        daemon.start()
        assert until_served(session) == b"x"
        assert session.reconnects == 1
        assert (session.session_id, session._core.link.welcome.boot_epoch) != before
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
        assert session.store(keys_of(2, "after"), {"kv": rows_of(2)}).wait(20).outcome is Outcome.STORED


def test_the_housekeeper_reconnects_by_itself(daemon):
    with connect(daemon.address, stack=stack("idle"), timeout=10) as session:
        daemon.kill()
        eventually(lambda: not session.connected)
        daemon.start()
        eventually(lambda: session.connected and session.reconnects == 1)
        assert session.ping(b"p") == b"p"


def test_views_that_outlive_the_daemon_stay_readable_and_are_reported(daemon):
    keys, kv = keys_of(4, "views"), rows_of(4)
    with connect(daemon.address, stack=stack("views"), timeout=10) as session:
        assert session.store(keys, {"kv": kv}).wait(20).ok
        loaded = session.load(keys)
        pages = loaded.pages("kv")
        daemon.kill()
        daemon.start()
        until_served(session)
        assert [bytes(p) for p in pages] == [bytes(r) for r in kv]
        assert session.retained_bytes > 0
        del pages
        loaded.release()
        assert session.retained_bytes == 0


def test_calls_that_wait_fail_at_once_when_the_daemon_dies(daemon):
    with connect(daemon.address, stack=stack("waiting"), timeout=60) as session:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        failures = []

        def call():
            try:
                session.ping(timeout=60)
            except HostStageError as error:
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: session._core.link.router.waiting == 4)
        daemon.kill()
        for thread in threads:
            thread.join(10)
        assert len(failures) == 4
        assert all(isinstance(error, SessionLost) for error in failures), failures


def test_a_daemon_that_does_not_answer_costs_no_more_than_the_deadline(daemon):
    keys = keys_of(2, "stopped")
    with connect(daemon.address, stack=stack("stopped"), timeout=10) as session:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        for call in (
            lambda: session.lookup(keys, timeout=0.3),
            lambda: session.store(keys, {"kv": rows_of(2)}, timeout=0.3),
            lambda: session.load(keys, timeout=0.3),
        ):
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                call()
            assert time.monotonic() - started < 3
        os.kill(daemon.process.pid, signal.SIGCONT)
        # What the abandoned calls were granted has gone back: the whole arena can be reserved.
        room = session.grant.pool("kv").write_slots
        with session.reserve(keys_of(room, "all"), {"kv": room}, wait=5) as batch:
            assert batch, batch.detail
        kv = rows_of(2)
        assert session.store(keys_of(2, "more"), {"kv": kv}).wait(20).ok
        eventually(lambda: daemon.status()["sessions"][0]["read_leases"] == 0)


def test_a_missing_daemon_is_named_with_its_address(tmp_path):
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=r"nobody\.sock"):
        connect(f"unix://{tmp_path}/nobody.sock", stack=stack("none"), timeout=5)
    assert time.monotonic() - started < 6


def test_a_forked_child_cannot_use_the_session_and_does_no_harm(daemon):
    keys, kv = keys_of(2, "fork"), rows_of(2)
    with connect(daemon.address, stack=stack("fork"), timeout=10) as session:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                session.ping(timeout=5)
            except ForkedSession:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.store(keys, {"kv": kv}).wait(20).ok
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]


WORKER = """
import os, sys, time
from hoststage.client import connect
from tests.integration.test_client_session import keys_of, stack
session = connect(sys.argv[1], stack=stack("killed"), timeout=10)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
loaded = session.load(keys_of(8, "killed"))
batch = session.reserve(keys_of(3, "killed-write"), {"kv": 3})
assert loaded and batch
stream = session.load_groups(keys_of(8, "killed"))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_worker_frees_everything_though_its_child_lives_on(daemon):
    keys = keys_of(8, "killed")
    with connect(daemon.address, stack=stack("killed"), timeout=10) as session:
        assert session.store(keys, {"kv": rows_of(8)}).wait(20).ok
        env = environment()
        env["PYTHONPATH"] += os.pathsep + os.getcwd()
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, daemon.address], stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        try:
            assert worker.stdout.readline() == b"ready\n"
            mine = session.session_id
            others = [s for s in daemon.status()["sessions"] if s["session"] != mine]
            assert others[0]["read_leases"] >= 8
            worker.kill()
            killed = time.monotonic()
            eventually(lambda: [s["session"] for s in daemon.status()["sessions"]] == [mine])
            assert time.monotonic() - killed < 3
            with session.load(keys) as loaded:
                assert loaded
                assert len(loaded.pages("kv")[0]) == PAGE
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)
