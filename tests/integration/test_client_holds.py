"""Holds between real processes: an owner that is killed, a daemon that is killed, a time that runs out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from hoststage.client import (
    DeadlineExceeded,
    HostStageError,
    Outcome,
    PayloadPath,
    Refused,
    RequestRejected,
    Retraction,
    RetractionWish,
    StackError,
    connect,
)
from tests.integration.daemon import Daemon, environment, eventually
from tests.integration.test_client_session import PAGE, SWA_PAGE, keys_of, rows_of, stack

TOKEN = "0123456789abcdef"
COUNTS = {"kv": 12, "swa": 5}

OWNER = """
import json, sys
from hoststage.client import connect
from tests.integration.test_client_holds import COUNTS, page_of, spec
address, model, token, durable, seal = sys.argv[1], sys.argv[2], sys.argv[3].encode(), sys.argv[4] == "1", sys.argv[5] == "1"
session = connect(address, stack=spec(model), timeout=20)
hold = session.hold(token, "r", 0, COUNTS, durable=durable, ttl_seconds=float(sys.argv[6]))
assert hold, hold.detail
for pool, views in hold.views.items():
    for i, view in enumerate(views):
        view[:] = page_of(pool, i)
if seal:
    hold.seal(b"resume at 190")
print("held", session.session_id, flush=True)
sys.stdin.read()
"""


def spec(model, path=PayloadPath.SHM, *, required=True):
    """A hybrid stack with holds of one request of 16 pages."""
    wish = RetractionWish(Retraction.HOST_POOL, required=required)
    return stack(model, path=path, swa=True, retraction=wish, largest_request_tokens=16 * 16)


def page_of(pool, i):
    """The bytes of a page, known to every process."""
    return bytes([i + 1 + (100 if pool == "swa" else 0)]) * (SWA_PAGE if pool == "swa" else PAGE)


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.stop()


@contextmanager
def owner(daemon, model, *, durable, seal=True, ttl=0.0):
    """A process that holds a request until it is killed; yields it and its session's number."""
    command = [sys.executable, "-c", OWNER, daemon.address, model, TOKEN, str(int(durable)), str(int(seal)), str(ttl)]
    here = environment()
    here["PYTHONPATH"] += os.pathsep + os.getcwd()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here, text=True)
    try:
        words = process.stdout.readline().split()
        assert words[:1] == ["held"], words
        yield process, int(words[1])
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def same(restored):
    """Whether every page is the one that the owner wrote."""
    return all(
        [bytes(v) for v in restored.views[pool]] == [page_of(pool, i) for i in range(n)] for pool, n in COUNTS.items()
    )


def restore(daemon, model, token=TOKEN):
    with connect(daemon.address, stack=spec(model), timeout=20) as session:
        found = session.restore(token.encode(), "r", 0)
        ok = bool(found) and same(found) and found.note == b"resume at 190" and found.taken_over
        found.release()
        return found.outcome, ok


def test_an_ordinary_hold_is_gone_within_a_second_of_its_owners_death(daemon):
    with owner(daemon, "ordinary", durable=False) as (process, session):
        assert daemon.status()["holds"]["ordinary"] == 1
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        started = time.monotonic()
        eventually(lambda: daemon.status()["holds"]["ordinary"] == 0)
        eventually(lambda: all(s["session"] != session for s in daemon.status()["sessions"]))
        # One second by the design; the rest is for a machine that is busy with other tests.
        assert time.monotonic() - started < 5
    assert restore(daemon, "ordinary") == (Outcome.MISS, False)
    assert daemon.status()["holds"]["slots_held"] == 0


def test_a_durable_hold_outlives_its_killed_owner_and_the_killed_daemon(daemon):
    with owner(daemon, "durable", durable=True) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert restore(daemon, "durable") == (Outcome.READY, True)
        assert restore(daemon, "durable", "someone else's.") == (Outcome.MISS, False)
    daemon.kill()
    daemon.start()
    eventually(lambda: daemon.status()["holds"]["durable"] == 1)
    assert restore(daemon, "durable") == (Outcome.READY, True)
    with connect(daemon.address, stack=spec("durable"), timeout=20) as session:
        session.restore(TOKEN.encode(), "r", 0).discard()
        eventually(lambda: daemon.status()["holds"]["durable"] == 0)
        assert not session.restore(TOKEN.encode(), "r", 0)
    eventually(lambda: daemon.status()["store"]["pages"] == 0)


def test_a_hold_that_was_never_sealed_is_nobodys(daemon):
    with owner(daemon, "unsealed", durable=True, seal=False) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert restore(daemon, "unsealed") == (Outcome.MISS, False)
    eventually(lambda: daemon.status()["holds"]["slots_held"] == 0)
    assert daemon.status()["store"]["pages"] == 0


def test_a_hold_expires_while_its_daemon_is_away(daemon):
    with owner(daemon, "ttl", durable=True, ttl=1.0):
        pass
    daemon.kill()
    time.sleep(1.1)
    daemon.start()
    assert restore(daemon, "ttl") == (Outcome.MISS, False)
    eventually(lambda: daemon.status()["store"]["pages"] == 0)
    counters = {(c["name"], c["label"]): c["value"] for c in daemon.status()["counters"]}
    assert counters["hold_ended", "expired"] == 1


def test_the_owner_token_is_in_no_file_of_the_store_and_in_no_log(daemon):
    with owner(daemon, "secret", durable=True):
        assert restore(daemon, "secret") == (Outcome.READY, True)
    daemon.stop()
    for root, _, files in os.walk(daemon.folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                assert TOKEN.encode() not in file.read(), name


def test_holds_are_granted_under_a_load_of_writes_and_reads(daemon):
    with connect(daemon.address, stack=spec("busy"), timeout=20) as session:
        keys, kv, swa = keys_of(8, "busy"), rows_of(8), rows_of(4, SWA_PAGE)
        assert session.store(keys, {"kv": kv, "swa": swa}).wait(20).ok
        tickets = [
            session.store(keys_of(8, f"busy{i}"), {"kv": rows_of(8), "swa": rows_of(4, SWA_PAGE)}) for i in range(8)
        ]
        loads = [session.load(keys) for _ in range(4)]
        assert all(loads)
        for attempt in range(5):
            with session.hold(b"me", "r", attempt, {"kv": 16, "swa": 5}) as hold:
                assert hold, hold.detail
                for view in (*hold.views["kv"], *hold.views["swa"]):
                    view[:] = bytes([attempt + 1]) * len(view)
                hold.seal()
            found = session.restore(b"me", "r", attempt)
            assert found
            assert not found.taken_over
            assert {bytes(v[:1]) for v in found.views["kv"]} == {bytes([attempt + 1])}
            found.discard()
        assert all(ticket.wait(20).ok for ticket in tickets)
        session.release(loads)
        metrics = daemon.get("/metrics")
        assert re.search(r'hoststage_hold_requests_total\{outcome="accepted"\} 5\.0', metrics)
        assert re.search(r'hoststage_hold_slots\{state="free"\} 21\.0', metrics)


def test_a_durable_hold_survives_a_reconnection_and_an_ordinary_one_does_not(daemon):
    with connect(daemon.address, stack=spec("again"), timeout=20) as session:
        for attempt, durable in ((0, False), (1, True)):
            with session.hold(b"me", "r", attempt, {"kv": 1, "swa": 1}, durable=durable) as hold:
                hold.views["kv"][0][:] = b"k" * PAGE
                hold.views["swa"][0][:] = b"s" * SWA_PAGE
                hold.seal()
        daemon.kill()
        daemon.start()

        def back():
            try:
                return session.ping(b"x", timeout=2)
            except HostStageError:
                return b""

        eventually(back, 20)
        assert not session.restore(b"me", "r", 0)
        found = session.restore(b"me", "r", 1)
        assert [bytes(v) for v in found.views["kv"]] == [b"k" * PAGE]
        found.discard()
        with pytest.raises(RequestRejected) as caught:
            session.discard(b"me", "r", 0)
        assert caught.value.reason == "HOLD_MISSING"


def test_over_the_inline_path_holds_are_refused_at_the_handshake_and_say_why(daemon):
    with pytest.raises(Refused) as caught:
        connect(daemon.address, stack=spec("inline", PayloadPath.INLINE), timeout=20)
    assert "RETRACTION_PATH" in {f.rule for f in caught.value.findings}
    with connect(daemon.address, stack=spec("inline", PayloadPath.INLINE, required=False), timeout=20) as session:
        assert session.grant.retraction is Retraction.NONE
        assert "RETRACTION_PATH" in {f.rule for f in session.findings}
        with pytest.raises(StackError, match="shared memory"):
            session.hold(b"me", "r", 0, {"kv": 1, "swa": 1})


def test_the_status_is_data(daemon):
    assert json.loads(daemon.get("/status.json"))["holds"].keys() >= {"ordinary", "durable", "slots_held", "slots"}


def test_a_restore_that_nobody_waited_for_leaves_no_lease(tmp_path):
    slow = Daemon(tmp_path, flags=["store.url=memory:?read_delay=1.5"]).start()
    try:
        with connect(slow.address, stack=spec("late"), timeout=20) as session:
            with session.hold(b"me", "r", 0, {"kv": 1, "swa": 1}, durable=True) as hold:
                hold.seal()
            with pytest.raises(DeadlineExceeded):
                session.restore(b"me", "r", 0, timeout=0.5)
            found = session.restore(b"me", "r", 0)
            assert found
            found.release()
            eventually(lambda: all(s["read_leases"] == 0 for s in slow.status()["sessions"]), 15)
    finally:
        slow.stop()
