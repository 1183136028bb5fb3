"""What the GGUF converter does to names, rotary halves and vocabularies."""

from __future__ import annotations

import numpy as np
import pytest

from hoststage.cli.demo.convert import ConversionError, merges_from_scores, unpermute_rotary, weight_name


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", "output_norm.weight", "model.norm.weight"),
        ("llama", "blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("llama", "blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("gemma3", "blk.12.ffn_norm.weight", "model.layers.12.pre_feedforward_layernorm.weight"),
        ("gemma3", "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("gemma3", "blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_a_tensor_goes_where_its_architecture_puts_it(architecture: str, name: str, expected: str) -> None:
    assert weight_name(architecture, name) == expected


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.post_ffw_norm.weight", "output.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConversionError, match=name):
        weight_name("llama", name)


def test_rotary_halves_are_restored_head_by_head() -> None:
    heads, half, hidden = 3, 4, 5
    original = np.arange(heads * 2 * half * hidden).reshape(heads * 2 * half, hidden)
    interleaved = original.reshape(heads, 2, half, hidden).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(interleaved, original)
    assert np.array_equal(unpermute_rotary(interleaved, heads), original)


def test_merges_come_in_the_order_of_the_joined_pieces_scores() -> None:
    tokens = ["a", "b", "c", "abc", "ab", "bc"]
    scores = [-9.0, -9.0, -9.0, -3.0, -1.0, -2.0]
    assert merges_from_scores(tokens, scores) == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
