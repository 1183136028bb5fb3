"""SGLang's real tree with hoststage's linker over real device pools held on the CPU. Nothing of SGLang is replaced."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import LinkerTransferPhase
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from hoststage.client.engines.sglang.linker import HostStageLinker
from tests.integration.daemon import ROOT

PAGE = 16
PAGES = 10
WINDOW = 3 * PAGE
SLOTS = 32 * PAGE
LAYERS = 4
MODEL = ROOT / "tests" / "fixtures" / "models" / "llama-3.1-8b"
KINDS = ("mha", "mla", "dsa", "swa", "mamba", "mamba_mla", "mamba_swa", "dsv4_swa")


def linker_flags(address: str, kind: str, **section: Any) -> dict[str, Any]:
    """Return the flags that turn the linker on."""
    names = {"dsa": ("kv", "indexer"), "dsv4_swa": ("deepseek_v4_c4", "swa")}.get(
        kind, ("kv", *(name for name in ("swa", "mamba") if name in kind))
    )
    slots = {name: 32 if name == "mamba" else 64 for name in names}
    hoststage = {"address": address, "load_timeout": 5.0, "store_timeout": 10.0, "slots": slots, **section}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "HostStageLinker",
            "linker_module_path": "hoststage.client.engines.sglang.linker",
            "linker_extra_config": {"hoststage": hoststage},
        },
    }


def _mha(device: str, layers: int = LAYERS) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        SLOTS, PAGE, torch.bfloat16, 2, 64, layers, device, enable_memory_saver=False, enable_alt_stream=False
    )


def _states(device: str) -> HybridReqToTokenPool:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=16, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=4,
        mamba_size=16,
        mamba_spec_state_size=4,
        max_context_len=SLOTS,
        device=device,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1, 3]),
        mamba_layer_ids=[1, 3],
        enable_mamba_extra_buffer=True,
    )


def page_of(kind: str) -> int:
    """Return the tokens of a page; DSA takes pages of 64 alone, DeepSeek-V4 large ones."""
    return {"dsa": 64, "dsv4_swa": 256}.get(kind, PAGE)


def run_of(kind: str, first: int) -> array:
    """Return tokens that fill four pages of a kind."""
    return array("q", range(first, first + 4 * page_of(kind)))


def _deepseek_v4(device: str) -> tuple[Any, Any]:
    size, page = 2048, 256
    kv = DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=size,
        c4_size=size // 4,
        c128_size=size // 128,
        c4_state_pool_size=64,
        c128_state_pool_size=64,
        page_size=page,
        swa_page_size=page,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=LAYERS,
        start_layer=0,
        end_layer=LAYERS,
        device=device,
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128, 4],
    )
    return kv, SWATokenToKVPoolAllocator(size, size, page, kv.dtype, device, kv, False)


def pools(kind: str, device: str) -> tuple[Any, Any, Any]:
    """Return a kind's KV cache, its allocator and its request pool."""
    requests: Any = ReqToTokenPool(4, SLOTS, device, False)
    page = page_of(kind)
    if "mamba" in kind:
        requests = _states(device)
    if kind == "dsv4_swa":
        return *_deepseek_v4(device), requests
    if "swa" in kind:
        kv = SWAKVPool(SLOTS, SLOTS, PAGE, torch.bfloat16, 2, 64, [0, 2], [1, 3], device, enable_alt_stream=False)
        return kv, SWATokenToKVPoolAllocator(SLOTS, SLOTS, PAGE, torch.bfloat16, device, kv, False), requests
    if kind == "mha":
        kv = _mha(device)
    elif kind == "mla":
        kv = MLATokenToKVPool(SLOTS, PAGE, torch.bfloat16, 128, 64, LAYERS, device, enable_memory_saver=False)
    elif kind == "dsa":
        kv = DSATokenToKVPool(
            SLOTS,
            page,
            128,
            torch.bfloat16,
            64,
            LAYERS,
            device,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=192,
        )
    else:
        mla = {"use_mla": True, "kv_lora_rank": 128, "qk_rope_head_dim": 64} if kind == "mamba_mla" else {}
        kv = HybridLinearKVPool(
            size=SLOTS,
            dtype=torch.bfloat16,
            page_size=PAGE,
            head_num=2,
            head_dim=64,
            full_attention_layer_ids=[0, 2],
            device=device,
            mamba_pool=requests.mamba_pool,
            **mla,
        )
    return kv, PagedTokenToKVPoolAllocator(SLOTS, page, torch.bfloat16, device, kv, False), requests


class LinkedEngine:
    """A rank: device pools, and the tree with its linker as SGLang's registry makes them.

    tp: this rank and how many there are; `group` is then their process group.
    """

    def __init__(
        self, address: str, kind: str, group: Any, *, device: str = "cpu", tp: tuple[int, int] = (0, 1), **section: Any
    ) -> None:
        flags = {key: section.pop(key) for key in ("model_path", "disaggregation_mode") if key in section}
        if flags.get("disaggregation_mode") == "decode":
            flags["disaggregation_decode_enable_radix_cache"] = True
        args = ServerArgs(
            **{"model_path": str(MODEL), **flags},
            device=device,
            page_size=page_of(kind),
            tp_size=tp[1],
            skip_tokenizer_init=True,
            **linker_flags(address, kind, **section),
        )
        ranks = runtime_context.SpawnRanks(world_rank=tp[0], gpu_id=0)
        self.context = runtime_context.use_context(runtime_context.create_context(args, role="scheduler", ranks=ranks))
        self.context.__enter__()
        self.kind = kind
        self.kv, self.allocator, self.requests = pools(kind, device)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_of(kind),
            tp_cache_group=group,
            sliding_window_size=WINDOW if "swa" in kind else None,
            enable_mamba_extra_buffer="mamba" in kind,
        )
        stream = torch.cuda.Stream() if device == "cuda" else None
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(forward_stream=stream),
            register_hicache_layer_transfer_counter=lambda counter: None,
        )
        context = SimpleNamespace(
            server_args=args,
            params=params,
            tp_worker=worker,
            is_hybrid_swa="swa" in kind,
            is_hybrid_ssm="mamba" in kind,
            enable_hierarchical_cache=False,
        )
        self.tree = create_unified_radix_cache(context)
        self.linker = self.tree.linker.cache_linker
        assert isinstance(self.linker, HostStageLinker)
        self.loaded: dict[str, Any] = {}

    def close(self) -> None:
        self.tree.release_host_resources()
        self.context.__exit__(None, None, None)

    # -------------------------------------------------------------- bytes

    def _buffers(self) -> dict[str, list[Any]]:
        if self.kind == "dsv4_swa":
            return {name: pool.kv_buffer for name, pool in self.linker.pools.items()}
        pool = getattr(self.kv, "full_kv_pool", self.kv)
        found = {"kv": list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]}
        if self.kind == "dsa":
            found["indexer"] = list(pool.index_k_with_scale_buffer)
        if "swa" in self.kind:
            found["swa"] = [*self.kv.swa_kv_pool.k_buffer, *self.kv.swa_kv_pool.v_buffer]
        if "mamba" in self.kind:
            cache = self.requests.mamba_pool.mamba_cache
            found["mamba"] = [
                state[layer] for state in (cache.temporal, *cache.conv) for layer in range(state.shape[0])
            ]
        return found

    def fill(self, seed: int) -> None:
        """Put random numbers everywhere in the device pools."""
        generator = torch.Generator().manual_seed(seed)
        for buffers in self._buffers().values():
            for buffer in buffers:
                whole = buffer.view(torch.uint8) if self.kind == "dsv4_swa" else buffer
                whole.copy_(100 * torch.rand(whole.shape, generator=generator))

    def rows(self, at: Any, state: Any = None) -> list[Any]:
        """Return the bytes of tokens: in the full pool, of their last window in the window pool, and of a state."""
        buffers = self._buffers()
        if self.kind == "dsv4_swa":
            return self._regions(at)
        out = [buffer[at].clone().cpu() for buffer in buffers["kv"]]
        # One row a page.
        out += [buffer[at[::64] // 64].clone().cpu() for buffer in buffers.get("indexer", [])]
        if "swa" in buffers:
            last = self.allocator.translate_loc_from_full_to_swa(at)[-WINDOW:]
            assert (last > 0).all()
            out += [buffer[last].clone().cpu() for buffer in buffers["swa"]]
        if "mamba" in buffers:
            out += [buffer[state].clone().cpu() for buffer in buffers["mamba"]]
        return out

    def _regions(self, at: Any) -> list[Any]:
        """Return the rows of DeepSeek-V4's pools, a row a page: of all pages, or of the one that has the window."""
        full = at[::256] // 256
        window = self.allocator.translate_loc_from_full_to_swa(at)[::256][-1:] // 256
        assert (window > 0).all()
        rows = {"kv": full, "swa": window}
        return [
            buffer.view(torch.uint8)[rows[str(pool.indices_from_pool)]].clone().cpu()
            for pool in self.linker.pools.values()
            for buffer in pool.kv_buffer
        ]

    # -------------------------------------------------------------- what the scheduler does

    def until(self, check: Callable[[], Any], seconds: float = 30) -> None:
        """Turn the scheduler's crank until something is so."""
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline
            self.tree.check_hicache_events()
            time.sleep(0.01)

    def match(self, tokens: array) -> Any:
        """Match what the device has."""
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _alloc(self, count: int) -> Any:
        if "swa" not in self.kind:
            return self.allocator.alloc(count)
        # What the allocator's own `alloc` does; that one is for pages of one token.
        at = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(at, self.allocator.swa_attn_allocator.alloc(count))
        return at

    def insert(self, tokens: array, seed: int) -> list[Any]:
        """Compute the tokens, so to speak, and put them into the tree, which offloads them. Return their rows."""
        self.fill(seed)
        at = self._alloc(len(tokens))
        state = self.requests.mamba_allocator.alloc(1) if "mamba" in self.kind else None
        rows = self.rows(at, state)
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=at, mamba_value=state))
        return rows

    def insert_written(self, tokens: array) -> None:
        """Put tokens into the tree whose pages something else writes."""
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=self._alloc(len(tokens))))

    def serve(self, tokens: array, rid: str) -> str:
        """Serve a request as the scheduler does, with pages whose bytes follow from their tokens, and check all that were not computed here.

        Returns "loaded", "failed" or "missed". For `mha`.
        """
        req = self.request(tokens, rid)
        locked = self.tree.inc_lock_ref(req.last_node).to_dec_params()
        try:
            return self._serve(req, tokens)
        finally:
            self.tree.dec_lock_ref(req.last_node, locked)

    def _serve(self, req: Req, tokens: array) -> str:
        matched, outcome = req.prefix_len, "missed"
        have = self.tree.path_device_indices(req.last_node)[:matched]
        assert len(have) == matched
        if req.host_hit_length and (at := self.admit(req)) is not None:
            if self.forward([req]):
                self.drop(req.rid)
                return "failed"
            self.loaded.pop(req.rid)
            have, outcome = torch.cat([have, at]), "loaded"
        self._check(tokens[: len(have)], have)
        if rest := len(tokens) - len(have):
            fresh = self.allocator.alloc(rest)
            if fresh is None:
                self.allocator.free(have[matched:])
                self.evict()
                return "full"
            self._compute(tokens[len(have) :], fresh)
            have = torch.cat([have, fresh])
        # What the tree has beyond that by now, it frees of these.
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=have, prev_prefix_len=matched))
        return outcome

    def _bytes_of(self, tokens: Sequence[int], layer: int) -> Any:
        ids = torch.tensor(list(tokens), dtype=torch.int64)
        return ((ids * 31 + layer * 7) % 251).to(torch.bfloat16)[:, None, None].expand(-1, 2, 64)

    def _compute(self, tokens: Sequence[int], at: Any) -> None:
        for layer, buffer in enumerate(self._buffers()["kv"]):
            buffer[at] = self._bytes_of(tokens, layer)

    def _check(self, tokens: Sequence[int], at: Any) -> None:
        for layer, buffer in enumerate(self._buffers()["kv"]):
            assert torch.equal(buffer[at], self._bytes_of(tokens, layer))

    def store(self, tokens: array, seed: int) -> list[Any]:
        """Insert tokens and wait until the tree has seen the acknowledgement."""
        rows = self.insert(tokens, seed)
        assert self.tree.linker.pending_offloads
        self.settle()
        return rows

    def settle(self) -> None:
        """Wait until no offload is pending."""
        self.until(lambda: not self.tree.linker.pending_offloads)

    def evict(self) -> None:
        """Evict everything from the device."""
        self.tree.evict(EvictParams(num_tokens=4 * SLOTS, swa_num_tokens=4 * SLOTS, mamba_num=16))

    def request(self, tokens: Sequence[int], rid: str = "r") -> Req:
        """Return a request for the tokens that was matched as the scheduler does before it admits it."""
        req = Req(rid, "", array("q", [*tokens, 1, 2, 3]), SamplingParams(max_new_tokens=4))
        req.init_next_round_input(self.tree, cow_mamba=False)
        return req

    def admit(self, req: Req) -> Any:
        """Queue the request's load; return the slots that it is loaded into."""
        params = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        count, _ = self.tree.init_load_back(params)
        at = self.tree.linker.private_load_indices.get(req.rid)
        assert (0 if at is None else len(at)) == count
        if at is not None:
            self.loaded[req.rid] = at
        return at

    def forward(self, reqs: Sequence[Req]) -> list[Req]:
        """Start the queued loads, wait for every layer as a forward pass does, and return the requests that failed."""
        index = self.tree.ready_to_load_host_cache()
        counter = self.tree.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        return list(self.tree.finish_external_linker_loads(list(reqs)))

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """Return what the linker answers of a run of tokens, in pages."""
        keys = get_storage_hash_str(list(tokens), None, page_size=PAGE)
        pin = f"lengths of {tokens[0]}"
        asked = [c.build_external_linker_transfer(LinkerTransferPhase.LOOKUP, None, keys) for c in self._components()]
        found = self.linker.lookup(pin, asked)
        self.linker.cancel_queued_load(pin)
        return list(found)

    def _components(self) -> list[Any]:
        return list(self.tree.linker._components)

    def free(self, req: Req) -> None:
        """Free the slots of a request whose load failed, as the scheduler does."""
        self.drop(req.rid)

    def drop(self, rid: str) -> None:
        """Give the slots of a loaded request back."""
        at = self.loaded.pop(rid, None)
        if at is not None:
            self.allocator.free(at)

    def load(self, tokens: Sequence[int], rid: str = "r") -> tuple[list[Any], Req]:
        """Match, admit, load: return the rows that came."""
        req = self.request(tokens, rid)
        at = self.admit(req)
        assert at is not None
        assert self.forward([req]) == []
        state = req.kv.mamba_pool_idx.unsqueeze(0) if "mamba" in self.kind else None
        return self.rows(at, state), req


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists of rows are alike, byte for byte."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))
