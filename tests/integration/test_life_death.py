"""Workers that are killed, stopped or silent at every point of a page's life: nothing stays taken, nothing unwritten is published."""

import os
import signal
import time

import pytest

from hoststage.client import Mode, connect
from tests.integration.daemon import Daemon, eventually
from tests.life_support import (
    check_loaded,
    counter,
    keys_of,
    no_new_shared_files,
    pages,
    seconds_until,
    sessions,
    shared_files,
    slots_in_use,
    stack,
    worker,
)

SLOW = 0.4
"""Seconds that each call of the store takes."""
GENEROUS = 5.0
"""Within a second, says the design; a loaded machine may take longer to run anything at all."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    before = shared_files()
    made = Daemon(tmp_path_factory.mktemp("d"), store=f"memory:?read_delay={SLOW}&write_delay={SLOW}").start()
    yield made
    assert made.stop() == 0
    no_new_shared_files(before)


def stage_name(stage, mode, fork):
    return f"{stage}-{mode.value}-{fork}"


def put(session, keys, writer="test"):
    assert session.store(keys, {"kv": pages("kv", keys, writer)}).wait(20).ok


STAGES = ["reserved", "half_copied", "committed", "loading", "leasing", "pinning", "holding", "everything"]


@pytest.mark.parametrize("fork", ["alone", "fork"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_killed_anywhere_leaves_nothing_taken_and_nothing_unwritten(daemon, stage, fork, capsys):
    # In `cache` the pages are resident and a load is over at once: one that is to be killed half way comes from the store.
    mode = Mode.CACHE if stage in ("half_copied", "leasing", "holding") else Mode.BUFFER_ONLY
    model = stage_name(stage, mode, fork)
    there = keys_of(8, f"{model}/there")
    with connect(daemon.address, stack=stack(model, mode), timeout=20) as session:
        put(session, there)
        granted = daemon.status()["granted_bytes"]
        with worker(stage, daemon.address, model, mode.value, fork) as victim:
            [its] = [s for s in sessions(daemon).values() if s["worker"] == stage]
            assert slots_in_use(daemon)
            victim.send_signal(signal.SIGKILL)
            victim.wait(10)

            def leases_gone():
                left = sessions(daemon).get(its["session"])
                return left is None or (left["state"] == "ending" and not left["read_leases"])

            leases = seconds_until(leases_gone, GENEROUS)
            slots = seconds_until(lambda: its["session"] not in sessions(daemon) and not slots_in_use(daemon), GENEROUS)
            with capsys.disabled():
                print(
                    f"\n  {model}: leases gone after {leases * 1000:.0f} ms, all slots after {slots * 1000:.0f} ms more",
                    end="",
                )
            # The budget is as before: memory that a child still maps is not given to anybody.
            eventually(lambda: daemon.status()["granted_bytes"] <= granted + (64 << 20))
            # The daemon serves on, though the child may live.
            with session.load(there) as loaded:
                assert check_loaded(loaded, there) == 8
            for name in ("reserved", "half_copied"):
                assert not session.lookup(keys_of(5, f"{model}/{name}"))
            done = keys_of(5, f"{model}/committed")
            if stage in ("committed", "everything"):
                # What was accepted is stored, whatever became of its client.
                with session.load(done) as loaded:
                    assert check_loaded(loaded, done) == 5
        assert not slots_in_use(daemon) or eventually(lambda: not slots_in_use(daemon))


@pytest.mark.parametrize("stage", ["leasing", "everything"])
def test_a_stopped_worker_keeps_what_it_has_and_holds_up_nobody(daemon, stage):
    model = f"stopped-{stage}"
    there = keys_of(8, f"{model}/there")
    with connect(daemon.address, stack=stack(model), timeout=20) as session:
        put(session, there)
        with worker(stage, daemon.address, model, "buffer_only") as victim:
            [its] = [s["session"] for s in sessions(daemon).values() if s["worker"] == stage]
            victim.send_signal(signal.SIGSTOP)
            for i in range(3):
                more = keys_of(4, f"{model}/more{i}")
                put(session, more)
                with session.load(more) as loaded:
                    assert check_loaded(loaded, more) == 4
                with session.load(there) as loaded:
                    assert check_loaded(loaded, there) == 8
            assert sessions(daemon)[its]["state"] == "active"
            assert sessions(daemon)[its]["read_leases"] >= 8
            victim.send_signal(signal.SIGKILL)
            victim.wait(10)
            seconds_until(lambda: its not in sessions(daemon) and not slots_in_use(daemon), GENEROUS)


def rss(daemon):
    with open(f"/proc/{daemon.process.pid}/statm", encoding="ascii") as statm:
        fields = statm.read().split()
    # Without shared pages, which the arenas are.
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def test_a_client_that_never_reads_costs_the_daemon_little_and_the_others_nothing(daemon):
    model = "unread"
    there = keys_of(8, f"{model}/there")
    with connect(daemon.address, stack=stack(model), timeout=20) as session:
        put(session, there)
        before = rss(daemon)
        with worker("unread", daemon.address, model, "buffer_only") as victim:
            slowest = 0.0
            for _ in range(20):
                start = time.monotonic()
                assert session.lookup(there).longest == 8
                slowest = max(slowest, time.monotonic() - start)
            assert slowest < 2
            assert rss(daemon) - before < 96 << 20
            victim.send_signal(signal.SIGKILL)
            victim.wait(10)
            seconds_until(lambda: len(sessions(daemon)) == 1 and not slots_in_use(daemon), GENEROUS)


def test_two_workers_of_one_name_are_two_sessions(daemon):
    model = "twins"
    there = keys_of(8, f"{model}/there")
    with connect(daemon.address, stack=stack(model), timeout=20) as session:
        put(session, there)
        with (
            worker("leasing", daemon.address, model, "buffer_only") as one,
            worker("leasing", daemon.address, model, "buffer_only") as two,
        ):
            its = {s["session"]: s["pid"] for s in sessions(daemon).values() if s["worker"] == "leasing"}
            assert sorted(its.values()) == sorted([one.pid, two.pid])
            two.send_signal(signal.SIGKILL)
            two.wait(10)
            eventually(lambda: len(sessions(daemon)) == 2)
            left = sessions(daemon)
            assert [left[s]["read_leases"] for s, pid in its.items() if pid == one.pid] == [8]
            with session.load(there) as loaded:
                assert check_loaded(loaded, there) == 8


def test_a_lane_that_breaks_quarantines_and_the_same_clients_return_frees(daemon):
    model = "quarantine"
    with connect(daemon.address, stack=stack(model), worker="broken", timeout=20) as session:
        keys = keys_of(5, f"{model}/lost")
        batch = session.reserve(keys, {"kv": 5})
        assert batch
        before, quarantined = session.session_id, counter(daemon, "quarantined_slots")
        # The process lives, and could write its slots: the housekeeper is held off from connecting anew.
        with session._core._reconnect:
            session._core.link.lane.close("the test breaks it")
            eventually(lambda: sessions(daemon)[before]["state"] == "quarantined")
            assert counter(daemon, "quarantined_slots") == quarantined + 5
            assert slots_in_use(daemon) == {"write/kv/quarantined": 5}
            with connect(daemon.address, stack=stack(model), timeout=20) as other:
                put(other, keys_of(40, f"{model}/other"))
                assert slots_in_use(daemon)["write/kv/quarantined"] == 5
        del batch
        eventually(lambda: session.connected and session.session_id != before)
        eventually(lambda: before not in sessions(daemon))
        assert not slots_in_use(daemon)
        put(session, keys)


def test_a_quarantined_client_that_still_maps_frees_nothing_until_it_dies(daemon):
    model = "keeper"
    with connect(daemon.address, stack=stack(model), timeout=20) as session:
        put(session, keys_of(8, f"{model}/there"))
        with worker("reserved", daemon.address, model, "buffer_only") as victim:
            [its] = [s["session"] for s in sessions(daemon).values() if s["worker"] == "reserved"]
            # A session of another process that claims to be its successor takes nothing over.
            thief = connect(daemon.address, stack=stack(model), worker="reserved", timeout=20)
            thief._core._link.lane.close("to come back as another")
            thief._core._previous = type(thief._core._previous)(its, thief._core.link.welcome.boot_epoch)
            eventually(lambda: thief.connected and thief.reconnects)
            assert sessions(daemon)[its]["state"] == "active"
            thief.close()
            victim.send_signal(signal.SIGKILL)
            victim.wait(10)
            seconds_until(lambda: its not in sessions(daemon), GENEROUS)
