"""Turn a GGUF file into a directory that ``transformers`` loads: config, float32 weights, tokenizer.

``transformers`` can read GGUF by itself, but it needs 16 seconds for the config of a model with a vocabulary
of 262,144, minutes for that tokenizer, ``accelerate`` for the weights, and all of it again in each process.
Here this is done once, and each later load reads plain safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[str, int, int], None]
"""Called as ``progress(phase, done, total)``; ``total`` 0 means that the length is not known."""

REVISION = 1
"""Part of the cache directory's name; raised when what this module writes changes."""

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# One GGUF name means two places: Gemma normalises before and after each block, Llama only before.
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}

_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4
_GEMMA_LAYERS_PER_FULL_ATTENTION = 6
_GEMMA_LOCAL_ROPE_THETA = 10_000.0


class ConversionError(ValueError):
    """The GGUF file isn't of an architecture, or of a shape, that the demo knows."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """A parsed GGUF file: its architecture, a reader of metadata, and its tensors."""

    architecture: str
    reader: Any

    @classmethod
    def open(cls, path: Path) -> Gguf:
        """Parse the file's directory (seconds for a large vocabulary). Raises ``ConversionError``."""
        from gguf import GGUFReader

        reader = GGUFReader(str(path))
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture not in _NORMS:
            raise ConversionError(f"{path}: general.architecture is {architecture!r}; the demo knows {sorted(_NORMS)}")
        return cls(architecture, reader)

    def value(self, key: str) -> Any:
        """The metadata under ``key``, or under the architecture's prefix. Raises ``ConversionError``."""
        for name in (key, f"{self.architecture}.{key}"):
            if name in self.reader.fields:
                return self.reader.fields[name].contents()
        raise ConversionError(f"GGUF metadata has no {key!r} for architecture {self.architecture!r}")


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write config, weights and tokenizer of the GGUF file ``source`` into the directory ``target``."""
    from safetensors.numpy import save_file

    progress("reading the GGUF file", 0, 0)
    gguf = Gguf.open(source)
    total = len(gguf.reader.tensors)
    weights: dict[str, np.ndarray] = {}
    for done, (name, tensor) in enumerate(_weights(gguf), start=1):
        weights[name] = tensor
        progress("dequantising weights", done, total)
    progress("writing weights", 0, 0)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config(gguf), indent=2))
    progress("building the tokenizer", 0, 0)
    build_tokenizer(gguf).save(str(target / "tokenizer.json"))


def config(gguf: Gguf) -> dict[str, Any]:
    """The ``config.json`` that ``transformers`` needs for this file."""
    heads = int(gguf.value("attention.head_count"))
    common = {
        "vocab_size": len(gguf.reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": int(gguf.value("embedding_length")),
        "intermediate_size": int(gguf.value("feed_forward_length")),
        "num_hidden_layers": int(gguf.value("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(gguf.value("attention.head_count_kv")),
        "max_position_embeddings": int(gguf.value("context_length")),
        "rms_norm_eps": float(gguf.value("attention.layer_norm_rms_epsilon")),
        "bos_token_id": int(gguf.value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(gguf.value("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(gguf.value("tokenizer.ggml.padding_token_id")),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    theta = float(gguf.value("rope.freq_base"))
    if gguf.architecture == "llama":
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "head_dim": int(gguf.value("embedding_length")) // heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    layers = int(gguf.value("block_count"))
    head_dim = int(gguf.value("attention.key_length"))
    return common | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "sliding_window": int(gguf.value("attention.sliding_window")),
        "layer_types": [
            "full_attention" if (i + 1) % _GEMMA_LAYERS_PER_FULL_ATTENTION == 0 else "sliding_attention"
            for i in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA_LOCAL_ROPE_THETA},
        },
    }


def _weights(gguf: Gguf) -> Iterator[tuple[str, np.ndarray]]:
    from gguf import dequantize

    for tensor in gguf.reader.tensors:
        name = weight_name(gguf.architecture, tensor.name)
        data = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if gguf.architecture == "gemma3" and data.ndim == 1:
            # llama.cpp stores Gemma's norm weights with the model's "1 +" folded in.
            data = data - np.float32(1)
        if gguf.architecture == "llama" and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            heads = gguf.value("attention.head_count_kv" if ".attn_k." in tensor.name else "attention.head_count")
            data = unpermute_rotary(data, int(heads))
        yield name, np.ascontiguousarray(data)


def weight_name(architecture: str, name: str) -> str:
    """The ``transformers`` name of a GGUF tensor such as ``blk.3.attn_q.weight``, or ``ConversionError``."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _NORMS[architecture]:
            return f"model.layers.{layer}.{_NORMS[architecture][part]}.weight"
        case ["blk", layer, part, "weight"] if part in _TENSORS:
            return f"model.layers.{layer}.{_TENSORS[part]}.weight"
    raise ConversionError(f"GGUF tensor {name!r} has no place in a {architecture!r} model")


def unpermute_rotary(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rotary halves in a ``[heads * head_dim, hidden]`` projection."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, half, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def build_tokenizer(gguf: Gguf) -> Any:
    """A ``tokenizers.Tokenizer`` from the vocabulary in the GGUF file."""
    tokens: list[str] = gguf.value("tokenizer.ggml.tokens")
    types: list[int] = gguf.value("tokenizer.ggml.token_type")
    if gguf.architecture == "llama":
        tokenizer = _byte_level(tokens, [_pair(merge) for merge in gguf.value("tokenizer.ggml.merges")])
    else:
        tokenizer = _sentencepiece(tokens, merges_from_scores(tokens, gguf.value("tokenizer.ggml.scores")))
    return _with_added(tokenizer, tokens, types)


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ", 1)
    return left, right


def _byte_level(tokens: list[str], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    model = BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # The normaliser leaves no space to split at: the whole text is one word, as in SentencePiece.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary: every split of a piece in two, best score first.

    SentencePiece joins the pair whose joined piece scores highest, so the order of merges is the order of
    scores.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _with_added(tokenizer: Any, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken

    def added(kind: int, special: bool) -> list[Any]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == kind
        ]

    tokenizer.add_special_tokens(added(_TOKEN_CONTROL, True))
    tokenizer.add_tokens(added(_TOKEN_USER_DEFINED, False))
    return tokenizer
