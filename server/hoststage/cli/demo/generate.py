"""Prefill and greedy decode; a run from restored pages repeats the arithmetic of an uninterrupted one.

Floating-point sums depend on how the work is split: the same prompt prefilled in other chunks gives keys,
values and logits that differ in their last bits. The split is the engine's own choice (each one prefills in
chunks), so both runs make the same choice here: ``chunk_ends`` always ends a chunk where the reusable prefix
ends. The uninterrupted run then computes the tail of the prompt as the very matrix products that the restored
run computes, from bytes that are equal, and every later bit is equal, not only the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hoststage.cli.demo.convert import Progress
from hoststage.cli.demo.models import LoadedModel
from hoststage.cli.demo.pages import new_cache, reusable_tokens, trim

CHUNK_TOKENS = 256

OnChunk = Callable[[Any, int], None]
"""Called as ``on_chunk(cache, tokens_so_far)`` after each chunk, before ``trim``."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt's cache and the logits of its last position, a float tensor of shape ``[vocabulary]``."""

    cache: Any
    last_logits: Any

    @property
    def next_token(self) -> int:
        """The greedy choice."""
        return int(self.last_logits.argmax())


def chunk_ends(start: int, n_tokens: int, page_tokens: int) -> list[int]:
    """Where the chunks end when a prompt of ``n_tokens`` is prefilled from token ``start``.

    Chunks end at the multiples of ``CHUNK_TOKENS``, at the end of the reusable prefix, and at the end.
    Whatever ``start`` is, the ends after the next one are those of the uninterrupted run.
    """
    ends = {*range(CHUNK_TOKENS, n_tokens, CHUNK_TOKENS), reusable_tokens(n_tokens, page_tokens), n_tokens}
    return sorted(end for end in ends if end > start)


def warm_up(model: LoadedModel) -> None:
    """Run one token through the model and forget it.

    Called by both workers before they measure: the first pass reads the weights in and sets up the kernels, which
    would otherwise count as prefill in one worker and as restore in the other.
    """
    import torch

    with torch.inference_mode():
        _forward(model, new_cache(model), [0])


def prefill(
    model: LoadedModel,
    tokens: Sequence[int],
    *,
    cache: Any = None,
    on_chunk: OnChunk | None = None,
    progress: Progress | None = None,
) -> Prefilled:
    """Compute the tokens that ``cache`` doesn't hold yet (all, without one), in fixed chunks.

    ``cache`` is extended in place. Raises ``ValueError`` when it leaves no token to compute.
    """
    import torch

    cache = new_cache(model) if cache is None else cache
    start = int(cache.get_seq_length())
    if start >= len(tokens):
        raise ValueError(f"the cache holds {start} tokens of a prompt of {len(tokens)}; leave at least one to compute")
    logits = None
    done = start
    with torch.inference_mode():
        for end in chunk_ends(start, len(tokens), model.page_tokens):
            logits = _forward(model, cache, tokens[done:end])
            if on_chunk is not None:
                on_chunk(cache, end)
            trim(cache)
            done = end
            if progress is not None:
                progress("prefill", done - start, len(tokens) - start)
    return Prefilled(cache, logits)


def decode(model: LoadedModel, cache: Any, first_token: int, n: int, *, progress: Progress | None = None) -> list[int]:
    """``n`` tokens by greedy choice, the prefill's ``first_token`` being the first; ``cache`` grows in place.

    Afterwards the cache holds all of them but the last, so ``decode(model, cache, tokens[-1], m + 1)[1:]``
    goes on. End-of-text is a token like others here: a proof of a fixed length is worth more than a polite
    stop.
    """
    import torch

    out = [first_token]
    with torch.inference_mode():
        while len(out) < n:
            out.append(int(_forward(model, cache, out[-1:]).argmax()))
            trim(cache)
            if progress is not None:
                progress("decode", len(out), n)
    return out[:n]


def _forward(model: LoadedModel, cache: Any, tokens: Sequence[int]) -> Any:
    import torch

    ids = torch.tensor([list(tokens)], device=model.device)
    output = model.module(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1]
