"""Views of resident pages are leased without a request, and stay what they are for as long as somebody looks at them."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import grpc
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
    SessionLost,
    StackSpec,
    aio,
    connect,
)
from hoststage.client._pages import pack_keys
from hoststage.v1 import admin_pb2 as admin
from hoststage.v1.admin_pb2_grpc import AdminStub
from tests.integration.daemon import Daemon, environment, eventually

PAGE = 16 << 10
SLOTS = 512


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path, store="none").start()
    yield made
    made.stop()


def stack(model, *pools, mode=Mode.CACHE):
    pools = pools or (PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=SLOTS),)
    return StackSpec(Identity(model), pools, modes=(ModeWish(mode, True),), paths=(PayloadPath.SHM,))


def keys_of(n, seed):
    return [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(n)]


def rows_of(keys, size=PAGE):
    return np.stack([np.tile(np.frombuffer(key, dtype=np.uint64), size // 32) for key in keys]).view(np.uint8)


def entries_of(session):
    board = session._core.link.arenas.board
    return board.slots if board is not None else 0


def slots_in(daemon, state):
    found = re.search(
        rf'hoststage_slots\{{arena="read",pool="kv",state="{state}"\}} ([0-9.e+]+)', daemon.get("/metrics")
    )
    return float(found.group(1)) if found else 0.0


def operate(daemon, method, **fields):
    """Ask the daemon as an operator does, and return its answer."""
    request = {"Evict": admin.EvictRequest, "ClearNamespace": admin.ClearNamespaceRequest}[method](**fields)
    with grpc.insecure_channel(daemon.address) as channel:
        return getattr(AdminStub(channel), method)(request, timeout=20)


def same(loaded, keys):
    return all(bytes(view) == rows_of([key]).tobytes() for view, key in zip(loaded.pages("kv"), keys, strict=True))


def test_views_are_leased_without_a_request_and_stay_until_they_are_released(daemon):
    with connect(daemon.address, stack=stack("own"), timeout=20) as session:
        keys = keys_of(4, "own")
        assert session.store(keys, {"kv": rows_of(keys)}).wait(20).outcome is Outcome.RESIDENT
        assert entries_of(session) >= 4
        with session.load(keys) as loaded:
            assert (loaded.prefix, loaded.first("kv"), loaded.outcome) == (4, 0, Outcome.READY)
            assert all(view.readonly for view in loaded.pages("kv"))
            operate(daemon, "Evict")
            assert slots_in(daemon, "resident") == 4
            assert same(loaded, keys)
            loaded.check()
        with pytest.raises(ValueError, match="released"):
            loaded.pages("kv")
        loaded.release()
        assert daemon.asked("load") == 0
        operate(daemon, "Evict")
        assert slots_in(daemon, "resident") == 0
        assert not session.load(keys)


def test_ranges_are_leased_without_a_request(daemon):
    with connect(daemon.address, stack=stack("ranges"), timeout=20) as session:
        keys = keys_of(6, "ranges")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        with session.load(keys, ranges={"kv": (2, 3)}) as loaded:
            assert (loaded.prefix, loaded.first("kv")) == (6, 2)
            assert same(loaded, keys[2:5])
            operate(daemon, "Evict")
            assert slots_in(daemon, "resident") == 3
            assert same(loaded, keys[2:5])
            # What is around them is gone, they are not.
            stream = session.load_groups(keys, ranges={"kv": (3, 2)})
            [group] = list(stream)
            assert group.first == {"kv": 3}
            assert [bytes(page) for page in group.pages["kv"]] == [bytes(row) for row in rows_of(keys[3:5])]
            stream.loaded.release()
            del group
        assert daemon.asked("load") == 0


def test_more_than_the_board_has_room_for_is_the_daemons_to_lease(daemon):
    with connect(daemon.address, stack=stack("many"), timeout=20) as session:
        n = entries_of(session)
        keys = keys_of(2 * n, "many")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        first, second = session.load(keys[:n]), session.load(keys[n:])
        assert daemon.asked("load") == 1
        assert same(first, keys[:n])
        assert same(second, keys[n:])
        first.release()
        with session.load(keys[n:]) as again:
            assert daemon.asked("load") == 1
            assert same(again, keys[n:])
        second.release()


def test_a_window_is_leased_from_where_it_begins(daemon):
    pools = (
        PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=SLOTS),
        PoolSpec("swa", PoolKind.SWA, PAGE, 16, sliding_window=32, host_slots=SLOTS),
    )
    with connect(daemon.address, stack=stack("window", *pools), timeout=20) as session:
        keys = keys_of(6, "window")
        rows = rows_of(keys)
        session.store(keys, {"kv": rows, "swa": rows}).wait(20)
        with session.load(keys) as loaded:
            assert daemon.asked("load") == 0
            first = loaded.first("swa")
            assert 0 < first < 6
            assert same(loaded, keys)
            assert [bytes(v) for v in loaded.pages("swa")] == [rows[i].tobytes() for i in range(first, 6)]


def test_groups_and_the_asyncio_face_lease_by_themselves_too(daemon):
    import asyncio

    with connect(daemon.address, stack=stack("groups"), timeout=20) as session:
        keys = keys_of(3, "groups")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        stream = session.load_groups(keys)
        [group] = list(stream)
        assert group.first == {"kv": 0}
        assert [bytes(v) for v in group.pages["kv"]] == [row.tobytes() for row in rows_of(keys)]
        assert stream.wait()
        stream.loaded.release()
        for _ in session.load_groups(keys):
            break
        stopped = session.load_groups(keys)
        assert stopped.ended
        stopped.cancel()
        assert not stopped.loaded
        gc.collect()
        operate(daemon, "Evict")
        assert slots_in(daemon, "resident") == 0
        session.store(keys, {"kv": rows_of(keys)}).wait(20)

    async def look() -> None:
        async with await aio.connect(daemon.address, stack=stack("groups"), timeout=20) as session:
            with await session.load(keys) as loaded:
                assert same(loaded, keys)
            async for group in session.load_groups(keys):
                assert len(group.pages["kv"]) == 3

    asyncio.run(look())
    assert daemon.asked("load") == 0


def test_a_pin_is_given_back_by_a_lease_of_ones_own(daemon):
    with connect(daemon.address, stack=stack("pin"), timeout=20) as session:
        keys = keys_of(3, "pin")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        match = session.lookup(keys, pin_seconds=20)
        assert match.pin
        with session.load(keys, pin=match) as loaded:
            assert same(loaded, keys)
        assert daemon.asked("load") == 0
        eventually(lambda: slots_in(daemon, "resident") == 3)
        operate(daemon, "Evict")
        assert slots_in(daemon, "resident") == 0


def test_what_is_dropped_without_a_release_is_released_all_the_same(daemon):
    with connect(daemon.address, stack=stack("dropped"), timeout=20) as session:
        keys = keys_of(2, "dropped")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        loaded = session.load(keys)
        assert loaded._own is not None
        operate(daemon, "Evict")
        assert slots_in(daemon, "resident") == 2
        del loaded
        gc.collect()

        def gone():
            operate(daemon, "Evict")
            return slots_in(daemon, "resident") == 0

        eventually(gone)


def test_pages_whose_keys_are_cleared_or_replaced_linger_until_they_are_released(daemon):
    with connect(daemon.address, stack=stack("linger"), timeout=20) as session:
        keys = keys_of(3, "linger")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        loaded = session.load(keys)
        assert loaded._own is not None
        free = slots_in(daemon, "free")
        [pool] = [p for p in daemon.status()["pools"] if p["kind"] == "read"]
        operate(daemon, "ClearNamespace", namespace=pool["namespace"])
        assert not session.lookup(keys)
        assert slots_in(daemon, "lingering") == 3
        assert slots_in(daemon, "free") == free
        assert same(loaded, keys)
        # The same keys again: other pages, which do not come where the old ones are looked at.
        other = rows_of(keys_of(3, "other"))
        session.store(keys, {"kv": other}).wait(20)
        assert same(loaded, keys)
        with session.load(keys) as anew:
            assert [bytes(v) for v in anew.pages("kv")] == [row.tobytes() for row in other]
        loaded.release()
        eventually(lambda: slots_in(daemon, "lingering") == 0)
        assert slots_in(daemon, "free") == free


def test_a_board_full_of_garbage_harms_nobody(daemon):
    with connect(daemon.address, stack=stack("garbage"), timeout=20) as bad:
        memory = bad._core.link.arenas.board.whole()
        with connect(daemon.address, stack=stack("garbage"), timeout=20) as good:
            for pattern in (b"\xff", b"\x01\x00\x00\x00", os.urandom(64)):
                memory[:] = (pattern * memory.nbytes)[: memory.nbytes]
                for at in range(0, 2 * SLOTS, 32):
                    keys = keys_of(32, f"garbage {pattern!r} {at}")
                    assert good.store(keys, {"kv": rows_of(keys)}).wait(20).outcome is Outcome.RESIDENT
                    with good.load(keys[:4]) as loaded:
                        assert same(loaded, keys[:4])
            # Every slot is listed, and no more than the bad one's share of them stays.
            share = entries_of(bad)
            for at in range(memory.nbytes // 4):
                memory[4 * at : 4 * at + 4] = (1 + at % SLOTS).to_bytes(4, "little")
            operate(daemon, "Evict")
            assert slots_in(daemon, "resident") <= share
        del memory
    operate(daemon, "Evict")
    assert slots_in(daemon, "resident") == 0
    eventually(
        lambda: slots_in(daemon, "free") == next(p for p in daemon.status()["pools"] if p["kind"] == "read")["slots"]
    )


def test_who_is_about_to_ask_by_the_index_when_its_memory_goes_finds_nothing_there(daemon):
    """Its thread may have looked for what serves by the index already, before another one gives the memory back."""
    with connect(daemon.address, stack=stack("gone"), timeout=20) as session:
        keys = keys_of(2, "gone")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        link = session._core.link
        service = link.self_service
        assert service.holds(pack_keys(keys))
        link.unmap()
        assert link.self_service is service
        assert not service.holds(pack_keys(keys))
        assert session.board_pages == 0
        assert session.lookup(keys).longest == 2
        link.flush_released()
        link.tell_touched()


def test_a_client_that_knows_no_board_asks(daemon, monkeypatch):
    monkeypatch.setattr(options_module, "FEATURES", tuple(f for f in options_module.FEATURES if f != "lease_board"))
    with connect(daemon.address, stack=stack("older"), timeout=20) as session:
        assert session._core.link.arenas.board is None
        keys = keys_of(2, "older")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        with session.load(keys) as loaded:
            assert same(loaded, keys)
        assert daemon.asked("load") == 1


def test_an_arena_with_no_room_to_spare_has_no_boards(daemon):
    small = PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=48)
    with connect(daemon.address, stack=stack("small", small), timeout=20) as session:
        assert session._core.link.arenas.board is None
        keys = keys_of(2, "small")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        with session.load(keys) as loaded:
            assert same(loaded, keys)


def test_sessions_share_the_room_and_get_it_back(daemon):
    sessions = []
    while True:
        sessions.append(connect(daemon.address, stack=stack("shares"), timeout=20))
        if not entries_of(sessions[-1]):
            break
        assert len(sessions) < 20
    assert len(sessions) >= 4
    for session in sessions:
        session.close()
    with connect(daemon.address, stack=stack("shares"), timeout=20) as session:
        assert entries_of(session) == entries_of(sessions[0]) > 0


def test_a_forked_child_lets_go_without_touching_the_board(daemon):
    with connect(daemon.address, stack=stack("fork"), timeout=20) as session:
        keys = keys_of(2, "fork")
        session.store(keys, {"kv": rows_of(keys)}).wait(20)
        loaded = session.load(keys)
        assert loaded._own is not None
        child = os.fork()
        if child == 0:
            loaded._pages = {}
            loaded.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        operate(daemon, "Evict")
        assert same(loaded, keys)
        loaded.release()


def test_a_lost_daemon_takes_its_promise_along(tmp_path):
    daemon = Daemon(tmp_path, store="none").start()
    try:
        with connect(daemon.address, stack=stack("lost"), timeout=20) as session:
            keys = keys_of(2, "lost")
            session.store(keys, {"kv": rows_of(keys)}).wait(20)
            loaded = session.load(keys)
            assert loaded._own is not None
            daemon.kill()
            eventually(lambda: not session.connected)
            with pytest.raises(SessionLost):
                loaded.check()
            daemon.start()
            eventually(lambda: session.connected, 20)
            assert same(loaded, keys)
            loaded.release()
            session.store(keys, {"kv": rows_of(keys)}).wait(20)
            with session.load(keys) as anew:
                assert anew._own is not None
                assert same(anew, keys)
    finally:
        daemon.stop()


# ---------------------------------------------------------------- under pressure


class Churn:
    """A process that stores, and so evicts, without end, and others that are told how far it is."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.head = 0
        self.viewers: list[subprocess.Popen[str]] = []
        self.writer = self._spawn("page_writer.py")
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _spawn(self, program, *more):
        command = [sys.executable, str(Path(__file__).parent / program), self.daemon.address, str(PAGE), str(SLOTS)]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *more], env=environment(), stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def _follow(self):
        for line in self.writer.stdout:
            self.head = int(line)
            for viewer in list(self.viewers):
                try:
                    viewer.stdin.write(line)
                except (OSError, ValueError):
                    continue

    def view(self, *more):
        self.viewers.append(self._spawn("page_viewer.py", *more))
        return self.viewers[-1]

    def close(self):
        for process in (self.writer, *self.viewers):
            process.kill()
            process.wait(10)
        self._follower.join(10)


@pytest.fixture
def churn(daemon):
    made = Churn(daemon)
    yield made
    made.close()


def test_a_page_is_never_overwritten_under_a_view(daemon, churn):
    """One process evicts all the time; two hold views of what is about to go, and compare every byte before they let go; others die at it."""
    eventually(lambda: churn.head > SLOTS, 60)
    viewers = [churn.view(), churn.view()]
    for _ in range(4):
        start = churn.head
        mortal = churn.view()
        eventually(lambda start=start: churn.head > start + 2 * SLOTS or any(v.poll() is not None for v in viewers), 90)
        assert mortal.poll() is None, "a view was overwritten"
        churn.viewers.remove(mortal)
        mortal.kill()
        mortal.wait(10)
    for viewer in viewers:
        assert viewer.poll() is None, "a view was overwritten"
        churn.viewers.remove(viewer)
        out, _ = viewer.communicate(timeout=30)
        assert viewer.returncode == 0, out
        looked, own = map(int, re.search(r"looked (\d+) (\d+)", out).groups())
        assert own > 50, (looked, own)
    kept = re.search(r"hoststage_listed_pages_kept_total ([0-9.e+]+)", daemon.get("/metrics"))
    assert float(kept.group(1)) > 0
    churn.writer.kill()
    churn.writer.wait(10)

    def all_free():
        operate(daemon, "Evict")
        return slots_in(daemon, "free") == next(p for p in daemon.status()["pools"] if p["kind"] == "read")["slots"]

    eventually(all_free)


def test_what_a_killed_process_listed_is_free_again(daemon, churn):
    eventually(lambda: churn.head > SLOTS, 60)
    viewer = churn.view("hold")
    assert viewer.stdout.readline().startswith("holding ")
    # All that is not listed goes; what the process holds stays, and what is stored meanwhile.
    churn.writer.kill()
    churn.writer.wait(10)
    operate(daemon, "Evict")
    left = slots_in(daemon, "resident")
    assert left >= 4
    viewer.kill()
    viewer.wait(10)

    def gone():
        operate(daemon, "Evict")
        return slots_in(daemon, "resident") == 0

    eventually(gone)
