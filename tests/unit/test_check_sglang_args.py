"""Reading SGLang command lines as they stand."""

from __future__ import annotations

import shlex

import pytest

from hoststage.cli.sglang_args import CommandLineError, read_command
from hoststage.cli.sglang_settings import engine_settings, wishes
from hoststage.core.stack import KvLayout, Mode, ModeWish, Retraction, Role, WritePolicy
from hoststage.models import Engine

LAUNCH = "python -m sglang.launch_server"


def test_both_spellings_of_a_value_are_read() -> None:
    flags = read_command(shlex.split(f"{LAUNCH} --model-path /m --page-size 64 --hicache-ratio=1.5 --tp-size=8"))
    assert (flags.model_path, flags.page_size, flags.hicache_ratio, flags.tp_size) == ("/m", 64, 1.5, 8)
    assert flags.given == {"model_path", "page_size", "hicache_ratio", "tp_size"}


@pytest.mark.parametrize("flag", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_aliases_are_read(flag: str) -> None:
    assert read_command([*shlex.split(LAUNCH), flag, "4"]).tp_size == 4


@pytest.mark.parametrize(
    "command",
    [
        "--tp 4 --page-size 64",
        f"{LAUNCH} --tp 4 --page-size 64",
        "CUDA_VISIBLE_DEVICES=0,1 numactl -N 0 python3 -u -m sglang.launch_server --tp 4 --page-size 64",
        "python python/sglang/launch_server.py --tp 4 --page-size 64",
        "sglang serve --tp 4 --page-size 64",
        "/opt/bin/sglang serve --page-size 64 --tp 4",
    ],
)
def test_the_flags_are_found_behind_any_way_to_launch(command: str) -> None:
    for argv in (shlex.split(command), [command]):
        flags = read_command(argv)
        assert (flags.tp_size, flags.page_size) == (4, 64)


def test_a_positional_model_is_read() -> None:
    assert read_command(["sglang", "serve", "openai/gpt-oss-20b", "--tp", "2"]).model_path == "openai/gpt-oss-20b"


def test_unknown_flags_and_their_values_are_passed_over_and_listed() -> None:
    text = f"{LAUNCH} --port 30000 --trust-remote-code --mem-fraction-static=0.9 --model-path /m --log-level info"
    flags = read_command(shlex.split(text))
    assert flags.model_path == "/m"
    assert flags.unread == ("--port", "--trust-remote-code", "--mem-fraction-static", "--log-level")


def test_a_switch_takes_no_value() -> None:
    flags = read_command(shlex.split(f"{LAUNCH} --enable-hierarchical-cache --model-path /m"))
    assert flags.enable_hierarchical_cache
    assert flags.model_path == "/m"


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        (f"{LAUNCH} --page-size", "--page-size"),
        (f"{LAUNCH} --page-size --tp 2", "--page-size"),
        (f"{LAUNCH} --page-size many", "--page-size"),
        (f"{LAUNCH} --page-size 0", "--page-size"),
        (f"{LAUNCH} --tp -1", "--tp"),
        (f"{LAUNCH} --hicache-ratio=x", "--hicache-ratio"),
        (f"{LAUNCH} --hicache-host-memory-mode warm", "--hicache-host-memory-mode"),
        (f"{LAUNCH} --disaggregation-mode both", "--disaggregation-mode"),
        (f"{LAUNCH} --enable-hierarchical-cache=maybe", "--enable-hierarchical-cache"),
        ("vllm serve model", "vllm"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, flag: str) -> None:
    with pytest.raises(CommandLineError) as error:
        read_command(shlex.split(text))
    assert error.value.flag == flag
    assert error.value.remedy


def test_the_environment_of_the_command_tells_the_layout() -> None:
    flags = read_command(shlex.split(f"SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton {LAUNCH} --tp 8"))
    assert engine_settings(flags, engine=Engine.SGLANG, kv_layout=None).kv_layout is KvLayout.UNIFIED_KV
    assert engine_settings(flags, engine=Engine.SGLANG, kv_layout=KvLayout.PAGED).kv_layout is KvLayout.PAGED


def test_dp_attention_divides_the_tensor_parallel_group() -> None:
    flags = read_command(["--tp", "8", "--dp", "4", "--enable-dp-attention"])
    settings = engine_settings(flags, engine=Engine.SGLANG, kv_layout=None)
    assert (settings.dp_size, settings.attn_dp_size, settings.attn_tp_size) == (1, 4, 2)


@pytest.mark.parametrize(
    ("flags", "ratio"),
    [
        ("--enable-hierarchical-cache", 2.0),
        ("--enable-hierarchical-cache --hicache-host-memory-mode buffer_only", 1.2),
        ("--enable-hierarchical-cache --hicache-ratio 3", 3.0),
        ("--disaggregation-mode decode", 0.2),
        ("--enable-hierarchical-cache --disaggregation-mode decode", 2.0),
    ],
)
def test_the_host_ratio_defaults_as_in_sglang(flags: str, ratio: float) -> None:
    settings = engine_settings(read_command(shlex.split(flags)), engine=Engine.SGLANG, kv_layout=None)
    assert settings.host_ratio == ratio


def test_wishes_follow_the_flags() -> None:
    text = (
        "--enable-hierarchical-cache --hicache-host-memory-mode buffer_only --hicache-write-policy write_back "
        "--disaggregation-mode decode --disaggregation-decode-retraction-backup host_pool"
    )
    wish = wishes(read_command(shlex.split(text)), modes=(), window_only=True)
    assert wish.modes == (ModeWish(Mode.BUFFER_ONLY, required=True),)
    assert wish.role is Role.DECODE
    assert wish.write_policy is WritePolicy.WRITE_BACK
    assert (wish.retraction.retraction, wish.retraction.window_only, wish.retraction.required) == (
        Retraction.HOST_POOL,
        True,
        True,
    )


def test_modes_of_the_operator_win_over_the_flag() -> None:
    modes = (ModeWish(Mode.CACHE), ModeWish(Mode.BUFFER_ONLY))
    flags = read_command(["--hicache-host-memory-mode", "buffer_only"])
    assert wishes(flags, modes=modes, window_only=False).modes == modes


@pytest.mark.parametrize(
    ("flags", "page"),
    [
        ("", None),
        ("--page-size 16", 16),
        ("--attention-backend flashmla --page-size 16", 64),
        ("--attention-backend trtllm_mla", 64),
        ("--decode-attention-backend trtllm_mla --page-size 32", 32),
        ("--prefill-attention-backend trtllm_mha --page-size 128", 128),
        ("--prefill-attention-backend trtllm_mha --page-size 256", 64),
        ("--attention-backend fa3 --page-size 1", 1),
    ],
)
def test_attention_backends_have_pages_of_their_own(flags: str, page: int | None) -> None:
    assert read_command(shlex.split(flags)).backend_page_size == page
