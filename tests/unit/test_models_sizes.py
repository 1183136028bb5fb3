"""Real models' configs, and their page sizes worked out by hand.

Every expected number has its computation beside it. Pages are 64 tokens unless a case says otherwise; two bytes an element.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoststage.core.stack import HitPolicy, KvLayout, Pool, PoolKind
from hoststage.models import Engine, EngineSettings, describe, load_preset, preset_names

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"


def config(name: str) -> dict[str, object]:
    data = json.loads((FIXTURES / name / "config.json").read_text())
    assert isinstance(data, dict)
    return data


def pools(name: str, settings: EngineSettings | None = None) -> dict[str, Pool]:
    description = describe(config(name), settings or EngineSettings(page_tokens=64))
    (shard,) = description.shards
    return {pool.name: pool for pool in shard.stack.pools}


EXPECTED: list[tuple[str, EngineSettings, dict[str, int]]] = [
    # 32 layers × 8 heads × (128 + 128) × 2 B = 131,072 B a token; × 64 = 8,388,608. head_dim = 4096 / 32 = 128.
    ("llama-3.1-8b", EngineSettings(page_tokens=64), {"kv": 8_388_608}),
    # 80 × (8 / 8 ranks) × 256 × 2 = 40,960 a token; × 64 = 2,621,440.
    ("llama-3.3-70b", EngineSettings(page_tokens=64, tp_size=8), {"kv": 2_621_440}),
    # 8 heads on 16 ranks: one head each, the same bytes as on 8 ranks.
    ("llama-3.3-70b", EngineSettings(page_tokens=64, tp_size=16), {"kv": 2_621_440}),
    # 28 × 4 × 256 × 2 = 57,344; × 64 = 3,670,016. use_sliding_window is false, so the 131,072 window does not count.
    ("qwen2.5-7b", EngineSettings(page_tokens=64), {"kv": 3_670_016}),
    # 64 × 8 × 256 × 1 B (fp8) = 131,072; × 64 = 8,388,608.
    ("qwen3-32b", EngineSettings(page_tokens=64, kv_dtype="fp8_e4m3"), {"kv": 8_388_608}),
    # 94 × (4 / 4) × 256 × 2 = 48,128; × 64 = 3,080,192.
    ("qwen3-235b-a22b", EngineSettings(page_tokens=64, tp_size=4), {"kv": 3_080_192}),
    # A window on every layer: 32 × 8 × 256 × 2 = 131,072; × 64 = 8,388,608. No full pool.
    ("mistral-7b-v0.1", EngineSettings(page_tokens=64), {"swa": 8_388_608}),
    # sliding_window is null: as Llama.
    ("mixtral-8x7b", EngineSettings(page_tokens=16), {"kv": 131_072 * 16}),
    # 42 layers, half of each: 21 × 8 × (256 + 256) × 2 = 172,032; × 64 = 11,010,048.
    ("gemma-2-9b", EngineSettings(page_tokens=64), {"kv": 11_010_048, "swa": 11_010_048}),
    # 62 layers, every sixth full: 10 full, 52 sliding. A layer: 16 × 256 × 2 = 8,192.
    # 10 × 8,192 × 64 = 5,242,880; 52 × 8,192 × 64 = 27,262,976.
    ("gemma-3-27b", EngineSettings(page_tokens=64), {"kv": 5_242_880, "swa": 27_262_976}),
    # 18 of each: 18 × 8 × (64 + 64) × 2 = 36,864; × 64 = 2,359,296.
    ("gpt-oss-120b", EngineSettings(page_tokens=64), {"kv": 2_359_296, "swa": 2_359_296}),
    # 12 of each, 8 / 2 heads: 12 × 4 × 128 × 2 = 12,288; × 64 = 786,432.
    ("gpt-oss-20b", EngineSettings(page_tokens=64, tp_size=2), {"kv": 786_432, "swa": 786_432}),
    # 48 layers, every fourth full: 12 and 36. A layer: 8 × 256 × 2 = 4,096.
    # 12 × 4,096 × 64 = 3,145,728; 36 × 4,096 × 64 = 9,437,184.
    ("llama-4-scout", EngineSettings(page_tokens=64), {"kv": 3_145_728, "swa": 9_437_184}),
    # 12 full layers: 12 × 2 × 512 × 2 = 24,576; × 64 = 1,572,864.
    # 36 state layers. Convolution: (32 × 128 + 2 × 16 × 128) = 8,192 channels × 3 steps × 2 B = 49,152.
    # State: 32 × 128 × 128 × 4 B = 2,097,152. 36 × 2,146,304 = 77,266,944.
    ("qwen3-next-80b-a3b", EngineSettings(page_tokens=64), {"kv": 1_572_864, "mamba": 77_266_944}),
    # The same on 2 ranks: 1 head, and half of everything in the state: 36 × (24,576 + 1,048,576) = 38,633,472.
    ("qwen3-next-80b-a3b", EngineSettings(page_tokens=64, tp_size=2), {"kv": 786_432, "mamba": 38_633_472}),
    # 4 attention layers: 4 × 8 × 256 × 2 = 16,384; × 64 = 1,048,576.
    # 27 Mamba layers. Convolution: 128 × 80 + 2 × 8 × 128 = 12,288 channels × 3 × 2 = 73,728.
    # State: 128 × 80 × 128 × 4 = 5,242,880. 27 × 5,316,608 = 143,548,416.
    ("nemotron-nano-9b-v2", EngineSettings(page_tokens=64), {"kv": 1_048_576, "mamba": 143_548_416}),
    # 27 × (512 + 64) × 2 = 31,104; × 64 = 1,990,656, on every rank.
    ("deepseek-v2-lite", EngineSettings(page_tokens=64, tp_size=4), {"kv": 1_990_656}),
    # 61 × 576 × 2 = 70,272; × 64 = 4,497,408.
    ("deepseek-v3", EngineSettings(page_tokens=64, tp_size=8), {"kv": 4_497_408}),
    # fp8: 61 × 576 = 35,136; × 64 = 2,248,704.
    ("deepseek-v3", EngineSettings(page_tokens=64, kv_dtype="fp8_e4m3"), {"kv": 2_248_704}),
    # The latent as V3; the indexer: 61 × (128 + 4) = 8,052; × 64 = 515,328.
    ("deepseek-v3.2", EngineSettings(page_tokens=64), {"kv": 4_497_408, "indexer": 515_328}),
    # fp8 sparse attention: 512 + 4 scales of 4 B + 64 × 2 = 656; 61 × 656 × 64 = 2,561,024.
    ("deepseek-v3.2", EngineSettings(page_tokens=64, kv_dtype="fp8_e4m3"), {"kv": 2_561_024, "indexer": 515_328}),
    # 43 layers, 21 of ratio 4 and 20 of ratio 128; a row is 448 + 64 × 2 + 8 = 584 B, a page padded to 576 B.
    # Window: 256 × 584 = 149,504 → 260 × 576 = 149,760; × 43 = 6,439,680.
    # c4: 64 × 584 = 37,376 → 65 × 576 = 37,440; × 21 = 786,240. Indexer: 64 × 132 × 21 = 177,408.
    # c128: 2 × 584 = 1,168 → 3 × 576 = 1,728; × 20 = 34,560.
    # States: ring of 8 rows × 4 × 512 × 4 B = 65,536; × 21 = 1,376,256. Indexer's: 8 × 4 × 128 × 4 × 21 = 344,064.
    (
        "deepseek-v4-flash",
        EngineSettings(),
        {
            "kv": 8,
            "swa": 6_439_680,
            "deepseek_v4_c4": 786_240,
            "deepseek_v4_c4_indexer": 177_408,
            "deepseek_v4_c128": 34_560,
            "deepseek_v4_c4_state": 1_376_256,
            "deepseek_v4_c4_indexer_state": 344_064,
        },
    ),
    # unified_kv: bfloat16 rows of 512 × 2 = 1,024 B, no padding, no states. Window 256 × 1,024 × 43 = 11,272,192;
    # c4 64 × 1,024 × 21 = 1,376,256; c128 2 × 1,024 × 20 = 40,960.
    (
        "deepseek-v4-flash",
        EngineSettings(kv_layout=KvLayout.UNIFIED_KV),
        {
            "kv": 8,
            "swa": 11_272_192,
            "deepseek_v4_c4": 1_376_256,
            "deepseek_v4_c4_indexer": 177_408,
            "deepseek_v4_c128": 40_960,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "settings", "expected"), EXPECTED, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(EXPECTED)]
)
def test_page_bytes_of_every_pool(name: str, settings: EngineSettings, expected: dict[str, int]) -> None:
    assert {pool.name: pool.page_bytes for pool in pools(name, settings).values()} == expected


def test_at_least_twelve_models_are_worked_out() -> None:
    assert len({name for name, _, _ in EXPECTED}) >= 12
    assert {name for name, _, _ in EXPECTED} == {path.parent.name for path in FIXTURES.glob("*/config.json")}


@pytest.mark.parametrize(
    ("name", "page_tokens", "window", "window_pages"),
    [
        ("mistral-7b-v0.1", 64, 4096, 64),  # 4096 / 64
        ("gemma-2-9b", 16, 4096, 256),  # 4096 / 16
        ("gemma-3-27b", 100, 1024, 11),  # 10.24, rounded up
        ("gpt-oss-20b", 64, 128, 2),  # 128 / 64
        ("gpt-oss-20b", 256, 128, 1),  # half a page is a page
        ("llama-4-scout", 64, 8192, 128),  # a chunk of 8192
        ("deepseek-v4-flash", 256, 128, 1),
    ],
)
def test_windows_in_pages(name: str, page_tokens: int, window: int, window_pages: int) -> None:
    swa = pools(name, EngineSettings(page_tokens=page_tokens))["swa"]
    assert (swa.kind, swa.sliding_window, swa.window_pages) == (PoolKind.SWA, window, window_pages)
    assert (swa.hit_policy, swa.trailing_pages) == (HitPolicy.TRAILING_PAGES, window_pages)


def test_a_recurrent_state_is_one_trailing_page() -> None:
    mamba = pools("nemotron-nano-9b-v2")["mamba"]
    assert (mamba.kind, mamba.hit_policy, mamba.trailing_pages) == (PoolKind.MAMBA, HitPolicy.TRAILING_PAGES, 1)
    assert mamba.page_tokens == 64


def test_bfloat16_state_halves_the_state_and_not_the_convolution() -> None:
    # 27 × (73,728 + 2,621,440) = 72,769,536
    described = describe(
        config("nemotron-nano-9b-v2"), EngineSettings(page_tokens=64), overrides={"mamba_ssm_dtype": "bfloat16"}
    )
    mamba = described.shards[0].stack.pool("mamba")
    assert mamba is not None
    assert mamba.page_bytes == 72_769_536


def test_groups_fewer_than_ranks_are_repeated() -> None:
    # 8 groups on 16 ranks become 16: (10,240 + 2 × 16 × 128) / 16 = 896 channels × 3 × 2 B = 5,376;
    # state 8 × 80 × 128 × 4 = 327,680; 27 × 333,056 = 8,992,512.
    assert pools("nemotron-nano-9b-v2", EngineSettings(page_tokens=64, tp_size=16))["mamba"].page_bytes == 8_992_512


def test_compressed_sidecars_reuse_their_sources() -> None:
    by_name = pools("deepseek-v4-flash", EngineSettings())
    assert {n: p.indices_from_pool for n, p in by_name.items() if p.kind is PoolKind.SIDECAR} == {
        "deepseek_v4_c4": "kv",
        "deepseek_v4_c4_indexer": "kv",
        "deepseek_v4_c128": "kv",
        "deepseek_v4_c4_state": "swa",
        "deepseek_v4_c4_indexer_state": "swa",
    }
    assert by_name["deepseek_v4_c4"].hit_policy is HitPolicy.ALL_PAGES
    assert by_name["deepseek_v4_c4_state"].hit_policy is HitPolicy.TRAILING_PAGES


def test_unified_kv_leaves_the_window_on_the_device() -> None:
    assert not pools("deepseek-v4-flash", EngineSettings(kv_layout=KvLayout.UNIFIED_KV))["swa"].has_host_pool
    assert not pools("gpt-oss-20b", EngineSettings(page_tokens=64, kv_layout=KvLayout.UNIFIED_KV))["swa"].has_host_pool


@pytest.mark.parametrize(
    ("name", "replicated"), [("deepseek-v3", True), ("deepseek-v4-flash", True), ("llama-3.1-8b", False)]
)
def test_latent_pools_are_the_same_on_every_rank(name: str, replicated: bool) -> None:
    assert all(pool.replicated is replicated for pool in pools(name, EngineSettings(page_tokens=128)).values())


def test_sglang_keeps_gemma_windows_in_the_full_pool_and_says_so() -> None:
    # 42 × 8 × 512 × 2 × 64 = 22,020,096
    settings = EngineSettings(engine=Engine.SGLANG, page_tokens=64)
    described = describe(config("gemma-2-9b"), settings)
    assert [(p.name, p.page_bytes) for p in described.shards[0].stack.pools] == [("kv", 22_020_096)]
    assert "swa_pool" in {a.subject for a in described.assumptions}


def test_sglang_keeps_gpt_oss_windows_in_a_pool_of_their_own() -> None:
    assert "swa" in pools("gpt-oss-20b", EngineSettings(engine=Engine.SGLANG, page_tokens=64))


def test_every_term_of_a_page_ends_in_the_page() -> None:
    for name in preset_names():
        for shard in describe(load_preset(name).config, EngineSettings(page_tokens=128)).shards:
            for described in shard.pools:
                assert described.pool.page_bytes in {t.value for t in described.terms if t.name == "page"}


def test_presets_are_the_fixtures() -> None:
    assert {path.parent.name for path in FIXTURES.glob("*/config.json")} == set(preset_names())
    for name in preset_names():
        assert load_preset(name).config == config(name)
