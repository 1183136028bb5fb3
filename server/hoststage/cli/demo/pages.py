"""A model's KV cache as pages, and a cache built from pages.

One page holds ``page_tokens`` tokens of every layer of its pool, layer first: for each layer K, then V, each
``[heads, page_tokens, head_dim]``. Page ``i`` of a pool covers the tokens ``[i * page_tokens, (i + 1) *
page_tokens)`` in both pools, so one chain of keys names both.

A sliding layer attends to its last ``window - 1`` tokens and the new one. ``transformers`` keeps just those,
which starts in the middle of a page; a page that is named by its tokens must be whole, so the cache that
``new_cache`` makes is told to keep what a chunk pushed out until ``trim`` is called, between the chunks,
after the pages were taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hoststage.cli.demo.models import LoadedModel

Buffer: TypeAlias = memoryview | bytes | bytearray | npt.NDArray[np.uint8]
PagesByPool: TypeAlias = Mapping[str, Mapping[int, Buffer]]

KEY_BYTES = 32


class PageError(ValueError):
    """A page isn't in the cache, isn't among the pages given, or its buffer has the wrong size."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """One pool of a model's stack.

    ``kind`` is ``kv`` or ``swa``; ``layers`` are the model's layer numbers in page order; ``pieces`` are the
    bytes of each K and V run in a page (two per layer); ``window_tokens`` is 0 for full attention;
    ``itemsize`` is in bytes.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    page_tokens: int
    page_bytes: int
    pieces: tuple[int, ...]
    window_tokens: int
    heads: int
    head_dim: int
    itemsize: int

    @property
    def array_shape(self) -> tuple[int, int, int, int, int]:
        """A page as an array: ``(layers, K and V, heads, page_tokens, head_dim)``."""
        return len(self.layers), 2, self.heads, self.page_tokens, self.head_dim

    def pages_for(self, n_tokens: int) -> range:
        """The pages that a restore at ``n_tokens`` needs: all, or those that meet the trailing window."""
        end = -(-n_tokens // self.page_tokens)
        return range(self.first_token(n_tokens) // self.page_tokens, end)

    def first_token(self, n_tokens: int) -> int:
        """The first token that the next one still attends to in this pool."""
        return max(0, n_tokens - self.window_tokens + 1) if self.window_tokens else 0


def stack_shape(model: LoadedModel) -> list[PoolShape]:
    """The pools of the model: ``kv`` for full attention first, then ``swa`` where it has sliding layers."""
    config = model.module.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    pools = [_pool(model, "kv", full, 0)]
    if sliding:
        pools.append(_pool(model, "swa", sliding, int(config.sliding_window)))
    return pools


def _pool(model: LoadedModel, kind: str, layers: tuple[int, ...], window: int) -> PoolShape:
    config = model.module.config
    itemsize = int(model.module.dtype.itemsize)
    piece = int(config.num_key_value_heads) * model.page_tokens * int(config.head_dim) * itemsize
    return PoolShape(
        name=kind,
        kind=kind,
        layers=layers,
        page_tokens=model.page_tokens,
        page_bytes=2 * len(layers) * piece,
        pieces=(piece,) * (2 * len(layers)),
        window_tokens=window,
        heads=int(config.num_key_value_heads),
        head_dim=int(config.head_dim),
        itemsize=itemsize,
    )


def chain_keys(tokens: Sequence[int], page_tokens: int, seed: bytes = b"") -> list[bytes]:
    """The key of every whole page of ``tokens``: a hash of the page's tokens and of the key before it.

    ``seed`` separates what tokens alone don't, such as another hash scheme; the namespace separates models.
    """
    keys: list[bytes] = []
    parent = hashlib.blake2b(seed, digest_size=KEY_BYTES).digest()
    ids = np.asarray(tokens, dtype="<u4")
    for start in range(0, len(ids) - page_tokens + 1, page_tokens):
        page = ids[start : start + page_tokens].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def reusable_tokens(n_tokens: int, page_tokens: int) -> int:
    """The longest whole-page prefix of a prompt that leaves a token to compute, for the next one's logits."""
    return (n_tokens - 1) // page_tokens * page_tokens


def new_cache(model: LoadedModel) -> Any:
    """An empty cache for the model, whose sliding layers keep what a chunk pushes out until ``trim``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.module.config)
    for layer in _sliding(cache):
        layer.activate_past_recording()
    return cache


def trim(cache: Any) -> None:
    """Drop what no later token attends to, between two chunks, so that each starts from the same state."""
    for layer in _sliding(cache):
        if layer.is_initialized:
            layer.crop(0)


def _sliding(cache: Any) -> Iterable[Any]:
    return (layer for layer in cache.layers if layer.is_sliding)


def extract_page(cache: Any, pool: PoolShape, page_index: int, out: Buffer) -> None:
    """Copy one whole page of every layer of ``pool`` into ``out`` (``page_bytes``, writable).

    Raises ``PageError`` when the cache doesn't hold all of the page's tokens.
    """
    first = page_index * pool.page_tokens
    base, end = held_tokens(cache, pool)
    if first < base or first + pool.page_tokens > end:
        raise PageError(
            f"page {page_index} of pool {pool.name!r} covers tokens {first} to "
            f"{first + pool.page_tokens}, and the cache holds {base} to {end}; "
            "take pages after the chunk that ends them and before trim()"
        )
    _copy_out(cache, pool, page_index, out)


def extract_partial_page(cache: Any, pool: PoolShape, page_index: int, out: Buffer) -> None:
    """Copy what the cache holds of one page into ``out``; the rest of the page is zeros.

    For a request's private pages (a hold, in the middle of decoding): such a page isn't named by its tokens,
    and ``restore`` reads no token that isn't there. Raises ``PageError`` when ``out`` has the wrong size.
    """
    _as_array(pool, out)[:] = 0
    _copy_out(cache, pool, page_index, out)


def held_tokens(cache: Any, pool: PoolShape) -> tuple[int, int]:
    """The first token that the cache holds in this pool, and the one after the last."""
    layer = cache.layers[pool.layers[0]]
    end = int(layer.get_seq_length())
    return (end - int(layer.keys.shape[-2]), end) if layer.is_initialized else (end, end)


def _copy_out(cache: Any, pool: PoolShape, page_index: int, out: Buffer) -> None:
    base, end = held_tokens(cache, pool)
    page_first = page_index * pool.page_tokens
    first, last = max(base, page_first), min(end, page_first + pool.page_tokens)
    page = _as_array(pool, out)
    if first >= last:
        return
    for row, layer_index in zip(page, pool.layers, strict=True):
        layer = cache.layers[layer_index]
        for piece, tensor in zip(row, (layer.keys, layer.values), strict=True):
            piece[:, first - page_first : last - page_first] = _bits(tensor[0, :, first - base : last - base], pool)


def restore(model: LoadedModel, pages: PagesByPool, n_tokens: int) -> Any:
    """A cache that stands where the one stood from which ``pages`` were taken, after ``n_tokens`` tokens.

    ``pages`` gives, for each pool's name, the buffers of at least ``pool.pages_for(n_tokens)``, by page
    index; they are copied and may be read-only. Raises ``PageError`` for a missing page or a wrong size.
    """
    cache = new_cache(model)
    for pool in stack_shape(model):
        held = pages.get(pool.name, {})
        needed = pool.pages_for(n_tokens)
        if missing := [index for index in needed if index not in held]:
            raise PageError(
                f"pool {pool.name!r} lacks pages {missing} of the {len(needed)} that {n_tokens} tokens need"
            )
        _fill(model, cache, pool, held, n_tokens)
    return cache


def _fill(model: LoadedModel, cache: Any, pool: PoolShape, held: Mapping[int, Buffer], n_tokens: int) -> None:
    import torch

    base, count = pool.first_token(n_tokens), n_tokens - pool.first_token(n_tokens)
    shape = (len(pool.layers), 2, 1, pool.heads, count, pool.head_dim)
    whole = torch.empty(shape, dtype=model.module.dtype)
    # Filled as integers of the same width: bytes move unchanged in any dtype, NaN payloads included.
    bits = _bits(whole, pool)[:, :, 0]
    for index in pool.pages_for(n_tokens):
        page_first = index * pool.page_tokens
        first, last = max(base, page_first), min(n_tokens, page_first + pool.page_tokens)
        page = _as_array(pool, held[index])
        bits[..., first - base : last - base, :] = page[..., first - page_first : last - page_first, :]
    # The pieces are views of one tensor: the first decoded token copies each into a longer one in any case.
    for (keys, values), layer_index in zip(whole.to(model.device), pool.layers, strict=True):
        layer = cache.layers[layer_index]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = n_tokens


def _as_array(pool: PoolShape, buffer: Buffer) -> npt.NDArray[Any]:
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.nbytes != pool.page_bytes:
        raise PageError(
            f"a page of pool {pool.name!r} was given a buffer of {flat.nbytes} bytes; give {pool.page_bytes}"
        )
    return flat.view(f"u{pool.itemsize}").reshape(pool.array_shape)


def _bits(tensor: Any, pool: PoolShape) -> npt.NDArray[Any]:
    """The tensor's elements as unsigned integers; the same memory where it is contiguous and on the host."""
    import torch

    signed = {2: torch.int16, 4: torch.int32}[pool.itemsize]
    bits: npt.NDArray[Any] = tensor.detach().cpu().contiguous().view(signed).numpy()
    return bits.view(f"u{pool.itemsize}")
