"""`hoststage check` against a running daemon, and without one, as an operator runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.daemon import ROOT, Daemon, environment
from tests.integration.handshake_stacks import budget_of

MODELS = ROOT / "tests" / "fixtures" / "models"
MIB = 1 << 20
SHAPE = {"granted", "retraction", "findings", "pools"}
FINDING = {"rule", "severity", "subject", "message", "remedy", "values"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), budget="512MiB").start()
    yield made
    assert made.stop() == 0


def check(*arguments: str, columns: int = 0) -> subprocess.CompletedProcess[str]:
    extra = {"COLUMNS": str(columns)} if columns else {}
    command = [sys.executable, "-m", "hoststage.cli.main", "check", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment() | extra, cwd=ROOT, check=False
    )


def verdict(*arguments: str) -> tuple[int, dict]:
    done = check("--json", *arguments)
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(done.stdout)
    assert set(data) == SHAPE
    assert all(set(f) == FINDING for f in data["findings"])
    return done.returncode, data


CASES = {
    "gpt-oss-20b": (["--page-size", "64", "--hicache-host-memory-mode", "buffer_only"], 0, "buffer_only"),
    "gpt-oss-20b unified": (
        ["--page-size", "64", "--hicache-host-memory-mode", "buffer_only", "--kv-layout", "unified_kv"],
        1,
        None,
    ),
    "qwen3-next-80b-a3b": (
        ["--page-size", "64", "--mode", "buffer_only", "--tp-size", "4", "--ranks", "1"],
        0,
        "buffer_only",
    ),
    "llama-3.1-8b": (["--page-size", "64", "--hicache-size", "4", "--mode", "buffer_only"], 1, None),
    "deepseek-v3.2": (["--page-size", "64", "--mode", "buffer_only"], 0, "buffer_only"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_daemon_and_no_daemon_agree(daemon, name):
    flags, status, mode = CASES[name]
    flags = ["--config", str(MODELS / name.split()[0] / "config.json"), *flags]
    before = budget_of(daemon)
    asked = verdict("--daemon", daemon.address, *flags)
    alone = verdict("--budget", "512MiB", *flags)
    assert (asked[0], asked[1]["granted"]) == (alone[0], alone[1]["granted"]) == (status, mode)
    assert asked[1]["pools"] == alone[1]["pools"]
    assert asked[1]["retraction"] == alone[1]["retraction"]

    def told(data: dict) -> list[tuple[str, str, str, str]]:
        return [(f["rule"], f["severity"], f["subject"], f["message"]) for f in data["findings"]]

    assert told(asked[1]) == told(alone[1])
    assert budget_of(daemon) == before


def test_hand_computed_sizes_of_real_models():
    """Bytes of a page of 64 tokens, from the models' published shapes."""
    expected = {
        # layers × (K and V) × heads × head dim × 2 bytes × 64 tokens
        "llama-3.1-8b": {"kv": 32 * 2 * 8 * 128 * 2 * 64},
        "qwen3-32b": {"kv": 64 * 2 * 8 * 128 * 2 * 64},
        # every other layer has the window
        "gpt-oss-20b": {"kv": 12 * 2 * 8 * 64 * 2 * 64, "swa": 12 * 2 * 8 * 64 * 2 * 64},
        "gemma-2-9b": {"kv": 21 * 2 * 8 * 256 * 2 * 64, "swa": 21 * 2 * 8 * 256 * 2 * 64},
        # five window layers, then one full, 62 layers: 10 full
        "gemma-3-27b": {"kv": 10 * 2 * 16 * 128 * 2 * 64, "swa": 52 * 2 * 16 * 128 * 2 * 64},
        # MLA: 512 latent and 64 rotary values
        "deepseek-v3": {"kv": 61 * (512 + 64) * 2 * 64},
        # every fourth of 48 layers is full attention with 2 heads of 256
        "qwen3-next-80b-a3b": {"kv": 12 * 2 * 2 * 256 * 2 * 64},
    }
    for model, pools in expected.items():
        _, data = verdict("--config", str(MODELS / model / "config.json"), "--page-size", "64")
        sizes = {p["name"]: p["page_bytes"] for p in data["pools"]}
        assert {name: sizes[name] for name in pools} == pools, model


def test_the_table_fits_eighty_columns():
    done = check(
        *("--config", str(MODELS / "gpt-oss-20b" / "config.json"), "--page-size", "64", "--budget", "100MiB"),
        *("--hicache-host-memory-mode", "buffer_only", "--hicache-size", "4"),
        columns=80,
    )
    assert done.returncode == 1, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    # The numbers of one pool stay on one line.
    [kv] = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("kv ")]
    assert kv[:4] == ["kv", "1.5", "MiB", "64"]
    assert "refused by hoststage" in done.stdout
    assert "What would" in done.stdout


def test_unusable_input_is_named_and_ends_with_two(daemon):
    missing = check("--config", "/nonexistent/config.json")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "/nonexistent/config.json" in missing.stderr
    llama = str(MODELS / "llama-3.1-8b" / "config.json")
    away = check("--daemon", "unix:///nonexistent.sock", "--timeout", "2", "--config", llama, "--page-size", "64")
    assert away.returncode == 2
    assert "/nonexistent.sock" in away.stderr
    assert "Traceback" not in missing.stderr + away.stderr


def test_a_launch_line_of_a_decode_instance_is_refused_by_the_engine_and_says_the_way():
    done = check(
        *("--json", "--budget", "64GiB", "--", "python", "-m", "sglang.launch_server"),
        *("--model-path", str(MODELS / "gpt-oss-20b"), "--page-size", "64", "--disaggregation-mode", "decode"),
        *("--enable-hierarchical-cache", "--hicache-host-memory-mode", "buffer_only"),
    )
    data = json.loads(done.stdout)
    assert (done.returncode, data["granted"]) == (1, None)
    [engine] = [f for f in data["findings"] if f["rule"] == "SGLANG_DECODE_ROLE"]
    assert "--disaggregation-decode-enable-offload-kvcache" in engine["remedy"]
    assert "DECODE_ROLE" in [f["rule"] for f in data["findings"] if f["severity"] == "notice"]
