"""`hoststage plan` as a process: the numbers of a node, worked out by hand, and the files it writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hoststage.models import preset_names, read_stack
from hoststage.server.config import Settings

ROOT = Path(__file__).parent.parent.parent
HUGE = 2 << 20
SLACK = 64 << 20


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_command("plan", *argv)


def run_command(*argv: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in ("proto", "server", "client"))
    return subprocess.run(
        [sys.executable, "-m", "hoststage.cli.main", *argv],
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def plan(text: str) -> dict[str, Any]:
    done = run("--json", *shlex.split(text))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


def mode(data: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [m for m in data["modes"] if m["mode"] == name]
    assert isinstance(found, dict)
    return found


def test_smallest_pools_of_a_window_model() -> None:
    # gpt-oss-20b: pages of 1,572,864 bytes. The window is 128 / 64 = 2 pages; the prefetch threshold 256 / 64 = 4.
    # buffer_only: one span written, one read. cache: one more read.
    data = plan("--preset gpt-oss-20b --page-size 64")
    slots = {name: {p["pool"]: p["slots"] for p in mode(data, name)["smallest"]} for name in ("buffer_only", "cache")}
    assert slots == {"buffer_only": {"kv": 8, "swa": 4}, "cache": {"kv": 12, "swa": 6}}
    assert [p["token_bytes"] for p in data["pools"]] == [24_576, 24_576]
    assert [p["window_pages"] for p in data["pools"]] == [0, 2]
    # (8 + 4) × 1,572,864 = 18,874,368 bytes: 9 huge pages, and 4 arenas (two pools, one process, one namespace).
    least = mode(data, "buffer_only")["least"]
    assert least["bytes"] == 18_874_368
    assert least["nr_hugepages"] == 9 + 4
    assert least["memlock_bytes"] == 13 * HUGE + SLACK


def test_ranks_and_engines_of_a_sharded_model() -> None:
    # llama-3.1-8b, 4 ranks: 2 heads, pages of 32 × 2 × 256 × 2 × 64 = 2,097,152 bytes; a span is 4 pages.
    # 2 engines: 4 × 2 write arenas of 4 pages, 4 namespaces with a read arena of 4 pages.
    data = plan("--preset llama-3.1-8b --page-size 64 --tp-size 4 --engines 2")
    assert (data["processes"], data["engines"]) == (4, 2)
    assert mode(data, "buffer_only")["least"]["bytes"] == (8 * 4 + 4 * 4) * 2_097_152


def test_ranks_and_engines_of_a_latent_model_share_one_namespace() -> None:
    # deepseek-v3: 4,497,408 bytes, exactly 1,098 × 4,096. 8 × 2 write arenas of 4 pages, one read arena of 4.
    data = plan("--preset deepseek-v3 --page-size 64 --tp-size 8 --engines 2")
    assert mode(data, "buffer_only")["least"]["bytes"] == (16 * 4 + 4) * 4_497_408


def test_sizes_that_the_flags_ask_for_are_kept() -> None:
    # 1 GB / 131,072 = 7,629 tokens / 64 = 119 + 1 pages of 8,388,608 bytes, split into both arenas.
    data = plan("--preset llama-3.1-8b --page-size 64 --hicache-size 1")
    assert mode(data, "buffer_only")["chosen"]["bytes"] == 120 * 8_388_608


def test_holds_are_counted() -> None:
    # A largest request of 1,024 tokens is 16 pages of 64.
    data = plan(
        "--preset llama-3.1-8b --page-size 64 --context-length 1024 --disaggregation-decode-retraction-backup host_pool"
    )
    (pool,) = mode(data, "buffer_only")["smallest"]
    assert (pool["hold_slots"], pool["slots"]) == (16, 24)


def test_every_line_of_arithmetic_comes_out() -> None:
    """Each line reads `name = formula = value unit`; those that are plain sums and products are computed again."""
    done = run("--preset", "gemma-3-27b", "--page-size", "64", "--tp-size", "2")
    assert done.returncode == 0, done.stderr
    computed = 0
    for line in done.stdout.splitlines():
        match = re.fullmatch(
            r"\s+[a-zA-Z._ ]+ = (.+) = (\d+) (?:bytes|slots|pages|heads)(?: \([\d.]+ [MGT]iB\))?", line
        )
        if match is None:
            continue
        formula = match[1].replace("×", "*")
        words = r"tokens|layers|processes|engines|namespaces|bytes|held|KV heads|heads|ranks|K\b|V\b"
        formula = re.sub(rf"\s*(?:{words})", "", formula).replace(" / ", " // ")
        if re.fullmatch(r"[\d+*/() ]+", formula):
            computed += 1
            assert eval(formula) == int(match[2]), line
    assert computed > 20


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_planned(name: str) -> None:
    data = plan(f"--preset {name} --page-size 128")
    assert {m["mode"] for m in data["modes"]} == {"buffer_only", "cache"}
    assert all(p["arithmetic"] for p in data["pools"])


def test_the_configuration_is_written_and_holds_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "hoststage.toml"
    data = plan(f"--preset llama-3.1-8b --page-size 64 --mode buffer_only --hicache-size 4 --config-out {path}")
    assert path.read_text() == data["config"]
    assert tomllib.loads(data["config"])
    needed = mode(data, "buffer_only")["chosen"]["bytes"]
    assert any(needed <= int(n) < needed + (1 << 30) for n in re.findall(r"\d+", data["config"]))


QWEN = "--preset qwen3-32b --page-size 64 --tp-size 8 --mode buffer_only"
"""8 processes of 4 + 4 pages of 2 MiB: 128 MiB."""


def test_a_budget_below_the_least_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "hoststage.toml"
    done = run(*shlex.split(f"{QWEN} --budget 10MiB --write {path}"))
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "refused BUDGET budget (buffer_only): Does not fit." in said
    assert "The 8 processes together need 128.0 MiB at the least; the node's budget has 10.0 MiB for it." in said
    assert "Raise the budget to 128.0 MiB or more" in said
    assert done.stdout.splitlines()[-1] == "No configuration for hoststage serve: the budget given is too small."
    assert not path.exists()


@pytest.mark.parametrize(("budget", "engines", "status"), [("128MiB", 1, 0), ("128MiB", 2, 1), ("192MiB", 2, 0)])
def test_a_budget_has_to_hold_the_least_of_every_engine(budget: str, engines: int, status: int) -> None:
    # The second engine shares the read arenas: 8 × 8 MiB more.
    assert run(*shlex.split(f"{QWEN} --budget {budget} --engines {engines}")).returncode == status


def test_sizes_that_only_fit_evenly_are_said() -> None:
    findings = {f["rule"]: f for f in plan(f"{QWEN} --budget 200MiB")["findings"]}
    assert findings["BUDGET"]["severity"] == "adjusted"
    assert findings["BUDGET"]["values"]["share"] == "kv 12"


def test_totals_are_said_in_words_too() -> None:
    said = run(*shlex.split(QWEN)).stdout
    assert "node = 67108864 + 67108864 = 134217728 bytes (128.0 MiB)" in said


def test_what_is_written_is_what_serve_reads(tmp_path: Path) -> None:
    path = tmp_path / "hoststage.toml"
    assert run(*shlex.split(f"{QWEN} --budget 48GiB --write {path}")).returncode == 0
    done = run_command("serve", "--config", str(path), "--print-config")
    assert done.returncode == 0, done.stderr
    settings = tomllib.loads(done.stdout)
    assert settings["memory"]["budget"] in (48 << 30, str(48 << 30), "48GiB")
    assert settings["store"]["url"] == Settings().store.url == "file:///var/lib/hoststage"


def test_a_file_that_is_there_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "hoststage.toml"
    path.write_text("mine")
    done = run(*shlex.split(f"{QWEN} --write {path}"))
    assert (done.returncode, path.read_text()) == (2, "mine")
    assert "--force" in done.stderr
    assert run(*shlex.split(f"{QWEN} --write {path} --force")).returncode == 0
    assert "[memory]" in path.read_text()


@pytest.mark.parametrize("columns", [60, 160])
def test_piped_findings_are_as_wide_as_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(*shlex.split(f"{QWEN} --budget 10MiB")).stdout.splitlines()
    start = lines.index("Findings and assumptions")
    wrapped = [len(line) for line in lines[start + 1 : lines.index("", start)]]
    assert columns - 20 < max(wrapped) <= columns


def test_every_option_of_the_help_page_has_a_description() -> None:
    from hoststage.cli.main import load

    for name in ("check", "plan"):
        options = [p for p in load(name).params if p.param_type_name == "option"]
        assert [p.name for p in options if not p.help] == []


def test_a_given_budget_goes_into_the_configuration() -> None:
    assert str(48 << 30) in plan("--preset llama-3.1-8b --page-size 64 --budget 48GiB")["config"]


def test_the_stack_that_is_written_can_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    plan(f"--preset deepseek-v4-flash --tp-size 4 --stack-out {path}")
    assert read_stack(path).pool("deepseek_v4_c4") is not None
    assert {p["name"] for p in plan(f"--stack {path}")["pools"]} == {p.name for p in read_stack(path).pools}


def test_a_launch_line_is_planned_with_the_rules_of_its_engine() -> None:
    data = plan(
        "--preset llama-3.1-8b -- python -m sglang.launch_server --enable-hierarchical-cache --page-size 64 "
        "--hicache-host-memory-mode buffer_only"
    )
    assert "SGLANG_STORE_REQUIRED" in {f["rule"] for f in data["findings"]}
    assert [m["mode"] for m in data["modes"]] == ["buffer_only"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no model is given"),
        ("--preset llama-3.1-8b --engines 0", "engines"),
        ("--preset llama-3.1-8b --config-out /nowhere/at/all.toml", "cannot be written"),
    ],
)
def test_unusable_input_ends_with_status_2(text: str, said: str) -> None:
    done = run(*shlex.split(text))
    assert done.returncode == 2
    assert said in done.stderr
