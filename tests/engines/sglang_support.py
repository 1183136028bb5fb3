"""Real host pools of SGLang on a CPU, and hoststage's backend over a real daemon, for the engine tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins import hook_registry
from sglang.srt.server_args import ServerArgs

from hoststage.client.engines.sglang import allocator, plugin
from tests.integration.daemon import ROOT

CPU = torch.device("cpu")
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
PAGE = 16
LAYERS = 3
TOKENS = 128
_allocation = {"allocator_type": "default"}


@contextmanager
def allocated_by(allocator: str) -> Iterator[None]:
    """Let the pools that are made meanwhile take their memory from that allocator of SGLang's."""
    before = _allocation["allocator_type"]
    _allocation["allocator_type"] = allocator
    try:
        yield
    finally:
        _allocation["allocator_type"] = before


def _rows(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype) for _ in range(count))


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha(
    layout: str,
    *,
    heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    label: str = "kv",
    pages: int = 32,
    page: int = PAGE,
    layers: int = LAYERS,
) -> Any:
    """Return an MHA host pool."""
    v_dim = dim if v_dim is None else v_dim
    k, v = _rows(layers, TOKENS, heads, dim), _rows(layers, TOKENS, heads, v_dim)
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return get_mha_host_pool_cls(info)(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=page,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=layers,
        pool_label=label,
        host_token_capacity=pages * page,
        **_allocation,
    )


def mla(layout: str, *, pages: int = 32) -> Any:
    """Return an MLA host pool."""
    rows = _rows(LAYERS, TOKENS, 1, 128 + 64)
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=128,
        qk_rope_head_dim=64,
        kv_cache_dim=192,
        dtype=torch.bfloat16,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=pages * PAGE,
        **_allocation,
    )


def mamba(layout: str = "page_first", *, slots: int = 15, side_state: bool = False) -> Any:
    """Return a Mamba host pool: a temporal and a convolution state a slot, and a side state where asked."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, slots, 4, 8, 8), dtype=torch.float32),
        conv=(torch.zeros((LAYERS, slots, 32, 3), dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros((slots, 5), dtype=torch.int32),) if side_state else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout, **_allocation)


def indexer(anchor: Any) -> Any:
    """Return the DSA indexer's host pool beside an MLA pool."""
    width = 128 + 4
    buffers = [torch.zeros((TOKENS // PAGE + 1, width * PAGE), dtype=torch.uint8) for _ in range(LAYERS)]
    device_pool = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=LAYERS,
        layer_num=LAYERS,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=buffers,
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device_pool,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=width, dtype=torch.uint8),
        host_pool_builder=None,
    )
    return DSAIndexerPoolHost(decl, anchor, pin_memory=False, **_allocation)


def paged(name: PoolName, layout: str, item_bytes: int, *, pages: int = 32) -> Any:
    """Return one of DeepSeek-V4's host pools."""
    buffers = [torch.zeros((TOKENS // PAGE, item_bytes), dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        str(name),
        buffers,
        item_bytes,
        pages,
        PAGE,
        layout=layout,
        pin_memory=False,
        page_aligned_only=True,
        **_allocation,
    )


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """Return the tensors that hold a pool's bytes."""
    for names in (("temporal_buffer", "conv_buffer", "slot_state_buffers"), ("index_k_with_scale_buffer",)):
        if hasattr(pool, names[0]):
            found = [getattr(pool, name) for name in names]
            return [t for part in found for t in (part if isinstance(part, list | tuple) else [part])]
    if getattr(pool, "v_buffer", None) is not None and not isinstance(pool.kv_buffer, torch.Tensor):
        return [pool.k_buffer, pool.v_buffer]
    buffers = pool.kv_buffer
    return list(buffers) if isinstance(buffers, list | tuple) else [buffers]


def fill(pool: Any, seed: int) -> None:
    """Put random bytes everywhere in a pool."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors_of(pool):
        flat = tensor.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def snapshot(pool: Any) -> list[torch.Tensor]:
    """Return a copy of all bytes of a pool."""
    return [tensor.view(torch.uint8).clone() for tensor in tensors_of(pool)]


def page_bytes(pool: Any, page: int) -> bytes:
    """Return a page's bytes, read by SGLang's own code."""
    index = page * pool.page_size
    try:
        return pool.get_data_page(index, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
    except NotImplementedError:
        import ctypes

        pointers, sizes = pool.get_page_buffer_meta(torch.arange(index, index + pool.page_size))
        return b"".join(ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True))


def ids(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the slot ids of pages."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages] or [torch.empty(0)]).long()


def hashes(text: str, count: int) -> list[str]:
    """Return a chain of page hashes as SGLang's are."""
    out, last = [], b""
    for i in range(count):
        last = hashlib.sha256(last + f"{text}/{i}".encode()).digest()
        out.append(last.hex())
    return out


def config(address: str, *, section: dict[str, Any] | None = None, interface: int = 1, **given: Any) -> Any:
    """Return the storage configuration that SGLang's controller would make."""
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tests/model",
        **given,
    }
    extra = {
        "backend_name": "hoststage",
        "module_path": "hoststage.client.engines.sglang.backend",
        "class_name": "HostStageStorage",
        "interface_v1": interface,
        "hoststage": {"address": address, "load_timeout": 5.0, **(section or {})},
    }
    # As it comes from the command line.
    return HiCacheStorageConfig(extra_config=json.loads(json.dumps(extra)), **values)


def open_backend(address: str, anchor: Any, pools: dict[PoolName, Any] | None = None, **given: Any) -> Any:
    """Attach the backend as SGLang's controller does: by the factory, then pool by pool."""
    backend = StorageBackendFactory.create_backend("dynamic", config(address, **given), anchor)
    backend.register_mem_pool_host(anchor)
    for name, pool in (pools or {}).items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def transfer(
    name: PoolName,
    keys: list[str],
    pool: Any = None,
    pages: list[int] | None = None,
    policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES,
) -> Any:
    """Return a transfer; without pages it only asks."""
    indices = None if pages is None else ids(pool, pages)
    return PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy)


HOOKED = (
    (common, "get_allocator_from_storage"),
    (base, "host_memory_budget_bytes"),
    (common, "_cuda_host_register"),
    (common, "_cuda_host_unregister"),
)


def hook_host_pools() -> Callable[[], None]:
    """Load the plug-in as SGLang's loader does, in a process that makes host pools. Returns what takes the hooks off again."""
    originals = [getattr(module, name) for module, name in HOOKED]
    resolve = ServerArgs.resolve_once
    plugin.register()
    hook_registry.HookRegistry.apply_hooks()

    def unhook() -> None:
        hook_registry.HookRegistry.reset()
        for (module, name), original in zip(HOOKED, originals, strict=True):
            wrapped = getattr(module, name)
            setattr(module, name, original)
            hook_registry._propagate_patch(wrapped, original, module)
        ServerArgs.resolve_once = resolve
        if allocator._current is not None:
            allocator._current.close()
            allocator._current = None

    return unhook


@contextmanager
def engine(extra: dict[str, Any] | None, storage: str | None = None) -> Iterator[None]:
    """Publish the configuration of an engine with that extra configuration, as a scheduler process has it."""
    args = ServerArgs(
        model_path=str(ROOT / "tests" / "fixtures" / "models" / "llama-3.1-8b"),
        device="cpu",
        skip_tokenizer_init=True,
        enable_hierarchical_cache=True,
        hicache_storage_backend=storage,
        hicache_storage_backend_extra_config=None if extra is None else json.dumps(extra),
    )
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    with runtime_context.use_context(runtime_context.create_context(args, role="scheduler", ranks=ranks)):
        yield


def mapping_at(address: int) -> tuple[str, str]:
    """Return the name and the inode of what this process maps at an address."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            first, _, last = line.split()[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                fields = line.split()
                return (fields[5] if len(fields) > 5 else "", fields[4])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def sockets(folder: Path) -> Path:
    """Return a folder whose name leaves room for a socket's."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
