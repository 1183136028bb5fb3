"""Stacks for the handshake tests, as a client describes them, and small helpers around a live daemon.

Pages are small, so that whole stacks fit a daemon of some tens of MiB. Numbers: a page has 16 tokens; the DeepSeek-V4-like
stack has a window of 64 tokens (4 pages) beside compressed regions that reuse the slots of its `kv` pool.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from hoststage.client import (
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    PayloadPath,
    PoolKind,
    PoolSpec,
    StackSpec,
    connect,
)
from tests.integration.daemon import Daemon, eventually

TOKENS = 16
WINDOW = 64
WINDOW_PAGES = 4
KIB = 1024

KV = PoolSpec("kv", PoolKind.KV, 8 * KIB, TOKENS, host_slots=64)
SWA = PoolSpec("swa", PoolKind.SWA, 4 * KIB, TOKENS, sliding_window=WINDOW, host_slots=32)
STATE = PoolSpec("state", PoolKind.MAMBA, 20_000, TOKENS, host_slots=8)


def sidecar(name: str, source: str = "kv", page: int = 1000, **changes: object) -> PoolSpec:
    """Return a pool that reuses the slots of another."""
    return PoolSpec(name, PoolKind.SIDECAR, page, TOKENS, indices_from_pool=source, **changes)  # type: ignore[arg-type]


V4_POOLS = (
    replace(KV, replicated=True),
    sidecar("deepseek_v4_c4", page=2048),
    sidecar("deepseek_v4_c128", page=500),
    sidecar("indexer", page=4096),
    SWA,
    replace(STATE, name="deepseek_v4_state"),
)


def spec(model: str, *pools: PoolSpec, modes: tuple[Mode, ...] = (Mode.BUFFER_ONLY,), **changes: object) -> StackSpec:
    """Return a stack of a model of its own that asks for `modes`, in order, over shared memory."""
    wishes = tuple(ModeWish(mode) for mode in modes)
    changes.setdefault("paths", (PayloadPath.SHM,))
    return StackSpec(Identity(model), pools, modes=wishes, **changes)  # type: ignore[arg-type]


def unified(model: str, *modes: Mode) -> StackSpec:
    """Return a hybrid stack whose window part is a device-only ring."""
    ring = replace(SWA, layout=KvLayout.UNIFIED_KV, host_slots=0)
    return spec(model, replace(KV, layout=KvLayout.UNIFIED_KV), ring, modes=modes)


def keys_of(n: int, seed: str) -> list[bytes]:
    """Return `n` keys of 32 bytes."""
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]


def rows_of(n: int, size: int, seed: int) -> np.ndarray:
    """Return `n` pages of `size` bytes, different for each seed."""
    return np.random.default_rng(seed).integers(0, 256, (n, size), dtype=np.uint8)


def opened(daemon: Daemon, stack: StackSpec, **named: object):
    """Open a session."""
    return connect(daemon.address, stack=stack, timeout=20, **{"worker": "t", **named})  # type: ignore[arg-type]


def budget_of(daemon: Daemon) -> tuple[int, int]:
    """Return the number of sessions, and the bytes of the budget that are held."""
    facts = daemon.status()
    return len(facts["sessions"]), facts["granted_bytes"]


def nothing_held(daemon: Daemon, seconds: float = 20.0) -> None:
    """Wait until no session is left and all memory of sessions is back; what namespaces keep warm may be reclaimed."""
    eventually(lambda: budget_of(daemon)[0] == 0, seconds)
