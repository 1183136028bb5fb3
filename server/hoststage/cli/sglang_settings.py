"""From SGLang's flags to the settings of a model description and to what the engine asks of the host tier."""

from __future__ import annotations

from dataclasses import replace

from hoststage.cli.sglang_args import SglangFlags, json_object
from hoststage.core.stack import (
    KvLayout,
    Mode,
    ModeWish,
    PoolKind,
    Retraction,
    RetractionWish,
    Role,
    Stack,
    WritePolicy,
)
from hoststage.models import Assumption, Engine, EngineSettings, Wishes

DEFAULT_RATIO = {Mode.CACHE: 2.0, Mode.BUFFER_ONLY: 1.2}
RETRACTION_ONLY_RATIO = 0.2
PREFETCH_THRESHOLD = 256

ROLES = {"null": Role.MIXED, "prefill": Role.PREFILL, "decode": Role.DECODE}


def engine_settings(flags: SglangFlags, *, engine: Engine, kv_layout: KvLayout | None) -> EngineSettings:
    """Return the settings that shape the pools. `kv_layout` None leaves it to the command's environment, else paged."""
    if kv_layout is None:
        kv_layout = KvLayout.UNIFIED_KV if flags.unified_kv else KvLayout.PAGED
    attn_dp = flags.dp_size if flags.enable_dp_attention else flags.attn_dp_size
    host_sized = engine is Engine.NEUTRAL or flags.host_tier
    return EngineSettings(
        engine=engine,
        tp_size=flags.tp_size,
        pp_size=flags.pp_size,
        dp_size=1 if flags.enable_dp_attention else flags.dp_size,
        attn_dp_size=attn_dp,
        attn_cp_size=flags.attn_cp_size,
        dcp_size=flags.dcp_size,
        page_tokens=(flags.backend_page_size if engine is Engine.SGLANG else flags.page_size) or 0,
        kv_dtype=flags.kv_cache_dtype,
        kv_layout=kv_layout,
        mem_layout=flags.hicache_mem_layout if engine is Engine.SGLANG and flags.host_tier else "",
        swa_ratio=flags.swa_full_tokens_ratio,
        host_ratio=_host_ratio(flags, engine) if host_sized else None,
        host_gb=float(flags.hicache_size) if host_sized else 0.0,
        device_tokens=flags.max_total_tokens or 0,
        context_tokens=flags.context_length or 0,
        state_slots=flags.max_mamba_cache_size or 0,
        state_ratio=flags.mamba_full_memory_ratio,
        prefetch_threshold_tokens=_prefetch_threshold(flags),
    )


def _host_ratio(flags: SglangFlags, engine: Engine) -> float | None:
    if flags.hicache_ratio is not None or engine is Engine.NEUTRAL:
        return flags.hicache_ratio
    if flags.decode:
        return DEFAULT_RATIO[Mode.CACHE] if flags.enable_hierarchical_cache else RETRACTION_ONLY_RATIO
    return DEFAULT_RATIO[Mode(flags.hicache_host_memory_mode)]


def _prefetch_threshold(flags: SglangFlags) -> int:
    extra = json_object("--hicache-storage-backend-extra-config", flags.hicache_storage_backend_extra_config) or {}
    value = extra.get("prefetch_threshold", PREFETCH_THRESHOLD)
    return value if isinstance(value, int) and not isinstance(value, bool) else PREFETCH_THRESHOLD


def wishes(flags: SglangFlags, *, modes: tuple[ModeWish, ...], window_only: bool) -> Wishes:
    """Return what the flags ask for. `modes` given by the operator win over the engine's own flag."""
    if not modes and ("hicache_host_memory_mode" in flags.given or flags.enable_hierarchical_cache):
        modes = (ModeWish(Mode(flags.hicache_host_memory_mode), required=True),)
    return Wishes(
        role=ROLES[flags.disaggregation_mode],
        write_policy=WritePolicy(flags.hicache_write_policy),
        modes=modes or Wishes().modes,
        retraction=_explicit_retraction(flags, window_only),
    )


def _explicit_retraction(flags: SglangFlags, window_only: bool) -> RetractionWish:
    asked = flags.disaggregation_decode_retraction_backup
    return RetractionWish(
        retraction=Retraction.NONE if asked is None else Retraction(asked),
        window_only=window_only,
        concurrent_receive=flags.disaggregation_decode_host_receive_threshold < 1,
        required=asked == "host_pool",
    )


def inferred_retraction(flags: SglangFlags, stack: Stack) -> tuple[Stack, Assumption | None]:
    """Return `stack` with the backup that SGLang infers on a decode instance which names none, and the assumption."""
    if not flags.decode or flags.disaggregation_decode_retraction_backup is not None:
        return stack, None
    plain = not stack.of_kind(PoolKind.MAMBA) and bool(stack.of_kind(PoolKind.KV))
    latent = stack.anchor is not None and stack.anchor.replicated
    preempts = flags.enable_priority_scheduling and not flags.disable_priority_preemption
    unified_swa = flags.enable_unified_memory and bool(stack.of_kind(PoolKind.SWA))
    host_pool = (
        plain
        and not latent
        and not unified_swa
        and flags.dcp_size == 1
        and not flags.disaggregation_decode_enable_radix_cache
        and not flags.disaggregation_decode_enable_offload_kvcache
        and not preempts
    )
    chosen = Retraction.HOST_POOL if host_pool else Retraction.CPU_TENSOR
    stack = replace(stack, retraction=replace(stack.retraction, retraction=chosen))
    return stack, Assumption(
        "retraction",
        f"{chosen.value}, what SGLang infers on a decode instance with these flags",
        "--disaggregation-decode-retraction-backup",
    )
