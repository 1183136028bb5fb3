"""From a Hugging Face config and an engine's settings to the stacks that its ranks would present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hoststage.core.stack import Identity, KvLayout, Parallel, Stack
from hoststage.models.capacity import assume_unsized, with_slots
from hoststage.models.dtypes import kv_dtype, quantization_name
from hoststage.models.errors import ModelError
from hoststage.models.families import describe_layers
from hoststage.models.fields import Assumption, Fields
from hoststage.models.layers import Attention, Compressed, Latent, ModelShape
from hoststage.models.pools import PoolDescription, Stage
from hoststage.models.settings import SGLANG_RELEASE, Engine, EngineSettings, Wishes
from hoststage.models.stages import describe_pools

NEUTRAL_PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """What the ranks of one pipeline stage present: their stack (with tensor-parallel rank 0) and its arithmetic.

    first_layer, end_layer: the stage's layers, end excluded.
    """

    stack: Stack
    pools: tuple[PoolDescription, ...]
    pp_rank: int
    first_layer: int
    end_layer: int

    def for_rank(self, rank: int, settings: EngineSettings) -> Stack:
        """Return the stack of the stage's process number `rank` of `settings.tp_size`."""
        cp = rank // settings.attn_tp_size % settings.attn_cp_size
        parallel = replace(
            self.stack.parallel,
            tp_rank=rank % settings.attn_tp_size,
            cp_rank=cp,
            dp_rank=rank // (settings.attn_tp_size * settings.attn_cp_size),
            dcp_rank=rank % settings.dcp_size,
        )
        return replace(self.stack, parallel=parallel)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as an engine would hold it: one shard for each pipeline stage, and every value that nobody gave."""

    architecture: str
    settings: EngineSettings
    shards: tuple[Shard, ...]
    assumptions: tuple[Assumption, ...]

    def stacks(self) -> tuple[Stack, ...]:
        """Return one stack for each rank of one replica, in order of pipeline then tensor-parallel rank."""
        return tuple(shard.for_rank(r, self.settings) for shard in self.shards for r in range(self.settings.tp_size))


def describe(
    config: Mapping[str, object],
    settings: EngineSettings | None = None,
    wishes: Wishes | None = None,
    *,
    model: str = "",
    overrides: Mapping[str, object] | None = None,
) -> ModelDescription:
    """Describe a model.

    config: the parsed `config.json`. model: its name for the namespace, else taken from the config. overrides: fields
    that replace the config's. Raises a `ModelError` that names the field which is missing or wrong.
    """
    settings, wishes = settings or EngineSettings(), wishes or Wishes()
    f = Fields(config, overrides)
    shape = describe_layers(f)
    settings = replace(settings, page_tokens=_page_tokens(f, shape, settings))
    dtype, element_bytes = _dtype(f, shape, settings)
    window_pool = _window_pool(f, shape, settings)
    largest = _largest_request(f, shape, settings)
    identity = Identity(
        model=model or f.text("_name_or_path") or f.architecture,
        quantization=quantization_name(f),
        dtype=dtype,
        layout=settings.mem_layout,
    )
    shards = []
    for pp_rank in range(settings.pp_size):
        first, end = stage_layers(len(shape.layers), pp_rank, settings.pp_size)
        stage = Stage(
            layers=shape.layers[first:end],
            element_bytes=element_bytes,
            kv_ranks=settings.attn_tp_size // settings.dcp_size,
            state_ranks=settings.attn_tp_size,
            page_tokens=settings.page_tokens,
            kv_layout=settings.kv_layout,
            mem_layout=settings.mem_layout,
            window_pool=window_pool,
            sparse=_sparse(shape),
        )
        pools = with_slots(describe_pools(stage), shape, settings, f)
        if not pools:
            raise ModelError("pp_size", f"stage {pp_rank} has no layer that keeps a cache", "Give fewer stages")
        stack = Stack(
            identity=identity,
            pools=tuple(d.pool for d in pools),
            parallel=_parallel(settings, pp_rank),
            role=wishes.role,
            write_policy=wishes.write_policy,
            modes=wishes.modes,
            retraction=wishes.retraction,
            largest_request_tokens=largest,
            prefetch_threshold_tokens=settings.prefetch_threshold_tokens,
            requires_pinned=wishes.requires_pinned,
        )
        shards.append(Shard(stack, pools, pp_rank, first, end))
    assume_unsized(settings, shape, f)
    return ModelDescription(f.architecture, settings, tuple(shards), tuple(f.assumptions))


def stage_layers(layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Return the first layer of a pipeline stage and the one after its last; the last stages take what is over."""
    if layers < pp_size:
        raise ModelError("pp_size", f"is {pp_size}, but there are only {layers} layers", "Give fewer stages")
    base, over = divmod(layers, pp_size)
    plain = pp_size - over
    first = pp_rank * base + max(0, pp_rank - plain)
    return first, first + base + (1 if pp_rank >= plain else 0)


def _parallel(s: EngineSettings, pp_rank: int) -> Parallel:
    return Parallel(
        tp_size=s.attn_tp_size,
        pp_rank=pp_rank,
        pp_size=s.pp_size,
        cp_size=s.attn_cp_size,
        dp_size=s.dp_size * s.attn_dp_size,
        dcp_size=s.dcp_size,
    )


def _page_tokens(f: Fields, shape: ModelShape, s: EngineSettings) -> int:
    if s.engine is Engine.SGLANG and shape.page_tokens and s.page_tokens not in (0, shape.page_tokens):
        f.assume(
            "page_size",
            f"SGLang {SGLANG_RELEASE} sets {shape.page_tokens} tokens for this architecture on CUDA, whatever the flag",
        )
        return shape.page_tokens
    if any(isinstance(layer, Compressed) for layer in shape.layers) and s.page_tokens % 128:
        raise ModelError("page_size", f"is {s.page_tokens}", "Give a multiple of 128, as the compressed regions ask")
    if s.page_tokens:
        return s.page_tokens
    if shape.page_tokens:
        f.assume(
            "page_size",
            f"{shape.page_tokens} tokens, what the kernels of this architecture ask for",
            "--page-size",
        )
        return shape.page_tokens
    if s.engine is Engine.SGLANG:
        f.assume("page_size", "1 token, SGLang's default on CUDA", "--page-size (64 or more suits a host tier)")
        return 1
    f.assume("page_size", f"{NEUTRAL_PAGE_TOKENS} tokens", "--page-size")
    return NEUTRAL_PAGE_TOKENS


def _sparse(shape: ModelShape) -> bool:
    return any(isinstance(layer, Latent) and layer.index_dim for layer in shape.layers)


def _dtype(f: Fields, shape: ModelShape, s: EngineSettings) -> tuple[str, int]:
    if any(isinstance(layer, Compressed) for layer in shape.layers):
        return "deepseek_v4_packed", 1
    name, element_bytes = kv_dtype(f, s.kv_dtype)
    if _sparse(shape) and s.kv_dtype in ("", "auto") and s.engine is Engine.SGLANG:
        f.assume(
            "kv_cache_dtype",
            f"{name}; SGLang takes fp8_e4m3 for sparse attention on Blackwell",
            "--kv-cache-dtype",
        )
    return name, element_bytes


def _window_pool(f: Fields, shape: ModelShape, s: EngineSettings) -> bool:
    """Return whether window layers get a pool of their own, and list it where the engine departs from the model."""
    windowed = any(isinstance(layer, Attention) and layer.window for layer in shape.layers)
    if s.window_pool is not None:
        return s.window_pool
    if s.engine is Engine.NEUTRAL or shape.window_pool or not windowed:
        return True
    if s.kv_layout is KvLayout.UNIFIED_KV:
        # Whoever names this layout says that window layers live in a ring of their own, on the device alone.
        f.assume("swa_pool", "window layers are a device-only ring, as --kv-layout unified_kv says", "--no-swa-pool")
        return True
    f.assume(
        "swa_pool",
        f"SGLang {SGLANG_RELEASE} keeps the window layers of {f.architecture} in the full pool, so there is no SWA pool",
        "--swa-pool, for an engine that gives them one",
    )
    return False


def _largest_request(f: Fields, shape: ModelShape, s: EngineSettings) -> int:
    largest = s.context_tokens or shape.max_positions
    if not largest:
        f.assume(
            "context_length",
            "the longest request is unknown: the config has no max_position_embeddings",
            "--context-length",
        )
    if s.device_tokens and largest > s.device_tokens:
        return s.device_tokens
    return largest
