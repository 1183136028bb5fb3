"""What operators meet: starting, refusing to start, readiness, metrics, stopping."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.daemon import Daemon, environment


def cli(*args, **env):
    command = [sys.executable, "-m", "hoststage.cli.main", *args]
    return subprocess.run(command, env=environment() | env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.kill()


def test_a_ready_daemon_says_so_everywhere(daemon):
    assert cli("health", "--http", daemon.http).returncode == 0
    assert daemon.get("/healthz")
    assert daemon.status()["problems"] == []
    assert "hoststage" in daemon.get("/")
    assert "budget" in cli("status", "--http", daemon.http).stdout
    families = {f.name: f for f in text_string_to_metric_families(daemon.get("/metrics"))}
    assert families["hoststage_budget_bytes"].samples[0].value == 256 << 20
    assert "hoststage_store_stored_pages" in families


def test_sigterm_drains_and_leaves_no_socket_behind(daemon, tmp_path):
    assert daemon.stop() == 0
    assert [e["event"] for e in daemon.events()][-1] == "daemon.stopped"
    assert list(tmp_path.glob("*.sock")) == []
    assert cli("health", "--http", daemon.http).returncode == 1


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_serves_on(daemon, tmp_path):
    second = cli("serve", "--socket", str(daemon.socket), "--store", "none", "--http", "")
    assert second.returncode == 2
    assert "another daemon listens" in second.stderr
    assert daemon.status()["problems"] == []


def test_the_socket_of_a_killed_daemon_is_taken_over(daemon):
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.status()["problems"] == []


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["--set", "memory.budgt=1GiB"], {}, ["memory.budgt", "a flag", "Did you mean memory.budget"]),
        ([], {"HOSTSTAGE_STORE_LIMIT": "much"}, ["store.limit", "much", "the environment", "8GiB"]),
        (["--config", "/nonexistent.toml"], {}, ["/nonexistent.toml", "No such file"]),
        (["--store", "file:///nonexistent/dir"], {}, ["/nonexistent/dir", "store.create_directory=true"]),
        (["--store", "ftp://x"], {}, ["ftp"]),
        (["--set", "http.listen=here"], {}, ["http.listen", "here"]),
    ],
)
def test_bad_configuration_names_key_value_source_and_remedy(tmp_path, args, env, words):
    defaults = ["--socket", str(tmp_path / "h.sock"), "--http", "", "--budget", "64MiB", "--store", "none"]
    taken = {a for a in args if a.startswith("--")}
    kept = [x for pair in zip(defaults[::2], defaults[1::2], strict=True) if pair[0] not in taken for x in pair]
    if any("http" in a for a in args):
        kept = [x for pair in zip(kept[::2], kept[1::2], strict=True) if pair[0] != "--http" for x in pair]
    result = cli("serve", *kept, *args, **env)
    assert result.returncode == 2, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_a_budget_that_can_hardly_be_meant_is_doubted_in_the_log_with_both_numbers(tmp_path):
    daemon = Daemon(tmp_path, budget="4096").start()
    try:
        [doubt] = [e for e in daemon.events() if e["event"] == "memory.budget_doubtful"]
    finally:
        daemon.kill()
    assert (doubt["level"], doubt["budget_bytes"], doubt["bound_bytes"]) == ("warning", 4096, 1 << 20)


def test_a_budget_that_is_meant_is_not_doubted(daemon):
    assert not [e for e in daemon.events() if e["event"] == "memory.budget_doubtful"]


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("memory: {budget: 1GiB, chunk: 2MiB}\nlog: {level: error}\n")
    result = cli("serve", "--config", str(file), "--budget", "3GiB", "--print-config", HOSTSTAGE_MEMORY_CHUNK="4MiB")
    assert result.returncode == 0, result.stderr
    assert f"budget = {3 << 30}" in result.stdout
    assert f"chunk = {4 << 20}" in result.stdout
    assert 'level = "error"' in result.stdout


def test_the_daemon_imports_no_torch_and_starts_quickly(daemon):
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "torch" not in maps
    first, ready = (next(e for e in daemon.events() if e["event"] == n) for n in ("memory.budget", "daemon.ready"))
    assert first["timestamp"][:16] == ready["timestamp"][:16] or ready["timestamp"] > first["timestamp"]


def test_a_second_signal_stops_at_once(daemon):
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(10) == 0


def test_hostile_bytes_on_every_socket_harm_nobody(daemon, tmp_path):
    import socket

    for path in tmp_path.glob("*.sock"):
        for data in (b"", b"\0" * 7, b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" + b"\x10" * 400):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(data)
    assert daemon.status()["problems"] == []
    assert daemon.stop() == 0
