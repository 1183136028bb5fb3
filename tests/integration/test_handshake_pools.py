"""Stacks beyond the engines through the daemon: sidecars, states and windows come back whole, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hoststage.client import Mode, Outcome, PayloadPath, Role, Severity, connect
from tests.integration.daemon import Daemon
from tests.integration.handshake_stacks import KV, STATE, SWA, V4_POOLS, keys_of, opened, rows_of, sidecar, spec

N = 12
SIDECARS = ("deepseek_v4_c4", "deepseek_v4_c128", "indexer")
STATE_NAME = "deepseek_v4_state"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), budget="128MiB").start()
    yield made
    assert made.stop() == 0


def v4_pages(n: int, seed: int, *, window: int = 4) -> dict[str, np.ndarray]:
    """Pages of a span of `n` keys: all of `kv` and its sidecars, the trailing window, one state."""
    counts = {p.name: n for p in V4_POOLS} | {"swa": window, STATE_NAME: 1}
    return {p.name: rows_of(counts[p.name], p.page_bytes, seed + i) for i, p in enumerate(V4_POOLS)}


def assert_same(loaded, pages: dict[str, np.ndarray], firsts: dict[str, int]) -> None:
    for name, rows in pages.items():
        assert loaded.first(name) == firsts[name], name
        assert [bytes(p) for p in loaded.pages(name)] == [bytes(r) for r in rows], name


PATHS = pytest.mark.parametrize("path", [PayloadPath.SHM, PayloadPath.INLINE], ids=lambda p: p.value)
MODES = pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE], ids=lambda m: m.value)


@PATHS
@MODES
def test_a_deepseek_v4_stack_comes_back_byte_for_byte(daemon, mode, path):
    name = f"v4-{mode.value}-{path.value}"
    stack = spec(name, *V4_POOLS, modes=(mode,), paths=(path,))
    keys, pages = keys_of(N, name), v4_pages(N, 10)
    with opened(daemon, stack) as writer:
        result = writer.store(keys, pages).wait(30)
        assert (result.outcome, result.pages) == (Outcome.STORED, 4 * N + 4 + 1)
    with opened(daemon, stack) as reader:
        # The window and the state are at the end: no shorter prefix can be resumed.
        assert reader.lookup(keys).runs == ((N, N),)
        firsts = {p.name: 0 for p in V4_POOLS} | {"swa": N - 4, STATE_NAME: N - 1}
        with reader.load(keys, pin=reader.lookup(keys, pin_seconds=10)) as loaded:
            assert loaded.prefix == N
            assert_same(loaded, pages, firsts)
        assert not reader.load(keys, N - 1)


def test_a_span_that_grows_is_restorable_where_a_state_was_stored(daemon):
    stack = spec("v4-growing", *V4_POOLS)
    keys = keys_of(N, "growing")
    with opened(daemon, stack) as session:
        first, second = v4_pages(8, 20), v4_pages(4, 40)
        assert session.store(keys[:8], first).wait(30).ok
        assert session.store(keys[8:], second, parent=keys[7]).wait(30).ok
        assert session.lookup(keys).runs == ((8, 8), (12, 12))
        with session.load(keys, 8) as loaded:
            assert_same(loaded, first, {p.name: 0 for p in V4_POOLS} | {"swa": 4, STATE_NAME: 7})
        with session.load(keys, 12) as loaded:
            both = [np.concatenate([first[n], second[n]]) for n in ("kv", *SIDECARS)]
            whole = dict(zip(("kv", *SIDECARS), both, strict=True)) | {n: second[n] for n in ("swa", STATE_NAME)}
            assert_same(loaded, whole, {p.name: 0 for p in V4_POOLS} | {"swa": 8, STATE_NAME: 11})


@MODES
@pytest.mark.parametrize("left_out", [*SIDECARS, "swa", STATE_NAME])
def test_a_span_with_one_pool_missing_is_not_handed_out(daemon, mode, left_out):
    name = f"partial-{mode.value}-{left_out}"
    stack = spec(name, *V4_POOLS, modes=(mode,))
    keys, pages = keys_of(6, name), v4_pages(6, 60)
    with opened(daemon, stack) as session:
        partial = {n: rows for n, rows in pages.items() if n != left_out}
        assert session.store(keys, partial).wait(30).ok
        assert session.lookup(keys).runs == ()
        assert not session.load(keys)
        assert session.load(keys, accept_shorter=True).prefix == 0


@MODES
def test_a_sidecar_that_lacks_one_page_ends_the_prefix_there(daemon, mode):
    stack = spec(f"short-{mode.value}", KV, sidecar("indexer", page=4096), modes=(mode,))
    keys, kv, indexer = keys_of(6, f"short{mode}"), rows_of(6, KV.page_bytes, 1), rows_of(4, 4096, 2)
    with opened(daemon, stack) as session:
        assert session.store(keys, {"kv": kv, "indexer": indexer}, first={"indexer": 0}).wait(30).ok
        assert session.lookup(keys).runs == ((1, 4),)
        with session.load(keys, accept_shorter=True) as loaded:
            assert loaded.prefix == 4
            assert_same(loaded, {"kv": kv[:4], "indexer": indexer}, {"kv": 0, "indexer": 0})


def test_a_sidecar_of_another_commit_is_not_served_with_its_source(daemon):
    """Two writers of one key: pages of `kv` from one and of its indexer from the other never meet."""
    stack = spec("mixed-commits", KV, sidecar("indexer", page=4096))
    keys = keys_of(3, "mixed-commits")
    with opened(daemon, stack) as one, opened(daemon, stack) as two:
        assert one.store(keys, {"kv": rows_of(3, KV.page_bytes, 1)}).wait(30).ok
        assert two.store(keys, {"indexer": rows_of(3, 4096, 2)}).wait(30).ok
        assert one.lookup(keys).runs == ()
        assert not two.load(keys)
        whole = {"kv": rows_of(3, KV.page_bytes, 3), "indexer": rows_of(3, 4096, 4)}
        fresh = keys_of(3, "mixed-commits-2")
        assert two.store(fresh, whole).wait(30).ok
        with one.load(fresh) as loaded:
            assert_same(loaded, whole, {"kv": 0, "indexer": 0})


@PATHS
def test_a_dsa_indexer_follows_its_source(daemon, path):
    name = f"dsa-{path.value}"
    stack = spec(name, replace(KV, replicated=True), sidecar("indexer", page=4096, replicated=True), paths=(path,))
    keys, pages = keys_of(N, name), {"kv": rows_of(N, KV.page_bytes, 5), "indexer": rows_of(N, 4096, 6)}
    with opened(daemon, stack) as session:
        kv, indexer = session.grant.pool("kv"), session.grant.pool("indexer")
        assert (kv.write_slots, kv.read_slots) == (indexer.write_slots, indexer.read_slots)
        assert session.store(keys, pages).wait(30).ok
        assert session.lookup(keys).runs == ((1, N),)
        with session.load(keys, 7) as loaded:
            assert_same(loaded, {n: rows[:7] for n, rows in pages.items()}, {"kv": 0, "indexer": 0})


@MODES
def test_a_mamba_state_is_one_trailing_slot(daemon, mode):
    stack = spec(f"mamba-{mode.value}", KV, STATE, modes=(mode,))
    keys = keys_of(9, f"mamba-{mode.value}")
    kv, states = rows_of(9, KV.page_bytes, 7), rows_of(3, STATE.page_bytes, 8)
    with opened(daemon, stack) as session:
        for i, end in enumerate((3, 6, 9)):
            pages = {"kv": kv[end - 3 : end], "state": states[i : i + 1]}
            assert session.store(keys[end - 3 : end], pages).wait(30).ok
        # A state is a point in the sequence: only where one was stored can a request go on.
        assert session.lookup(keys).runs == ((3, 3), (6, 6), (9, 9))
        for i, end in enumerate((3, 6, 9)):
            with session.load(keys, end) as loaded:
                assert_same(loaded, {"kv": kv[:end], "state": states[i : i + 1]}, {"kv": 0, "state": end - 1})
        assert not session.load(keys, 5)
        with session.load(keys[:8], accept_shorter=True) as loaded:
            assert loaded.prefix == 6


def test_a_decode_session_stages_in_buffer_only_what_a_prefill_session_stored(daemon):
    prefill = spec("pd", KV, SWA, role=Role.PREFILL)
    decode = replace(prefill, role=Role.DECODE)
    keys, kv, swa = keys_of(8, "pd"), rows_of(8, KV.page_bytes, 1), rows_of(4, SWA.page_bytes, 2)
    with opened(daemon, prefill) as one, opened(daemon, decode) as two:
        assert two.grant.mode is Mode.BUFFER_ONLY
        [notice] = two.findings
        assert (notice.rule, notice.severity) == ("DECODE_ROLE", Severity.NOTICE)
        assert "--disaggregation-decode-enable-radix-cache" in notice.remedy
        assert one.store(keys, {"kv": kv, "swa": swa}).wait(30).ok
        with two.load(keys) as loaded:
            assert_same(loaded, {"kv": kv, "swa": swa}, {"kv": 0, "swa": 4})
        more, kv2, swa2 = keys_of(4, "pd-more"), rows_of(4, KV.page_bytes, 3), rows_of(4, SWA.page_bytes, 4)
        assert two.store(more, {"kv": kv2, "swa": swa2}, parent=keys[-1]).wait(30).ok
        # Both windows touch: every end between them has four window pages behind it.
        assert one.lookup([*keys, *more]).runs == ((8, 12),)


def test_a_sidecar_of_a_sidecar_counts_in_the_slots_at_the_end_of_the_chain(daemon):
    stack = spec("chain", KV, sidecar("a"), sidecar("b", source="a", page=300))
    keys = keys_of(4, "chain")
    pages = {"kv": rows_of(4, KV.page_bytes, 1), "a": rows_of(4, 1000, 2), "b": rows_of(4, 300, 3)}
    with opened(daemon, stack) as session:
        assert {p.write_slots for p in session.grant.pools} == {32}
        assert session.store(keys, pages).wait(30).ok
        with session.load(keys) as loaded:
            assert_same(loaded, pages, {"kv": 0, "a": 0, "b": 0})


def test_ranks_of_a_replicated_stack_share_its_pages(daemon):
    from hoststage.client import Parallel

    pools = tuple(replace(p, replicated=True) for p in (KV, sidecar("indexer", page=4096)))
    stacks = [spec("mla", *pools, parallel=Parallel(tp_rank=r, tp_size=2)) for r in (0, 1)]
    keys = keys_of(4, "mla")
    pages = {"kv": rows_of(4, KV.page_bytes, 1), "indexer": rows_of(4, 4096, 2)}
    with connect(daemon.address, stack=stacks[0], timeout=20) as zero, opened(daemon, stacks[1]) as one:
        assert zero.grant.namespace == one.grant.namespace
        assert zero.store(keys, pages).wait(30).ok
        with one.load(keys) as loaded:
            assert_same(loaded, pages, {"kv": 0, "indexer": 0})
