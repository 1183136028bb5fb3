"""What an engine's flags say about the cache: sizes, sharding, layout, and what is wanted of the host tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hoststage.core.stack import KvLayout, Mode, ModeWish, RetractionWish, Role, WritePolicy
from hoststage.models.errors import ModelError


class Engine(Enum):
    """Whose layout to follow. `NEUTRAL` keeps the model's own structure: each kind of layer in a pool of its own."""

    NEUTRAL = "neutral"
    SGLANG = "sglang"


SGLANG_RELEASE = "0.5.23"
"""The release whose rules and layouts are followed."""

MOST_RANKS = 4096
MOST = 1 << 48

FINITE = {
    "page_tokens": "page_size",
    "host_ratio": "hicache_ratio",
    "host_gb": "hicache_size",
    "device_tokens": "max_total_tokens",
    "context_tokens": "context_length",
    "state_slots": "max_mamba_cache_size",
    "state_ratio": "mamba_full_memory_ratio",
    "prefetch_threshold_tokens": "prefetch_threshold",
}
"""Settings that are sizes or ratios, and the flags that give them."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that shape the pools. Zero, None and "auto" mean that nobody said.

    dp_size: replicas of the whole model. attn_dp_size: data-parallel attention groups inside the tensor-parallel
    group. page_tokens: tokens of a page. kv_dtype: as SGLang's `--kv-cache-dtype`. mem_layout: as
    `--hicache-mem-layout`. swa_ratio: window tokens for each full token on the device. host_ratio: host pool over
    device pool. host_gb: host pool of one rank in units of 10^9 bytes. device_tokens: tokens of the full device pool.
    state_slots: recurrent states on the device. state_ratio: bytes of states over bytes of the full pool.
    window_pool: whether window layers have a pool of their own; None leaves it to the engine.
    """

    engine: Engine = Engine.NEUTRAL
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    page_tokens: int = 0
    kv_dtype: str = "auto"
    kv_layout: KvLayout = KvLayout.PAGED
    mem_layout: str = ""
    swa_ratio: float | None = None
    host_ratio: float | None = None
    host_gb: float = 0.0
    device_tokens: int = 0
    context_tokens: int = 0
    state_slots: int = 0
    state_ratio: float | None = None
    window_pool: bool | None = None
    prefetch_threshold_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ModelError(name, f"is {getattr(self, name)}", f"Give a size of 1 to {MOST_RANKS}")
        for name, flag in FINITE.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value < MOST:
                raise ModelError(flag, f"is {value}", "Give a number that is not negative, and not absurd")
        if self.tp_size % (self.attn_dp_size * self.attn_cp_size):
            raise ModelError(
                "tp_size",
                f"{self.tp_size} is no multiple of attn_dp_size × attn_cp_size = {self.attn_dp_size * self.attn_cp_size}",
                "Give sizes that divide the tensor-parallel group",
            )
        if self.attn_tp_size % self.dcp_size:
            raise ModelError(
                "dcp_size",
                f"{self.dcp_size} does not divide the {self.attn_tp_size} attention tensor-parallel ranks",
                "Give a decode-context-parallel size that divides the group",
            )
        if self.swa_ratio is not None and not 0 < self.swa_ratio <= 1:
            raise ModelError("swa_full_tokens_ratio", f"is {self.swa_ratio}", "Give a ratio above 0 and at most 1")

    @property
    def attn_tp_size(self) -> int:
        """Ranks over which the KV heads are divided."""
        return self.tp_size // (self.attn_dp_size * self.attn_cp_size)

    @property
    def ranks(self) -> int:
        """Processes with pools of their own in one replica of the model."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client asks of the host tier; goes into the stack as it is."""

    role: Role = Role.MIXED
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    modes: tuple[ModeWish, ...] = (ModeWish(Mode.BUFFER_ONLY), ModeWish(Mode.CACHE))
    retraction: RetractionWish = field(default_factory=RetractionWish)
    requires_pinned: bool = False
