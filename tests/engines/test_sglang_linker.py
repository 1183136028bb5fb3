"""The linker in SGLang's real UnifiedRadixCache, made by its own factory, over real device pools held on the CPU. Nothing is replaced.

Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache", exc_type=ImportError)
torch = pytest.importorskip("torch")

from hoststage.client import DaemonUnavailable, Role, StackError  # noqa: E402
from tests.engines import linker_support as ls  # noqa: E402
from tests.integration.daemon import ROOT, Daemon, environment, eventually  # noqa: E402


@pytest.fixture
def engines(group: Any) -> Iterator[Callable[..., ls.LinkedEngine]]:
    opened: list[ls.LinkedEngine] = []

    def start(address: str, kind: str, **given: Any) -> ls.LinkedEngine:
        opened.append(ls.LinkedEngine(address, kind, group, **given))
        return opened[-1]

    yield start
    for engine in reversed(opened):
        engine.close()


def _tokens(first: int, pages: int = ls.PAGES) -> array:
    return array("q", range(first, first + pages * ls.PAGE))


@pytest.mark.parametrize("kind", ls.KINDS)
def test_what_was_evicted_from_the_device_comes_back_byte_for_byte(
    node: Daemon, engines: Callable[..., ls.LinkedEngine], kind: str
) -> None:
    engine = engines(node.address, kind)
    tokens = ls.run_of(kind, 1000)
    wanted = engine.store(tokens, 1)
    engine.evict()
    assert engine.match(tokens).device_prefix_len == 0
    engine.fill(2)
    rows, _ = engine.load(tokens)
    assert ls.same(wanted, rows)


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_tail_behind_what_the_device_still_has_is_loaded(
    node: Daemon, engines: Callable[..., ls.LinkedEngine], kind: str
) -> None:
    engine = engines(node.address, kind)
    tokens = _tokens(3000)
    wanted = engine.store(tokens, 3)
    engine.evict()
    engine.fill(4)
    half = tokens[: 5 * ls.PAGE]
    engine.load(half, "first")
    at = engine.loaded["first"]
    engine.tree.insert(ls.InsertParams(key=ls.RadixKey(half), value=at))
    req = engine.request(tokens, "second")
    assert (req.prefix_len, req.host_hit_length) == (len(half), len(tokens) - len(half))
    tail = engine.admit(req)
    assert engine.forward([req]) == []
    assert ls.same(wanted, engine.rows(torch.cat([at, tail])))


def test_every_length_at_which_all_pools_can_be_restored_is_answered_and_no_other(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mamba")
    tokens = _tokens(5000)
    for pages in (4, 7):
        engine.store(tokens[: pages * ls.PAGE], 5)
    # There is a state after 4 and after 7 pages; full pages alone restore nothing.
    assert engine.lengths(tokens) == [4, 7]
    engine.evict()
    rows, req = engine.load(tokens[: 6 * ls.PAGE])
    assert req.host_hit_length == 4 * ls.PAGE
    assert len(rows[0]) == 4 * ls.PAGE
    assert engines(node.address, "mha").lengths(tokens) == []


def test_a_window_is_asked_for_at_every_length(node: Daemon, engines: Callable[..., ls.LinkedEngine]) -> None:
    engine = engines(node.address, "swa")
    tokens = _tokens(6000)
    engine.store(tokens, 6)
    assert engine.lengths(tokens) == list(range(1, ls.PAGES + 1))
    # The store has the window of tokens after 10 pages, and of no other run of tokens.
    assert engine.lengths(array("q", [7, *tokens])) == []


@pytest.mark.parametrize("kind", ls.KINDS)
def test_an_offload_is_one_commit_over_all_pools(
    node: Daemon, engines: Callable[..., ls.LinkedEngine], kind: str
) -> None:
    engine = engines(node.address, kind)
    before = _counters(node, "commit")
    engine.insert(ls.run_of(kind, 8000), 7)
    # With a window the tree makes two nodes of it: one that has the window, and what lies before.
    offloads = len(engine.tree.linker.pending_offloads)
    engine.settle()
    after = _counters(node, "commit")
    assert after["accepted"] - before.get("accepted", 0) == offloads == engine.linker.offloader.stored
    assert sum(after.values()) - sum(before.values()) == offloads


def _counters(node: Daemon, name: str) -> dict[str, int]:
    return {c["label"]: c["value"] for c in node.status()["counters"] if c["name"] == name}


@pytest.mark.parametrize("kind", ls.KINDS)
def test_another_engine_finds_what_the_first_one_stored_after_both_and_the_daemon_were_restarted(
    engines: Callable[..., ls.LinkedEngine], group: Any, kind: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        tokens = ls.run_of(kind, 1000)
        first = ls.LinkedEngine(daemon.address, kind, group)
        wanted = first.store(tokens, 8)
        first.close()
        other = engines(daemon.address, kind)
        daemon.stop()
        daemon.start()
        try:
            other.until(lambda: other.linker.channel.session.connected)
            assert ls.same(wanted, other.load(tokens)[0])
            assert other.linker.channel.session.reconnects == 1
        finally:
            daemon.kill()


# -------------------------------------------------------------- a daemon that dies


def test_a_daemon_killed_during_a_load_fails_these_requests_and_no_others_and_all_recovers(
    engines: Callable[..., ls.LinkedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        engine = engines(daemon.address, "swa")
        tokens, others = _tokens(1000), _tokens(9000, 3)
        wanted = engine.store(tokens, 9)
        engine.evict()
        loading, fresh = engine.request(tokens, "loading"), engine.request(others, "fresh")
        assert engine.admit(loading) is not None
        assert fresh.host_hit_length == 0
        daemon.process.send_signal(signal.SIGSTOP)
        index = engine.tree.ready_to_load_host_cache()
        daemon.kill()
        engine.linker.layer_done_counter.set_consumer(index)
        for layer in range(ls.LAYERS):
            engine.linker.layer_done_counter.wait_until(layer)
        assert engine.tree.finish_external_linker_loads([loading, fresh]) == [loading]
        assert loading.discard_output_reason.status_code == 503
        assert fresh.discard_output_reason is None
        engine.free(loading)

        # Later lookups miss, backups are dropped and counted, and none of it takes long.
        started = time.monotonic()
        for i in range(20):
            assert engine.request(tokens, f"later{i}").host_hit_length == 0
            engine.insert(_tokens(20_000 + 100 * i, 1), i)
        engine.settle()
        assert engine.linker.offloader.dropped == 20
        assert time.monotonic() - started < 10
        troubles = [r for r in caplog.records if "hoststage cannot" in r.getMessage()]
        assert len(troubles) == 1

        daemon.start()
        engine.until(lambda: engine.linker.channel.session.connected)
        engine.evict()
        engine.fill(10)
        assert ls.same(wanted, engine.load(tokens, "again")[0])
        assert len([r for r in caplog.records if "serves kv+swa again" in r.getMessage()]) == 1
        stored = engine.linker.offloader.stored
        engine.store(_tokens(40_000), 11)
        assert engine.linker.offloader.stored > stored
        daemon.kill()


def test_a_daemon_killed_between_lookup_and_load_fails_that_request_alone(
    engines: Callable[..., ls.LinkedEngine],
) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        engine = engines(daemon.address, "mha")
        tokens = _tokens(1000)
        engine.store(tokens, 12)
        engine.evict()
        req = engine.request(tokens)
        daemon.kill()
        assert engine.admit(req) is not None
        assert engine.forward([req]) == [req]
        # A batch without loads has none that could fail.
        assert engine.forward([req]) == []
        # Nothing keeps the dead daemon's memory alive.
        eventually(lambda: engine.linker.channel.session.retained_bytes == 0)
        engine.linker.close()
        engine.linker.close()


def test_a_page_that_rots_in_the_store_fails_its_load_and_is_a_miss_afterwards(
    engines: Callable[..., ls.LinkedEngine],
) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB", flags=["store.direct_io=off"]).start()
        engine = engines(daemon.address, "swa")
        tokens = _tokens(1000)
        engine.store(tokens, 25)
        for segment in Path(folder).glob("store/**/*.seg"):
            data = bytearray(segment.read_bytes())
            data[4096 : len(data) // 2] = bytes(len(data) // 2 - 4096)
            segment.write_bytes(data)
        engine.evict()
        req = engine.request(tokens)
        assert engine.admit(req) is not None
        assert engine.forward([req]) == [req]
        assert engine.request(tokens, "again").host_hit_length < len(tokens)
        daemon.kill()


def test_a_stopped_daemon_makes_the_scheduler_wait_once_and_not_at_every_lookup(
    engines: Callable[..., ls.LinkedEngine],
) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        engine = engines(daemon.address, "mha", lookup_timeout=0.5)
        tokens = _tokens(1000)
        engine.store(tokens, 13)
        engine.evict()
        daemon.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert not any(engine.request(tokens, f"r{i}").host_hit_length for i in range(50))
        # 50 lookups that each waited would take 25 seconds.
        assert time.monotonic() - started < 10
        daemon.process.send_signal(signal.SIGCONT)
        engine.until(lambda: engine.request(tokens).host_hit_length == len(tokens))
        daemon.kill()


def test_without_a_daemon_the_engine_runs_and_uses_it_once_it_is_there(engines: Callable[..., ls.LinkedEngine]) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB")
        engine = engines(daemon.address, "mha")
        tokens = _tokens(1000)
        assert engine.request(tokens).host_hit_length == 0
        engine.insert(tokens, 14)
        engine.settle()
        assert engine.linker.offloader.dropped == 1
        daemon.start()

        def served() -> bool:
            engine.request(_tokens(2000), "ask")
            return engine.linker.channel.session is not None

        engine.until(served)
        wanted = engine.store(_tokens(3000), 15)
        engine.evict()
        assert ls.same(wanted, engine.load(_tokens(3000))[0])
        daemon.kill()


def test_an_absent_daemon_that_is_required_stops_the_engine(group: Any, tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable):
        ls.LinkedEngine(f"unix://{tmp_path}/nobody.sock", "mha", group, required=True)


# -------------------------------------------------------------- pins


@pytest.fixture(scope="module")
def resident() -> Iterator[Daemon]:
    """A daemon without a store: a page that is evicted is gone."""
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB", store="none").start()
        yield daemon
        daemon.kill()


@pytest.mark.parametrize("pinned", [True, False])
def test_what_a_lookup_found_cannot_go_before_its_load_whatever_others_store(
    resident: Daemon, engines: Callable[..., ls.LinkedEngine], pinned: bool
) -> None:
    given: dict[str, Any] = {"modes": ["cache"], "slots": {"kv": 96}, "tenant": f"pins-{pinned}"}
    engine, other = engines(resident.address, "mha", **given), engines(resident.address, "mha", **given)
    tokens = _tokens(1000)
    wanted = engine.store(tokens, 16)
    engine.evict()
    engine.fill(17)
    req = engine.request(tokens)
    assert req.host_hit_length == len(tokens)
    if not pinned:
        # So that the test can fail: the same pressure, and nothing that holds the pages.
        engine.linker.pins.drop(req.rid)
    for i in range(12):
        other.store(_tokens(50_000 + 1000 * i), i)
        other.evict()
    at = engine.admit(req)
    assert at is not None
    failed = engine.forward([req])
    assert failed == ([] if pinned else [req])
    if pinned:
        assert ls.same(wanted, engine.rows(at))


def test_pins_are_given_up_by_cancelling_by_a_later_lookup_and_by_their_load(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mha", tenant="pins")
    tokens = _tokens(1000)
    engine.store(tokens, 18)
    engine.evict()
    assert _leases(node) == 0
    req = engine.request(tokens)
    assert _leases(node) == ls.PAGES
    engine.request(tokens)
    assert _leases(node) == ls.PAGES, "asking again holds nothing twice"
    engine.request(tokens[: 4 * ls.PAGE], req.rid)
    eventually(lambda: _leases(node) == 4)
    req = engine.request(tokens)
    assert engine.admit(req) is not None
    engine.tree.release_aborted_request(req.cache_request_handle)
    eventually(lambda: _leases(node) == 0)
    assert engine.forward([req]) == []
    engine.load(tokens, "loaded")
    eventually(lambda: _leases(node) == 0)
    engine.request(tokens, "waits")
    engine.linker.reset()
    eventually(lambda: _leases(node) == 0)


def test_a_pin_that_nobody_uses_expires(node: Daemon, engines: Callable[..., ls.LinkedEngine]) -> None:
    engine = engines(node.address, "mha", tenant="expiry", pin_seconds=0.5)
    tokens = _tokens(1000)
    engine.store(tokens, 19)
    engine.evict()
    engine.request(tokens, "gone")
    assert _leases(node) == ls.PAGES
    eventually(lambda: _leases(node) == 0)
    assert engine.request(tokens, "later").host_hit_length == len(tokens)


def _leases(node: Daemon) -> int:
    line = next(line for line in node.get("/metrics").splitlines() if line.startswith("hoststage_read_leases "))
    return int(float(line.split()[1]))


def test_where_not_all_can_be_pinned_a_shorter_prefix_is_answered(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mha", tenant="small", slots={"kv": 16})
    tokens = _tokens(1000)
    wanted = engine.store(tokens, 20)
    engine.evict()
    engine.fill(21)
    rows, req = engine.load(tokens)
    assert 0 < req.host_hit_length < len(tokens)
    assert ls.same([row[: req.host_hit_length] for row in wanted], rows)


def test_waiting_requests_make_way_for_the_one_that_is_asked_about(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mha", tenant="way", slots={"kv": 48})
    runs = [_tokens(1000 * i, 8) for i in range(1, 7)]
    for i, run in enumerate(runs):
        wanted = engine.store(run, i)
        engine.evict()
    # In one turn: there is room for some, and these keep it.
    hits = [engine.request(run, f"w{i}").host_hit_length for i, run in enumerate(runs)]
    assert hits[0] == len(runs[0])
    assert hits[-1] < len(runs[-1])
    again = [engine.request(run, f"w{i}").host_hit_length for i, run in enumerate(runs)]
    assert again[0] == len(runs[0])
    time.sleep(0.2)
    rows, req = engine.load(runs[-1], "w5")
    assert req.host_hit_length == len(runs[-1])
    assert ls.same(wanted, rows)


# -------------------------------------------------------------- batches, order, reset


def test_a_batch_of_loads_comes_in_one_pass_and_a_cancelled_one_is_left_out(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mha", tenant="batch")
    runs = [_tokens(1000 * i, 4) for i in range(1, 4)]
    wanted = [engine.store(run, 30 + i) for i, run in enumerate(runs)]
    engine.evict()
    engine.fill(33)
    reqs = [engine.request(run, f"b{i}") for i, run in enumerate(runs)]
    places = [engine.admit(req) for req in reqs]
    engine.tree.release_aborted_request(reqs[1].cache_request_handle)
    assert engine.forward(reqs) == []
    for i in (0, 2):
        assert ls.same(wanted[i], engine.rows(places[i]))
    assert not ls.same(wanted[1], engine.rows(places[1]))


def test_results_of_offloads_come_in_order_and_a_reset_forgets_them(
    node: Daemon, engines: Callable[..., ls.LinkedEngine]
) -> None:
    engine = engines(node.address, "mha", tenant="order")
    for i in range(4):
        engine.insert(_tokens(1000 * i, 2), i)
    eventually(lambda: engine.linker.num_completed_offloads() == 4)
    assert [engine.linker.pop_completed_offload() for _ in range(2)] == [True, True]
    engine.linker.reset()
    assert engine.linker.num_completed_offloads() == 0
    engine.tree.linker._release_pending_offloads()
    engine.store(_tokens(9000, 2), 5)


def test_a_flush_forgets_the_tree_and_not_the_store(node: Daemon, engines: Callable[..., ls.LinkedEngine]) -> None:
    engine = engines(node.address, "swa", tenant="flush")
    tokens = _tokens(1000)
    wanted = engine.store(tokens, 22)
    engine.tree.reset()
    engine.allocator.clear()
    engine.fill(23)
    assert ls.same(wanted, engine.load(tokens)[0])


# -------------------------------------------------------------- everything at once


@pytest.mark.parametrize("mode", ["buffer_only", "cache"])
def test_no_wrong_byte_is_ever_loaded_whatever_goes_on(
    engines: Callable[..., ls.LinkedEngine], mode: str, record_property: Callable[[str, object], None]
) -> None:
    """Two engines serve requests over shared prefixes, with little room everywhere; the daemon is killed and started meanwhile."""
    rng = random.Random(20_260)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="64MiB", flags=["store.limit=2MiB"]).start()
        two = [engines(daemon.address, "mha", modes=[mode], slots={"kv": 40}, load_timeout=3.0) for _ in range(2)]
        for step in range(160):
            engine = rng.choice(two)
            first = 10_000 * rng.randrange(8)
            seen[engine.serve(_tokens(first, rng.randint(1, 9)), f"s{step}")] += 1
            engine.tree.check_hicache_events()
            if rng.random() < 0.25:
                engine.evict()
            if step in (60, 110):
                for each in two:
                    each.settle()
                daemon.kill()
                seen["killed"] += 1
            if step in (68, 118):
                daemon.start()
                eventually(lambda: all(e.linker.channel.session.connected for e in two))
        for each in two:
            each.settle()
            each.evict()
            assert each.tree.full_evictable_size() == 0
            assert each.allocator.available_size() == ls.SLOTS, "no slot is lost"
        daemon.kill()
    record_property("seen", dict(seen))
    assert seen["loaded"] > 20
    assert seen["missed"] > 20


# -------------------------------------------------------------- ranks, each a process


class Ranks:
    """The tensor-parallel ranks of one engine."""

    def __init__(self, address: str, folder: Path, size: int = 2) -> None:
        folder.mkdir()
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.engines.linker_worker",
                    address,
                    f"{folder}/gloo",
                    str(rank),
                    str(size),
                ],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        self.read()

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            process.stdin.flush()
        return self.read()

    def read(self) -> list[dict[str, Any]]:
        out = []
        for process in self.processes:
            assert process.stdout is not None
            # What SGLang prints itself is no answer.
            line = next((line for line in process.stdout if line.startswith("{")), None)
            assert line is not None, f"a rank ended with {process.wait(10)}"
            out.append(json.loads(line))
        return out

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=10)


RANKED = ("mha", "mla", "swa", "mamba")


@pytest.fixture(scope="module")
def ranked(node: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, dict[str, Any]]]:
    """Two ranks that stored and loaded a run of each kind, were killed, and started again: what they saw, and the ranks of now."""
    folder, seen = tmp_path_factory.mktemp("ranks"), {}
    first = Ranks(node.address, folder / "one")
    try:
        for kind in RANKED:
            before = _counters(node, "commit").get("accepted", 0)
            stored = first.ask("store", kind=kind, first=1000, seed=1)
            commits = _counters(node, "commit")["accepted"] - before
            seen[kind] = {
                "stored": stored,
                "commits": commits,
                "loaded": first.ask("load", kind=kind, first=1000, seed=2),
            }
    finally:
        first.kill()
    again = Ranks(node.address, folder / "two")
    for kind in RANKED:
        seen[kind]["again"] = again.ask("load", kind=kind, first=1000, seed=3)
    yield again, seen
    again.kill()


@pytest.mark.parametrize("kind", RANKED)
def test_two_ranks_store_and_load_their_own_pages_or_share_them_across_a_restart_of_the_engine(
    ranked: tuple[Ranks, dict[str, Any]], kind: str
) -> None:
    seen = ranked[1][kind]
    stored = seen["stored"]
    assert [r["dropped"] for r in stored] == [0, 0]
    # A replicated pool has one writer; otherwise each rank has pages of its own.
    assert (stored[0]["rows"] == stored[1]["rows"]) == (kind == "mla")
    assert seen["commits"] == {"mla": 1, "mha": 2, "mamba": 2, "swa": 4}[kind]
    wanted = [{"hit": ls.PAGES * ls.PAGE, "failed": 0, "rows": r["rows"]} for r in stored]
    assert seen["loaded"] == wanted
    assert seen["again"] == wanted


def test_ranks_that_do_not_see_the_same_agree_on_a_miss_and_never_hang(ranked: tuple[Ranks, dict[str, Any]]) -> None:
    ranks, kind = ranked[0], "mha"
    assert [r["hit"] for r in ranks.ask("load", kind=kind, first=1000, seed=4)] == [ls.PAGES * ls.PAGE] * 2
    ranks.ask("silence", kind=kind, rank=1)
    assert ranks.ask("load", kind=kind, first=1000, seed=5) == [{"hit": 0}, {"hit": 0}]
    # What one rank could not store no rank counts as stored; offloads go on in step.
    assert [r["dropped"] for r in ranks.ask("store", kind=kind, first=80_000, seed=6)] == [0, 1]
    assert ranks.ask("load", kind=kind, first=80_000, seed=7) == [{"hit": 0}, {"hit": 0}]


# -------------------------------------------------------------- decode workers


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_decode_worker_offloads_and_a_prefill_worker_loads_it(
    node: Daemon, engines: Callable[..., ls.LinkedEngine], kind: str
) -> None:
    tokens = _tokens(1000)
    decode = ls.LinkedEngine(
        node.address, kind, torch.distributed.group.WORLD, disaggregation_mode="decode", tenant=f"pd-{kind}"
    )
    assert decode.linker.channel.session.stack.role is Role.DECODE
    wanted = decode.store(tokens, 24)
    decode.evict()
    # SGLang's decode workers have no way to load back; they get their pages from the prefill worker.
    assert decode.request(tokens).host_hit_length == 0
    decode.close()
    prefill = engines(node.address, kind, disaggregation_mode="prefill", tenant=f"pd-{kind}")
    assert ls.same(wanted, prefill.load(tokens)[0])


# -------------------------------------------------------------- what is not served


def test_a_layout_that_is_not_served_is_refused_by_name(
    node: Daemon, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(StackError, match="NHD"):
        ls.LinkedEngine(node.address, "mha", group)


def test_a_setting_that_does_not_exist_is_refused(node: Daemon, group: Any) -> None:
    with pytest.raises(StackError, match=r"hoststage\.pins"):
        ls.LinkedEngine(node.address, "mha", group, pins=3)
