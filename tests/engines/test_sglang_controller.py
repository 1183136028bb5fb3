"""SGLang's real HiCacheController and its storage threads over hoststage: backup, query, prefetch, detach.

Real are the controller with its four threads, its device pool, its host pool, its page hashes, and the factory that builds the backend. In place of a
launched engine stand one gloo process group of a single rank, and the parallel identity that SGLang would have set up with it. Copies between device and
host, which need a GPU, are no part of this.
"""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engines

cache_controller = pytest.importorskip("sglang.srt.managers.cache_controller", exc_type=ImportError)
torch = pytest.importorskip("torch")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

from tests.engines import sglang_support as sg  # noqa: E402
from tests.integration.daemon import Daemon, eventually  # noqa: E402

PAGES = 150
"""More than one of SGLang's batches of 128."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parallel identity of a launched engine with one rank."""
    parallel = SimpleNamespace(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_rank=0, attn_tp_size=1
    )
    monkeypatch.setattr(cache_controller, "get_parallel", lambda: parallel)
    monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)


def _controller(node: Daemon, group: Any, layout: str, interface: int) -> Any:
    device = MHATokenToKVPool(
        sg.TOKENS, sg.PAGE, torch.bfloat16, 2, 64, sg.LAYERS, "cpu", enable_memory_saver=False, enable_alt_stream=False
    )
    extra = json.loads(json.dumps(sg.config(node.address, interface=interface).extra_config))
    return cache_controller.HiCacheController(
        SimpleNamespace(get_kvcache=lambda: device),
        sg.mha(layout, pages=2 * PAGES),
        sg.PAGE,
        group,
        threading.Event(),
        storage_backend="dynamic",
        model_name=f"tests/controller {layout} {interface}",
        storage_backend_extra_config=extra,
    )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("layout", "interface"), [("layer_first", 1), ("page_first_direct", 1), ("layer_first", 0)])
def test_what_the_controller_backs_up_it_prefetches_after_a_restart(
    node: Daemon, group: Any, layout: str, interface: int
) -> None:
    tokens = list(range(1000, 1000 + PAGES * sg.PAGE))
    controller = _controller(node, group, layout, interface)
    pool = controller.mem_pool_host
    zero_copy = controller.page_get_func == controller._page_get_zero_copy
    assert zero_copy == bool(interface)
    sg.fill(pool, 21)
    wanted = [sg.page_bytes(pool, page) for page in range(PAGES)]
    indices = pool.alloc(PAGES * sg.PAGE)
    assert indices.tolist() == list(range(PAGES * sg.PAGE))
    hashes = cache_controller.get_storage_hash_str(tokens, None, page_size=sg.PAGE)
    controller.write_storage(indices, tokens, hash_value=hashes)
    acknowledged = controller.ack_backup_queue.get(timeout=30)
    assert acknowledged.completed_tokens == len(tokens)
    controller.detach_storage_backend()

    # Another engine, with more tokens than are stored: the query stops where the store does.
    controller = _controller(node, group, layout, interface)
    pool = controller.mem_pool_host
    sg.fill(pool, 22)
    controller.prefetch("request", [*tokens, *range(5 * sg.PAGE)])
    found = controller.prefetch_hit_queue.get(timeout=30)
    assert found.storage_hit_count == len(tokens)
    assert found.hash_value == hashes
    # What SGLang's scheduler does with a hit: room for it, then on to the thread that reads.
    pool.alloc(7 * sg.PAGE)
    found.host_indices = controller.alloc_prefetch_host_buffers(found, found.storage_hit_count)
    controller.prefetch_buffer.put(found)
    progress = []
    while not (ack := controller.ack_prefetch_queue.get(timeout=30)).completed_req:
        progress.append(ack.completed_tokens)
    assert progress[-1] == len(tokens)
    assert [sg.page_bytes(pool, page + 7) for page in range(PAGES)] == wanted
    controller.detach_storage_backend()


@pytest.mark.usefixtures("engine")
def test_a_daemon_that_dies_costs_a_backup_and_a_hit_and_no_thread(group: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        controller = _controller(daemon, group, "page_first", 1)
        pool = controller.mem_pool_host
        tokens = list(range(4 * sg.PAGE))
        hashes = cache_controller.get_storage_hash_str(tokens, None, page_size=sg.PAGE)
        indices = pool.alloc(len(tokens))
        daemon.kill()
        controller.write_storage(indices, tokens, hash_value=hashes)
        assert controller.ack_backup_queue.get(timeout=30).completed_tokens == 0
        controller.prefetch("lost", tokens)
        assert controller.prefetch_hit_queue.get(timeout=30).storage_hit_count == 0
        daemon.start()

        def backed_up() -> bool:
            controller.write_storage(indices, tokens, hash_value=hashes)
            return controller.ack_backup_queue.get(timeout=30).completed_tokens == len(tokens)

        eventually(backed_up, 20)
        controller.prefetch("found", tokens)
        assert controller.prefetch_hit_queue.get(timeout=30).storage_hit_count == len(tokens)
        controller.detach_storage_backend()
        daemon.kill()
