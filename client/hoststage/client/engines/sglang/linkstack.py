"""The stack that the linker presents: all device pools of one rank in one session, so that one commit covers them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from hoststage.client.engines.sglang.devicepools import DevicePages
from hoststage.client.engines.sglang.settings import Settings
from hoststage.client.stack import (
    HitPolicy,
    Identity,
    Parallel,
    PayloadPath,
    PoolKind,
    PoolSpec,
    Role,
    StackSpec,
)

KV, SWA, MAMBA = "kv", "swa", "mamba"
_MOST_PIECES = 256
"""Pieces that are worth telling an operator; they are no part of how the daemon keeps a page."""

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass(frozen=True, slots=True)
class Worker:
    """What a rank is: its model, its place and the tokens of a page and of the window (0: none)."""

    model: str
    dtype: str
    page_tokens: int
    window_tokens: int
    parallel: Parallel
    role: Role
    replicated: bool


def stack_of(
    pools: Mapping[str, DevicePages], worker: Worker, settings: Settings, engine: Mapping[str, str]
) -> StackSpec:
    """Return the stack. `engine`: what the engine's own arguments tell of the identity.

    The tree's components are pools of their own: FULL needs all pages, SWA its window, Mamba the last state. What shares a component's slot ids
    (an indexer, a draft, DeepSeek-V4's regions) is a sidecar of it: served only where both come from one commit.

    :raises StackError: for `slots` of a pool that is not there.
    """
    settings.check_slots(pools)
    identity = Identity(
        model=worker.model or "unnamed",
        tenant=settings.tenant,
        weights_revision=settings.weights_revision or engine.get("weights_revision", ""),
        quantization=settings.quantization or engine.get("quantization", ""),
        kv_scales=settings.kv_scales or engine.get("kv_scales", ""),
        dtype=worker.dtype,
        layout="device " + " ".join(_layout_words(pool) for pool in pools.values()),
        key_hash="sglang",
    )
    anchors: dict[str, str] = {}
    for pool in pools.values():
        # DeepSeek-V4 has no pool of the tree's own name: the first one that takes its slot ids stands for it.
        anchors.setdefault(pool.source, pool.source if pool.source in pools else pool.name)
    specs = tuple(_spec(pool, anchors[pool.source], worker, settings) for pool in pools.values())
    return StackSpec(identity, specs, worker.parallel, worker.role, modes=settings.modes, paths=(PayloadPath.SHM,))


def _spec(pool: DevicePages, anchor: str, worker: Worker, settings: Settings) -> PoolSpec:
    sidecar = pool.name != anchor
    kinds = {SWA: PoolKind.SWA, MAMBA: PoolKind.MAMBA}
    window = pool.source == SWA
    trailing = -(-worker.window_tokens // worker.page_tokens) if window else 1 if pool.source == MAMBA else 0
    sizes = tuple(int(size) for size in pool.sizes)
    return PoolSpec(
        pool.name,
        PoolKind.SIDECAR if sidecar else kinds.get(pool.source, PoolKind.KV),
        pool.page_bytes,
        worker.page_tokens,
        layers=max(1, len(pool.of_layer)),
        sliding_window=worker.window_tokens if window and not sidecar else 0,
        hit_policy=HitPolicy.TRAILING_PAGES if trailing else HitPolicy.ALL_PAGES,
        trailing_pages=trailing,
        indices_from_pool=anchor if sidecar else "",
        replicated=worker.replicated,
        pieces=sizes if len(sizes) <= _MOST_PIECES else (),
        host_slots=settings.slots.get(pool.name, 0),
    )


def _layout_words(pool: DevicePages) -> str:
    """Return what two processes must share for a page of one to mean the same bytes in the other."""
    layers = repr(sorted((layer, part.start, part.stop) for layer, part in pool.of_layer.items()))
    words = pool.sizes.tobytes() + layers.encode()
    return f"{pool.name}:{pool.page_bytes}:{hashlib.sha256(words).hexdigest()[:16]}"
