"""SGLang's own host pools in memfds (`"allocator": "shm"`): the daemon reads and writes them itself, and this process copies nothing.

Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
torch = pytest.importorskip("torch")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName  # noqa: E402

from hoststage.client import PayloadPath, _pages  # noqa: E402
from hoststage.shm import copy  # noqa: E402
from tests.engines import sglang_support as sg  # noqa: E402
from tests.engines.test_sglang_backend import Worker  # noqa: E402
from tests.integration.daemon import Daemon, eventually  # noqa: E402
from tests.life_support import counter, sessions  # noqa: E402

COPIES = ((_pages, "copy_pages"), (copy, "copy_pages"), (copy, "copy_bytes"))


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="1GiB").start()
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture
def own_node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="512MiB").start()
        yield daemon
        daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    with sg.allocated_by("shm"):
        yield


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever copies a page in this process fails."""

    def forbidden(*_: object) -> int:
        raise AssertionError("a page was copied in the engine's process")

    for module, name in COPIES:
        monkeypatch.setattr(module, name, forbidden)


def _paths(backend: Any) -> set[PayloadPath]:
    return {channel._session.grant.path for channel in backend._channels.values()}


def _others_are_untouched(pool: Any, before: list[Any], pages: list[int]) -> None:
    others = [page for page in range(pool.size // pool.page_size) if page not in pages]
    now = [sg.page_bytes(pool, page) for page in others]
    for tensor, old in zip(sg.tensors_of(pool), before, strict=True):
        tensor.view(torch.uint8).copy_(old)
    assert now == [sg.page_bytes(pool, page) for page in others]


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("layout", sg.LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_of_every_layout_come_back_byte_for_byte_by_the_daemons_one_copy(
    node: Daemon, kind: str, layout: str
) -> None:
    pool = sg.mha(layout) if kind == "mha" else sg.mla(layout)
    sg.fill(pool, 1)
    backend = sg.open_backend(node.address, pool, is_mla_model=kind == "mla")
    assert _paths(backend) == {PayloadPath.IMPORTED}
    keys = sg.hashes(f"round/{kind}/{layout}", 9)
    written = [3, 0, 7, 30, 31, 12, 13, 14, 5]
    wanted = [sg.page_bytes(pool, page) for page in written]
    assert backend.batch_get_v1(keys, sg.ids(pool, written)) == [False] * 9
    assert [sg.page_bytes(pool, page) for page in written] == wanted
    copies = counter(node, "daemon_copies")
    assert backend.batch_set_v1(keys, sg.ids(pool, written)) == [True] * 9
    assert counter(node, "daemon_copies") - copies == 9
    assert backend.batch_exists(keys) == 9
    sg.fill(pool, 2)
    before = sg.snapshot(pool)
    read = [8, 9, 10, 1, 2, 25, 24, 23, 0]
    assert backend.batch_get_v1(keys, sg.ids(pool, read)) == [True] * 9
    assert counter(node, "daemon_copies") - copies == 18
    assert [sg.page_bytes(pool, page) for page in read] == wanted
    _others_are_untouched(pool, before, read)
    assert backend.failures == {}
    backend.close()


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("layout", sg.LAYOUTS)
def test_sidecars_families_and_states_lie_in_memfds_of_their_own(node: Daemon, layout: str) -> None:
    kv = sg.mla(layout)
    pools = {
        PoolName.KV: kv,
        PoolName.INDEXER: sg.indexer(kv),
        PoolName.MAMBA: sg.mamba(side_state=True),
        PoolName.DEEPSEEK_V4_C4_INDEXER: sg.paged(PoolName.DEEPSEEK_V4_C4_INDEXER, layout, 1024),
        PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE: sg.paged(PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE, layout, 64),
        PoolName.SWA: sg.mha(layout, heads=1, label="swa"),
    }
    for seed, pool in enumerate(pools.values()):
        sg.fill(pool, 10 + seed)
    backend = sg.open_backend(node.address, kv, pools, is_mla_model=True, model_name=f"tests/all {layout}")
    assert _paths(backend) == {PayloadPath.IMPORTED}
    keys = sg.hashes(f"all/{layout}", 3)
    wanted = {name: [sg.page_bytes(pool, page) for page in (4, 1, 6)] for name, pool in pools.items()}

    def moves(pages: list[int]) -> list[Any]:
        return [sg.transfer(name, keys, pool, pages, PoolHitPolicy.ALL_PAGES) for name, pool in pools.items()]

    assert backend.batch_set_v2(moves([4, 1, 6])) == {name: [True] * 3 for name in pools}
    for pool in pools.values():
        sg.fill(pool, 99)
    assert backend.batch_get_v2(moves([9, 10, 3])) == {name: [True] * 3 for name in pools}
    found = {name: [sg.page_bytes(pool, page) for page in (9, 10, 3)] for name, pool in pools.items()}
    assert found == wanted
    assert backend.failures == {}
    backend.close()


def test_the_bytes_are_the_same_as_over_the_path_that_copies(node: Daemon) -> None:
    keys, pages = sg.hashes("both", 5), [4, 0, 2, 9, 7]
    pool = sg.mha("layer_first")
    sg.fill(pool, 31)
    backend = sg.open_backend(node.address, pool, model_name="tests/both")
    assert all(backend.batch_set_v1(keys, sg.ids(pool, pages)))
    # A page as a tensor of its own lies in no memfd: it travels in messages, in the same session.
    flat = pool.get_dummy_flat_data_page()
    assert backend.get(keys[3], flat) is flat
    assert flat.view(torch.uint8).numpy().tobytes() == sg.page_bytes(pool, 9)
    assert backend.set(sg.hashes("one", 1)[0], pool.get_data_page(9 * sg.PAGE))
    assert all(backend.batch_get_v1(sg.hashes("one", 1), sg.ids(pool, [20])))
    assert sg.page_bytes(pool, 20) == sg.page_bytes(pool, 9)
    with sg.allocated_by("default"):
        plain = sg.mha("layer_first")
    other = sg.open_backend(node.address, plain, model_name="tests/both")
    assert _paths(other) == {PayloadPath.SHM}
    assert all(other.batch_get_v1(keys, sg.ids(plain, [0, 1, 2, 3, 4])))
    assert [sg.page_bytes(plain, i) for i in range(5)] == [sg.page_bytes(pool, page) for page in pages]
    backend.close()
    other.close()


@pytest.mark.usefixtures("no_copies")
def test_pages_outlive_the_daemon_and_the_pools_memory_is_given_to_the_next_one(own_node: Daemon) -> None:
    pool = sg.mha("page_first_direct")
    sg.fill(pool, 41)
    backend = sg.open_backend(own_node.address, pool, model_name="tests/restart")
    keys = sg.hashes("restart", 8)
    wanted = [sg.page_bytes(pool, page) for page in range(8)]
    assert all(backend.batch_set_v1(keys, sg.ids(pool, list(range(8)))))
    own_node.kill()
    assert backend.batch_get_v1(keys, sg.ids(pool, list(range(8, 16)))) == [False] * 8
    own_node.start()
    eventually(lambda: backend.batch_exists(keys) == 8, 20)
    assert all(backend.batch_get_v1(keys, sg.ids(pool, list(range(8, 16)))))
    assert [sg.page_bytes(pool, page) for page in range(8, 16)] == wanted
    assert _paths(backend) == {PayloadPath.IMPORTED}
    backend.close()
    eventually(lambda: not sessions(own_node))


@pytest.mark.timeout(240)
def test_pages_outlive_the_engine_and_another_one_finds_them_by_whichever_path(own_node: Daemon) -> None:
    engines = [Worker(own_node), Worker(own_node)]
    try:
        wrote = engines[0].does("write layer_first 0 1 shm")
        assert wrote["ok"] == [True] * 8
        assert counter(own_node, "daemon_copies") == 8
        engines[0].kill()
        eventually(lambda: not sessions(own_node))
        own_node.kill()
        own_node.start()
        assert engines[1].does("read layer_first 0 1 shm") == wrote
        assert counter(own_node, "daemon_copies") == 8
        assert engines[1].does("read layer_first 0 1") == wrote
    finally:
        for engine in engines:
            engine.kill()


def test_slots_of_a_read_that_was_given_up_are_never_written_later(own_node: Daemon) -> None:
    pool = sg.mha("layer_first")
    sg.fill(pool, 51)
    backend = sg.open_backend(
        own_node.address, pool, model_name="tests/late", section={"load_timeout": 0.5, "store_timeout": 0.5}
    )
    keys = sg.hashes("late", 8)
    assert all(backend.batch_set_v1(keys, sg.ids(pool, list(range(8)))))
    own_node.process.send_signal(signal.SIGSTOP)
    assert backend.batch_get_v1(keys, sg.ids(pool, list(range(8, 16)))) == [False] * 8
    fresh = sg.hashes("fresh", 8)
    assert backend.batch_set_v1(fresh, sg.ids(pool, list(range(16, 24)))) == [False] * 8
    # The engine uses the slots for other pages now.
    sg.fill(pool, 52)
    before = sg.snapshot(pool)
    own_node.process.send_signal(signal.SIGCONT)
    eventually(lambda: backend.batch_exists(keys) == 8, 20)
    eventually(lambda: all(s["read_leases"] == 0 for s in sessions(own_node).values()))
    assert all(torch.equal(a, b) for a, b in zip(before, sg.snapshot(pool), strict=True))
    assert backend.batch_exists(fresh) == 0
    backend.close()


def test_no_page_byte_passes_through_python(node: Daemon) -> None:
    pool = sg.mha("layer_first", heads=8, dim=128, pages=128)
    backend = sg.open_backend(node.address, pool, model_name="tests/copies")
    keys, pages = sg.hashes("copies", 64), list(range(64))
    total = 64 * len(sg.page_bytes(pool, 0))
    tracemalloc.start()
    assert all(backend.batch_set_v1(keys, sg.ids(pool, pages)))
    assert all(backend.batch_get_v1(keys, sg.ids(pool, [page + 64 for page in pages])))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < total // 16
    backend.close()


def test_where_the_daemon_does_not_take_the_memory_pages_are_copied_and_it_is_said_once(
    node: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    pool = sg.mha("page_first")
    sg.fill(pool, 61)
    # A descriptor of the same memory that may not be written.
    pool.allocator.fds[0] = os.open(f"/proc/self/fd/{pool.allocator.fds[0]}", os.O_RDONLY)
    with caplog.at_level(logging.WARNING, "hoststage"):
        backend = sg.open_backend(node.address, pool, model_name="tests/refused")
        keys = sg.hashes("refused", 4)
        assert all(backend.batch_set_v1(keys, sg.ids(pool, [0, 1, 2, 3])))
        assert all(backend.batch_get_v1(keys, sg.ids(pool, [10, 11, 12, 13])))
    assert [sg.page_bytes(pool, page) for page in (10, 11)] == [sg.page_bytes(pool, page) for page in (0, 1)]
    said = [record.getMessage() for record in caplog.records if "copies the pages" in record.getMessage()]
    assert len(said) == 1
    assert "IMPORT_KIND" in said[0]
    backend.close()
