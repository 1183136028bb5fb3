"""From the layers of one pipeline stage to its pools, with the arithmetic behind every size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hoststage.core.sizing import Term
from hoststage.core.stack import HitPolicy, KvLayout, Placement, Pool, PoolKind, ceil_div
from hoststage.models.errors import ModelError
from hoststage.models.layers import Attention, Latent, Layer, State

DSA_SCALE_GROUP = 128
"""Values of the indexer's key, and of the fp8 latent, that share one four-byte scale."""


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A pool and how its sizes come about. token_bytes: bytes of one token, 0 where a page is not made of tokens."""

    pool: Pool
    terms: tuple[Term, ...]
    token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: the layers it holds, and the settings that its pools depend on.

    element_bytes: bytes of one cached element. kv_ranks: ranks over which KV heads are divided. window_pool: whether
    window layers have a pool of their own. sparse: whether latent attention is sparse, which gives its fp8 cache another row.
    """

    layers: tuple[Layer | None, ...]
    element_bytes: int
    kv_ranks: int
    state_ranks: int
    page_tokens: int
    kv_layout: KvLayout
    mem_layout: str
    window_pool: bool
    sparse: bool = False


def heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return KV heads that one rank holds: divided where there are enough, else one, the same on several ranks."""
    if kv_heads >= ranks:
        if kv_heads % ranks:
            raise ModelError(
                "tp_size", f"{ranks} ranks do not divide {kv_heads} KV heads", "Give a size that divides them"
            )
        return kv_heads // ranks
    if ranks % kv_heads:
        raise ModelError(
            "tp_size",
            f"{ranks} ranks are no multiple of {kv_heads} KV heads",
            "Give a multiple, so that ranks share a head evenly",
        )
    return 1


def page_term(stage: Stage, token_bytes: int) -> Term:
    """Return the line that makes a page of its tokens."""
    return Term("page", f"{stage.page_tokens} tokens × {token_bytes}", stage.page_tokens * token_bytes, "bytes")


def window_term(window: int, page_tokens: int, chunked: bool = False) -> Term:
    """Return the line that turns a window into pages."""
    what = "chunk" if chunked else "window"
    return Term("window", f"ceil({window} {what} tokens / {page_tokens})", ceil_div(window, page_tokens), "pages")


def attention_pool(stage: Stage, name: str, layers: list[Attention], window: int) -> PoolDescription:
    """Return the pool of attention layers of one kind; `window` above 0 makes it a window pool."""
    first = layers[0]
    heads = heads_per_rank(first.kv_heads, stage.kv_ranks)
    if first.kv_heads >= stage.kv_ranks:
        formula = f"{first.kv_heads} KV heads / {stage.kv_ranks} ranks"
    else:
        formula = (
            f"{first.kv_heads} KV heads on {stage.kv_ranks} ranks, each held by {stage.kv_ranks // first.kv_heads}"
        )
    k = heads * first.head_dim * stage.element_bytes
    v = heads * first.v_head_dim * stage.element_bytes
    token = len(layers) * (k + v)
    terms = [
        Term("heads", formula, heads, "heads"),
        Term(
            "token and layer",
            f"{heads} heads × ({first.head_dim} K + {first.v_head_dim} V) × {stage.element_bytes} bytes",
            k + v,
            "bytes",
        ),
        Term("token", f"{len(layers)} layers × {k + v}", token, "bytes"),
        page_term(stage, token),
    ]
    if window:
        terms.append(window_term(window, stage.page_tokens, first.chunked))
    pool = Pool(
        name=name,
        kind=PoolKind.SWA if window else PoolKind.KV,
        page_bytes=stage.page_tokens * token,
        page_tokens=stage.page_tokens,
        layers=len(layers),
        layout=stage.kv_layout,
        pieces=_pieces(stage, len(layers), (k, v)),
    )
    if window:
        pool = _windowed(pool, window, stage.kv_layout)
    return PoolDescription(pool, tuple(terms), token)


def _windowed(pool: Pool, window: int, layout: KvLayout) -> Pool:
    """Turn a pool into a window pool. Under `unified_kv` its window is a ring on the device and has no host pages."""
    device_only = layout is KvLayout.UNIFIED_KV
    return replace(
        pool,
        sliding_window=window,
        hit_policy=HitPolicy.TRAILING_PAGES,
        trailing_pages=ceil_div(window, pool.page_tokens),
        placement=Placement.DEVICE_ONLY if device_only else Placement.HOST_POOL,
        pieces=() if device_only else pool.pieces,
    )


def _pieces(stage: Stage, layers: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pieces of a page: a layer-first layout has one for each layer and part, a page-first one for each part."""
    if stage.mem_layout == "layer_first":
        return tuple(part * stage.page_tokens for part in parts for _ in range(layers))
    if stage.mem_layout.startswith("page_first"):
        return tuple(part * stage.page_tokens * layers for part in parts)
    return ()


def latent_pools(stage: Stage, layers: list[Latent]) -> list[PoolDescription]:
    """Return the latent pool and, with sparse attention, the indexer's sidecar."""
    first = layers[0]
    width = first.rank + first.rope_dim
    indexed = [layer for layer in layers if layer.index_dim]
    if stage.sparse and stage.element_bytes == 1:
        scales = ceil_div(first.rank, DSA_SCALE_GROUP) * 4
        per_layer = first.rank + scales + first.rope_dim * 2
        line = f"{first.rank} fp8 latent + {scales} scales + {first.rope_dim} rope × 2 bytes"
    else:
        per_layer = width * stage.element_bytes
        line = f"({first.rank} latent + {first.rope_dim} rope) × {stage.element_bytes} bytes"
    token = len(layers) * per_layer
    pools = [
        PoolDescription(
            Pool(
                name="kv",
                kind=PoolKind.KV,
                page_bytes=stage.page_tokens * token,
                page_tokens=stage.page_tokens,
                layers=len(layers),
                layout=stage.kv_layout,
                replicated=True,
                pieces=_pieces(stage, len(layers), (per_layer,)),
            ),
            (
                Term("token and layer", f"{line}, the same on every tensor-parallel rank", per_layer, "bytes"),
                Term("token", f"{len(layers)} layers × {per_layer}", token, "bytes"),
                page_term(stage, token),
            ),
            token,
        )
    ]
    if indexed:
        pools.append(_indexer_pool(stage, len(indexed), indexed[0].index_dim))
    return pools


def _indexer_pool(stage: Stage, layers: int, index_dim: int) -> PoolDescription:
    scales = index_dim // DSA_SCALE_GROUP * 4
    per_layer = index_dim + scales
    token = layers * per_layer
    return PoolDescription(
        Pool(
            name="indexer",
            kind=PoolKind.SIDECAR,
            page_bytes=stage.page_tokens * token,
            page_tokens=stage.page_tokens,
            layers=layers,
            layout=stage.kv_layout,
            indices_from_pool="kv",
            replicated=True,
        ),
        (
            Term("token and layer", f"{index_dim} fp8 index key + {scales} scales", per_layer, "bytes"),
            Term("token", f"{layers} layers × {per_layer}", token, "bytes"),
            page_term(stage, token),
        ),
        token,
    )


def state_pool(stage: Stage, layers: list[State]) -> PoolDescription:
    """Return the pool of recurrent states: a page is one request's state over all recurrent layers of the stage."""
    s, ranks = layers[0], stage.state_ranks
    if s.heads % ranks:
        raise ModelError(
            "tp_size", f"{ranks} ranks do not divide {s.heads} state heads", "Give a size that divides them"
        )
    groups = s.groups if s.groups % ranks == 0 else s.groups + ranks - s.groups
    channels = (s.heads * s.head_dim + 2 * groups * s.state_size) // ranks
    conv = channels * (s.kernel - 1) * s.conv_bytes
    state = s.heads // ranks * s.head_dim * s.state_size * s.state_bytes
    total = len(layers) * (conv + state)
    terms = (
        Term(
            "convolution channels",
            f"({s.heads} heads × {s.head_dim} + 2 × {groups} groups × {s.state_size}) / {ranks} ranks",
            channels,
            "channels",
        ),
        Term("convolution", f"{channels} × ({s.kernel} - 1) steps × {s.conv_bytes} bytes", conv, "bytes"),
        Term(
            "state",
            f"{s.heads // ranks} heads × {s.head_dim} × {s.state_size} × {s.state_bytes} bytes",
            state,
            "bytes",
        ),
        Term("page", f"one state for each request: {len(layers)} layers × ({conv} + {state})", total, "bytes"),
    )
    pool = Pool(
        name="mamba",
        kind=PoolKind.MAMBA,
        page_bytes=total,
        page_tokens=stage.page_tokens,
        layers=len(layers),
        hit_policy=HitPolicy.TRAILING_PAGES,
        trailing_pages=1,
    )
    return PoolDescription(pool, terms)
