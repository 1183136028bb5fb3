"""Sharding, slots, assumptions, and what happens when a config lacks something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoststage.core.stack import namespace_of
from hoststage.models import (
    BadField,
    Engine,
    EngineSettings,
    MissingField,
    ModelError,
    UnknownArchitecture,
    UnknownPreset,
    describe,
    load_preset,
)


def preset(name: str) -> dict[str, object]:
    return load_preset(name).config


def without(name: str, field: str) -> dict[str, object]:
    return {key: value for key, value in preset(name).items() if key != field}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "hidden_size"),
        ("gpt-oss-20b", "sliding_window"),
        ("gemma-2-9b", "head_dim"),
        ("qwen3-next-80b-a3b", "linear_num_value_heads"),
        ("nemotron-nano-9b-v2", "ssm_state_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3.2", "index_head_dim"),
        ("deepseek-v4-flash", "compress_ratios"),
        ("deepseek-v4-flash", "sliding_window"),
    ],
)
def test_a_missing_field_is_named_and_asked_for(name: str, field: str) -> None:
    with pytest.raises(MissingField) as error:
        describe(without(name, field))
    assert error.value.field == field
    assert f"--set {field}=" in error.value.remedy


def test_a_missing_field_can_be_supplied() -> None:
    described = describe(without("gpt-oss-20b", "sliding_window"), overrides={"sliding_window": 256})
    swa = described.shards[0].stack.pool("swa")
    assert swa is not None
    assert swa.sliding_window == 256


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownArchitecture) as error:
        describe({"architectures": ["NovelForCausalLM"]})
    assert "NovelForCausalLM" in str(error.value)
    assert "LlamaForCausalLM" in error.value.remedy


def test_a_config_without_architecture_asks_for_it() -> None:
    with pytest.raises(MissingField) as error:
        describe({"num_hidden_layers": 2})
    assert error.value.field == "architectures"


def test_an_override_may_name_a_known_architecture() -> None:
    novel = {**preset("llama-3.1-8b"), "architectures": ["NovelForCausalLM"]}
    assert describe(novel, overrides={"architectures": ["LlamaForCausalLM"]}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "32"),
        ("num_hidden_layers", True),
        ("num_key_value_heads", -1),
        ("hidden_size", 4097),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(BadField) as error:
        describe({**preset("llama-3.1-8b"), field: value})
    assert error.value.field == field


def test_layer_types_shorter_than_the_model_are_refused() -> None:
    with pytest.raises(BadField, match="layer_types"):
        describe({**preset("gpt-oss-20b"), "layer_types": ["full_attention"]})


@pytest.mark.parametrize("tp", [3, 12])
def test_heads_that_ranks_cannot_share_evenly_are_refused(tp: int) -> None:
    with pytest.raises(ModelError, match="tp_size"):
        describe(preset("llama-3.1-8b"), EngineSettings(tp_size=tp))


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp8", "int3"])
def test_kv_types_with_scales_beside_them_are_not_guessed(dtype: str) -> None:
    with pytest.raises(BadField, match="kv_cache_dtype"):
        describe(preset("llama-3.1-8b"), EngineSettings(kv_dtype=dtype))


def test_every_default_that_was_taken_is_listed() -> None:
    bare = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    subjects = {a.subject for a in describe(bare).assumptions}
    assert subjects == {
        "num_key_value_heads",
        "head_dim",
        "page_size",
        "kv_cache_dtype",
        "context_length",
        "host_slots",
    }


def test_nothing_is_assumed_where_everything_is_given() -> None:
    settings = EngineSettings(page_tokens=64, host_gb=10.0)
    assert describe(preset("llama-3.3-70b"), settings).assumptions == ()


def test_the_checkpoints_own_kv_quantization_counts() -> None:
    quantized = {
        **preset("llama-3.1-8b"),
        "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    }
    described = describe(quantized, EngineSettings(page_tokens=64))
    assert described.shards[0].stack.pools[0].page_bytes == 8_388_608 // 2
    assert described.shards[0].stack.identity.dtype == "fp8_e4m3"


def test_pipeline_stages_share_the_layers_and_the_last_take_the_rest() -> None:
    # 61 layers on 4 stages: 15, 15, 15, 16. A layer and page: 576 × 2 × 64 = 73,728.
    shards = describe(preset("deepseek-v3"), EngineSettings(page_tokens=64, pp_size=4)).shards
    assert [(s.first_layer, s.end_layer) for s in shards] == [(0, 15), (15, 30), (30, 45), (45, 61)]
    assert [s.stack.pools[0].page_bytes for s in shards] == [15 * 73_728] * 3 + [16 * 73_728]
    assert [s.stack.parallel.pp_rank for s in shards] == [0, 1, 2, 3]


def test_ranks_of_a_sharded_model_have_namespaces_of_their_own() -> None:
    stacks = describe(preset("llama-3.1-8b"), EngineSettings(tp_size=4)).stacks()
    assert [s.parallel.tp_rank for s in stacks] == [0, 1, 2, 3]
    assert len({namespace_of(s) for s in stacks}) == 4


def test_ranks_of_a_latent_model_share_one_namespace() -> None:
    stacks = describe(preset("deepseek-v3"), EngineSettings(tp_size=8)).stacks()
    assert len(stacks) == 8
    assert len({namespace_of(s) for s in stacks}) == 1


def test_data_parallel_attention_shares_the_heads_over_fewer_ranks() -> None:
    # 8 ranks, 2 attention groups of 4: 8 / 4 = 2 heads each. 32 × 2 × 256 × 2 × 64 = 2,097,152.
    described = describe(preset("llama-3.1-8b"), EngineSettings(page_tokens=64, tp_size=8, attn_dp_size=2))
    assert described.shards[0].stack.pools[0].page_bytes == 2_097_152
    assert [(s.parallel.dp_rank, s.parallel.tp_rank) for s in described.stacks()] == [
        (group, rank) for group in (0, 1) for rank in (0, 1, 2, 3)
    ]


def test_decode_context_parallel_ranks_hold_the_heads_of_their_group() -> None:
    # 8 ranks in groups of 2: 8 heads over 4, so 2 each, and each process knows its shard.
    described = describe(preset("llama-3.1-8b"), EngineSettings(page_tokens=64, tp_size=8, dcp_size=2))
    assert described.shards[0].stack.pools[0].page_bytes == 2_097_152
    assert [s.parallel.dcp_rank for s in described.stacks()] == [0, 1] * 4


def test_host_slots_follow_the_ratio_of_the_device_pool() -> None:
    # 10,000 tokens × 1.5 = 15,000; / 64 = 234 whole pages, and SGLang's one more.
    settings = EngineSettings(page_tokens=64, device_tokens=10_000, host_ratio=1.5)
    (pool,) = describe(preset("llama-3.1-8b"), settings).shards[0].stack.pools
    assert (pool.device_slots, pool.host_slots) == (156, 235)


def test_a_host_size_is_divided_in_proportion_to_the_device_pools() -> None:
    # 4 GB; kv and swa cost the same a token, the window pool has half the tokens: 2/3 and 1/3.
    # 2,666,666,666 / 24,576 = 108,506 tokens / 64 = 1,695 + 1; half of that: 54,253 / 64 = 847 + 1.
    settings = EngineSettings(page_tokens=64, host_gb=4.0, swa_ratio=0.5)
    by_name = {p.name: p.host_slots for p in describe(preset("gpt-oss-20b"), settings).shards[0].stack.pools}
    assert by_name == {"kv": 1696, "swa": 848}


def test_sidecars_have_as_many_slots_as_their_source() -> None:
    # 100,000 / 256 = 391 pages × 2; the window pool a tenth: 10,000 / 256 = 40 × 2.
    settings = EngineSettings(device_tokens=100_000, host_ratio=2.0)
    pools = {p.name: p for p in describe(preset("deepseek-v4-flash"), settings).shards[0].stack.pools}
    assert pools["kv"].host_slots == pools["deepseek_v4_c4"].host_slots == pools["deepseek_v4_c128"].host_slots == 782
    assert pools["swa"].host_slots == pools["deepseek_v4_c4_state"].host_slots == 80


def test_a_layer_first_page_has_a_piece_for_each_layer_and_part() -> None:
    settings = EngineSettings(page_tokens=64, mem_layout="layer_first")
    (pool,) = describe(preset("llama-3.1-8b"), settings).shards[0].stack.pools
    assert len(pool.pieces) == 64
    assert sum(pool.pieces) == pool.page_bytes


def test_sglang_fixes_the_page_of_compressed_models_and_says_so() -> None:
    described = describe(preset("deepseek-v4-flash"), EngineSettings(engine=Engine.SGLANG, page_tokens=128))
    assert described.settings.page_tokens == 256
    assert "page_size" in {a.subject for a in described.assumptions}


def test_gemma_3_class_defaults_are_taken_and_listed(tmp_path: Path) -> None:
    # gemma-3-4b's published config leaves the head counts to the class: 8, 4 and 256.
    # 34 layers: 5 full, 29 sliding; a layer 4 × 512 × 2 = 4,096 a token.
    text = {"num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024, "model_type": "gemma3_text"}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    described = describe(json.loads(json.dumps(config)), EngineSettings(page_tokens=64))
    assert [p.page_bytes for p in described.shards[0].stack.pools] == [5 * 4096 * 64, 29 * 4096 * 64]
    assert {"num_attention_heads", "num_key_value_heads", "head_dim"} <= {a.subject for a in described.assumptions}


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UnknownPreset) as error:
        load_preset("../../etc/passwd")
    assert "llama-3.1-8b" in error.value.remedy


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, 61),
        # Every fourth layer from the second on: 0, 1, 5, 9, …, 57 make 1 + 15, and layer 0 has its own too.
        ({"index_topk_freq": 4}, 16),
        # The first three layers, then every fourth: 0, 1, 2, 6, 10, …, 58: 2 + 15.
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 17),
        ({"index_topk_pattern": "FSS"}, 59),
        ({"indexer_types": ["full", "shared"] * 30 + ["full"]}, 31),
    ],
)
def test_layers_that_share_an_indexer_store_no_keys_of_their_own(fields: dict[str, object], layers: int) -> None:
    described = describe({**preset("deepseek-v3.2"), **fields}, EngineSettings(page_tokens=64))
    indexer = described.shards[0].stack.pool("indexer")
    assert indexer is not None
    assert (indexer.layers, indexer.page_bytes) == (layers, layers * 132 * 64)


def test_pooled_index_keys_are_not_guessed() -> None:
    with pytest.raises(BadField, match="index_kpool"):
        describe({**preset("deepseek-v3.2"), "index_kpool": 4})


def test_a_stage_of_recurrent_layers_alone_spends_its_host_size_on_states() -> None:
    # The first of 4 stages has layers 0 to 13, "M-M-M-MM-M-M-M": 8 states of 73,728 + 5,242,880 bytes each.
    settings = EngineSettings(page_tokens=64, pp_size=4, host_gb=1.0)
    (pool,) = describe(preset("nemotron-nano-9b-v2"), settings).shards[0].stack.pools
    assert (pool.name, pool.page_bytes) == ("mamba", 8 * 5_316_608)
    assert pool.host_slots == 10**9 // pool.page_bytes + 1


def test_a_host_size_that_compressed_pools_cannot_use_is_said_to_be_unused() -> None:
    described = describe(preset("deepseek-v4-flash"), EngineSettings(host_gb=8.0))
    assert {p.host_slots for p in described.shards[0].stack.pools} == {0}
    assert "hicache_size" in {a.subject for a in described.assumptions}
