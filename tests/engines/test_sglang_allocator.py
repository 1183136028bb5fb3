"""SGLang's real host pools in the daemon's memory: where they live, what outlives whom, whose budget counts.

Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
torch = pytest.importorskip("torch")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName  # noqa: E402
from sglang.srt.mem_cache.pool_host import base, common  # noqa: E402

from hoststage.client import PayloadPath, StackError, connect  # noqa: E402
from hoststage.client.engines.sglang import allocator, plugin  # noqa: E402
from hoststage.client.engines.sglang.hostpools import HostPoolsUnavailable, memory_stack  # noqa: E402
from tests.engines import sglang_support as sg  # noqa: E402
from tests.integration.daemon import ROOT, Daemon, environment, eventually  # noqa: E402

WORKER = Path(__file__).with_name("sglang_pool_worker.py")
OURS = "/memfd:hoststage-whole"
IMPORTERS = ("mha", "mla", "mamba", "dsa", "unified", "base", "mha_mxfp8", "minimax_m3_nvfp4")


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        yield daemon
        daemon.kill()


@pytest.fixture
def own_node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="192MiB").start()
        yield daemon
        daemon.kill()


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    unhook = sg.hook_host_pools()
    monkeypatch.setattr(allocator, "_said", set())
    yield
    unhook()


def _extra(address: str, **section: Any) -> dict[str, Any]:
    return {"hoststage": {"address": address, "host_pools": "daemon", **section}}


def _leased(daemon: Daemon) -> int:
    return sum(p["slots"] * p["stride"] for p in daemon.status()["pools"] if p["kind"] == "whole")


def _free(daemon: Daemon) -> int:
    with connect(daemon.address, stack=memory_stack("probe"), timeout=20) as session:
        return session.budget().free_bytes


KINDS: dict[str, Callable[[], Any]] = {
    **{f"mha {layout}": lambda layout=layout: sg.mha(layout) for layout in sg.LAYOUTS},
    **{f"mla {layout}": lambda layout=layout: sg.mla(layout) for layout in sg.LAYOUTS},
    "wide value": lambda: sg.mha("page_first", v_dim=32),
    "mamba": lambda: sg.mamba(side_state=True),
    **{f"v4 {layout}": lambda layout=layout: sg.paged(PoolName.DEEPSEEK_V4_C4, layout, 4096) for layout in sg.LAYOUTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_pool_lives_in_the_daemons_memory_and_goes_back_with_it(node: Daemon, kind: str) -> None:
    before = _leased(node)
    with sg.engine(_extra(node.address, required=True)):
        pool = KINDS[kind]()
        tensors = sg.tensors_of(pool)
        assert {sg.mapping_at(tensor.data_ptr())[0] for tensor in tensors} == {OURS}
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        # An arena that is kept warm may be a little larger than what is asked for.
        assert sum(sizes) <= _leased(node) - before < sum(sizes) + (len(sizes) << 21)
        sg.fill(pool, 5)
        once = sg.snapshot(pool)
        assert all(torch.equal(a, b) for a, b in zip(once, sg.snapshot(pool), strict=True))
        del pool, tensors
        gc.collect()
        eventually(lambda: _leased(node) == before)


def test_an_indexer_beside_its_anchor_lives_there_too(node: Daemon) -> None:
    with sg.engine(_extra(node.address, required=True)):
        anchor = sg.mla("page_first")
        pool = sg.indexer(anchor)
        assert {sg.mapping_at(tensor.data_ptr())[0] for tensor in sg.tensors_of(pool)} == {OURS}


def test_memory_goes_back_though_a_forked_child_of_the_engine_lives_on(node: Daemon) -> None:
    before = _leased(node)
    with sg.engine(_extra(node.address, required=True)):
        pool = sg.mla("page_first")
        backend = sg.open_backend(node.address, pool, is_mla_model=True, model_name="tests/forked")
        inode = sg.mapping_at(sg.tensors_of(pool)[0].data_ptr())[1]
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        try:
            backend.close()
            del pool, backend
            gc.collect()
            eventually(lambda: _leased(node) == before)
            again = sg.mla("page_first")
            assert sg.mapping_at(sg.tensors_of(again)[0].data_ptr())[1] == inode
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("storage", [None, "file"])
def test_it_serves_launches_with_any_storage_backend_or_none(node: Daemon, storage: str | None) -> None:
    with sg.engine(_extra(node.address, required=True), storage):
        pool = sg.mla("page_first")
        assert sg.mapping_at(sg.tensors_of(pool)[0].data_ptr())[0] == OURS


@pytest.mark.parametrize("extra", [None, {"hoststage": {"host_pools": "engine"}}, {"prefetch_threshold": 16}])
def test_without_the_setting_everything_is_as_sglang_has_it(node: Daemon, extra: dict[str, Any] | None) -> None:
    with sg.engine(extra):
        pool = sg.mla("page_first")
        assert type(pool.allocator) is common.HostTensorAllocator
        assert sg.mapping_at(sg.tensors_of(pool)[0].data_ptr())[0] != OURS
        assert allocator._current is None


def test_a_backend_that_brings_its_own_memory_is_left_alone(node: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with sg.engine(_extra(node.address)):
        chosen = common.get_allocator_from_storage("shm")
    assert type(chosen) is common.ShmHostTensorAllocator
    assert any("ShmHostTensorAllocator brings memory of its own" in r.getMessage() for r in caplog.records)


# -------------------------------------------------------------- through the storage backend


def test_pages_of_several_pools_go_through_the_storage_backend_and_come_back_byte_for_byte(node: Daemon) -> None:
    with sg.engine(_extra(node.address, required=True)):
        kv, state = sg.mha("page_first_direct"), sg.mamba()
        for pool, seed in ((kv, 1), (state, 2)):
            sg.fill(pool, seed)
        backend = sg.open_backend(
            node.address, kv, {PoolName.KV: kv, PoolName.MAMBA: state}, model_name="tests/daemon pools"
        )
        keys = sg.hashes("daemon pools", 6)
        wanted = [sg.page_bytes(kv, page) for page in range(6)], sg.page_bytes(state, 3)
        policy = PoolHitPolicy.TRAILING_PAGES
        assert backend.batch_set_v2([sg.transfer(PoolName.MAMBA, keys[-1:], state, [3], policy)])[PoolName.MAMBA] == [
            True
        ]
        assert backend.batch_set_v1(keys, sg.ids(kv, list(range(6)))) == [True] * 6
        for pool, seed in ((kv, 8), (state, 9)):
            sg.fill(pool, seed)
        assert backend.batch_get_v1(keys, sg.ids(kv, list(range(10, 16)))) == [True] * 6
        assert backend.batch_get_v2([sg.transfer(PoolName.MAMBA, keys[-1:], state, [7], policy)])[PoolName.MAMBA] == [
            True
        ]
        assert [sg.page_bytes(kv, page) for page in range(10, 16)] == wanted[0]
        assert sg.page_bytes(state, 7) == wanted[1]
        assert backend.failures == {}
        paths = {channel.open().grant.path for channel in backend._channels.values()}
        assert paths == {PayloadPath.IMPORTED}
        backend.close()


class Worker:
    """An engine process with one host pool."""

    def __init__(self, address: str, shape: str = "mha page_first 64", **section: Any) -> None:
        env = environment()
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env["PYTHONPATH"]])
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - for as long as the process writes to it
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), address, json.dumps({"host_pools": "daemon", **section}), shape],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=env,
        )
        self.began = self._line()

    def _line(self) -> Any:
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def ask(self, word: str) -> Any:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._line()

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.kill()


def test_a_killed_engines_memory_goes_back_and_is_warm_at_its_next_start(
    own_node: Daemon, workers: list[Worker]
) -> None:
    workers.append(first := Worker(own_node.address, required=True))
    [(name, inode), *_] = first.ask("where")
    assert name == OURS
    ok, pages = first.ask("store")
    assert ok == [True] * 8
    # The daemon moves the pages itself: they are in its memory, and pass through no other.
    assert " over imported (" in first.said()
    granted = own_node.status()["granted_bytes"]
    first.kill()
    eventually(lambda: _leased(own_node) == 0)
    workers.append(second := Worker(own_node.address, required=True))
    # The same memory, and none beside it.
    assert {(name, inode)} == {tuple(found) for found in second.ask("where")}
    assert 'hoststage_arena_leases_total{memory="warm"} 1.0' in own_node.get("/metrics")
    # But for the few pages of a session that was just ending.
    assert abs(own_node.status()["granted_bytes"] - granted) < 1 << 16
    assert "populated already" in second.said()
    assert second.ask("load") == [[True] * 8, pages]


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_an_engine_outlives_its_daemon_with_every_byte_and_is_counted_by_the_next(
    own_node: Daemon, workers: list[Worker], ending: str
) -> None:
    free = _free(own_node)
    workers.append(engine := Worker(own_node.address, required=True))
    whole = engine.ask("digest")
    ok, pages = engine.ask("store")
    assert ok == [True] * 8
    held = _leased(own_node)
    assert held > 0
    getattr(own_node, ending)()
    eventually(lambda: engine.said().count("is away; the host pools") == 1)
    assert engine.ask("digest") == whole
    own_node.start()
    eventually(lambda: "is back, and counts" in engine.said(), 20)
    assert engine.said().count("is away; the host pools") == 1
    assert engine.ask("digest") == whole
    # The backend's own session comes back by itself too; a miss until then.
    eventually(lambda: engine.ask("load") == [[True] * 8, pages], 20)
    # What the engine maps is not to be had a second time; nor is it held against anybody once the engine has ended.
    assert _free(own_node) <= free - held
    engine.kill()
    eventually(lambda: _free(own_node) == free)


def test_two_ranks_share_one_budget_and_the_second_is_refused_or_goes_without(
    own_node: Daemon, workers: list[Worker]
) -> None:
    # 24 KiB a page: 118 MB of the 192 MiB there are.
    shape = "mha page_first 4800"
    workers.append(first := Worker(own_node.address, shape, required=True))
    assert first.began == {"allocator": "DaemonHostTensorAllocator"}
    held = _leased(own_node)
    workers.append(second := Worker(own_node.address, shape, required=True))
    assert second.began["error"] == "HostPoolsUnavailable"
    assert "hoststage.host_pools is 'daemon' and required" in second.began["text"]
    assert "--hicache-ratio" in second.began["text"]
    workers.append(third := Worker(own_node.address, shape))
    assert OURS not in {name for name, _ in third.ask("where")}
    assert third.said().count("is allocated by SGLang itself") == 1
    assert _leased(own_node) == held
    first.kill()
    eventually(lambda: _leased(own_node) == 0)
    workers.append(fourth := Worker(own_node.address, shape, required=True))
    assert fourth.began == {"allocator": "DaemonHostTensorAllocator"}


# -------------------------------------------------------------- without the daemon


def test_without_a_daemon_sglang_allocates_and_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with sg.engine(_extra("unix:///nowhere/h.sock", connect_timeout=1)):
        pools = [sg.mla("page_first"), sg.mha("layer_first")]
    assert {sg.mapping_at(t.data_ptr())[0] == OURS for pool in pools for t in sg.tensors_of(pool)} == {False}
    said = [r.getMessage() for r in caplog.records if "by SGLang itself" in r.getMessage()]
    assert len(said) == 1
    assert "nowhere" in said[0]


def test_a_required_daemon_that_is_gone_when_pools_are_made_stops_the_launch_with_a_typed_error(
    own_node: Daemon,
) -> None:
    with sg.engine(_extra(own_node.address, connect_timeout=1, required=True)):
        own_node.kill()
        with pytest.raises(HostPoolsUnavailable, match="no daemon answers") as stopped:
            sg.mla("page_first")
    assert (stopped.value.field, stopped.value.value) == ("hoststage.host_pools", "daemon")
    assert "--budget" in stopped.value.remedy


def test_what_neither_the_daemon_nor_the_host_has_is_refused_as_sglang_refuses(
    node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sg.engine(_extra(node.address)):
        chosen = common.get_allocator_from_storage("default")
        monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 11 << 30)
        with pytest.raises(ValueError, match=r"Not enough host memory available.*memory\.budget"):
            chosen.allocate((2 << 30,), torch.uint8, "cpu")


# -------------------------------------------------------------- the check of free memory


def test_the_budget_is_the_daemons_wherever_sglang_asks(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # A host on which the daemon has taken all but nothing: SGLang's own check would refuse every pool.
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 10 << 30)
    for name in IMPORTERS:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for function in ("host_memory_budget_bytes", "get_allocator_from_storage"):
            found = getattr(module, function, None)
            assert found is None or found is getattr(base, function)
    with sg.engine(_extra(node.address, required=True)):
        free = base.host_memory_budget_bytes(4096)
        assert free == base.host_memory_budget_bytes() == allocator._current.free()
        assert 0 < free < 256 << 20
        pool = sg.mha("page_first")
        assert base.host_memory_budget_bytes(4096) < free
        # All ranks of a host ask before any of them leases.
        monkeypatch.setattr(base, "ranks_per_host", lambda: 4)
        assert base.host_memory_budget_bytes(auto_size=True) == allocator._current.free() // 4
        with base.host_memory_budget_scope(1 << 20):
            assert base.host_memory_budget_bytes(1 << 19) == 1 << 20
            assert base.host_memory_budget_bytes(1 << 19) == 1 << 19
        with pytest.raises(HostPoolsUnavailable, match="are free"):
            base.host_memory_budget_bytes(1 << 40)
        del pool


def test_what_the_daemon_cannot_give_is_checked_against_the_hosts_memory(
    node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 11 << 30)
    with sg.engine(_extra(node.address)):
        assert base.host_memory_budget_bytes(1 << 40) == 1 << 30


# -------------------------------------------------------------- registration with CUDA


class Cudart:
    """The three calls of the CUDA runtime, noted."""

    def __init__(self, most: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.most = most
        self.sizes: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.most is not None and len(self.ranges) >= self.most:
            return 2
        self.ranges[address] = size
        self.sizes.append(size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        # What is not mapped any more cannot be unregistered.
        sg.mapping_at(address)
        return 0 if self.ranges.pop(address, None) is not None else 1

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def _pinned(dims: tuple[int, ...], granularity: int | None = None) -> Any:
    return common.alloc_with_host_register(
        dims, torch.uint8, "cpu", True, common.get_allocator_from_storage("default"), granularity
    )


@pytest.mark.parametrize("granularity", [3 << 16, None])
def test_memory_is_registered_in_pieces_at_page_boundaries_and_unregistered_before_it_goes(
    node: Daemon, monkeypatch: pytest.MonkeyPatch, granularity: int | None
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(allocator, "MAX_PIECE_BYTES", 1 << 20)
    with sg.engine(_extra(node.address, required=True)):
        buffer = _pinned((2, 9, 3 << 16), granularity)
        unit = 3 << 16
        assert len(cudart.sizes) > 3
        assert all(size <= 1 << 20 and size % unit == 0 for size in cudart.sizes)
        assert sum(cudart.ranges.values()) == buffer.numel()
        # The buffer's owner drops it without a word.
        del buffer
        gc.collect()
        assert not cudart.ranges
        # SGLang's own end of a pool.
        buffer = _pinned((2, 9, 3 << 16), granularity)
        common._cuda_host_unregister(buffer)
        assert not cudart.ranges
        del buffer
        gc.collect()
        # What the first lease had is free again at once.
        eventually(lambda: not allocator._current.held)


def test_a_failed_registration_leaves_nothing_registered(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(most=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(allocator, "MAX_PIECE_BYTES", 1 << 16)
    before = _leased(node)
    with sg.engine(_extra(node.address, required=True)):
        with pytest.raises(RuntimeError, match="cudaHostRegister failed"):
            _pinned((16, 1 << 16))
        assert not cudart.ranges
        gc.collect()
        eventually(lambda: _leased(node) == before)


# -------------------------------------------------------------- at start


def _args(extra: dict[str, Any], storage: str | None = None, **given: Any) -> Any:
    return sg.ServerArgs(
        model_path=str(ROOT / "tests" / "fixtures" / "models" / "llama-3.1-8b"),
        device="cpu",
        skip_tokenizer_init=True,
        enable_hierarchical_cache=True,
        hicache_storage_backend=storage,
        hicache_storage_backend_extra_config=json.dumps(extra),
        **given,
    )


@pytest.mark.parametrize("storage", [None, "file"])
def test_at_start_it_is_said_what_the_daemon_has(
    node: Daemon, caplog: pytest.LogCaptureFixture, storage: str | None
) -> None:
    caplog.set_level(logging.INFO, logger=plugin.__name__)
    _args(_extra(node.address, required=True), storage).resolve_once()
    [said] = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert "host pools come from the daemon" in said


def test_at_start_an_absent_daemon_stops_the_launch_only_where_it_is_required(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(plugin.LaunchRefused, match=r"hoststage\.host_pools.*nowhere"):
        _args(_extra("unix:///nowhere/h.sock", required=True, connect_timeout=1)).resolve_once()
    _args(_extra("unix:///nowhere/h.sock", connect_timeout=1)).resolve_once()
    assert any("to allocate its host pools itself" in r.getMessage() for r in caplog.records)


def test_two_owners_of_the_same_memory_stop_the_launch(node: Daemon) -> None:
    ours = {"backend_name": "hoststage", "module_path": plugin.MODULE, "class_name": "HostStageStorage"}
    with pytest.raises(StackError, match="allocator is 'shm'"):
        _args({**ours, "allocator": "shm", **_extra(node.address)}, "dynamic").resolve_once()
    with pytest.raises(StackError, match=r"hoststage\.host_pools.*engine or daemon"):
        _args({"hoststage": {"host_pools": "demon"}}).resolve_once()
