"""What SGLang itself refuses, on both sides of each boundary."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hoststage.cli.inputs import Request, resolve
from hoststage.cli.sglang_rules import BACKEND_CONFIG, CHECKS, LINKER_CONFIG, LINKER_FLAGS, is_engine_rule
from hoststage.core.findings import Severity
from hoststage.core.stack import Role

ROOT = Path(__file__).parents[2]
HICACHE = "--enable-hierarchical-cache --hicache-storage-backend file --page-size 64"
BUFFER = f"{HICACHE} --hicache-host-memory-mode buffer_only"
LINKER = (
    "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
    """--unified-cache-external-linker-config '{"linker": "L", "linker_module_path": "m"}'"""
)
DECODE = "--disaggregation-mode decode"
HOST_POOL = "--disaggregation-decode-retraction-backup host_pool"


def refusals(preset: str, flags: str) -> set[str]:
    subject = resolve(Request(preset=preset, command=tuple(shlex.split(f"python -m sglang.launch_server {flags}"))))
    assert all(is_engine_rule(f) for f in subject.engine)
    refused = [f for f in subject.engine if f.severity is Severity.REFUSED]
    for finding in refused:
        assert finding.message.startswith("SGLang itself refuses")
        assert finding.remedy
        assert finding.values["engine"] == "sglang"
    return {f.rule.removeprefix("SGLANG_") for f in refused}


@pytest.mark.parametrize(
    ("preset", "flags", "rules"),
    [
        ("llama-3.1-8b", BUFFER, set()),
        ("llama-3.1-8b", BUFFER.replace("--hicache-storage-backend file", ""), {"STORE_REQUIRED"}),
        ("llama-3.1-8b", HICACHE.replace("--hicache-storage-backend file", ""), set()),
        ("llama-3.1-8b", f"{BUFFER} {DECODE} --disaggregation-decode-enable-radix-cache", {"DECODE_ROLE"}),
        ("llama-3.1-8b", f"{BUFFER} {DECODE}", {"DECODE_ROLE", "RADIX_DISABLED"}),
        ("llama-3.1-8b", f"{BUFFER} --disaggregation-mode prefill", set()),
        # A decode instance builds a host pool for retraction even without HiCache, and judges the mode.
        (
            "llama-3.1-8b",
            f"--page-size 64 --hicache-host-memory-mode buffer_only --hicache-storage-backend file {DECODE}",
            {"DECODE_ROLE"},
        ),
        ("deepseek-v3", f"{BUFFER} --tp 8 --dcp-size 2", {"DCP_UNSUPPORTED"}),
        ("deepseek-v3", f"{HICACHE} --tp 8 --dcp-size 2", set()),
        ("llama-3.1-8b", f"{HICACHE} --tp 8 --dcp-size 2", {"DCP_NOT_MLA"}),
        ("deepseek-v3", f"{HICACHE.replace(' file', ' nixl')} --tp 8 --dcp-size 2", {"DCP_BACKEND"}),
        ("llama-3.1-8b", f"{HICACHE} {HOST_POOL}", set()),
        ("qwen3-next-80b-a3b", f"{HICACHE} {HOST_POOL}", {"RETRACTION_MAMBA"}),
        ("gpt-oss-20b", f"{HICACHE} {HOST_POOL}", set()),
        ("deepseek-v3", f"{HICACHE} {HOST_POOL}", {"RETRACTION_STACK"}),
        ("llama-3.1-8b", f"{HICACHE} --disable-radix-cache", {"RADIX_DISABLED"}),
        ("deepseek-v4-flash", f"{BUFFER} --hicache-size 8", {"V4_HICACHE_SIZE"}),
        ("deepseek-v4-flash", f"{BUFFER} --hicache-ratio 2", set()),
        ("llama-3.1-8b", f"{LINKER} --page-size 64", set()),
        ("llama-3.1-8b", f"{LINKER} {HICACHE}", {"LINKER_EXCLUSIVE"}),
        ("llama-3.1-8b", f"{LINKER} {DECODE}", {"LINKER_RADIX"}),
        ("llama-3.1-8b", f"{LINKER} {DECODE} --disaggregation-decode-enable-radix-cache", set()),
        ("llama-3.1-8b", f"{LINKER} --disable-radix-cache", {"LINKER_RADIX"}),
        ("llama-3.1-8b", f"{LINKER} --enable-unified-memory", {"LINKER_UNIFIED_MEMORY"}),
        ("llama-3.1-8b", f"{LINKER} --enable-lmcache", {"LINKER_EXCLUSIVE"}),
        ("llama-3.1-8b", LINKER.replace('"m"}', '"m", "linker_extra_config": {}}'), set()),
        ("llama-3.1-8b", LINKER.replace('"m"}', '"m", "hoststage": {}}'), {"LINKER_CONFIG"}),
        (
            "llama-3.1-8b",
            "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic",
            {"LINKER_CONFIG"},
        ),
        ("llama-3.1-8b", HICACHE.replace(" file", " dynamic"), {"DYNAMIC_BACKEND"}),
        (
            "llama-3.1-8b",
            HICACHE.replace(" file", " dynamic") + " --hicache-storage-backend-extra-config "
            """'{"backend_name": "hoststage", "module_path": "m", "class_name": "C"}'""",
            set(),
        ),
        ("llama-3.1-8b", f"{HICACHE} --enable-lmcache", {"LMCACHE"}),
        ("llama-3.1-8b", f"{HICACHE} --disaggregation-decode-enable-offload-kvcache", {"OFFLOAD"}),
        (
            "llama-3.1-8b",
            "--disaggregation-decode-host-receive-threshold 0.5 --disaggregation-decode-retraction-backup cpu_tensor",
            {"HOST_RECEIVE"},
        ),
    ],
)
def test_what_sglang_refuses(preset: str, flags: str, rules: set[str]) -> None:
    assert refusals(preset, flags) == rules


@pytest.mark.parametrize(("tokens", "refused"), [(319, True), (320, False)])
def test_a_window_pool_of_two_windows_is_enough_and_one_page_less_is_not(tokens: int, refused: bool) -> None:
    # Two windows are 2 × 2 pages of 64 tokens. The window pool has int(int(tokens × 0.5) × 1.2) // 64 + 1 pages:
    # 319 → 159 → 190 → 3 pages; 320 → 160 → 192 → 4 pages.
    flags = f"{BUFFER} --swa-full-tokens-ratio 0.5 --max-total-tokens {tokens}"
    assert ("SWA_POOL_TOO_SMALL" in refusals("gpt-oss-20b", flags)) is refused


def test_a_unified_layout_has_no_window_pool_to_stage() -> None:
    command = tuple(
        shlex.split(f"SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton python -m sglang.launch_server {BUFFER}")
    )
    rules = {f.rule for f in resolve(Request(preset="deepseek-v4-flash", command=command)).engine}
    assert "SGLANG_SWA_POOL_REQUIRED" in rules


def test_a_model_with_windows_only_has_neither_buffer_mode_nor_host_retraction() -> None:
    request = Request(
        preset="mistral-7b-v0.1",
        swa_pool=True,
        command=tuple(shlex.split(f"python -m sglang.launch_server {BUFFER} {HOST_POOL}")),
    )
    rules = {f.rule for f in resolve(request).engine if f.severity is Severity.REFUSED}
    assert rules == {"SGLANG_PURE_SWA_TREE", "SGLANG_RETRACTION_PURE_SWA"}


def test_flags_without_a_host_tier_are_said_to_be_ignored() -> None:
    command = ("--hicache-host-memory-mode", "buffer_only")
    (notice,) = [
        f for f in resolve(Request(preset="llama-3.1-8b", command=command)).engine if f.rule == "SGLANG_NO_HOST_TIER"
    ]
    assert "--hicache-host-memory-mode" in notice.message


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (BUFFER.replace("--hicache-storage-backend file", ""), "SGLANG_STORE_REQUIRED"),
        (
            f"{HICACHE.replace('--hicache-storage-backend file', '')} {DECODE} "
            "--disaggregation-decode-enable-radix-cache --disaggregation-decode-enable-offload-kvcache",
            "SGLANG_OFFLOAD",
        ),
        (HICACHE.replace(" file", " dynamic"), "SGLANG_DYNAMIC_BACKEND"),
    ],
)
def test_the_flags_of_a_remedy_are_what_the_launch_lacks(flags: str, rule: str) -> None:
    command = shlex.split(f"python -m sglang.launch_server {flags}")
    subject = resolve(Request(preset="llama-3.1-8b", command=tuple(command)))
    (finding,) = [f for f in subject.engine if f.severity is Severity.REFUSED]
    assert finding.rule == rule
    remedy = shlex.split(finding.remedy[finding.remedy.index("--") :])
    assert not resolve(Request(preset="llama-3.1-8b", command=(*command, *remedy))).engine_refuses


def test_the_backend_that_remedies_name_is_there_and_documented() -> None:
    config = json.loads(BACKEND_CONFIG)
    source = ROOT / "client" / f"{config['module_path'].replace('.', '/')}.py"
    assert f"class {config['class_name']}(HiCacheStorage)" in source.read_text()
    page = (ROOT / "docs" / "sglang.md").read_text()
    for name, value in config.items():
        assert f'"{name}": {json.dumps(value)}' in page


def test_the_linker_that_remedies_name_is_there_documented_and_accepted_on_a_decode_instance() -> None:
    config = json.loads(LINKER_CONFIG)
    source = ROOT / "client" / f"{config['linker_module_path'].replace('.', '/')}.py"
    assert f"class {config['linker']}(UnifiedCacheLinker)" in source.read_text()
    page = (ROOT / "docs" / "sglang.md").read_text()
    for name, value in config.items():
        assert f'"{name}": {json.dumps(value)}' in page
    request = Request(preset="llama-3.1-8b", command=tuple(shlex.split(f"sglang serve {BUFFER} {DECODE}")))
    (refusal,) = [f for f in resolve(request).engine if f.rule == "SGLANG_DECODE_ROLE"]
    assert LINKER_FLAGS in refusal.remedy
    command = f"sglang serve {DECODE} {LINKER_FLAGS} --disaggregation-decode-enable-radix-cache"
    subject = resolve(Request(preset="llama-3.1-8b", command=tuple(shlex.split(command))))
    assert not subject.engine_refuses
    assert "SGLANG_NO_HOST_TIER" not in {f.rule for f in subject.engine}
    assert subject.stacks[0].role is Role.DECODE


def test_host_pool_retraction_keeps_sglang_from_building_the_linker() -> None:
    command = f"sglang serve {DECODE} {HOST_POOL} {LINKER_FLAGS} --disaggregation-decode-enable-radix-cache"
    subject = resolve(Request(preset="llama-3.1-8b", command=tuple(shlex.split(command))))
    (notice,) = [f for f in subject.engine if f.rule == "SGLANG_LINKER_EXCLUSIVE"]
    assert "no linker" in notice.message


def test_write_back_in_buffer_mode_is_said_to_change() -> None:
    subject = resolve(
        Request(preset="llama-3.1-8b", command=tuple(shlex.split(f"{BUFFER} --hicache-write-policy write_back")))
    )
    assert "SGLANG_WRITE_BACK_RESOLVED" in {f.rule for f in subject.engine}


def test_options_alone_bring_no_rules_of_an_engine() -> None:
    request = Request(preset="llama-3.1-8b", engine_flags=("--hicache-host-memory-mode=buffer_only",))
    assert resolve(request).engine == ()


def test_every_check_has_a_line_that_says_what_it_demands() -> None:
    assert all(check.__doc__ for check in CHECKS)


def test_a_page_that_the_backend_changes_is_said_and_used() -> None:
    command = tuple(shlex.split(f"{BUFFER} --attention-backend trtllm_mha --page-size 256"))
    subject = resolve(Request(preset="llama-3.1-8b", command=command))
    assert subject.stacks[0].pools[0].page_tokens == 64
    assert "SGLANG_PAGE_SIZE" in {f.rule for f in subject.engine}
