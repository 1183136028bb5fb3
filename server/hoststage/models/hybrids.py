"""Hybrids of attention and recurrent layers: Qwen3-Next and its successors, Nemotron-H."""

from __future__ import annotations

from hoststage.models.errors import BadField
from hoststage.models.fields import Fields
from hoststage.models.layers import Attention, Layer, ModelShape, State

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2}
CONV_BYTES = 2
"""SGLang keeps the convolution's tail in bfloat16."""


def state_bytes(f: Fields) -> int:
    """Return bytes of one element of the recurrent state: `mamba_ssm_dtype`, else SGLang's float32."""
    name = f.text("mamba_ssm_dtype")
    if not name:
        f.assume(
            "mamba_ssm_dtype",
            "the recurrent state is kept in float32, SGLang's default",
            "--mamba-ssm-dtype in the engine's command, or --set mamba_ssm_dtype=bfloat16",
        )
        return 4
    if name not in DTYPE_BYTES:
        raise BadField("mamba_ssm_dtype", name, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _attention(f: Fields) -> Attention:
    kv = f.integer("num_key_value_heads")
    dim = f.integer("head_dim", "attention_head_dim")
    return Attention(kv, dim, dim)


def gated_delta(f: Fields) -> ModelShape:
    """Qwen3-Next: gated delta-net layers, every fourth layer full attention."""
    count = f.layer_count()
    if f.has("layer_types"):
        types = f.strings("layer_types")
        if len(types) < count:
            raise BadField("layer_types", f"a list of {len(types)}", f"one entry for each of {count} layers")
        full = [kind == "full_attention" for kind in types[:count]]
    else:
        every = f.integer_or("full_attention_interval", 4, "Qwen3-Next's default: every fourth layer is full", least=1)
        full = [(i + 1) % every == 0 for i in range(count)]
    state = State(
        heads=f.integer("linear_num_value_heads"),
        head_dim=f.integer("linear_value_head_dim"),
        state_size=f.integer("linear_key_head_dim"),
        groups=f.integer("linear_num_key_heads"),
        kernel=f.integer("linear_conv_kernel_dim"),
        conv_bytes=CONV_BYTES,
        state_bytes=state_bytes(f),
    )
    attention = _attention(f)
    layers: tuple[Layer, ...] = tuple(attention if is_full else state for is_full in full)
    return ModelShape(layers, _positions(f))


def nemotron_h(f: Fields) -> ModelShape:
    """Nemotron-H: a pattern of `M` (Mamba 2), `*` (attention), `-` (MLP) and `E` (experts); the last two keep nothing."""
    pattern = f.text("hybrid_override_pattern")
    if not pattern:
        kinds = f.strings("layers_block_type")
        letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        unknown = sorted(set(kinds) - set(letters))
        if unknown:
            raise BadField("layers_block_type", unknown[0], f"one of {', '.join(letters)}")
        pattern = "".join(letters[kind] for kind in kinds)
    if bad := sorted(set(pattern) - set("M*-E")):
        raise BadField("hybrid_override_pattern", bad[0], "only the letters M, *, - and E")
    state = State(
        heads=f.integer("mamba_num_heads"),
        head_dim=f.integer("mamba_head_dim"),
        state_size=f.integer("ssm_state_size"),
        groups=f.integer("n_groups"),
        kernel=f.integer("conv_kernel"),
        conv_bytes=CONV_BYTES,
        state_bytes=state_bytes(f),
    )
    attention = _attention(f)
    kinds_of: dict[str, Layer | None] = {"M": state, "*": attention, "-": None, "E": None}
    return ModelShape(tuple(kinds_of[letter] for letter in pattern), _positions(f))


def _positions(f: Fields) -> int:
    return f.integer("max_position_embeddings") if f.has("max_position_embeddings") else 0
