"""Whatever a config, a command line or a stack file says: a description or a typed error, never anything else."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoststage.cli.sglang_args import FLAG_NAMES, CommandLineError, read_command
from hoststage.cli.sglang_rules import engine_findings
from hoststage.cli.sglang_settings import engine_settings, inferred_retraction, wishes
from hoststage.core.stack import KvLayout
from hoststage.models import (
    Engine,
    EngineSettings,
    ModelError,
    describe,
    load_preset,
    preset_names,
    stack_from_mapping,
    stack_to_mapping,
)

PRESETS = {name: load_preset(name).config for name in preset_names()}

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 130), max_size=4),
    st.lists(st.text(max_size=4), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
quick = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

engines: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(Engine),
        "tp_size": st.sampled_from([1, 2, 3, 8, 16]),
        "pp_size": st.integers(1, 4),
        "attn_dp_size": st.sampled_from([1, 2]),
        "dcp_size": st.sampled_from([1, 2]),
        "page_tokens": st.integers(-1, 300),
        "kv_dtype": st.sampled_from(["auto", "fp8_e4m3", "nvfp4"]),
        "kv_layout": st.sampled_from(KvLayout),
        "mem_layout": st.sampled_from(["", "layer_first", "page_first"]),
        "swa_ratio": st.one_of(st.none(), st.floats()),
        "host_ratio": st.one_of(st.none(), st.floats()),
        "host_gb": st.floats(),
        "device_tokens": st.integers(-1, 10**7),
    }
)


def say_what_to_do(subject: str, remedy: str) -> None:
    """Demand that an error names its subject and a remedy."""
    assert subject
    assert remedy


@st.composite
def configs(draw: st.DrawFn) -> dict[str, object]:
    """A real config with a few fields dropped or replaced, the nested ones too."""
    config: dict[str, object] = dict(PRESETS[draw(st.sampled_from(sorted(PRESETS)))])
    text = config.get("text_config")
    target: dict[str, object] = config
    if isinstance(text, dict):
        target = dict(text)
        config["text_config"] = target
    for name in draw(st.lists(st.sampled_from(sorted(target)), max_size=2)):
        if draw(st.booleans()):
            target.pop(name, None)
        else:
            target[name] = draw(junk)
    return config


@quick
@given(configs(), engines)
def test_a_config_is_described_or_a_field_is_named(config: dict[str, object], engine: dict[str, Any]) -> None:
    try:
        described = describe(config, EngineSettings(**engine))
    except ModelError as error:
        say_what_to_do(error.field, error.remedy)
        return
    for stack in described.stacks():
        for pool in stack.pools:
            assert pool.page_bytes > 0
            assert not pool.pieces or sum(pool.pieces) == pool.page_bytes
            if pool.indices_from_pool:
                source = stack.pool(pool.indices_from_pool)
                assert source is not None
                assert source.host_slots == pool.host_slots
    assert stack_from_mapping(stack_to_mapping(described.stacks()[0])) == described.stacks()[0]


words = st.one_of(
    st.sampled_from(sorted(FLAG_NAMES)),
    st.sampled_from(["--foo", "decode", "host_pool", "buffer_only", "file", "dynamic", "true", "64", "nan", "-1"]),
    st.text(max_size=6),
)


@quick
@given(st.lists(words, max_size=8))
def test_a_command_is_read_or_a_flag_is_named(argv: list[str]) -> None:
    try:
        flags = read_command(["--tp", "1", *argv])
        engine = engine_settings(flags, engine=Engine.SGLANG, kv_layout=None)
        wish = wishes(flags, modes=(), window_only=False)
        described = describe(PRESETS["gpt-oss-20b"], engine, wish)
        stack, _ = inferred_retraction(flags, described.shards[0].stack)
        for finding in engine_findings(flags, stack):
            assert finding.rule.startswith("SGLANG_")
    except CommandLineError as error:
        say_what_to_do(error.flag, error.remedy)
    except ModelError as error:
        say_what_to_do(error.field, error.remedy)


@quick
@given(
    st.dictionaries(
        st.sampled_from(["model", "pools", "identity", "parallel", "modes", "retraction", "role", "paths", "x"]),
        st.one_of(
            junk,
            st.lists(
                st.dictionaries(
                    st.sampled_from(["name", "kind", "page_bytes", "page_tokens", "pieces", "layout"]), junk
                ),
                max_size=2,
            ),
        ),
    )
)
def test_a_stack_file_is_read_or_a_field_is_named(data: dict[str, object]) -> None:
    try:
        stack_from_mapping(data)
    except ModelError as error:
        say_what_to_do(error.field, error.remedy)
