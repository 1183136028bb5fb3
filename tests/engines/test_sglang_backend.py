"""The storage backend on SGLang's real host pools and a real daemon: bytes, prefixes, restarts, trouble.

Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
torch = pytest.importorskip("torch")

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
)

from hoststage.client import Refused, StackError, _pages  # noqa: E402
from hoststage.shm.copy import copy_pages  # noqa: E402
from tests.engines import sglang_support as sg  # noqa: E402
from tests.integration.daemon import Daemon, environment, eventually  # noqa: E402

WORKER = Path(__file__).with_name("sglang_worker.py")


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="1GiB").start()
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="512MiB").start()
        yield daemon
        daemon.kill()


def _pool(kind: str, layout: str) -> Any:
    if kind == "mha":
        return sg.mha(layout)
    if kind == "wide value":
        return sg.mha(layout, v_dim=32)
    return sg.mla(layout)


def _assert_only(pool: Any, before: list[Any], pages: list[int], wanted: list[bytes]) -> None:
    """The pages have these bytes, and no other byte of the pool has changed."""
    assert [sg.page_bytes(pool, page) for page in pages] == wanted
    others = [page for page in range(pool.size // pool.page_size) if page not in pages]
    now = [sg.page_bytes(pool, page) for page in others]
    for tensor, old in zip(sg.tensors_of(pool), before, strict=True):
        tensor.view(torch.uint8).copy_(old)
    assert now == [sg.page_bytes(pool, page) for page in others]


@pytest.mark.parametrize("layout", sg.LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla", "wide value"])
def test_pages_of_every_layout_come_back_byte_for_byte_and_into_other_slots(
    node: Daemon, kind: str, layout: str
) -> None:
    if kind == "wide value" and layout == "layer_first":
        pytest.skip("SGLang gives such a pool no storage pages")
    pool = _pool(kind, layout)
    sg.fill(pool, 1)
    backend = sg.open_backend(node.address, pool, is_mla_model=kind == "mla")
    keys = sg.hashes(f"round/{kind}/{layout}", 9)
    written = [3, 0, 7, 30, 31, 12, 13, 14, 5]
    wanted = [sg.page_bytes(pool, page) for page in written]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, sg.ids(pool, written)) == [False] * 9
    assert [sg.page_bytes(pool, page) for page in written] == wanted

    assert backend.batch_set_v1(keys, sg.ids(pool, written)) == [True] * 9
    assert backend.batch_exists(keys) == 9
    sg.fill(pool, 2)
    before = sg.snapshot(pool)
    read = [8, 9, 10, 1, 2, 25, 24, 23, 0]
    assert backend.batch_get_v1(keys, sg.ids(pool, read)) == [True] * 9
    _assert_only(pool, before, read, wanted)
    assert backend.failures == {}
    backend.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_flat_pages_and_zero_copy_pages_are_the_same_bytes(node: Daemon, layout: str) -> None:
    pool = sg.mha(layout)
    sg.fill(pool, 3)
    backend = sg.open_backend(node.address, pool, model_name="tests/flat")
    keys = sg.hashes(f"flat/{layout}", 4)
    assert backend.batch_set(keys, [pool.get_data_page(page * sg.PAGE) for page in range(4)])
    wanted = [sg.page_bytes(pool, page) for page in range(4)]
    assert backend.batch_get_v1(keys, sg.ids(pool, [20, 21, 22, 23])) == [True] * 4
    assert [sg.page_bytes(pool, page) for page in (20, 21, 22, 23)] == wanted
    pages = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    pool.set_from_flat_data_page(9 * sg.PAGE, pages[3])
    assert sg.page_bytes(pool, 9) == wanted[3]
    missing = sg.hashes("flat/missing", 1)[0]
    assert backend.get(missing, pool.get_dummy_flat_data_page()) is None
    assert not backend.exists(missing)
    assert backend.exists(keys[0])
    backend.close()


@pytest.mark.parametrize("state", ["plain", "with side state"])
def test_a_mamba_state_comes_back_with_its_convolution_and_side_states(node: Daemon, state: str) -> None:
    kv, pool = sg.mha("page_first"), sg.mamba(side_state=state != "plain")
    sg.fill(pool, 4)
    backend = sg.open_backend(node.address, kv, {PoolName.KV: kv, PoolName.MAMBA: pool}, model_name=f"tests/m {state}")
    key = sg.hashes(f"mamba/{state}", 1)
    wanted = sg.page_bytes(pool, 6)
    policy = PoolHitPolicy.TRAILING_PAGES
    assert backend.batch_set_v2([sg.transfer(PoolName.MAMBA, key, pool, [6], policy)]) == {PoolName.MAMBA: [True]}
    before = sg.snapshot(pool)
    assert backend.batch_get_v2([sg.transfer(PoolName.MAMBA, key, pool, [11], policy)]) == {PoolName.MAMBA: [True]}
    _assert_only(pool, before, [11], [wanted])
    backend.close()


@pytest.mark.parametrize("layout", sg.LAYOUTS)
def test_the_dsa_indexer_is_read_and_written_beside_its_kv_in_calls_of_its_own(node: Daemon, layout: str) -> None:
    kv = sg.mla(layout)
    pool = sg.indexer(kv)
    sg.fill(kv, 5)
    sg.fill(pool, 6)
    pools = {PoolName.KV: kv, PoolName.INDEXER: pool}
    backend = sg.open_backend(node.address, kv, pools, is_mla_model=True, model_name=f"tests/dsa {layout}")
    keys = sg.hashes(f"dsa/{layout}", 6)
    pages = [4, 5, 6, 7, 8, 9]
    wanted = [(sg.page_bytes(kv, page), sg.page_bytes(pool, page)) for page in pages]
    ask = [sg.transfer(PoolName.INDEXER, keys)]
    # The sidecar first, its source after it, as SGLang's backup thread does; the first four keys only.
    part = sg.transfer(PoolName.INDEXER, keys[:4], pool, pages[:4])
    assert backend.batch_set_v2([part]) == {PoolName.INDEXER: [True] * 4}
    assert backend.batch_exists_v2(keys, ask).kv_hit_pages == 0
    assert all(backend.batch_set_v1(keys, sg.ids(kv, pages)))
    found = backend.batch_exists_v2(keys, ask)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 4}

    sg.fill(kv, 7)
    sg.fill(pool, 8)
    into = [20, 21, 22, 23]
    assert all(backend.batch_get_v1(keys[:4], sg.ids(kv, into)))
    assert backend.batch_get_v2([sg.transfer(PoolName.INDEXER, keys[:4], pool, into)]) == {PoolName.INDEXER: [True] * 4}
    assert [(sg.page_bytes(kv, page), sg.page_bytes(pool, page)) for page in into] == wanted[:4]
    # What is not there is said to be missing, and the slots keep what they had.
    before = sg.snapshot(pool)
    answer = backend.batch_get_v2([sg.transfer(PoolName.INDEXER, keys[4:], pool, [1, 2])])
    assert answer == {PoolName.INDEXER: [False, False]}
    assert all(torch.equal(a, b) for a, b in zip(before, sg.snapshot(pool), strict=True))
    backend.close()


def test_codes_are_served_only_with_the_scales_of_their_own_commit(node: Daemon) -> None:
    anchor = sg.mla("page_first")
    codes = sg.paged(PoolName.DEEPSEEK_V4_C4_INDEXER, "page_first", 1024)
    scales = sg.paged(PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE, "page_first", 64)
    names = (PoolName.DEEPSEEK_V4_C4_INDEXER, PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE)
    pools = {PoolName.KV: anchor, names[0]: codes, names[1]: scales}
    backend = sg.open_backend(node.address, anchor, pools, is_mla_model=True, model_name="tests/v4")
    sg.fill(codes, 9)
    sg.fill(scales, 10)
    keys = sg.hashes("v4", 3)

    def both(pages: list[int]) -> list[Any]:
        return [sg.transfer(names[0], keys, codes, pages), sg.transfer(names[1], keys, scales, pages)]

    alone = [sg.transfer(names[0], keys, codes, [0, 1, 2])]
    assert backend.batch_set_v2(alone) == {names[0]: [False] * 3}
    assert backend.batch_set_v2(both([0, 1, 2])) == {names[0]: [True] * 3, names[1]: [True] * 3}
    assert backend.batch_get_v2(alone) == {names[0]: [False] * 3}
    wanted = [(sg.page_bytes(codes, page), sg.page_bytes(scales, page)) for page in (0, 1, 2)]
    assert backend.batch_get_v2(both([7, 8, 9])) == {names[0]: [True] * 3, names[1]: [True] * 3}
    assert [(sg.page_bytes(codes, page), sg.page_bytes(scales, page)) for page in (7, 8, 9)] == wanted
    backend.close()


def test_a_window_pool_answers_with_every_length_at_which_its_window_is_whole(node: Daemon) -> None:
    kv, swa = sg.mha("page_first"), sg.mha("page_first", heads=1, label="swa")
    sg.fill(kv, 11)
    sg.fill(swa, 12)
    pools = {PoolName.KV: kv, PoolName.SWA: swa}
    backend = sg.open_backend(node.address, kv, pools, model_name="tests/swa")
    keys = sg.hashes("swa", 12)
    policy = PoolHitPolicy.TRAILING_PAGES
    assert all(backend.batch_set_v1(keys[:10], sg.ids(kv, list(range(10)))))
    # Windows of two pages that end at 4, 5 and 9.
    for pages in ([2, 3, 4], [7, 8]):
        part = sg.transfer(PoolName.SWA, [keys[page] for page in pages], swa, pages, policy)
        assert all(backend.batch_set_v2([part])[PoolName.SWA])
    found = backend.batch_exists_v2(keys, [sg.transfer(PoolName.SWA, keys[-2:], policy=policy)])
    assert found.restorable_prefix_pages == [4, 5, 9]
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (9, {PoolName.KV: 10, PoolName.SWA: 9})
    # The same as SGLang's own backend says of the same pages.
    assert found == _file_answer(keys, kv, swa)
    got = backend.batch_get_v2([sg.transfer(PoolName.SWA, keys[7:9], swa, [20, 21], policy)])
    assert got == {PoolName.SWA: [True, True]}
    assert [sg.page_bytes(swa, 20), sg.page_bytes(swa, 21)] == [sg.page_bytes(swa, 7), sg.page_bytes(swa, 8)]
    backend.close()


def _file_answer(keys: list[str], kv: Any, swa: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    with tempfile.TemporaryDirectory() as folder:
        file = HiCacheFile(sg.config("unix:///nowhere"), folder)
        file.register_mem_host_pool_v2(kv, PoolName.KV)
        file.register_mem_host_pool_v2(swa, PoolName.SWA)
        file.batch_set_v2([sg.transfer(PoolName.KV, keys[:10], kv, list(range(10)))])
        for pages in ([2, 3, 4], [7, 8]):
            file.batch_set_v2([sg.transfer(PoolName.SWA, [keys[page] for page in pages], swa, pages)])
        return file.batch_exists_v2(keys, [sg.transfer(PoolName.SWA, keys[-2:], policy=PoolHitPolicy.TRAILING_PAGES)])


def test_block_groups_never_gate_the_prefix(node: Daemon) -> None:
    kv, other = sg.mha("page_first"), sg.paged(PoolName.DEEPSEEK_V4_C128, "page_first", 512)
    pools = {PoolName.KV: kv, PoolName.DEEPSEEK_V4_C128: other}
    backend = sg.open_backend(node.address, kv, pools, model_name="tests/groups")
    keys = sg.hashes("groups", 8)
    assert all(backend.batch_set_v1(keys, sg.ids(kv, list(range(8)))))
    assert all(backend.batch_set_v2([sg.transfer(PoolName.DEEPSEEK_V4_C128, keys[:3], other, [0, 1, 2])]).values())
    ask = sg.transfer(PoolName.DEEPSEEK_V4_C128, keys, policy=PoolHitPolicy.BLOCK_GROUPS)
    ask.group_pages, ask.block_pages = 2, 4
    found = backend.batch_exists_v2(keys, [ask])
    assert found.kv_hit_pages == 8
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.DEEPSEEK_V4_C128: 4}
    backend.close()


@pytest.mark.parametrize("name", ["swa", "draft", "deepseek_v4_c4_rope"])
def test_slots_of_a_pool_that_is_not_there_or_is_part_of_another_stop_the_launch(node: Daemon, name: str) -> None:
    pools = {PoolName(other): sg.mha("page_first") for other in ("deepseek_v4_c4", "deepseek_v4_c4_rope")}
    with pytest.raises(StackError, match=r"name one of kv, deepseek_v4_c4$") as refused:
        sg.open_backend(node.address, sg.mha("page_first"), pools, section={"slots": {"kv": 8, name: 8}})
    assert (refused.value.field, refused.value.value) == ("hoststage.slots", name)


def test_a_batch_larger_than_the_staging_comes_in_parts(node: Daemon) -> None:
    pool = sg.mha("layer_first", pages=300)
    sg.fill(pool, 13)
    backend = sg.open_backend(node.address, pool, model_name="tests/parts", section={"slots": {"kv": 40}})
    keys = sg.hashes("parts", 150)
    wanted = [sg.page_bytes(pool, page) for page in range(150)]
    assert all(backend.batch_set_v1(keys, sg.ids(pool, list(range(150)))))
    assert backend.batch_exists(keys + sg.hashes("more", 5)) == 150
    assert all(backend.batch_get_v1(keys, sg.ids(pool, list(range(150, 300)))))
    assert [sg.page_bytes(pool, page) for page in range(150, 300)] == wanted
    # A gap ends what is read at the page before it.
    mixed = keys[:70] + sg.hashes("gap", 1) + keys[71:100]
    assert backend.batch_get_v1(mixed, sg.ids(pool, list(range(100)))) == [True] * 70 + [False] * 30
    backend.close()


def test_no_page_byte_passes_through_python_and_each_is_copied_once(
    node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = sg.mha("layer_first", heads=8, dim=128, pages=128)
    backend = sg.open_backend(node.address, pool, model_name="tests/copies")
    keys, pages = sg.hashes("copies", 64), list(range(64))
    total = 64 * len(sg.page_bytes(pool, 0))
    copied: list[int] = []

    def counting(*arguments: Any, **named: Any) -> int:
        copied.append(copy_pages(*arguments, **named))
        return copied[-1]

    monkeypatch.setattr(_pages, "copy_pages", counting)
    tracemalloc.start()
    assert all(backend.batch_set_v1(keys, sg.ids(pool, pages)))
    assert sum(copied) == total
    assert all(backend.batch_get_v1(keys, sg.ids(pool, [page + 64 for page in pages])))
    assert sum(copied) == 2 * total
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Python and numpy held addresses and messages, not pages.
    assert peak < total // 16
    backend.close()


def test_ids_that_are_no_pages_of_the_pool_touch_nothing(node: Daemon) -> None:
    pool = sg.mha("page_first")
    backend = sg.open_backend(node.address, pool, model_name="tests/ids")
    keys = sg.hashes("ids", 2)
    sg.fill(pool, 14)
    before = sg.snapshot(pool)
    for wrong in (sg.ids(pool, [31]), sg.ids(pool, [31, 32]), sg.ids(pool, [1, 2]) + 1, sg.ids(pool, [1, 2]) - 32):
        assert backend.batch_set_v1(keys, wrong) == [False, False]
        assert backend.batch_get_v1(keys, wrong) == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(before, sg.snapshot(pool), strict=True))
    assert backend.batch_exists(keys) == 0
    backend.close()


# -------------------------------------------------------------- identity


def test_pages_meet_only_where_their_bytes_mean_the_same(node: Daemon) -> None:
    def seen(**given: Any) -> int:
        pool = sg.mha(given.pop("layout", "page_first"))
        backend = sg.open_backend(node.address, pool, **{"model_name": "tests/identity", **given})
        found = backend.batch_exists(keys)
        backend.close()
        return found

    keys = sg.hashes("identity", 2)
    pool = sg.mha("page_first")
    backend = sg.open_backend(node.address, pool, model_name="tests/identity", tp_rank=1, tp_size=2)
    assert all(backend.batch_set_v1(keys, sg.ids(pool, [0, 1])))
    backend.close()
    assert seen(tp_rank=1, tp_size=2) == 2
    assert seen(tp_rank=1, tp_size=2, dp_rank=1) == 2
    for other in (
        {"tp_rank": 0},
        {"layout": "layer_first"},
        {"model_name": "tests/other"},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"section": {"tenant": "other"}},
        {"section": {"weights_revision": "b"}},
    ):
        assert seen(**{"tp_rank": 1, "tp_size": 2, **other}) == 0, other


def test_settings_that_mean_nothing_stop_the_attach() -> None:
    for section, name in (({"adress": "x"}, "adress"), ({"required": 1}, "required"), ({"modes": "fast"}, "modes")):
        with pytest.raises(StackError, match=name):
            sg.open_backend("unix:///nowhere", sg.mha("page_first"), section=section)


# -------------------------------------------------------------- processes


class Worker:
    """An engine process; see `sglang_worker.py`."""

    def __init__(self, node: Daemon) -> None:
        paths = os.pathsep.join([environment()["PYTHONPATH"], str(WORKER.parents[2])])
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), node.address],
            env={**environment(), "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return the next answer; the test's own timeout bounds the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the worker ended with {self.process.wait(10)}")

    def does(self, line: str) -> dict[str, Any]:
        self.ask(line)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def workers(own_node: Daemon) -> Iterator[list[Worker]]:
    both = [Worker(own_node), Worker(own_node)]
    yield both
    for worker in both:
        worker.kill()


@pytest.mark.timeout(240)
def test_pages_outlive_the_engine_and_the_daemon(own_node: Daemon, workers: list[Worker]) -> None:
    wrote = workers[0].does("write layer_first 0 1")
    assert wrote["ok"] == [True] * 8
    workers[0].kill()
    assert workers[1].does("read layer_first 0 1") == wrote
    own_node.kill()
    own_node.start()
    assert workers[1].does("read layer_first 0 1") == wrote


@pytest.mark.timeout(240)
def test_two_ranks_keep_their_own_shards_and_share_what_is_replicated(workers: list[Worker]) -> None:
    def at_once(verb: str) -> list[dict[str, Any]]:
        for rank, worker in enumerate(workers):
            worker.ask(f"{verb} page_first {rank} 2")
        return [worker.answer() for worker in workers]

    wrote = at_once("write")
    assert all(all(one["ok"]) for one in wrote)
    assert wrote[0]["pages"] != wrote[1]["pages"]
    assert at_once("read") == wrote
    # MLA: the first rank alone writes, every rank reads.
    one = workers[0].does("write mla 0 2")
    assert workers[1].does("read mla 1 2") == one


# -------------------------------------------------------------- trouble


def test_sglangs_failure_injector_around_it_turns_no_failure_into_bytes(
    node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = sg.mha("layer_first")
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.4):
        backend = sg.open_backend(node.address, pool, model_name="tests/injector")
    assert isinstance(backend, HiCacheStorageFailureInjector)
    sg.fill(pool, 15)
    stored: dict[str, bytes] = {}
    outcomes = set()
    for turn in range(40):
        key, page = sg.hashes(f"injector/{turn}", 1), turn % 16
        if backend.batch_set_v1(key, sg.ids(pool, [page])) == [True]:
            stored[key[0]] = sg.page_bytes(pool, page)
        before = sg.page_bytes(pool, 20)
        hit = backend.batch_get_v1(key, sg.ids(pool, [20])) == [True]
        assert sg.page_bytes(pool, 20) == (stored[key[0]] if hit else before)
        outcomes.add(hit)
    assert outcomes == {True, False}
    backend.close()


def test_a_daemon_that_is_away_is_a_miss_and_comes_back_by_itself(
    own_node: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    pool = sg.mha("layer_first")
    sg.fill(pool, 16)
    backend = sg.open_backend(own_node.address, pool)
    keys = sg.hashes("away", 4)
    wanted = [sg.page_bytes(pool, page) for page in range(4)]
    assert all(backend.batch_set_v1(keys, sg.ids(pool, list(range(4)))))
    own_node.kill()
    caplog.clear()
    for _ in range(5):
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, sg.ids(pool, [8, 9, 10, 11])) == [False] * 4
        assert backend.batch_set_v1(keys, sg.ids(pool, [0, 1, 2, 3])) == [False] * 4
        assert backend.batch_exists_v2(keys, []).kv_hit_pages == 0
    said = [record for record in caplog.records if "hoststage cannot" in record.getMessage()]
    assert len(said) == 1
    own_node.start()
    assert eventually(lambda: backend.batch_exists(keys), 20) == 4
    assert backend.batch_get_v1(keys, sg.ids(pool, [8, 9, 10, 11])) == [True] * 4
    assert [sg.page_bytes(pool, page) for page in (8, 9, 10, 11)] == wanted
    assert [record for record in caplog.records if "again" in record.getMessage()]
    assert backend.failures == {}
    backend.close()


def test_an_engine_that_starts_before_the_daemon_works_once_that_is_there(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB")
        pool = sg.mha("page_first")
        backend = sg.open_backend(daemon.address, pool)
        keys = sg.hashes("early", 2)
        assert backend.batch_set_v1(keys, sg.ids(pool, [0, 1])) == [False, False]
        daemon.start()
        eventually(lambda: all(backend.batch_set_v1(keys, sg.ids(pool, [0, 1]))), 20)
        assert backend.batch_exists(keys) == 2
        backend.close()
        daemon.kill()


def test_required_makes_an_absent_daemon_or_a_refusal_fail_the_attach(own_node: Daemon) -> None:
    with pytest.raises(ConnectionError):
        sg.open_backend("unix:///nowhere/h.sock", sg.mha("page_first"), section={"required": True})
    section = {"required": True, "slots": {"kv": 1_000_000}}
    with pytest.raises(Refused, match="BUDGET"):
        sg.open_backend(own_node.address, sg.mha("page_first"), section=section)
    refused = sg.open_backend(own_node.address, sg.mha("page_first"), section={**section, "required": False})
    assert refused.batch_exists(sg.hashes("refused", 1)) == 0
    refused.close()


def test_nothing_escapes_into_the_engine_whatever_it_passes(node: Daemon) -> None:
    pool = sg.mha("page_first")
    backend = sg.open_backend(node.address, pool, model_name="tests/escape")
    keys: Any = sg.hashes("escape", 2)
    unknown = sg.transfer(PoolName.DRAFT, keys, pool, [0, 1])
    assert backend.batch_get_v2([unknown]) == {PoolName.DRAFT: [False, False]}
    assert backend.batch_set_v2([unknown]) == {PoolName.DRAFT: [False, False]}
    assert backend.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0
    assert backend.batch_set_v1(keys, None) == [False, False]
    assert backend.batch_set([keys[0]], ["no tensor"]) is False
    assert backend.get(keys[0], torch.zeros(3)) is None
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], sg.ids(pool, [])) == []
    backend.clear()
    assert all(backend.batch_set_v1(keys, sg.ids(pool, [0, 1])))
    backend.close()
    backend.close()
    # A thread that outlives the detach hears of misses, and opens no session anew.
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v2([sg.transfer(PoolName.KV, keys, pool, [0, 1])]) == {PoolName.KV: [False, False]}
    assert eventually(lambda: not [one for one in node.status()["sessions"] if "sglang" in json.dumps(one)])
