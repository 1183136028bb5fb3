"""The main job on real models: what `hoststage demo` proves, and that it notices when the proof fails."""

import json
import subprocess
import sys

import pytest

from hoststage.cli.demo.models import DemoModel, ModelUnavailableError, locate
from tests.integration.daemon import Daemon, environment, eventually

FIELDS = {
    *("model", "mode", "path", "tokens_identical", "pages_identical", "prefill_seconds"),
    *("restore_seconds", "pages", "bytes"),
}


def demo(*args, timeout=240):
    command = [sys.executable, "-m", "hoststage.cli.main", "demo", "--json", *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


def need(model):
    try:
        locate(DemoModel(model))
    except ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "mode", "path"),
    [
        ("smollm2", "buffer_only", "shm"),
        ("smollm2", "cache", "inline"),
        ("gemma", "cache", "shm"),
        ("gemma", "buffer_only", "inline"),
    ],
)
def test_tokens_and_pages_are_those_of_the_uninterrupted_run(model, mode, path):
    need(model)
    result = demo("--model", model, "--mode", mode, "--path", path, "--prompt-tokens", "2048", "--new-tokens", "12")
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    report = json.loads(line)
    assert report.keys() >= FIELDS
    assert (report["model"], report["mode"], report["path"]) == (model, mode, path)
    assert report["tokens_identical"] is True
    assert report["pages_identical"] is True
    assert report["pools"]["kv"]["pages"] == 127
    if model == "gemma":
        # 512 tokens of window are 32 pages, and the last prefix token ends one: no page beyond them crosses.
        assert report["pools"]["swa"]["pages"] == 32
    assert report["bytes"] == sum(p["bytes"] for p in report["pools"].values())
    assert 0 < report["restore_seconds"] < report["prefill_seconds"]


@pytest.mark.timeout(300)
def test_a_daemon_that_runs_already_serves_the_demo_and_remembers_across_its_restart(tmp_path):
    need("smollm2")
    daemon = Daemon(tmp_path, budget="1GiB").start()
    try:
        result = demo(
            *("--address", daemon.address, "--mode", "buffer_only", "--path", "shm"),
            *("--prompt-tokens", "300", "--new-tokens", "4"),
        )
        assert result.returncode == 0, result.stderr
        assert daemon.status()["store"]["pages"] == 18
        daemon.kill()
        daemon.start()
        assert daemon.status()["store"]["pages"] == 18
    finally:
        daemon.kill()


def test_a_daemon_that_is_not_there_fails_the_proof_in_words(tmp_path):
    need("smollm2")
    result = demo("--address", f"unix://{tmp_path}/none.sock", "--mode", "cache", "--path", "shm")
    assert result.returncode == 1
    assert "the proof failed" in result.stderr
    assert result.stdout == ""


def test_sessions_of_the_demo_say_goodbye_and_a_terminated_demo_leaves_nothing(tmp_path):
    need("smollm2")
    daemon = Daemon(tmp_path, budget="1GiB").start()
    try:
        result = demo(
            *("--address", daemon.address, "--mode", "cache", "--path", "shm"),
            *("--prompt-tokens", "128", "--new-tokens", "2"),
        )
        assert result.returncode == 0, result.stderr
        assert "smollm2 cache shm: proved" in result.stderr, "one line a finished run where nobody watches"
        ends = [e["reason"] for e in daemon.events() if e.get("event") == "session.ended"]
        assert ends == ["goodbye", "goodbye"]
    finally:
        daemon.kill()


def test_a_terminated_demo_cleans_up(tmp_path):
    need("smollm2")
    command = [sys.executable, "-m", "hoststage.cli.main", "demo", "--mode", "cache", "--path", "shm"]
    process = subprocess.Popen(
        command,
        env=environment() | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: list(tmp_path.glob("hoststage-demo-*/hoststage.sock")), 60)
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after 0 of 1 runs" in words
    assert list(tmp_path.iterdir()) == []
