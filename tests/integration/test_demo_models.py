"""The KV cache of a pretrained model survives being cut into pages and built again, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hoststage.cli.demo import corpus, generate, pages
from hoststage.cli.demo.models import DemoModel, LoadedModel, ModelUnavailableError, load, locate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)

PROMPT_TOKENS = 2_100
DECODE_TOKENS = 24

Pages = dict[str, dict[int, bytes]]


@dataclass(frozen=True, slots=True)
class Reference:
    """An uninterrupted run, and the pages that were taken from it where its reusable prefix ended."""

    model: LoadedModel
    prompt: list[int]
    prefix: int
    pages: Pages
    last_logits: Any
    tokens: list[int]
    cache: Any


def take(cache: Any, model: LoadedModel, n_tokens: int, *, partial: bool = False) -> Pages:
    extract = pages.extract_partial_page if partial else pages.extract_page
    taken: Pages = {}
    for pool in pages.stack_shape(model):
        taken[pool.name] = {}
        for index in pool.pages_for(n_tokens):
            buffer = bytearray(b"\xff" * pool.page_bytes)
            extract(cache, pool, index, memoryview(buffer))
            taken[pool.name][index] = bytes(buffer)
    return taken


@pytest.fixture(scope="module", params=list(DemoModel), ids=str)
def reference(request: pytest.FixtureRequest) -> Reference:
    try:
        locate(request.param)
    except ModelUnavailableError as missing:
        pytest.skip(str(missing))
    model = load(request.param)
    prompt = corpus.prompt_tokens(model, PROMPT_TOKENS)
    prefix = pages.reusable_tokens(len(prompt), model.page_tokens)
    taken: Pages = {}

    def on_chunk(cache: Any, end: int) -> None:
        if end == prefix:
            taken.update(take(cache, model, prefix))

    done = generate.prefill(model, prompt, on_chunk=on_chunk)
    tokens = generate.decode(model, done.cache, done.next_token, DECODE_TOKENS)
    return Reference(model, prompt, prefix, taken, done.last_logits, tokens, done.cache)


def test_a_restored_prefix_gives_the_same_logits_and_tokens(reference: Reference) -> None:
    cache = pages.restore(reference.model, reference.pages, reference.prefix)
    assert cache.get_seq_length() == reference.prefix
    done = generate.prefill(reference.model, reference.prompt, cache=cache)
    assert bool((done.last_logits == reference.last_logits).all()), "not bit-identical after the tail"
    assert generate.decode(reference.model, cache, done.next_token, DECODE_TOKENS) == reference.tokens


def test_pages_taken_from_a_restored_cache_are_the_pages_it_was_built_from(reference: Reference) -> None:
    cache = pages.restore(reference.model, reference.pages, reference.prefix)
    kv = pages.stack_shape(reference.model)[0]
    again = bytearray(kv.page_bytes)
    for index in kv.pages_for(reference.prefix):
        pages.extract_page(cache, kv, index, again)
        assert again == reference.pages["kv"][index]


def test_altered_pages_of_any_pool_alter_the_logits(reference: Reference) -> None:
    for name, by_index in reference.pages.items():
        index = max(by_index)
        altered = (np.frombuffer(by_index[index], dtype=np.float32) + np.float32(1)).tobytes()
        spoilt = {**reference.pages, name: {**by_index, index: altered}}
        cache = pages.restore(reference.model, spoilt, reference.prefix)
        done = generate.prefill(reference.model, reference.prompt, cache=cache)
        assert not bool((done.last_logits == reference.last_logits).all()), name


def test_the_tokenizer_gives_the_text_back(reference: Reference) -> None:
    tokenizer = reference.model.tokenizer
    text = corpus.text()[:4_000] + " naïve 東京 🎈 1234"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 3, "whole words, not bytes"


def test_the_model_knows_what_it_learned(reference: Reference) -> None:
    """Wrongly converted weights still decode, deterministically, to nonsense."""
    model = reference.model
    prompts = {
        DemoModel.SMOLLM2: ("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"),
        DemoModel.GEMMA: (
            "<bos>Paris is the capital of France. Berlin is the capital of Germany. London is the capital of"
        ),
    }
    answers = {DemoModel.SMOLLM2: "Paris", DemoModel.GEMMA: "England"}
    ids = model.tokenizer.encode(prompts[model.name], add_special_tokens=False).ids
    done = generate.prefill(model, ids)
    said = model.tokenizer.decode(generate.decode(model, done.cache, done.next_token, 8))
    assert answers[model.name] in said


def test_a_shorter_hit_computes_the_rest_in_another_split_and_still_agrees(reference: Reference) -> None:
    shorter = 1_000 // reference.model.page_tokens * reference.model.page_tokens
    taken: Pages = {}

    def on_chunk(cache: Any, end: int) -> None:
        if end == shorter:
            taken.update(take(cache, reference.model, shorter))

    part = reference.prompt[: shorter + 1]
    generate.prefill(reference.model, part, on_chunk=on_chunk)
    cache = pages.restore(reference.model, taken, shorter)
    done = generate.prefill(reference.model, reference.prompt, cache=cache)
    drift = float((done.last_logits - reference.last_logits).abs().max())
    assert drift < 1e-2, "the split of the chunks changes rounding only"
    assert generate.decode(reference.model, cache, done.next_token, DECODE_TOKENS) == reference.tokens


def test_a_request_in_mid_decode_goes_on_from_its_pages(reference: Reference) -> None:
    model = reference.model
    n_tokens = int(reference.cache.get_seq_length())
    assert n_tokens % model.page_tokens, "the last page must be partly filled for this to say anything"
    held = take(reference.cache, model, n_tokens, partial=True)
    resumed = pages.restore(model, held, n_tokens)
    after = generate.decode(model, resumed, reference.tokens[-1], 12)
    uninterrupted = generate.decode(model, reference.cache, reference.tokens[-1], 12)
    assert after == uninterrupted


def test_a_missing_page_is_named(reference: Reference) -> None:
    kv = dict(reference.pages["kv"])
    del kv[7]
    with pytest.raises(pages.PageError, match=r"'kv' lacks pages \[7\]"):
        pages.restore(reference.model, {**reference.pages, "kv": kv}, reference.prefix)
