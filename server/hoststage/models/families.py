"""Architectures: from a config's fields to the layers that keep something.

One function for each family that stores its cache in its own way; `describe_layers` finds it by the name of the
architecture. Names and defaults follow the Hugging Face configs and what SGLang 0.5.23 reads from them.
"""

from __future__ import annotations

from collections.abc import Callable

from hoststage.models.errors import BadField, MissingField, UnknownArchitecture
from hoststage.models.fields import Fields
from hoststage.models.hybrids import gated_delta, nemotron_h
from hoststage.models.layers import Attention, Compressed, Latent, Layer, ModelShape

SLIDING = "sliding_attention"
FULL = "full_attention"
CHUNKED = "chunked_attention"


def max_positions(f: Fields) -> int:
    """Return the longest request that the config allows, 0 where it does not say."""
    return f.integer("max_position_embeddings") if f.has("max_position_embeddings") else 0


def heads(f: Fields) -> tuple[int, int]:
    """Return KV heads and head width, with the defaults that the Hugging Face configs define."""
    query = f.integer("num_attention_heads")
    kv = f.integer_or("num_key_value_heads", query, "as many as num_attention_heads (no grouped queries)", least=1)
    if f.has("head_dim"):
        return kv, f.integer("head_dim")
    hidden = f.integer("hidden_size")
    if hidden % query:
        raise BadField("hidden_size", hidden, f"a multiple of num_attention_heads ({query})")
    f.assume(
        "head_dim",
        f"head_dim = hidden_size / num_attention_heads = {hidden // query}",
        "--set head_dim=VALUE",
    )
    return kv, hidden // query


def layer_types(f: Fields) -> list[str] | None:
    """Return `layer_types`, checked against the number of layers, or None where the config has none."""
    if not f.has("layer_types"):
        return None
    types = f.strings("layer_types")
    count = f.layer_count()
    if len(types) < count:
        raise BadField("layer_types", f"a list of {len(types)}", f"one entry for each of {count} layers")
    return types[:count]


def _windowed(f: Fields, windows: list[bool], window: int, *, chunked: bool = False) -> tuple[Layer, ...]:
    kv, dim = heads(f)
    full = Attention(kv, dim, dim)
    local = Attention(kv, dim, dim, window, chunked)
    return tuple(local if is_window else full for is_window in windows)


def dense(f: Fields) -> ModelShape:
    """Llama, Qwen 2 and 3, Mixtral and the like: full attention, or a window on all or some layers (Mistral, Qwen 2)."""
    count = f.layer_count()
    types = layer_types(f)
    if types is not None:
        windows = [kind == SLIDING for kind in types]
    elif f.has("sliding_window") and f.flag("use_sliding_window") is not False:
        first = 0
        if f.flag("use_sliding_window"):
            first = f.integer("max_window_layers", least=0)
        windows = [i >= first for i in range(count)]
    else:
        windows = [False] * count
    window = f.integer("sliding_window") if any(windows) else 0
    return ModelShape(_windowed(f, windows, window), max_positions(f))


def gemma2(f: Fields) -> ModelShape:
    """Gemma 2: every other layer slides, beginning with the first."""
    count = f.layer_count()
    types = layer_types(f) or [SLIDING if i % 2 == 0 else FULL for i in range(count)]
    if not f.has("head_dim"):
        raise MissingField("head_dim", f.architecture)
    return ModelShape(_windowed(f, [t == SLIDING for t in types], f.integer("sliding_window")), max_positions(f))


def gemma3(f: Fields) -> ModelShape:
    """Gemma 3: five sliding layers to one full, by `layer_types` or by `sliding_window_pattern`."""
    count = f.layer_count()
    types = layer_types(f)
    if types is None:
        alias = "_sliding_window_pattern"
        if f.has(alias) and not f.has("sliding_window_pattern"):
            every = f.integer(alias)
        else:
            every = f.integer_or("sliding_window_pattern", 6, "Gemma 3's default: every sixth layer is full", least=1)
        types = [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)]
    _class_default(f, "num_attention_heads", 8)
    _class_default(f, "num_key_value_heads", 4)
    _class_default(f, "head_dim", 256)
    return ModelShape(_windowed(f, [t == SLIDING for t in types], f.integer("sliding_window")), max_positions(f))


def _class_default(f: Fields, name: str, default: int) -> None:
    """Take Gemma 3's class default for a field that its published configs leave out, and list it."""
    if not f.has(name):
        f.supply(name, f.integer_or(name, default, "the default of the Gemma 3 config class", least=1))


def gpt_oss(f: Fields) -> ModelShape:
    """gpt-oss: sliding and full layers alternate, beginning with a sliding one."""
    count = f.layer_count()
    types = layer_types(f)
    if types is None:
        types = [SLIDING if i % 2 == 0 else FULL for i in range(count)]
        f.assume(
            "layer_types",
            "sliding and full attention alternate, as in the published gpt-oss models",
            "--set layer_types=[…]",
        )
    layers = _windowed(f, [t == SLIDING for t in types], f.integer("sliding_window"))
    return ModelShape(layers, max_positions(f), window_pool=True)


def llama4(f: Fields) -> ModelShape:
    """Llama 4: layers with rotary embeddings attend in chunks, those without attend to everything."""
    count = f.layer_count()
    types = layer_types(f)
    if types is not None:
        chunked = [t == CHUNKED for t in types]
    elif f.has("no_rope_layers") and f.get("no_rope_layers"):
        rope = f.integers("no_rope_layers")
        if len(rope) != count:
            raise BadField("no_rope_layers", f"a list of {len(rope)}", f"one entry for each of {count} layers")
        chunked = [bool(r) for r in rope]
    else:
        every = f.integer_or("no_rope_layer_interval", 4, "Llama 4's default: every fourth layer is full", least=1)
        chunked = [(i + 1) % every != 0 for i in range(count)]
    chunk = f.integer("attention_chunk_size") if any(chunked) else 0
    return ModelShape(_windowed(f, chunked, chunk, chunked=True), max_positions(f), window_pool=True)


def latent(f: Fields) -> ModelShape:
    """DeepSeek V2 and V3 (MLA); with an `index_head_dim` also V3.2's sparse attention and its indexer."""
    index = f.integer("index_head_dim") if f.has("index_head_dim") else 0
    if not index and f.architecture in SPARSE_LATENT:
        raise MissingField("index_head_dim", f.architecture)
    rank, rope, count = f.integer("kv_lora_rank"), f.integer("qk_rope_head_dim"), f.layer_count()
    own = _index_layers(f, count) if index else [False] * count
    layers = tuple(Latent(rank, rope, index if has else 0) for has in own)
    return ModelShape(layers, max_positions(f), page_tokens=64 if index else 0)


def _index_layers(f: Fields, count: int) -> list[bool]:
    """Return which layers have an indexer of their own; the others reuse the choice of the one before and store no keys."""
    if f.has("index_kpool") and f.integer("index_kpool") > 1:
        raise BadField("index_kpool", f.integer("index_kpool"), "1: describe pooled index keys in a stack file")
    if f.has("indexer_types"):
        kinds = f.strings("indexer_types")
        return [not (i < len(kinds) and kinds[i] == "shared") for i in range(count)]
    if f.has("index_topk_pattern"):
        pattern = f.text("index_topk_pattern")
        return [not (i < len(pattern) and pattern[i] == "S") for i in range(count)]
    every = f.integer("index_topk_freq") if f.has("index_topk_freq") else 1
    offset = f.integer("index_skip_topk_offset") if f.has("index_skip_topk_offset") else 2
    return [max(i - offset + 1, 0) % every == 0 for i in range(count)]


def deepseek_v4(f: Fields) -> ModelShape:
    """DeepSeek V4: a window on every layer, and compressed regions of 4 or 128 tokens on most."""
    count = f.layer_count()
    ratios = f.integers("compress_ratios")
    if len(ratios) < count:
        raise BadField("compress_ratios", f"a list of {len(ratios)}", f"one entry for each of {count} layers")
    for ratio in ratios[:count]:
        if ratio not in (0, 4, 128):
            raise BadField("compress_ratios", ratio, "0, 4 or 128 (describe other ratios in a stack file)")
    window = f.integer("sliding_window", "window_size")
    head, rope, index = f.integer("head_dim"), f.integer("qk_rope_head_dim"), f.integer("index_head_dim")
    if (head, rope) != (512, 64):
        raise BadField("head_dim", head, "512, of which qk_rope_head_dim 64: the packed cache rows know no other")
    layers = tuple(Compressed(ratio, head, rope, index, window) for ratio in ratios[:count])
    return ModelShape(layers, max_positions(f), page_tokens=256, window_pool=True)


SPARSE_LATENT = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})

FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "LlamaForCausalLM": dense,
    "MistralForCausalLM": dense,
    "Mistral3ForConditionalGeneration": dense,
    "MixtralForCausalLM": dense,
    "Qwen2ForCausalLM": dense,
    "Qwen2MoeForCausalLM": dense,
    "Qwen2_5_VLForConditionalGeneration": dense,
    "Qwen3ForCausalLM": dense,
    "Qwen3MoeForCausalLM": dense,
    "Qwen3VLForConditionalGeneration": dense,
    "Qwen3VLMoeForConditionalGeneration": dense,
    "Glm4MoeForCausalLM": dense,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "GptOssForCausalLM": gpt_oss,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4,
    "Qwen3NextForCausalLM": gated_delta,
    "Qwen3_5ForConditionalGeneration": gated_delta,
    "Qwen3_5MoeForConditionalGeneration": gated_delta,
    "NemotronHForCausalLM": nemotron_h,
    "DeepseekV2ForCausalLM": latent,
    "DeepseekV3ForCausalLM": latent,
    "DeepseekV32ForCausalLM": latent,
    "GlmMoeDsaForCausalLM": latent,
    "KimiK2ForCausalLM": latent,
    "DeepseekV4ForCausalLM": deepseek_v4,
}
"""Architecture name to the function that describes its layers."""


def describe_layers(f: Fields) -> ModelShape:
    """Return the layers of the model. Raises `UnknownArchitecture`, `MissingField` or `BadField`."""
    family = FAMILIES.get(f.architecture)
    if family is None:
        raise UnknownArchitecture(f.architecture, tuple(sorted(FAMILIES)))
    return family(f)
