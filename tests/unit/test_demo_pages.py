"""Keys, chunk ends, and the round trip of a cache through pages, on tiny models with random weights."""

from __future__ import annotations

from typing import Any

import pytest

from hoststage.cli.demo import generate, pages
from hoststage.cli.demo.models import DemoModel, LoadedModel

PAGE_TOKENS = 4
WINDOW = 13  # not a multiple of the page


def test_a_key_names_its_page_and_everything_before_it() -> None:
    tokens = list(range(40))
    keys = pages.chain_keys(tokens, 16)
    assert len(keys) == 2
    assert all(len(key) == pages.KEY_BYTES for key in keys)
    assert pages.chain_keys(tokens[:32], 16) == keys, "a partly filled page has no key"
    assert pages.chain_keys([1, *tokens[1:]], 16)[1] != keys[1], "a change in page 0 renames page 1"
    assert pages.chain_keys([*tokens[:16], *tokens[:16]], 16)[1] != keys[0], "same tokens, another place"
    assert pages.chain_keys(tokens, 16, b"other") != keys


@pytest.mark.parametrize(("n_tokens", "expected"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_reusable_prefix_leaves_a_token_to_compute(n_tokens: int, expected: int) -> None:
    assert pages.reusable_tokens(n_tokens, 16) == expected


@pytest.mark.parametrize("n_tokens", [1, 16, 17, 256, 257, 600, 2_100])
def test_a_run_from_the_reusable_prefix_repeats_the_last_chunks(n_tokens: int) -> None:
    whole = generate.chunk_ends(0, n_tokens, 16)
    prefix = pages.reusable_tokens(n_tokens, 16)
    assert whole[-1] == n_tokens
    assert prefix == 0 or prefix in whole
    assert all(0 < b - a <= generate.CHUNK_TOKENS for a, b in zip([0, *whole], whole, strict=False))
    assert generate.chunk_ends(prefix, n_tokens, 16) == [end for end in whole if end > prefix]


def tiny(kind: str) -> LoadedModel:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(7)
    if kind == "full":
        config = transformers.LlamaConfig(num_hidden_layers=2, **common)
        module = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=3,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **common,
        )
        module = transformers.Gemma3ForCausalLM(config)
    dtype = torch.bfloat16 if kind == "hybrid-bfloat16" else torch.float32
    name = DemoModel.SMOLLM2 if kind == "full" else DemoModel.GEMMA
    return LoadedModel(name, module.to(dtype).eval(), None, "0" * 64, PAGE_TOKENS, "cpu", 0.0)


@pytest.fixture(scope="module", params=["full", "hybrid", "hybrid-bfloat16"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


def take(model: LoadedModel, cache: Any, n_tokens: int, *, partial: bool) -> dict[str, dict[int, bytes]]:
    extract = pages.extract_partial_page if partial else pages.extract_page
    taken: dict[str, dict[int, bytes]] = {}
    for pool in pages.stack_shape(model):
        for index in pool.pages_for(n_tokens):
            buffer = bytearray(b"\xff" * pool.page_bytes)
            extract(cache, pool, index, buffer)
            taken.setdefault(pool.name, {})[index] = bytes(buffer)
    return taken


def test_the_stack_has_one_pool_for_each_kind_of_layer(model: LoadedModel) -> None:
    pools = {pool.name: pool for pool in pages.stack_shape(model)}
    if model.name is DemoModel.SMOLLM2:
        assert list(pools) == ["kv"]
        assert pools["kv"].layers == (0, 1)
    else:
        assert list(pools) == ["kv", "swa"]
        assert (pools["kv"].layers, pools["swa"].layers) == ((1,), (0, 2))
        assert (pools["kv"].window_tokens, pools["swa"].window_tokens) == (0, WINDOW)
    for pool in pools.values():
        assert sum(pool.pieces) == pool.page_bytes
        assert len(pool.pieces) == 2 * len(pool.layers)


def test_only_the_pages_that_meet_the_window_are_needed() -> None:
    swa = pages.stack_shape(tiny("hybrid"))[1]
    assert list(swa.pages_for(8)) == [0, 1]
    assert list(swa.pages_for(12)) == [0, 1, 2]
    assert list(swa.pages_for(16)) == [1, 2, 3], "tokens 4 to 15: the window less the new token"
    assert list(swa.pages_for(17)) == [1, 2, 3, 4]
    assert list(swa.pages_for(20)) == [2, 3, 4]


@pytest.mark.parametrize("n_tokens", [6, 14, 17, 40, 300, 530])
def test_a_restored_prefix_repeats_the_uninterrupted_run_bit_for_bit(model: LoadedModel, n_tokens: int) -> None:
    prompt = [(i * 31 + 7) % 97 for i in range(n_tokens)]
    prefix = pages.reusable_tokens(n_tokens, PAGE_TOKENS)
    taken: dict[str, dict[int, bytes]] = {}

    def on_chunk(cache: Any, end: int) -> None:
        if end == prefix:
            taken.update(take(model, cache, prefix, partial=False))

    whole = generate.prefill(model, prompt, on_chunk=on_chunk)
    tokens = generate.decode(model, whole.cache, whole.next_token, 6)

    cache = pages.restore(model, taken, prefix)
    resumed = generate.prefill(model, prompt, cache=cache)
    assert bool((resumed.last_logits == whole.last_logits).all())
    assert generate.decode(model, cache, resumed.next_token, 6) == tokens


@pytest.mark.parametrize("n_tokens", [3, 13, 29, 270])
def test_a_partly_filled_state_goes_on_from_its_pages(model: LoadedModel, n_tokens: int) -> None:
    prompt = [(i * 13 + 5) % 97 for i in range(n_tokens)]
    whole = generate.prefill(model, prompt)
    held = take(model, whole.cache, n_tokens, partial=True)
    cache = pages.restore(model, held, n_tokens)
    assert generate.decode(model, cache, whole.next_token, 8) == generate.decode(
        model, whole.cache, whole.next_token, 8
    )


def test_what_a_partial_page_does_not_hold_is_zero() -> None:
    model = tiny("full")
    pool = pages.stack_shape(model)[0]
    cache = generate.prefill(model, [1, 2, 3, 4, 5]).cache
    buffer = bytearray(b"\xff" * pool.page_bytes)
    pages.extract_partial_page(cache, pool, 1, buffer)
    row = pool.head_dim * pool.itemsize
    rows = [bytes(buffer[at : at + row]) for at in range(0, pool.page_bytes, row)]
    assert all(any(rows[i]) == (i % PAGE_TOKENS == 0) for i in range(len(rows)))


def test_a_page_that_left_the_window_is_refused() -> None:
    model = tiny("hybrid")
    swa = pages.stack_shape(model)[1]
    cache = generate.prefill(model, list(range(40))).cache
    with pytest.raises(pages.PageError, match=r"page 0 of pool 'swa' covers tokens 0 to 4, .* holds 28 to 40"):
        pages.extract_page(cache, swa, 0, bytearray(swa.page_bytes))


def test_wrong_sizes_and_missing_pages_are_named() -> None:
    model = tiny("full")
    pool = pages.stack_shape(model)[0]
    cache = generate.prefill(model, list(range(9))).cache
    with pytest.raises(pages.PageError, match=f"give {pool.page_bytes}"):
        pages.extract_page(cache, pool, 0, bytearray(8))
    with pytest.raises(pages.PageError, match=r"'kv' lacks pages \[0, 1\]"):
        pages.restore(model, {}, 8)


def test_a_warm_up_changes_no_bit_of_what_follows() -> None:
    model = tiny("hybrid")
    cold = generate.prefill(model, list(range(30))).last_logits
    generate.warm_up(model)
    assert bool((generate.prefill(model, list(range(30))).last_logits == cold).all())


def test_a_cache_that_leaves_nothing_to_compute_is_refused() -> None:
    model = tiny("full")
    cache = generate.prefill(model, [1, 2, 3]).cache
    with pytest.raises(ValueError, match="leave at least one"):
        generate.prefill(model, [1, 2, 3], cache=cache)
