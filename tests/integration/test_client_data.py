"""The client's inline path on data connections: the same pages, faster; and the gRPC stream where there are none to be had."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from hoststage.client import (
    DeadlineExceeded,
    HostStageError,
    Mode,
    Outcome,
    PayloadPath,
    ScatteredPages,
    StackError,
    connect,
)
from tests.integration.daemon import Daemon, environment, eventually
from tests.integration.test_client_session import PAGE, SWA_PAGE, keys_of, rows_of, stack

BOTH = pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def tcp():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, tcp):
    flags = [f"listen.tcp={tcp}", "listen.data_tcp=127.0.0.1:0"]
    made = Daemon(tmp_path_factory.mktemp("d"), flags=flags).start()
    yield made
    made.stop()


def inline(model, mode=Mode.CACHE, **more):
    return stack(model, mode, PayloadPath.INLINE, slots=256, **more)


def carried(daemon, road):
    """Requests with payload that came by a road."""
    names = {"data": ("store", "load"), "stream": ("inline_store", "inline_load")}[road]
    total = 0.0
    for line in daemon.get("/metrics").splitlines():
        if any(line.startswith(f'hoststage_request_seconds_count{{operation="{n}",road="{road}"}}') for n in names):
            total += float(line.split()[-1])
    return total


def round_trip(address, spec, n=12):
    """Store and load back in every form that rows may have."""
    keys, kv, swa = keys_of(n, spec.identity.model), rows_of(n), rows_of(4, SWA_PAGE)
    with connect(address, stack=spec, timeout=20) as session:
        assert session.store(keys[:8], {"kv": list(kv[:8]), "swa": swa}).wait(20).ok
        later = session.store(keys, {"kv": kv, "swa": [bytes(row) for row in swa]}).wait(20)
        assert (later.outcome, later.pages) == (Outcome.STORED, n - 8 + 4)
        assert session.store(keys, {"kv": kv, "swa": swa}).wait(20).outcome is Outcome.BELIEVED_STORED
        with session.load(keys) as loaded:
            assert (loaded.prefix, loaded.first("kv"), loaded.first("swa")) == (n, 0, n - 4)
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
            assert [bytes(p) for p in loaded.pages("swa")] == [bytes(r) for r in swa]
        into = {"kv": np.zeros((n + 2, PAGE), np.uint8), "swa": [bytearray(SWA_PAGE) for _ in range(4)]}
        assert session.load(keys, into=into).prefix == n
        assert np.array_equal(into["kv"][:n], kv)
        assert not into["kv"][n:].any()
        assert [bytes(b) for b in into["swa"]] == [bytes(r) for r in swa]
        layers = np.zeros((3, n, PAGE // 4), np.uint8), np.zeros((n, PAGE - 3 * (PAGE // 4)), np.uint8)
        sizes = np.array([PAGE // 4] * 3 + [PAGE - 3 * (PAGE // 4)], np.int64)
        places = [layer.ctypes.data + np.arange(n) * (PAGE // 4) for layer in layers[0]]
        places.append(layers[1].ctypes.data + np.arange(n) * int(sizes[-1]))
        scattered = ScatteredPages(np.stack(places, axis=1).astype(np.int64), sizes, layers)
        assert session.load(keys, into={"kv": scattered}).prefix == n
        assert np.array_equal(np.concatenate([*layers[0], layers[1]], axis=1), kv)
        again = keys_of(n, spec.identity.model + "/again")
        assert session.store(again, {"kv": scattered, "swa": swa}).wait(20).ok
        with session.load(again) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
        assert session.load(keys_of(3, "nowhere")).outcome is Outcome.MISS


@BOTH
def test_every_form_of_rows_crosses_a_data_connection(daemon, mode):
    before = carried(daemon, "data"), carried(daemon, "stream")
    round_trip(daemon.address, inline(f"forms-{mode.value}", mode, swa=True))
    assert carried(daemon, "data") >= before[0] + 7
    assert carried(daemon, "stream") == before[1]


def test_clients_of_other_hosts_have_a_port_for_it(daemon, tcp):
    before = carried(daemon, "data"), carried(daemon, "stream")
    round_trip(tcp, inline("tcp", swa=True))
    assert carried(daemon, "data") >= before[0] + 7
    assert carried(daemon, "stream") == before[1]


@pytest.mark.parametrize("road", ["unix", "tcp"])
def test_without_data_sockets_pages_travel_on_the_stream(tmp_path, caplog, road):
    place = f"127.0.0.1:{free_port()}"
    daemon = Daemon(tmp_path, flags=[f"listen.tcp={place}"]).start()
    try:
        # A container that has the daemon's socket alone; and a daemon that has no port for data.
        (tmp_path / "h-data.sock").unlink()
        with caplog.at_level(logging.WARNING, "hoststage"):
            round_trip(daemon.address if road == "unix" else place, inline("stream", swa=True))
        assert carried(daemon, "data") == 0
        assert carried(daemon, "stream") >= 7
        warnings = [r for r in caplog.records if "no data connection" in r.message]
        assert len(warnings) == (road == "unix")
    finally:
        daemon.stop()


def test_pages_of_many_megabytes_cross_whole(daemon):
    page = 6_000_001
    keys, kv = keys_of(2, "large"), rows_of(2, page)
    with connect(
        daemon.address, stack=stack("large", path=PayloadPath.INLINE, page=page, slots=8), timeout=30
    ) as session:
        assert session.store(keys, {"kv": kv}).wait(30).ok
        into = np.zeros((2, page), np.uint8)
        assert session.load(keys, into={"kv": into})
        assert np.array_equal(into, kv)


def test_more_threads_than_connections_take_turns(daemon):
    failures = []
    with connect(daemon.address, stack=inline("threads"), timeout=30) as session:

        def work(i):
            try:
                for turn in range(6):
                    keys, kv = keys_of(3, f"{i}/{turn}"), rows_of(3)
                    assert session.store(keys, {"kv": kv}).wait(30).ok
                    into = np.zeros((3, PAGE), np.uint8)
                    assert session.load(keys, into={"kv": into})
                    assert np.array_equal(into, kv)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        most = session._core.link.welcome.limits.max_data_connections
        assert 1 < len(session._core.link.data._all) <= most


def test_rows_that_are_too_few_fail_before_a_byte_is_written(daemon):
    with connect(daemon.address, stack=inline("few"), timeout=20) as session:
        keys, kv = keys_of(4, "few"), rows_of(4)
        assert session.store(keys, {"kv": kv}).wait(20).ok
        short = np.zeros((3, PAGE), np.uint8)
        with pytest.raises(StackError, match="4 pages were loaded"):
            session.load(keys, into={"kv": short})
        assert not short.any()
        assert session.load(keys).prefix == 4
        leases = lambda: [s["read_leases"] for s in daemon.status()["sessions"] if s["session"] == session.session_id]  # noqa: E731
        eventually(lambda: leases() == [0])


def test_a_daemon_that_hangs_costs_a_call_its_deadline_and_the_next_one_nothing(tmp_path):
    daemon = Daemon(tmp_path).start()
    try:
        with connect(daemon.address, stack=inline("hang"), timeout=20) as session:
            keys, kv = keys_of(4, "hang"), rows_of(4)
            assert session.store(keys, {"kv": kv}).wait(20).ok
            daemon.process.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded):
                session.load(keys, timeout=0.5)
            with pytest.raises(DeadlineExceeded):
                session.store(keys_of(2, "later"), {"kv": kv[:2]}, timeout=0.5)
            daemon.process.send_signal(signal.SIGCONT)
            assert session.load(keys, timeout=20).prefix == 4
            assert session.store(keys_of(2, "later"), {"kv": kv[:2]}, timeout=20).wait(20).ok
    finally:
        daemon.process.send_signal(signal.SIGCONT)
        daemon.stop()


def test_a_restarted_daemon_is_found_again_and_until_then_errors_are_typed(tmp_path):
    daemon = Daemon(tmp_path).start()
    keys, kv = keys_of(6, "restart"), rows_of(6)
    with connect(daemon.address, stack=inline("restart", Mode.BUFFER_ONLY), timeout=10) as session:
        assert session.store(keys, {"kv": kv}).wait(20).ok
        daemon.kill()
        with pytest.raises(HostStageError):
            session.load(keys, timeout=5)
        daemon.start()

        def loaded():
            try:
                return session.load(keys, timeout=5).prefix == 6
            except HostStageError:
                return False

        eventually(loaded, 20)
    daemon.stop()


def test_pages_outside_imported_memory_cross_a_data_connection_too(daemon):
    before = carried(daemon, "data"), carried(daemon, "stream")
    spec = stack("beside-imported", path=PayloadPath.IMPORTED)
    keys, kv = keys_of(5, "beside"), rows_of(5)
    with connect(daemon.address, stack=spec, timeout=20) as session:
        assert session.grant.path is PayloadPath.IMPORTED
        assert session.store(keys, {"kv": kv}).wait(20).outcome is Outcome.STORED
        into = np.zeros((5, PAGE), np.uint8)
        assert session.load(keys, into={"kv": into}).prefix == 5
        assert np.array_equal(into, kv)
    assert carried(daemon, "data") >= before[0] + 2
    assert carried(daemon, "stream") == before[1]


FORKING = """
import os, sys
from hoststage.client import ForkedSession, PayloadPath, connect
from tests.integration.test_client_session import keys_of, rows_of, stack
keys, kv = keys_of(4, "fork"), rows_of(4)
with connect(sys.argv[1], stack=stack("fork", path=PayloadPath.INLINE), timeout=20) as session:
    assert session.store(keys, {"kv": kv}).wait(20).ok
    child = os.fork()
    if child == 0:
        try:
            session.load(keys, timeout=5)
        except ForkedSession:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with session.load(keys) as loaded:
        assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
    assert session._core.link.data._all
print("done")
"""


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(daemon):
    done = subprocess.run(
        [sys.executable, "-c", FORKING, daemon.address],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], "."])},
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr


CLIENT = """
import os, sys, time
from hoststage.client import PayloadPath, connect
from tests.integration.test_client_session import keys_of, rows_of, stack
page = 4 << 20
session = connect(sys.argv[1], stack=stack("dies", path=PayloadPath.INLINE, page=page, slots=16), timeout=20)
print(session.session_id, flush=True)
rows = rows_of(4, page)
n = 0
while True:
    session.store(keys_of(4, f"dies/{n}"), {"kv": rows})
    n += 1
"""


def test_a_client_that_dies_in_the_middle_of_its_pages_leaves_nothing(daemon):
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT, daemon.address],
        stdout=subprocess.PIPE,
        env=environment() | {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], "."])},
    )
    try:
        session = int(child.stdout.readline())
        before = carried(daemon, "data")
        eventually(lambda: carried(daemon, "data") > before + 3)
        child.kill()
        child.wait(10)
        known = lambda: {s["session"] for s in daemon.status()["sessions"]}  # noqa: E731
        eventually(lambda: session not in known())
    finally:
        child.kill()
        child.stdout.close()
