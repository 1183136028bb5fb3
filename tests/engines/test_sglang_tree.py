"""SGLang's real UnifiedRadixCache over hoststage, in both host-memory modes: store, evict everything, prefetch back, match.

Real are the tree, its controller with all threads, the buffer pipeline, device pool, allocator, host pools, hashes, `ServerArgs` and the runtime context made of
them. Replaced, because they need a GPU: the two copies between device and host pool, by plain tensor copies, and `cudaHostRegister`, by nothing.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.engines

tree_module = pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache", exc_type=ImportError)
torch = pytest.importorskip("torch")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from hoststage.client import PayloadPath, _pages  # noqa: E402
from hoststage.shm import copy  # noqa: E402
from tests.engines import linker_support as ls  # noqa: E402
from tests.engines import sglang_support as sg  # noqa: E402
from tests.integration.daemon import ROOT, Daemon  # noqa: E402

PAGES = 10
WINDOW = 3 * sg.PAGE
SLOTS = 32 * sg.PAGE
MODEL = ROOT / "tests" / "fixtures" / "models" / "llama-3.1-8b"


def _to_host(host: Any, device: Any, host_ids: Any, device_ids: Any, _io: str) -> None:
    for layer in range(host.layer_num):
        host.kv_buffer[0][host_ids, layer] = device.k_buffer[layer][device_ids]
        host.kv_buffer[1][host_ids, layer] = device.v_buffer[layer][device_ids]


def _to_device(
    host: Any, device: Any, host_ids: Any, device_ids: Any, layer: int, _io: str, *, is_draft: bool = False
) -> None:
    device.k_buffer[layer][device_ids] = host.kv_buffer[0][host_ids, layer]
    device.v_buffer[layer][device_ids] = host.kv_buffer[1][host_ids, layer]


@pytest.fixture
def hooked() -> Iterator[None]:
    """The plug-in, as SGLang's loader applies it."""
    unhook = sg.hook_host_pools()
    yield
    unhook()


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_cuda_host_register", lambda *_: None)
    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", _to_host)
    monkeypatch.setattr(MHATokenToKVPoolHost, "load_to_device_per_layer", _to_device)
    monkeypatch.setattr(MambaPoolHost, "backup_from_device_all_layer", _states_to_host)
    monkeypatch.setattr(MambaPoolHost, "load_to_device_per_layer", _states_to_device)


def _states_to_host(host: Any, device: Any, host_ids: Any, device_ids: Any, _io: str) -> None:
    state = device.mamba_cache
    for there, here in zip((host.temporal_buffer, *host.conv_buffer), (state.temporal, *state.conv), strict=True):
        there[host_ids, :, 0] = here[:, device_ids].transpose(0, 1)


def _states_to_device(
    host: Any, device: Any, host_ids: Any, device_ids: Any, layer: int, _io: str, *, is_draft: bool = False
) -> None:
    state = device.mamba_cache
    for there, here in zip((host.temporal_buffer, *host.conv_buffer), (state.temporal, *state.conv), strict=True):
        here[layer, device_ids] = there[host_ids, layer, 0]


def _plain_pools() -> tuple[tuple[Any, ...], Any]:
    pool = MHATokenToKVPool(
        SLOTS, sg.PAGE, torch.bfloat16, 2, 64, sg.LAYERS, "cpu", enable_memory_saver=False, enable_alt_stream=False
    )
    return (pool,), PagedTokenToKVPoolAllocator(SLOTS, sg.PAGE, torch.bfloat16, "cpu", pool, False)


def _window_pools() -> tuple[tuple[Any, ...], Any]:
    pool = SWAKVPool(SLOTS, SLOTS, sg.PAGE, torch.bfloat16, 2, 64, [0, 2], [1, 3], "cpu", enable_alt_stream=False)
    allocator = SWATokenToKVPoolAllocator(SLOTS, SLOTS, sg.PAGE, torch.bfloat16, "cpu", pool, False)
    return (pool.full_kv_pool, pool.swa_kv_pool), allocator


class Engine:
    """A tree with HiCache and hoststage's backend, over a device pool in host memory (host layout `page_first`)."""

    def __init__(
        self,
        node: Daemon,
        group: Any,
        mode: str,
        *,
        window: bool = False,
        state: bool = False,
        allocator: str = "",
        **section: Any,
    ) -> None:
        extra = {**sg.config(node.address, section=section).extra_config, "prefetch_threshold": sg.PAGE}
        if allocator:
            extra["allocator"] = allocator
        args = ServerArgs(
            model_path=str(MODEL),
            device="cpu",
            page_size=sg.PAGE,
            skip_tokenizer_init=True,
            enable_hierarchical_cache=True,
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_host_memory_mode=mode,
            hicache_mem_layout="page_first",
            hicache_write_policy="write_through",
        )
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        self.context = runtime_context.use_context(runtime_context.create_context(args, role="scheduler", ranks=ranks))
        self.context.__enter__()
        self.requests: Any = ReqToTokenPool(4, SLOTS, "cpu", False)
        if state:
            kv, self.allocator, self.requests = ls.pools("mamba", "cpu")
            self.pools = (kv.full_kv_pool,)
        else:
            self.pools, self.allocator = _window_pools() if window else _plain_pools()
        more = [ComponentType.SWA] * window + [ComponentType.MAMBA] * state
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=sg.PAGE,
            tp_cache_group=group,
            sliding_window_size=WINDOW if window else None,
            enable_mamba_extra_buffer=state,
            tree_components=(ComponentType.FULL, *more),
        )
        self.tree = tree_module.UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)
        self.backend = self.tree.cache_controller.storage_backend

    def close(self) -> None:
        self.tree.shutdown()
        self.context.__exit__(None, None, None)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in [*self._buffers(self.pools), *self._states()]:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def _states(self) -> list[Any]:
        pool = getattr(self.requests, "mamba_pool", None)
        return [] if pool is None else [pool.mamba_cache.temporal, *pool.mamba_cache.conv]

    def states(self, slot: Any) -> list[Any]:
        """Return the state in a slot."""
        return [buffer[:, slot].clone() for buffer in self._states()]

    @staticmethod
    def _buffers(pools: Sequence[Any]) -> list[Any]:
        return [buffer for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)]

    def rows(self, at: Any) -> list[Any]:
        """Return the rows of tokens: in the full pool, and of the last window of them in the window pool."""
        full = [buffer[at].clone() for buffer in self._buffers(self.pools[:1])]
        if len(self.pools) == 1:
            return full
        last = self.allocator.translate_loc_from_full_to_swa(at)[-WINDOW:]
        assert (last > 0).all()
        return full + [buffer[last].clone() for buffer in self._buffers(self.pools[1:])]

    def until(self, check: Callable[[], Any], seconds: float = 30) -> None:
        """Turn the scheduler's crank until something is so."""
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline
            self.tree.check_hicache_events()
            time.sleep(0.01)

    def match(self, tokens: array) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _alloc(self, count: int) -> Any:
        if len(self.pools) == 1:
            return self.allocator.alloc(count)
        # What the allocator's own `alloc` does; that one is for pages of one token.
        at = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(at, self.allocator.swa_attn_allocator.alloc(count))
        return at

    def store(self, tokens: array, seed: int) -> list[Any]:
        """Compute the tokens, so to speak, put them into the tree, and wait until they are stored. Return their rows."""
        self.fill(seed)
        at = self._alloc(len(tokens))
        state = self.requests.mamba_allocator.alloc(1) if self._states() else None
        rows = self.rows(at) + ([] if state is None else self.states(state))
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=at, mamba_value=state))
        hashes = get_storage_hash_str(list(tokens), None, page_size=sg.PAGE)
        self.until(lambda: self.backend.batch_exists(hashes) == len(hashes))
        self.until(lambda: not self.tree.cache_controller.has_inflight_device_transfers())
        return rows

    def fetch(self, tokens: array) -> Req:
        """Let a request for the tokens wait for its prefetch, as the scheduler does."""
        req = Req("r", "", array("q", [*tokens, 1, 2, 3]), SamplingParams(max_new_tokens=4))
        start = self.match(tokens).last_host_node
        self.tree.prefetch_from_storage(req.cache_request_handle, start, tokens, matched_prefix_tokens=[])
        self.until(lambda: self.tree.check_prefetch_progress(req.cache_request_handle))
        return req

    def load(self, req: Req) -> None:
        """Admit the request: what was fetched goes to the device."""
        req.init_next_round_input(self.tree, cow_mamba=False)
        if self.tree.buffer_pipeline is not None:
            assert self.tree.buffer_pipeline.prepare_staged_prefetch(req)
        params = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        self.tree.init_load_back(params)
        self.tree.ready_to_load_host_cache()
        self.until(lambda: not self.tree.cache_controller.has_inflight_device_transfers())


@pytest.fixture
def engines(node: Daemon, group: Any, without_gpu: None) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def start(mode: str, *, window: bool = False, state: bool = False, **section: Any) -> Engine:
        opened.append(Engine(node, group, mode, window=window, state=state, **section))
        return opened[-1]

    yield start
    for engine in reversed(opened):
        engine.close()


@pytest.mark.parametrize("mode", ["buffer_only", "cache"])
def test_what_was_evicted_everywhere_comes_back_from_hoststage_and_matches(
    engines: Callable[..., Engine], mode: str
) -> None:
    engine = engines(mode)
    first = 1000 if mode == "cache" else 9000
    tokens = array("q", range(first, first + PAGES * sg.PAGE))
    wanted = engine.store(tokens, 1)
    assert engine.match(tokens).device_prefix_len == len(tokens)
    engine.until(lambda: engine.tree.evict(EvictParams(num_tokens=SLOTS)) and engine.tree.full_evictable_size() == 0)
    if mode == "cache":
        # Host pages are locked until the scheduler has seen the backup's acknowledgement.
        engine.until(lambda: engine.tree.evict_host(SLOTS) == len(tokens))
    gone = engine.match(tokens)
    assert (gone.device_prefix_len, gone.host_hit_length) == (0, 0)
    engine.fill(2)

    req = engine.fetch(tokens)
    engine.load(req)
    found = engine.match(tokens)
    assert found.device_prefix_len == len(tokens)
    at = engine.tree.path_device_indices(found.last_device_node)
    assert all(torch.equal(a, b) for a, b in zip(wanted, engine.rows(at), strict=True))
    assert engine.backend.failures == {}


@pytest.mark.parametrize("mode", ["buffer_only", "cache"])
def test_another_engine_finds_what_the_first_one_stored(engines: Callable[..., Engine], mode: str) -> None:
    first = 20_000 if mode == "cache" else 30_000
    tokens = array("q", range(first, first + PAGES * sg.PAGE))
    one = engines(mode)
    wanted = one.store(tokens, 3)
    other = engines(mode)
    other.fill(4)
    other.load(other.fetch(tokens))
    found = other.match(tokens)
    assert found.device_prefix_len == len(tokens)
    at = other.tree.path_device_indices(found.last_device_node)
    assert all(torch.equal(a, b) for a, b in zip(wanted, other.rows(at), strict=True))


def test_a_window_pool_comes_back_with_its_full_pool_in_buffer_only(engines: Callable[..., Engine]) -> None:
    tokens = array("q", range(40_000, 40_000 + PAGES * sg.PAGE))
    one = engines("buffer_only", window=True)
    wanted = one.store(tokens, 5)
    ask = [sg.transfer(PoolName.SWA, ["window"] * (WINDOW // sg.PAGE), policy=PoolHitPolicy.TRAILING_PAGES)]
    hashes = get_storage_hash_str(list(tokens), None, page_size=sg.PAGE)
    # The window is written after the full pages; until then no length can be restored.
    one.until(lambda: one.backend.batch_exists_v2(hashes, ask).kv_hit_pages == PAGES)
    other = engines("buffer_only", window=True)
    other.fill(6)
    other.load(other.fetch(tokens))
    found = other.match(tokens)
    assert found.device_prefix_len == len(tokens)
    at = other.tree.path_device_indices(found.last_device_node)
    assert all(torch.equal(a, b) for a, b in zip(wanted, other.rows(at), strict=True))
    assert other.backend.failures == {}


@pytest.mark.parametrize("mode", ["buffer_only", "cache"])
def test_a_tree_whose_host_pools_are_in_the_daemons_memory_works_alike(
    node: Daemon, hooked: None, engines: Callable[..., Engine], mode: str
) -> None:
    first = 50_000 if mode == "cache" else 60_000
    tokens = array("q", range(first, first + PAGES * sg.PAGE))
    engine = engines(mode, window=mode == "buffer_only", host_pools="daemon", required=True)
    for pool in (engine.backend.mem_pool_host, *(p.pool for p in engine.backend._pools.values())):
        assert {sg.mapping_at(t.data_ptr())[0] for t in sg.tensors_of(pool)} == {"/memfd:hoststage-whole"}
    wanted = engine.store(tokens, 7)
    if mode == "cache":
        engine.until(
            lambda: engine.tree.evict(EvictParams(num_tokens=SLOTS)) and engine.tree.full_evictable_size() == 0
        )
        # It comes back from the host pool, without the store.
        engine.fill(8)
        found = engine.match(tokens)
        assert found.host_hit_length == len(tokens)
        req = Req("r", "", array("q", [*tokens, 1, 2, 3]), SamplingParams(max_new_tokens=4))
    else:
        ask = [sg.transfer(PoolName.SWA, ["window"] * (WINDOW // sg.PAGE), policy=PoolHitPolicy.TRAILING_PAGES)]
        hashes = get_storage_hash_str(list(tokens), None, page_size=sg.PAGE)
        engine.until(lambda: engine.backend.batch_exists_v2(hashes, ask).kv_hit_pages == PAGES)
        engine = engines(mode, window=True, host_pools="daemon", required=True)
        engine.fill(8)
        req = engine.fetch(tokens)
    engine.load(req)
    found = engine.match(tokens)
    assert found.device_prefix_len == len(tokens)
    at = engine.tree.path_device_indices(found.last_device_node)
    assert all(torch.equal(a, b) for a, b in zip(wanted, engine.rows(at), strict=True))
    assert engine.backend.failures == {}


@pytest.mark.parametrize("kind", ["cache", "buffer_only", "window", "state"])
def test_a_tree_whose_host_pools_are_memfds_copies_no_page_in_its_own_process(
    node: Daemon, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def forbidden(*_: object) -> int:
        raise AssertionError("a page was copied in the engine's process")

    for module in (_pages, copy):
        monkeypatch.setattr(module, "copy_pages", forbidden)
    mode = "cache" if kind == "cache" else "buffer_only"
    given = {"window": kind == "window", "state": kind == "state", "allocator": "shm"}
    first = 80_000 + 2_000 * ["cache", "buffer_only", "window", "state"].index(kind)
    tokens = array("q", range(first, first + PAGES * sg.PAGE))
    one = engines(mode, **given)
    wanted = one.store(tokens, 9)
    policy = PoolHitPolicy.TRAILING_PAGES
    ask = [sg.transfer(PoolName.SWA, ["window"] * (WINDOW // sg.PAGE), policy=policy)] if kind == "window" else []
    ask += [sg.transfer(PoolName.MAMBA, ["state"], policy=policy)] if kind == "state" else []
    hashes = get_storage_hash_str(list(tokens), None, page_size=sg.PAGE)
    one.until(lambda: one.backend.batch_exists_v2(hashes, ask).kv_hit_pages == PAGES)
    other = engines(mode, **given)
    for engine in (one, other):
        paths = {channel._session.grant.path for channel in engine.backend._channels.values()}
        assert paths == {PayloadPath.IMPORTED}
    other.fill(10)
    other.load(other.fetch(tokens))
    found = other.match(tokens)
    assert found.device_prefix_len == len(tokens)
    rows = other.rows(other.tree.path_device_indices(found.last_device_node))
    if kind == "state":
        req = Req("next", "", array("q", [*tokens, 1, 2, 3]), SamplingParams(max_new_tokens=4))
        req.init_next_round_input(other.tree, cow_mamba=True)
        rows += other.states(req.kv.mamba_cow_src_index)
    assert all(torch.equal(a, b) for a, b in zip(wanted, rows, strict=True))
    assert one.backend.failures == other.backend.failures == {}


def test_a_state_comes_back_with_its_full_pool_in_buffer_only(engines: Callable[..., Engine]) -> None:
    tokens = array("q", range(70_000, 70_000 + PAGES * sg.PAGE))
    one = engines("buffer_only", state=True)
    wanted = one.store(tokens, 7)
    ask = [sg.transfer(PoolName.MAMBA, ["state"], policy=PoolHitPolicy.TRAILING_PAGES)]
    hashes = get_storage_hash_str(list(tokens), None, page_size=sg.PAGE)
    # The state is written after the full pages, and belongs to the last of them: no shorter prefix can be restored.
    one.until(lambda: one.backend.batch_exists_v2(hashes, ask).restorable_prefix_pages == [PAGES])
    one.until(lambda: not one.tree.cache_controller.has_inflight_device_transfers())
    one.tree.evict(EvictParams(num_tokens=SLOTS, mamba_num=16))
    assert one.match(tokens).device_prefix_len == 0
    for engine in (one, engines("buffer_only", state=True)):
        engine.fill(8)
        engine.load(engine.fetch(tokens))
        found = engine.match(tokens)
        assert found.device_prefix_len == len(tokens)
        rows = engine.rows(engine.tree.path_device_indices(found.last_device_node))
        req = Req("next", "", array("q", [*tokens, 1, 2, 3]), SamplingParams(max_new_tokens=4))
        req.init_next_round_input(engine.tree, cow_mamba=True)
        # What the request is going to copy its own state from.
        rows += engine.states(req.kv.mamba_cow_src_index)
        assert all(torch.equal(a, b) for a, b in zip(wanted, rows, strict=True))
        assert engine.backend.failures == {}
