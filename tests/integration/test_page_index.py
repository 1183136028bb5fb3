"""Resident pages are looked up and copied without asking the daemon, and never wrong."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import hoststage.client._options as options_module
from hoststage.client import (
    Identity,
    Mode,
    ModeWish,
    Outcome,
    PayloadPath,
    PoolKind,
    PoolSpec,
    RequestRejected,
    StackError,
    StackSpec,
    connect,
)
from tests.integration.daemon import Daemon, environment, eventually

PAGE = 64 << 10


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path, store="none").start()
    yield made
    made.stop()


def stack(model, *pools, mode=Mode.CACHE):
    pools = pools or (PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=48),)
    return StackSpec(Identity(model), pools, modes=(ModeWish(mode, True),), paths=(PayloadPath.SHM,))


def keys_of(n, seed):
    return [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(n)]


def rows_of(keys, size=PAGE):
    return np.stack([np.tile(np.frombuffer(key, dtype=np.uint64), size // 32) for key in keys]).view(np.uint8)


def index_hits(daemon, what):
    found = re.search(rf'hoststage_{what}s_total\{{[^}}]*"index_hit"[^}}]*\}} ([0-9.e+]+)', daemon.get("/metrics"))
    return float(found.group(1)) if found else 0.0


def test_hits_are_served_without_a_request_and_counted_all_the_same(daemon):
    with connect(daemon.address, stack=stack("own"), timeout=20) as session:
        keys = keys_of(6, "own")
        assert session.store(keys, {"kv": rows_of(keys)}).wait(20).outcome is Outcome.RESIDENT
        asked = daemon.asked("lookup"), daemon.asked("load")
        assert session.lookup(keys).runs == ((1, 6),)
        for prefix in (6, 1):
            target = np.zeros((prefix, PAGE), dtype=np.uint8)
            loaded = session.load(keys, prefix, into={"kv": target})
            assert loaded
            assert (loaded.prefix, loaded.first("kv")) == (prefix, 0)
            assert np.array_equal(target, rows_of(keys[:prefix]))
        assert (daemon.asked("lookup"), daemon.asked("load")) == asked
        eventually(lambda: index_hits(daemon, "lookup") == 1 and index_hits(daemon, "load") == 2)
        # What is not all there is the daemon's to answer.
        more = [*keys, *keys_of(1, "absent")]
        assert session.lookup(more).runs == ((1, 6),)
        assert not session.load(more, into={"kv": np.zeros((7, PAGE), dtype=np.uint8)})
        assert (daemon.asked("lookup"), daemon.asked("load")) == (asked[0] + 1, asked[1] + 1)


def test_a_pin_is_the_daemons_to_give_and_is_given_back_by_a_copy(daemon):
    with connect(daemon.address, stack=stack("pin"), timeout=20) as session:
        keys = keys_of(3, "pin")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        match = session.lookup(keys, pin_seconds=20)
        assert match.pin
        target = np.zeros((3, PAGE), dtype=np.uint8)
        assert session.load(keys, pin=match, into={"kv": target})
        assert np.array_equal(target, rows_of(keys))
        # Given back, its pages may go.
        command = [sys.executable, "-m", "hoststage.cli.main", "evict", "--socket", str(daemon.socket)]
        subprocess.run(command, env=environment(), check=True, timeout=60, capture_output=True)
        assert not session.lookup(keys)


def test_a_window_is_copied_from_where_it_begins(daemon):
    pools = (
        PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=48),
        PoolSpec("swa", PoolKind.SWA, PAGE, 16, sliding_window=32, host_slots=48),
    )
    with connect(daemon.address, stack=stack("window", *pools), timeout=20) as session:
        keys = keys_of(8, "window")
        rows = rows_of(keys)
        session.store(keys, {"kv": rows, "swa": rows}).wait(20)
        asked = daemon.asked("load")
        kv, swa = np.zeros((8, PAGE), dtype=np.uint8), np.zeros((8, PAGE), dtype=np.uint8)
        loaded = session.load(keys, into={"kv": kv, "swa": swa})
        assert loaded
        assert daemon.asked("load") == asked
        first = loaded.first("swa")
        assert 0 < first < 8
        assert np.array_equal(kv, rows)
        assert np.array_equal(swa[: 8 - first], rows[first:])
        assert not swa[8 - first :].any()


def test_ranges_are_copied_without_a_request_and_wrong_ones_are_the_daemons_to_refuse(daemon):
    pools = (
        PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=48),
        PoolSpec("swa", PoolKind.SWA, PAGE, 16, sliding_window=32, host_slots=48),
    )
    with connect(daemon.address, stack=stack("ranges", *pools), timeout=20) as session:
        keys = keys_of(8, "ranges")
        rows = rows_of(keys)
        # The window alone is stored: no prefix of fewer keys can be restored, ranges can.
        session.store(keys, {"kv": rows, "swa": rows[6:]}).wait(20)
        asked = daemon.asked("load")
        for ranges in ({"kv": (2, 3)}, {"kv": (0, 8)}, {"swa": (7, 1)}, {"kv": (5, 1), "swa": (6, 2)}):
            into = {pool: np.zeros((count, PAGE), dtype=np.uint8) for pool, (_, count) in ranges.items()}
            loaded = session.load(keys, into=into, ranges=ranges)
            assert loaded
            for pool, (first, count) in ranges.items():
                assert loaded.first(pool) == first
                assert np.array_equal(into[pool], rows[first : first + count])
        assert daemon.asked("load") == asked
        room = np.zeros((8, PAGE), dtype=np.uint8)
        assert not session.load(keys, into={"swa": room}, ranges={"swa": (4, 2)})
        with pytest.raises(RequestRejected):
            session.load(keys, into={"kv": room}, ranges={"kv": (7, 2)})
        with pytest.raises(StackError):
            session.load(keys, into={"kv": room}, ranges={"mamba": (0, 1)})


def test_what_was_dropped_is_gone_at_once(daemon):
    with connect(daemon.address, stack=stack("drop"), timeout=20) as session:
        keys = keys_of(4, "drop")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        assert session.lookup(keys)
        command = [sys.executable, "-m", "hoststage.cli.main", "evict", "--socket", str(daemon.socket)]
        subprocess.run(command, env=environment(), check=True, timeout=60, capture_output=True)
        assert not session.lookup(keys)
        assert not session.load(keys, into={"kv": np.zeros((4, PAGE), dtype=np.uint8)})


def test_what_is_read_by_oneself_is_not_evicted_first(daemon):
    with connect(daemon.address, stack=stack("lru"), timeout=20) as session:
        slots = session.grant.pools[0].read_slots
        hot, target = keys_of(2, "hot"), np.zeros((2, PAGE), dtype=np.uint8)
        session.store(hot, {"kv": rows_of(hot)}).wait(20)
        for i in range(3 * slots):
            before = index_hits(daemon, "load")
            assert session.load(hot, into={"kv": target}), f"evicted after {i} other pages"
            eventually(lambda before=before: index_hits(daemon, "load") > before)
            cold = keys_of(1, f"cold {i}")
            session.store(cold, {"kv": rows_of(cold)}).wait(20)
        assert np.array_equal(target, rows_of(hot))


def test_a_client_that_knows_no_index_asks(daemon, monkeypatch):
    monkeypatch.setattr(options_module, "FEATURES", tuple(f for f in options_module.FEATURES if f != "page_index"))
    with connect(daemon.address, stack=stack("older"), timeout=20) as session:
        assert not session._core.link.arenas.index
        keys = keys_of(2, "older")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        assert session.lookup(keys).longest == 2
        assert session.load(keys, into={"kv": np.zeros((2, PAGE), dtype=np.uint8)})
        assert daemon.asked("load") == 1


def test_in_buffer_only_nothing_stays_and_there_is_no_index(tmp_path):
    daemon = Daemon(tmp_path).start()
    try:
        with connect(daemon.address, stack=stack("buffer", mode=Mode.BUFFER_ONLY), timeout=20) as session:
            assert not session._core.link.arenas.index
    finally:
        daemon.stop()


def test_pages_copied_while_others_take_their_slots_are_right_or_a_miss(daemon):
    """A writer evicts without end; readers copy by the index what is about to go."""
    writer = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "page_writer.py"), daemon.address, str(PAGE)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    head = [0]
    over = threading.Event()

    def follow():
        for line in writer.stdout:
            head[0] = int(line)

    def read(results, behind):
        with connect(daemon.address, stack=stack("churn"), timeout=20) as session:
            target = np.zeros((1, PAGE), dtype=np.uint8)
            while not over.is_set():
                i = head[0] - behind
                key = hashlib.sha256(f"churn {i}".encode()).digest()
                loaded = session.load([key], into={"kv": target}) if i >= 0 else None
                results.append(bool(loaded))
                if loaded:
                    assert np.array_equal(target, rows_of([key])), i

    try:
        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        eventually(lambda: head[0] > 60, 30)
        failures: list[BaseException] = []
        results: list[list[bool]] = [[], [], []]

        def guarded(*args):
            try:
                read(*args)
            except BaseException as error:
                failures.append(error)
                raise

        # Around the end of what stays: 48 slots, of which some are reserved.
        readers = [threading.Thread(target=guarded, args=(results[n], behind)) for n, behind in enumerate((1, 20, 40))]
        for reader in readers:
            reader.start()
        eventually(lambda: head[0] > 600 or failures, 60)
        over.set()
        for reader in readers:
            reader.join(30)
        assert not failures
        assert any(results[0])
        assert index_hits(daemon, "load") > 0
    finally:
        over.set()
        writer.kill()
        writer.wait(10)
        follower.join(10)
