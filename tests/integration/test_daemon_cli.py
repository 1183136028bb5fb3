"""The operators' commands against a running daemon, and against this machine."""

import json
import os

import pytest

from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import stack_pb2 as spb
from tests.integration.daemon import Daemon
from tests.integration.test_daemon_operators import cli
from tests.integration.wire import PAGE, Wire, hello, keys_of, span


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("daemon")).start()
    yield made
    made.stop()


@pytest.fixture
def resident(daemon):
    """A session in `cache` with four resident pages; returns its namespace."""
    client = Wire(daemon.address).open(hello(spb.PAYLOAD_PATH_INLINE, spb.MODE_CACHE, model=os.urandom(4).hex()))
    pages = [pb.InlinePage(page=i, data=bytes([i]) * PAGE) for i in range(4)]
    store = pb.InlineStore(span=span(keys_of(4)), pages=pages, last=True)
    client.send(pb.ClientMessage(request_id=2, inline_store=store))
    assert client.pushed("stored").outcome in (pb.OUTCOME_STORED, pb.OUTCOME_RESIDENT)
    yield client.welcome.grant.namespace
    client.close()


def test_resident_pages_are_evicted_and_stay_in_the_store(daemon, resident):
    done = cli("evict", "--namespace", resident, "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout) == (0, "4 pages evicted\n")
    cleared = cli("clear", resident, "--yes", "--socket", str(daemon.socket))
    assert (cleared.returncode, cleared.stdout) == (0, "0 resident and 4 stored pages removed\n")


def test_clearing_asks_first_and_wants_a_whole_namespace(daemon, resident):
    assert cli("clear", resident, "--socket", str(daemon.socket)).returncode == 1
    refused = cli("clear", resident[:12], "--socket", str(daemon.socket))  # before it asks
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "64 hex digits" in refused.stderr
    assert "status --json" in refused.stderr
    assert "4 resident and 4 stored" in cli("clear", resident, "--yes", "--socket", str(daemon.socket)).stdout


def test_top_and_status_show_the_session(daemon, resident):
    shown = cli("top", "--once", "--http", daemon.http, COLUMNS="200").stdout
    assert resident[:12] in shown
    assert "pages stored/s" in shown
    data = json.loads(cli("status", "--json", "--http", daemon.http).stdout)
    assert [s["namespace"] for s in data["sessions"]] == [resident]


def test_top_fits_a_terminal_of_80_columns_without_cutting_a_head(daemon, resident):
    shown = cli("top", "--once", "--http", daemon.http, COLUMNS="80").stdout
    words = (
        "commits accepted/s",
        "pages fetched/s",
        "store written/s",
        "worker",
        "leases",
        "namespace",
        "reserve",
        "pinned",
    )
    for word in words:
        assert word in shown, shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_health_of_a_named_socket_is_that_daemons_whatever_the_default_port_says(daemon):
    with_other_port = {"HOSTSTAGE_HTTP_LISTEN": "127.0.0.1:1"}
    assert cli("health", "--socket", str(daemon.socket), **with_other_port).returncode == 0
    nobody = cli("health", "--socket", "/nonexistent.sock", "--http", daemon.http)
    assert nobody.returncode == 1
    assert "no daemon answers at unix:/nonexistent.sock: No such file or directory" in nobody.stderr


def test_health_asks_the_socket_where_there_is_no_operators_port(daemon):
    assert cli("health", "--socket", str(daemon.socket)).returncode == 0
    nobody = cli("health", "--socket", "/nonexistent.sock", "--timeout", "1")
    assert nobody.returncode == 1
    assert "hoststage serve" in nobody.stderr
    assert "Traceback" not in nobody.stderr


def test_a_command_without_a_daemon_says_how_to_find_one():
    for command in (["evict"], ["drain"], ["clear", "0" * 64, "--yes"]):
        done = cli(*command, "--socket", "/nonexistent.sock")
        assert done.returncode == 1
        assert "--socket" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_doctor_names_what_would_keep_a_daemon_from_starting(tmp_path):
    store = tmp_path / "store"
    settings = {
        "HOSTSTAGE_LISTEN_SOCKET": str(tmp_path / "h.sock"),
        "HOSTSTAGE_STORE_URL": f"file://{store}",
        "HOSTSTAGE_MEMORY_BUDGET": "64MiB",
        "HOSTSTAGE_STORE_MIN_FREE": "1MiB",
    }
    sick = cli("doctor", "--json", **settings)
    assert sick.returncode == 1
    checks = {c["name"]: c for c in json.loads(sick.stdout)["checks"]}
    assert [n for n, c in checks.items() if c["health"] == "bad"] == ["store"]
    assert str(store) in checks["store"]["remedy"]
    store.mkdir()
    well = cli("doctor", **settings)
    assert well.returncode == 0, well.stdout
    assert list(store.iterdir()) == []
    greedy = cli("doctor", "--json", **settings | {"HOSTSTAGE_MEMORY_BUDGET": "900TiB"})
    assert greedy.returncode == 1
    assert "memory.budget" in greedy.stdout


def test_the_doctor_looks_at_the_daemon_that_the_options_of_serve_name(tmp_path):
    options = ["--socket", str(tmp_path / "h.sock"), "--store", f"file://{tmp_path}/s", "--budget", "64MiB"]
    missing = cli("doctor", "--json", *options)
    assert missing.returncode == 1
    checks = {c["name"]: c for c in json.loads(missing.stdout)["checks"]}
    assert checks["socket folder"]["found"] == str(tmp_path)
    assert checks["store"]["found"] == f"{tmp_path}/s is no directory"
    assert checks["memory budget"]["found"].startswith("64.0 MiB configured")
    made = cli("doctor", "--json", *options, "--set", "store.create_directory=true")
    assert made.returncode == 0, made.stdout
    unusable = cli("doctor", "--set", "store.limit")
    assert (unusable.returncode, "section.name=value" in unusable.stderr) == (2, True)


@pytest.mark.parametrize(("budget", "words"), [("900TiB", "larger than"), ("8", "smaller than 1 MiB")])
def test_the_doctor_doubts_a_budget_that_can_hardly_be_meant(tmp_path, budget, words):
    shown = cli("doctor", "--json", "--store", "none", "--socket", str(tmp_path / "h.sock"), "--budget", budget).stdout
    [check] = [c for c in json.loads(shown)["checks"] if c["name"] == "memory budget"]
    assert check["health"] == ("bad" if budget == "900TiB" else "note")
    assert words in check["found"]


def test_drain_waits_and_the_daemon_stays(daemon):
    done = cli("drain", "--wait", "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout) == (0, "draining; 0 commits are not stored yet\n")
    unready = cli("health", "--http", daemon.http)
    assert unready.returncode == 1
    assert "draining" in unready.stderr
