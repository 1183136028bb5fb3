"""`hoststage check` as a process: exit status, JSON, and who it is that refuses."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hoststage.cli.sglang_rules import BACKEND_FLAGS, LINKER_FLAGS
from hoststage.models import preset_names

ROOT = Path(__file__).parent.parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "models"
LAUNCH = "python -m sglang.launch_server"
HICACHE = "--enable-hierarchical-cache --hicache-storage-backend file --page-size 64"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in ("proto", "server", "client"))
    return subprocess.run(
        [sys.executable, "-m", "hoststage.cli.main", *argv],
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(text: str) -> tuple[int, dict[str, Any]]:
    done = run("check", "--json", *shlex.split(text))
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(done.stdout)
    assert list(data) == ["granted", "retraction", "findings", "pools"]
    for finding in data["findings"]:
        assert list(finding) == ["rule", "severity", "subject", "message", "remedy", "values"]
        assert finding["severity"] in ("refused", "adjusted", "notice")
    assert (data["granted"] is not None) is (done.returncode == 0)
    return done.returncode, data


def refused(data: dict[str, Any]) -> set[str]:
    return {f["rule"] for f in data["findings"] if f["severity"] == "refused"}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_granted_with_a_store(name: str) -> None:
    status, data = check(f"--preset {name} --page-size 128")
    assert status == 0
    assert data["granted"] == "buffer_only"
    assert data["retraction"] == "none"
    assert data["pools"]


def test_a_config_path_or_its_directory_serves() -> None:
    for path in (FIXTURES / "gpt-oss-20b" / "config.json", FIXTURES / "gpt-oss-20b"):
        status, data = check(f"--config {path}")
        assert status == 0
        assert [p["name"] for p in data["pools"]] == ["kv", "swa"]


def test_the_model_of_a_launch_line_serves() -> None:
    status, data = check(f"-- {LAUNCH} --model-path {FIXTURES / 'llama-3.1-8b'} {HICACHE} --tp 2 --some-flag 1")
    assert status == 0
    assert data["granted"] == "cache"
    assert data["pools"][0]["page_bytes"] == 4_194_304  # 32 × 4 heads × 256 × 2 × 64
    (unread,) = [f for f in data["findings"] if f["rule"] == "SGLANG_FLAGS_UNREAD"]
    assert "--some-flag" in unread["message"]


UNIFIED = "--preset gpt-oss-20b --page-size 64 --kv-layout unified_kv"


def test_a_unified_layout_is_refused_buffer_only_with_a_remedy() -> None:
    status, data = check(f"{UNIFIED} --mode buffer_only")
    assert status == 1
    assert refused(data) == {"SWA_POOL_REQUIRED"}
    (finding,) = [f for f in data["findings"] if f["severity"] == "refused"]
    assert finding["remedy"]
    assert finding["values"]["mode"] == "buffer_only"


def test_a_unified_layout_is_granted_cache_as_the_second_wish() -> None:
    status, data = check(f"{UNIFIED} --mode buffer_only --mode cache")
    assert status == 0
    assert data["granted"] == "cache"
    assert refused(data) == {"SWA_POOL_REQUIRED"}


def test_a_required_mode_ends_the_list() -> None:
    status, data = check(f"{UNIFIED} --mode buffer_only!,cache")
    assert status == 1
    assert data["granted"] is None


@pytest.mark.parametrize(("store", "status"), [("--store", 0), ("--no-store", 1)])
def test_buffer_only_needs_a_store(store: str, status: int) -> None:
    code, data = check(f"--preset llama-3.1-8b --page-size 64 --mode buffer_only {store}")
    assert code == status
    assert ("STORE_REQUIRED" in refused(data)) is bool(status)


def test_host_pool_retraction_of_a_recurrent_model_is_refused() -> None:
    status, data = check("--preset qwen3-next-80b-a3b --disaggregation-decode-retraction-backup host_pool")
    assert status == 1
    assert "RETRACTION_MAMBA" in refused(data)


def test_host_pool_retraction_of_a_window_model_is_granted_on_opt_in() -> None:
    text = "--preset mistral-7b-v0.1 --page-size 64 --disaggregation-decode-retraction-backup host_pool"
    status, data = check(text)
    assert status == 1
    assert "RETRACTION_PURE_SWA" in refused(data)
    status, data = check(f"{text} --window-only-holds")
    assert status == 0
    assert data["retraction"] == "host_pool"
    assert data["pools"][0]["hold_slots"] == 65  # one window of 4096 / 64 pages, begun anywhere in a page


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (f"{LINKER_FLAGS} --disaggregation-decode-enable-radix-cache", False),
        (f"{BACKEND_FLAGS} --disaggregation-decode-enable-offload-kvcache", False),
        ("--enable-unified-cache-external-linker --disaggregation-decode-enable-radix-cache", True),
        ("", True),
    ],
    ids=["hoststage's linker", "hoststage's backend", "another linker", "neither"],
)
def test_a_decode_launch_is_told_the_way_unless_it_takes_it(flags: str, told: bool) -> None:
    _, data = check(f"--preset llama-3.1-8b -- {LAUNCH} --page-size 64 --disaggregation-mode decode {flags}")
    assert not refused(data)
    assert ("DECODE_ROLE" in [f["rule"] for f in data["findings"]]) is told


def test_a_refusal_of_the_engine_alone_is_told_from_hoststages() -> None:
    text = f"--preset llama-3.1-8b -- {LAUNCH} {HICACHE} --hicache-host-memory-mode buffer_only --disaggregation-mode decode"
    status, data = check(text)
    assert status == 1
    assert data["granted"] is None
    assert refused(data) == {"SGLANG_DECODE_ROLE", "SGLANG_RADIX_DISABLED"}
    (finding,) = [f for f in data["findings"] if f["rule"] == "SGLANG_DECODE_ROLE"]
    assert "SGLang itself refuses" in finding["message"]
    assert "Leave --hicache-host-memory-mode buffer_only out on decode instances" in finding["remedy"]
    assert "HostStageStorage" in finding["remedy"]
    shown = run("check", *shlex.split(text))
    assert shown.returncode == 1
    assert "refused by SGLang's own rules" in shown.stdout
    assert "hoststage would grant buffer_only" in shown.stdout


def test_the_last_line_says_that_the_launch_would_not_use_a_host_tier() -> None:
    text = f"check --preset llama-3.1-8b -- {LAUNCH} --hicache-host-memory-mode buffer_only"
    shown = run(*shlex.split(text))
    last = " ".join(" ".join(shown.stdout.splitlines()[-2:]).split())  # wherever the line was wrapped
    assert "SGLang builds no host tier for these flags" in last
    assert "granted:" not in shown.stdout
    assert run(*shlex.split(f"{text} {HICACHE}")).stdout.splitlines()[-1].startswith("granted: buffer_only")


def test_a_refusal_of_hoststage_is_said_to_be_its_own() -> None:
    shown = run("check", *shlex.split(f"{UNIFIED} --mode buffer_only"))
    assert shown.returncode == 1
    assert "refused by hoststage" in shown.stdout
    assert "SWA_POOL_REQUIRED" in shown.stdout


def test_the_budget_counts_every_process_of_the_node() -> None:
    # A page of one of two ranks is 32 × 4 × 256 × 2 × 64 = 4 MiB. 4.19 GB for each rank are 1,000 pages:
    # one rank fits 5 GiB, two do not.
    base = "--preset llama-3.1-8b --page-size 64 --mode cache --tp-size 2 --hicache-size 4.19 --budget 5GiB"
    status, data = check(f"{base} --ranks 1")
    assert status == 0
    status, data = check(base)
    assert status == 1
    (finding,) = [f for f in data["findings"] if f["severity"] == "refused"]
    assert finding["rule"] == "BUDGET"
    # 1,000 pages of 4 MiB for each of 2 ranks are 7.8125 GiB.
    assert "The 2 processes together need 7.9 GiB with the sizes asked for" in finding["message"]
    assert "Raise the budget to 7.9 GiB or more" in finding["remedy"]
    assert check(base.replace("5GiB", "7.9GiB"))[0] == 0


QWEN = "--preset qwen3-32b --page-size 64 --tp-size 8 --mode buffer_only"
"""A page of one of 8 ranks is 64 layers × 2 × 128 × 2 × 64 = 2 MiB; the least is 4 + 4 of them each, 128 MiB for all."""


@pytest.mark.parametrize(("budget", "slots"), [("128MiB", 8), ("140MiB", 8), ("200MiB", 12)])
def test_all_processes_are_granted_an_even_share_where_the_chosen_sizes_are_too_many(budget: str, slots: int) -> None:
    status, data = check(f"{QWEN} --budget {budget}")
    assert (status, data["granted"]) == (0, "buffer_only")
    (pool,) = data["pools"]
    assert pool["write_slots"] + pool["read_slots"] == slots
    (finding,) = [f for f in data["findings"] if f["rule"] == "BUDGET"]
    assert finding["severity"] == "adjusted"
    assert finding["message"].endswith(f"in slots: kv {slots}.")
    assert "raise the budget to 256.0 MiB or more" in finding["remedy"]


def test_an_even_share_that_every_process_asks_for_is_granted_as_it_stands(tmp_path: Path) -> None:
    pools = [{"name": "kv", "kind": "kv", "page_bytes": 2 << 20, "page_tokens": 64, "host_slots": 12}]
    path = tmp_path / "stack.json"
    path.write_text(json.dumps({"model": "m", "modes": ["buffer_only"], "pools": pools}))
    # 8 processes of one namespace: 8 × 6 written, 6 read, of 2 MiB each.
    assert check(f"--stack {path} --ranks 8 --budget 108MiB")[0] == 0
    assert check(f"--stack {path} --ranks 8 --budget 107MiB")[0] == 1


def test_sizes_that_fit_are_left_to_the_daemon() -> None:
    status, data = check(f"{QWEN} --budget 256MiB")
    assert status == 0
    assert "BUDGET" not in {f["rule"] for f in data["findings"]}


@pytest.mark.parametrize("budget", ["10MiB", "16MiB", "100MiB", "134217727"])
def test_the_remedy_names_the_room_of_all_processes_at_once(budget: str) -> None:
    status, data = check(f"{QWEN} --budget {budget}")
    assert status == 1
    (finding,) = [f for f in data["findings"] if f["rule"] == "BUDGET"]
    assert "The 8 processes together need 128.0 MiB at the least" in finding["message"]
    assert finding["remedy"].startswith("Raise the budget to 128.0 MiB or more")
    assert (finding["values"]["least_bytes"], finding["values"]["processes"]) == (128 << 20, 8)


def test_ranks_of_a_latent_model_share_one_read_arena() -> None:
    # A page is 4,497,408 bytes; 8 ranks that each ask for 0.9 GB (201 pages) have 8 write arenas and one read arena.
    base = "--preset deepseek-v3 --page-size 64 --mode cache --tp-size 8 --hicache-size 0.9"
    assert check(f"{base} --budget 3GiB")[0] == 0
    assert check("--preset deepseek-v3 --page-size 64 --mode cache --hicache-size 7.2 --budget 3GiB")[0] == 1


def test_a_stack_file_serves(tmp_path: Path) -> None:
    stack = {
        "model": "m",
        "modes": ["buffer_only"],
        "pools": [
            {"name": "kv", "kind": "kv", "page_bytes": 4096, "page_tokens": 64, "host_slots": 100},
            {
                "name": "deepseek_v4_c4",
                "kind": "sidecar",
                "page_bytes": 4096,
                "page_tokens": 64,
                "indices_from_pool": "kv",
                "host_slots": 100,
            },
        ],
    }
    path = tmp_path / "stack.json"

    def verdict() -> tuple[int, dict[str, Any]]:
        path.write_text(json.dumps(stack))
        return check(f"--stack {path}")

    assert verdict()[0] == 0
    stack["pools"][1]["host_slots"] = 99  # type: ignore[index]
    status, data = verdict()
    assert (status, refused(data)) == (1, {"SIDECAR_SMALLER_THAN_SOURCE"})
    stack["pools"][1]["indices_from_pool"] = "swa"  # type: ignore[index]
    status, data = verdict()
    assert (status, refused(data)) == (1, {"SIDECAR_MAPPING_INCOMPLETE"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no model is given"),
        ("--preset llama-3.1-8b --config /c", "exactly one"),
        ("--preset unheard-of", "Known presets"),
        ("--config /nowhere/config.json", "cannot be read"),
        ("--preset llama-3.1-8b --budget much", "64GiB"),
        (f"--preset llama-3.1-8b --budget {'9' * 400}", "64GiB"),
        ("--preset llama-3.1-8b --hicache-size nan", "hicache_size"),
        ("--preset llama-3.1-8b --hicache-size inf", "hicache_size"),
        ("--preset llama-3.1-8b --set num_hidden_layers=1000000000000", "num_hidden_layers"),
        ("--preset llama-3.1-8b --mode warm", "buffer_only"),
        ("--preset llama-3.1-8b --set nothing", "FIELD=VALUE"),
        ("--preset llama-3.1-8b --set num_hidden_layers=none", "num_hidden_layers"),
        ("--preset llama-3.1-8b --tp-size 3", "tp_size"),
        ("--preset llama-3.1-8b --page-size many", "--page-size"),
        ("--preset llama-3.1-8b --daemon unix:///nowhere/hoststage.sock --timeout 1", "unix:///nowhere/hoststage.sock"),
        ("--preset llama-3.1-8b -- vllm serve m", "not an SGLang launch command"),
        ("-- python -m sglang.launch_server --model-path nobody/nothing", "--config"),
        ("--no-such-option", "no-such-option"),
    ],
)
def test_unusable_input_ends_with_status_2_and_a_remedy_on_stderr(text: str, said: str) -> None:
    done = run("check", *shlex.split(text))
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_field_is_asked_for_and_can_be_given(tmp_path: Path) -> None:
    config = json.loads((FIXTURES / "gpt-oss-20b" / "config.json").read_text())
    del config["sliding_window"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = run("check", "--config", str(path))
    assert done.returncode == 2
    assert "MissingField: sliding_window" in done.stderr
    assert "--set sliding_window=VALUE" in done.stderr
    assert check(f"--config {path} --set sliding_window=128")[0] == 0


def test_assumptions_are_listed() -> None:
    _, data = check("--preset qwen3-next-80b-a3b")
    assumed = {f["subject"] for f in data["findings"] if f["rule"] == "ASSUMED"}
    assert assumed == {"page_size", "mamba_ssm_dtype", "host_slots", "budget"}


def test_the_command_wins_over_an_option_of_the_same_name() -> None:
    _, data = check(f"--preset llama-3.1-8b --page-size 32 -- {LAUNCH} {HICACHE}")
    assert data["pools"][0]["page_tokens"] == 64


def test_pipeline_stages_are_judged_and_shown_apart() -> None:
    _, data = check("--preset deepseek-v3 --page-size 64 --pp-size 2")
    assert [(p["pp_rank"], p["layers"]) for p in data["pools"]] == [(0, 30), (1, 31)]
    assert all(p["write_slots"] for p in data["pools"])


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-3-27b", "mistral-7b-v0.1", "llama-4-scout"])
def test_a_layout_named_unified_kv_is_taken_at_its_word_for_every_window_model(model: str) -> None:
    result = run(
        *("check", "--json", "--kv-layout", "unified_kv", "--", "python", "-m", "sglang.launch_server"),
        *("--model-path", str(FIXTURES / model), "--hicache-host-memory-mode", "buffer_only"),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    )
    assert result.returncode == 1, result.stdout
    assert "SWA_POOL_REQUIRED" in {f["rule"] for f in json.loads(result.stdout)["findings"]}
