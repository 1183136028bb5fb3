"""Slots: what the device pools hold, and what the engine's flags make the host pools."""

from __future__ import annotations

from dataclasses import replace

from hoststage.core.sizing import Term
from hoststage.core.stack import Pool, PoolKind, ceil_div
from hoststage.models.fields import Fields
from hoststage.models.layers import Compressed, ModelShape
from hoststage.models.pools import PoolDescription
from hoststage.models.settings import Engine, EngineSettings

GIGABYTE = 10**9
"""SGLang's `--hicache-size` counts in these."""


def with_slots(
    pools: tuple[PoolDescription, ...], shape: ModelShape, settings: EngineSettings, f: Fields
) -> tuple[PoolDescription, ...]:
    """Return `pools` with device and host slots, where the settings tell them; 0 leaves the size to the daemon."""
    sizes = _Sizes(pools, shape, settings, f)
    own = {d.pool.name: sizes.slots(d) for d in pools if not d.pool.indices_from_pool}
    return tuple(_filled(d, *own.get(d.pool.indices_from_pool or d.pool.name, (0, 0, ""))) for d in pools)


def _filled(d: PoolDescription, device: int, host: int, formula: str) -> PoolDescription:
    pool = replace(d.pool, device_slots=device, host_slots=host)
    if not host:
        return replace(d, pool=pool)
    source = f"as its source {pool.indices_from_pool}" if pool.indices_from_pool else formula
    return replace(d, pool=pool, terms=(*d.terms, Term("host slots", source, host, "pages")))


class _Sizes:
    """Sizes of one stage's pools. Device and host slots, and the formula of the latter."""

    def __init__(
        self, pools: tuple[PoolDescription, ...], shape: ModelShape, settings: EngineSettings, f: Fields
    ) -> None:
        self.s = settings
        self.f = f
        self.compressed = any(isinstance(layer, Compressed) for layer in shape.layers)
        self.swa_ratio = self._swa_ratio(pools)
        self.shares = self._shares(pools)

    def _swa_ratio(self, pools: tuple[PoolDescription, ...]) -> float:
        if self.s.swa_ratio is not None:
            return self.s.swa_ratio
        default = 0.1 if self.compressed else 0.8
        matters = self.s.device_tokens > 0 or self.s.host_gb > 0
        if (
            matters
            and any(d.pool.kind is PoolKind.SWA for d in pools)
            and any(d.pool.kind is PoolKind.KV for d in pools)
        ):
            self.f.assume(
                "swa_full_tokens_ratio",
                f"{default} window tokens for each full token, SGLang's default",
                "--swa-full-tokens-ratio",
            )
        return default

    def _shares(self, pools: tuple[PoolDescription, ...]) -> dict[str, float]:
        """Divide the host size over the pools as SGLang does: in proportion to the bytes of the device pools."""
        if self.s.host_gb <= 0:
            return {}
        weights: dict[str, float] = {}
        has_kv = any(d.pool.kind is PoolKind.KV for d in pools)
        for d in pools:
            per_token = d.pool.page_bytes / d.pool.page_tokens
            if d.pool.kind is PoolKind.KV:
                weights[d.pool.name] = per_token
            elif d.pool.kind is PoolKind.SWA:
                weights[d.pool.name] = per_token * (self.swa_ratio if has_kv else 1.0)
        if any(d.pool.kind is PoolKind.MAMBA for d in pools):
            ratio = self.s.state_ratio
            if ratio is None:
                ratio = 0.9
                self.f.assume("mamba_full_memory_ratio", "0.9, SGLang's default", "--mamba-full-memory-ratio")
            # A pipeline stage without attention layers has its states alone to spend the size on.
            weights["mamba"] = ratio * sum(weights.values()) if has_kv else 1.0
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def slots(self, d: PoolDescription) -> tuple[int, int, str]:
        """Return device slots, host slots and the formula of a pool with slots of its own."""
        pool = d.pool
        device_tokens = self._device_tokens(pool)
        if pool.kind is PoolKind.MAMBA:
            device = self.s.state_slots
        else:
            device = ceil_div(device_tokens, pool.page_tokens) if self.compressed else device_tokens // pool.page_tokens
        if self.s.host_gb > 0 and not self.compressed:
            return (device, *self._by_size(pool))
        ratio = self.s.host_ratio
        if ratio is None or not device:
            return device, 0, ""
        if self.compressed:
            return device, int(device * ratio), f"{device} device pages × {ratio:g}"
        if pool.kind is PoolKind.MAMBA:
            return device, int(device * ratio) + 1, f"{device} device states × {ratio:g} + 1"
        host = int(device_tokens * ratio) // pool.page_tokens + 1
        return device, host, f"{device_tokens} device tokens × {ratio:g} / {pool.page_tokens} + 1"

    def _device_tokens(self, pool: Pool) -> int:
        if pool.kind is PoolKind.SWA:
            return int(self.s.device_tokens * self.swa_ratio)
        return self.s.device_tokens

    def _by_size(self, pool: Pool) -> tuple[int, str]:
        share = self.shares[pool.name]
        size = self.s.host_gb * share * GIGABYTE
        if pool.kind is PoolKind.MAMBA:
            return int(size // pool.page_bytes) + 1, f"{size:.0f} bytes / {pool.page_bytes} + 1"
        token = pool.page_bytes // pool.page_tokens
        slots = int(size // token) // pool.page_tokens + 1
        return slots, f"{size:.0f} bytes / {token} / {pool.page_tokens} + 1"


def assume_unsized(settings: EngineSettings, shape: ModelShape, f: Fields) -> None:
    """List that host sizes are left to the daemon where the flags do not tell them."""
    compressed = any(isinstance(layer, Compressed) for layer in shape.layers)
    if settings.host_gb > 0 and compressed:
        f.assume(
            "hicache_size",
            "not used: compressed pools are sized by ratio only, as in SGLang; the sizes are left to the daemon",
            "--max-total-tokens with --hicache-ratio",
        )
        return
    if settings.host_gb > 0 or (settings.host_ratio is not None and settings.device_tokens > 0):
        return
    if settings.engine is Engine.SGLANG:
        f.assume(
            "host_slots",
            "host pool sizes are left to the daemon: the engine's ratio counts in the device pool, whose size nobody gave",
            "--max-total-tokens with --hicache-ratio, or --hicache-size",
        )
    else:
        f.assume(
            "host_slots",
            "host pool sizes are left to the daemon",
            "--hicache-size, or --max-total-tokens with --hicache-ratio",
        )
