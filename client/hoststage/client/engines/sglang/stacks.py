"""From SGLang's host pools to stacks: which pools go together, and under which identity their pages are kept.

SGLang reads and writes `kv` and its sidecars in separate calls, so one commit cannot cover them. Each pool therefore has a namespace, a session
and commits of its own, and whether a prefix can be restored is the intersection of what all pools have, taken when SGLang asks. That is sound because
a page is whole in itself: it carries the scales of its own codes, and its key names every token before its end, so that a page of one writer may stand beside
one of another as pages of two requests do in the engine's own tree. Pools that are *not* whole in themselves, codes and the scales of these codes, or two
halves of one row, form a family: one stack, one commit a call, the second pool a sidecar of the first, served only where the commit ids agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hoststage.client.engines.sglang.hostpages import HostPages
from hoststage.client.engines.sglang.settings import Settings, drafts_of
from hoststage.client.errors import StackError
from hoststage.client.stack import HitPolicy, Identity, Parallel, PoolKind, PoolSpec, StackSpec

ANCHOR = "kv"

SOURCES = {
    "deepseek_v4_c1_indexer_scale": "deepseek_v4_c1_indexer",
    "deepseek_v4_c2_indexer_scale": "deepseek_v4_c2_indexer",
    "deepseek_v4_c4_indexer_scale": "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_rope": "deepseek_v4_c4",
    "deepseek_v4_c128_rope": "deepseek_v4_c128",
}
"""Pools that mean nothing without the very page of another pool that was written with them."""

_RANK_SHARDED = ("mamba",)
"""Pools that every tensor-parallel rank has a part of, even where the model's KV is replicated."""


@dataclass(frozen=True, slots=True)
class Family:
    """Pools that are stored and loaded together: `names[0]` is the source of the others."""

    names: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.names[0]


def family_of(name: str, registered: Sequence[str]) -> Family:
    """Return the family of a pool among those that are registered."""
    source = SOURCES.get(name, name)
    if source not in registered:
        source = name
    others = [other for other, of in SOURCES.items() if of == source and other in registered]
    return Family((source, *others))


def check_described(settings: Settings, described: Sequence[str], args: Any) -> None:
    """Raise `StackError` where `slots` names a pool that a launch with SGLang's arguments `args` will not have.

    described: pools of its model, as `hoststage check` describes them.
    """
    compressed = any(name.startswith("deepseek_v4") for name in described)
    # Of DeepSeek-V4 the engine keeps nothing but the numbers of slots in the anchor; it is no pool of a session's.
    there = [name for name in described if name != ANCHOR or not compressed]
    settings.check_slots(there, [*drafts_of(args), *(name for name, of in SOURCES.items() if of in there)])


def stack_of(
    family: Family,
    pools: Mapping[str, HostPages],
    config: Any,
    settings: Settings,
    engine: Mapping[str, str],
    page_tokens: int,
) -> StackSpec:
    """Return the stack that a family presents.

    config: SGLang's `HiCacheStorageConfig`. engine: what the engine's own arguments tell of the identity (`engine_identity`). page_tokens: of one key.
    """
    source = pools[family.source]
    replicated = all(_replicated(pools[name], config) for name in family.names)
    identity = Identity(
        model=config.model_name or "unnamed",
        tenant=settings.tenant,
        weights_revision=settings.weights_revision or engine.get("weights_revision", ""),
        quantization=settings.quantization or engine.get("quantization", ""),
        kv_scales=settings.kv_scales or engine.get("kv_scales", ""),
        dtype=source.dtype,
        layout=" ".join(_layout_words(pools[name]) for name in family.names),
        key_hash="sglang",
    )
    specs = [_spec(name, family, pools[name], settings, page_tokens, replicated) for name in family.names]
    # Each axis is part of the namespace; dcp cannot be attached to a dynamic backend, and is passed on so that a fence may say so.
    parallel = Parallel(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        dp_rank=0,
        dp_size=1,
        dcp_rank=config.dcp_rank,
        dcp_size=config.dcp_size,
    )
    return StackSpec(identity, tuple(specs), parallel, modes=settings.modes)


def _spec(
    name: str, family: Family, pages: HostPages, settings: Settings, page_tokens: int, replicated: bool
) -> PoolSpec:
    """Return one pool of a family's stack.

    The policy asks for the last page alone: a lookup then tells of every single page whether it is there. Which pages a prefix needs is SGLang's to say,
    with each call.
    """
    sidecar = name != family.source
    kind = PoolKind.SIDECAR if sidecar else PoolKind.MAMBA if name == "mamba" else PoolKind.KV
    sizes = [int(size) for size in pages.sizes]
    return PoolSpec(
        name,
        kind,
        pages.page_bytes,
        page_tokens,
        hit_policy=HitPolicy.TRAILING_PAGES,
        trailing_pages=1,
        indices_from_pool=family.source if sidecar else "",
        replicated=replicated,
        pieces=tuple(sizes) if len(sizes) <= _MOST_PIECES else (),
        host_slots=settings.slots.get(family.source, 0),
    )


_MOST_PIECES = 256
"""Pieces that are worth telling an operator; they are no part of how the daemon keeps a page."""


def _layout_words(pages: HostPages) -> str:
    """Return what two processes must share for a page of one to mean the same bytes in the other."""
    pieces = hashlib.sha256(pages.sizes.tobytes()).hexdigest()[:16]
    return f"{pages.name}:{pages.layout}:{pages.order}:{pages.page_bytes}:{pieces}"


def _replicated(pages: HostPages, config: Any) -> bool:
    """Whether every tensor-parallel rank holds the same bytes, one of them writing. SGLang says so of the model, with exceptions."""
    if not config.is_mla_model or pages.name in _RANK_SHARDED:
        return False
    # A multi-head draft model beside an MLA target is sharded; SGLang then writes only the first rank's part.
    return not (pages.name.startswith("draft") and hasattr(pages.pool, "head_num") and hasattr(pages.pool, "v_buffer"))


def engine_args() -> Any:
    """Return the arguments of the running engine, None outside one."""
    from sglang.srt import runtime_context

    try:
        return runtime_context.get_server_args()
    except (AttributeError, RuntimeError, ValueError):
        return None


def engine_identity() -> dict[str, str]:
    """Return what the arguments of the running engine tell of the identity; nothing outside an engine."""
    args = engine_args()
    named = {
        "weights_revision": ("revision", "load_format"),
        "quantization": ("quantization", "kv_cache_dtype"),
        "kv_scales": ("quantization_param_path",),
    }
    out = {}
    for field, sources in named.items():
        values = [str(value) for name in sources if (value := getattr(args, name, None)) not in (None, "")]
        if values:
            out[field] = " ".join(values)
    return out


def check_config(config: Any) -> None:
    """Raise `StackError` for what no namespace can stand for."""
    if getattr(config, "should_split_heads", False):
        raise StackError("tp_lcm_size", config.tp_lcm_size, "leave it out: pages split by heads are not supported")
