"""Arenas leased whole: what an engine keeps in them outlives the daemon, is counted once, and is warm for its next start."""

import os
import subprocess
import sys

import pytest

from hoststage.client import Mode, QuotaExceeded, connect
from tests.integration.daemon import Daemon, environment, eventually
from tests.integration.test_client_session import stack

MIB = 1 << 20
SIZE = 40 * MIB + 4321

WORKER = """
import sys
from hoststage.client import connect
from tests.integration.test_whole_arenas import inodes, small
session = connect(sys.argv[1], stack=small(sys.argv[2]), timeout=20)
arena = session.lease_arena("pool", int(sys.argv[3]))
whole = arena.whole()
whole[:5] = b"mine!"
print(arena.warm, *inodes(arena.mapping.address), flush=True)
sys.stdin.read()
"""


def small(name: str = "whole"):
    return stack(name, Mode.CACHE)


def inodes(address: int) -> list[str]:
    """Return the name and the inode of what this process maps at an address."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            fields = line.split()
            if int(fields[0].partition("-")[0], 16) == address:
                return [fields[5], fields[4]]
    return []


def worker(daemon: Daemon, size: int = SIZE, name: str = "worker") -> tuple[subprocess.Popen, list[str]]:
    """Start a process that leases an arena; return it and what it saw."""
    env = {**environment(), "PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], os.getcwd()])}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, daemon.address, name, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    return process, process.stdout.readline().split()


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path, budget="256MiB").start()
    yield made
    if made.process.poll() is None:
        assert made.stop() == 0


def leased(daemon: Daemon) -> int:
    return sum(p["slots"] * p["stride"] for p in daemon.status()["pools"] if p["kind"] == "whole")


def test_the_budget_tells_what_can_be_leased_and_gets_all_of_it_back(daemon):
    with connect(daemon.address, stack=small(), timeout=20) as session:
        before = session.budget()
        assert before.budget_bytes == 256 * MIB
        arena = session.lease_arena("pool", SIZE)
        assert leased(daemon) == -(-SIZE // 4096) * 4096
        assert session.budget().free_bytes == before.free_bytes - leased(daemon)
        with pytest.raises(QuotaExceeded, match=r"memory\.budget"):
            session.lease_arena("more", session.budget().free_bytes + 1)
        session.return_arena(arena)
        assert session.budget() == before
        assert leased(daemon) == 0
        # All of it at once, though a warm arena that does not fit was kept.
        session.return_arena(session.lease_arena("everything", before.free_bytes // 4096 * 4096))


def test_a_killed_workers_next_start_finds_its_memory_warm_even_where_the_budget_has_room_for_it_once(daemon):
    size = 200 * MIB
    process, (warm, name, inode) = worker(daemon, size)
    assert (warm, name) == ("False", "/memfd:hoststage-whole")
    process.kill()
    process.wait(10)
    eventually(lambda: leased(daemon) == 0)
    again, (warm, _, same) = worker(daemon, size)
    assert (warm, same) == ("True", inode)
    again.kill()
    again.wait(10)
    assert 'hoststage_arena_leases_total{memory="warm"} 1.0' in daemon.get("/metrics")


def test_memory_of_one_tenant_is_not_the_next_ones(daemon):
    process, (_, _, inode) = worker(daemon)
    process.kill()
    process.wait(10)
    eventually(lambda: leased(daemon) == 0)
    spec = stack("other", Mode.CACHE)
    identity = type(spec.identity)(model="other", tenant="another")
    with connect(daemon.address, stack=type(spec)(identity, spec.pools, modes=spec.modes), timeout=20) as session:
        arena = session.lease_arena("pool", SIZE)
        assert not arena.warm
        assert inodes(arena.mapping.address)[1] != inode


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_what_an_engine_keeps_outlives_the_daemon_and_counts_in_the_next_ones_budget(daemon, ending):
    with connect(daemon.address, stack=small(), timeout=20) as session:
        free = session.budget().free_bytes
        arena = session.lease_arena("pool", SIZE)
        whole = arena.whole()
        whole[:] = b"\xa5" * len(whole)
        getattr(daemon, ending)()
        assert bytes(whole) == b"\xa5" * len(whole)
        daemon.start()
        eventually(lambda: session.connected and session.reconnects)
        assert session.retained_bytes == len(whole)
        assert session.budget().free_bytes == free - len(whole)
        whole[:4] = b"more"
        # The number of the lease may be another's by now.
        other = session.lease_arena("other", SIZE)
        assert other.arena_id == arena.arena_id
        del whole
        session.return_arena(arena)
        assert other in session.arenas
        assert len(other.whole()) >= SIZE


def test_a_lost_connection_to_a_daemon_that_lives_counts_no_byte_twice(daemon):
    with connect(daemon.address, stack=small(), timeout=20) as session:
        before = daemon.status()["granted_bytes"]
        whole = session.lease_arena("pool", SIZE).whole()
        session._core.link.lane.close("lost")
        eventually(lambda: session.connected and session.reconnects)
        session.ping()
        assert session.retained_bytes == len(whole)
        whole[:4] = b"mine"
        # The earlier session keeps its grant and its lease for as long as this process lives, and the new one has a grant too.
        grant = session.grant.pool("kv")
        assert daemon.status()["granted_bytes"] == before + len(whole) + grant.write_slots * grant.stride


def test_a_worker_that_dies_while_its_memory_is_being_made_leaves_nothing_behind(daemon):
    with connect(daemon.address, stack=small(), timeout=20) as session:
        before = session.budget().free_bytes
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, daemon.address, "dying", str(200 * MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**environment(), "PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], os.getcwd()])},
        )
        eventually(lambda: session.budget().free_bytes < before - 100 * MIB)
        process.kill()
        process.wait(10)
        eventually(lambda: session.budget().free_bytes == before)
