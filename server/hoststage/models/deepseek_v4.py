"""DeepSeek V4's pools, as SGLang 0.5.23 lays them out.

The `kv` pool there is only an address space: its slots name pages of 256 tokens, whose bytes are in the sidecars. The
compressed regions and the indexer's keys reuse its slot ids, the compressors' states those of the window pool. Under
`unified_kv` the window is a ring on the device, the states go with it, and the compressed rows are plain bfloat16.
"""

from __future__ import annotations

from hoststage.core.sizing import Term
from hoststage.core.stack import HitPolicy, KvLayout, Placement, Pool, PoolKind, align_up
from hoststage.models.layers import Compressed
from hoststage.models.pools import PoolDescription, Stage, window_term

ANCHOR_BYTES = 8
"""What a page of the address space is stored as: a mark that its sidecars are there."""

ROPE_BYTES = 2
SCALE_GROUP = 64
ROW_ALIGNMENT = 576
"""Packed pages are padded to the stride in which the kernels read."""

STATE_RING = 8
STATE_BYTES = 4
"""Rows of the ratio-4 compressor's ring for one page without speculative decoding, and bytes of one float32 element."""


def compressed_pools(stage: Stage, layers: list[Compressed]) -> list[PoolDescription]:
    """Return the anchor, the window pool, the compressed regions, the indexer and the states of one stage."""
    unified = stage.kv_layout is KvLayout.UNIFIED_KV
    first = layers[0]
    c4 = sum(1 for layer in layers if layer.ratio == 4)
    c128 = sum(1 for layer in layers if layer.ratio == 128)
    pools = [_anchor(stage, len(layers)), _window_pool(stage, len(layers), first)]
    for ratio, count in ((4, c4), (128, c128)):
        if count:
            pools.append(_region(stage, f"deepseek_v4_c{ratio}", count, ratio, first))
    if c4:
        pools.insert(3, _indexer(stage, c4, first.index_dim))
    if c4 and not unified:
        window_pages = pools[1].pool.window_pages
        pools.append(_state(stage, "deepseek_v4_c4_state", c4, first.head_dim, window_pages))
        pools.append(_state(stage, "deepseek_v4_c4_indexer_state", c4, first.index_dim, window_pages))
    return pools


def _anchor(stage: Stage, layers: int) -> PoolDescription:
    pool = Pool(
        name="kv",
        kind=PoolKind.KV,
        page_bytes=ANCHOR_BYTES,
        page_tokens=stage.page_tokens,
        layers=layers,
        layout=stage.kv_layout,
        replicated=True,
    )
    line = "an address space without bytes in the engine; hoststage stores a mark"
    return PoolDescription(pool, (Term("page", line, ANCHOR_BYTES, "bytes"),))


def _row(first: Compressed, unified: bool) -> tuple[int, str]:
    """Return bytes of one cache row, and the formula."""
    if unified:
        return first.head_dim * 2, f"{first.head_dim} × 2 bytes"
    nope = first.head_dim - first.rope_dim
    scales = nope // SCALE_GROUP + 1
    row = nope + first.rope_dim * ROPE_BYTES + scales
    return row, f"{nope} fp8 + {first.rope_dim} rope × {ROPE_BYTES} bytes + {scales} scales and pad"


def _page(stage: Stage, rows: int, layers: int, first: Compressed) -> tuple[int, list[Term]]:
    """Return bytes of one page over all layers of a region with `rows` rows a page, and the arithmetic."""
    unified = stage.kv_layout is KvLayout.UNIFIED_KV
    row, formula = _row(first, unified)
    per_layer = rows * row if unified else align_up(rows * row, ROW_ALIGNMENT)
    padded = "" if unified else f", padded to a multiple of {ROW_ALIGNMENT}"
    return layers * per_layer, [
        Term("row", formula, row, "bytes"),
        Term("page and layer", f"{rows} rows × {row}{padded}", per_layer, "bytes"),
        Term("page", f"{layers} layers × {per_layer}", layers * per_layer, "bytes"),
    ]


def _window_pool(stage: Stage, layers: int, first: Compressed) -> PoolDescription:
    page, terms = _page(stage, stage.page_tokens, layers, first)
    unified = stage.kv_layout is KvLayout.UNIFIED_KV
    window = window_term(first.window, stage.page_tokens)
    pool = Pool(
        name="swa",
        kind=PoolKind.SWA,
        page_bytes=page,
        page_tokens=stage.page_tokens,
        layers=layers,
        sliding_window=first.window,
        hit_policy=HitPolicy.TRAILING_PAGES,
        trailing_pages=window.value,
        layout=stage.kv_layout,
        placement=Placement.DEVICE_ONLY if unified else Placement.HOST_POOL,
        replicated=True,
    )
    return PoolDescription(pool, (*terms, window))


def _region(stage: Stage, name: str, layers: int, ratio: int, first: Compressed) -> PoolDescription:
    rows = stage.page_tokens // ratio
    page, terms = _page(stage, rows, layers, first)
    terms.insert(0, Term("rows", f"{stage.page_tokens} tokens / {ratio}", rows, "rows a page"))
    return PoolDescription(_sidecar(stage, name, layers, page, "kv"), tuple(terms))


def _indexer(stage: Stage, layers: int, index_dim: int) -> PoolDescription:
    rows = stage.page_tokens // 4
    row = index_dim + index_dim // 128 * 4
    page = layers * rows * row
    terms = (
        Term("rows", f"{stage.page_tokens} tokens / 4", rows, "rows a page"),
        Term("row", f"{index_dim} fp8 index key + {index_dim // 128 * 4} scale", row, "bytes"),
        Term("page", f"{layers} layers × {rows} rows × {row}", page, "bytes"),
    )
    return PoolDescription(_sidecar(stage, "deepseek_v4_c4_indexer", layers, page, "kv"), terms)


def _state(stage: Stage, name: str, layers: int, dim: int, window_pages: int) -> PoolDescription:
    row = 2 * 2 * dim * STATE_BYTES
    page = layers * STATE_RING * row
    terms = (
        Term("row", f"(value + score) × 2 overlapping × {dim} × {STATE_BYTES} bytes", row, "bytes"),
        Term("page", f"{layers} layers × {STATE_RING} rows in the ring × {row}", page, "bytes"),
    )
    return PoolDescription(_sidecar(stage, name, layers, page, "swa", trailing=window_pages), terms)


def _sidecar(stage: Stage, name: str, layers: int, page: int, source: str, *, trailing: int = 0) -> Pool:
    return Pool(
        name=name,
        kind=PoolKind.SIDECAR,
        page_bytes=page,
        page_tokens=stage.page_tokens,
        layers=layers,
        hit_policy=HitPolicy.TRAILING_PAGES if trailing else HitPolicy.ALL_PAGES,
        trailing_pages=trailing,
        layout=stage.kv_layout,
        indices_from_pool=source,
        replicated=True,
    )
