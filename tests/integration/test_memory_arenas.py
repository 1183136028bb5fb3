"""Arenas against real client processes: nobody can shrink, re-seal or write what is not theirs, and nobody is harmed by trying."""

import asyncio
import errno
import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import uvloop

from hoststage.server.memory.arena import Arena, ArenaKind, HugePages, MemoryPolicy, MemoryUnavailable
from hoststage.server.memory.pool import ArenaPool
from hoststage.shm import fdpass, libc
from hoststage.shm.mapping import Chunk, Mapping, MappingError
from tests.integration.daemon import environment

MIB = 1 << 20
POLICY = MemoryPolicy(chunk_bytes=2 * MIB, huge_pages=HugePages.OFF, lock=False)

CLIENT = textwrap.dedent("""
    import errno, fcntl, os, socket, sys
    from hoststage.shm import fdpass, libc
    from hoststage.shm.mapping import Chunk, Mapping, MappingError

    sock = socket.socket(fileno=int(sys.argv[1]))
    _, fds = fdpass.recv_fds(sock, 1024, 64)
    size, kind = int(sys.argv[2]), sys.argv[3]

    def refused(action):
        try:
            action()
        except (OSError, MappingError):
            return
        sys.exit(f"{kind}: was not refused: {action}")

    for fd in fds:
        refused(lambda: os.ftruncate(fd, 0))
        refused(lambda: os.ftruncate(fd, size * 2))
        refused(lambda: fcntl.fcntl(fd, libc.F_ADD_SEALS, int(libc.Seal.WRITE)))
        again = f"/proc/self/fd/{fd}"
        refused(lambda: os.truncate(again, 0))
        if kind == "read":
            refused(lambda: os.pwrite(fd, b"x", 0))
            refused(lambda: Mapping.map([Chunk(fd, size)], writable=True))
            try:
                rw = os.open(again, os.O_RDWR)
            except OSError:
                continue
            refused(lambda: os.pwrite(rw, b"x", 0))
            refused(lambda: Mapping.map([Chunk(rw, size)], writable=True))
            refused(lambda: os.ftruncate(rw, 0))
    print("held", flush=True)
    writable = kind == "write"
    m = Mapping.map([Chunk(fd, size) for fd in fds], writable, private_to_process=True, require_seals=True)
    if writable:
        m.view(0, 5)[:] = b"hello"
    for fd in fds:
        os.close(fd)
    print("mapped", flush=True)
    sys.stdin.read()
""")


class Client:
    """A client process that holds an arena's descriptors."""

    def __init__(self, arena):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-c", CLIENT, str(theirs.fileno()), str(arena.chunks[0].size), arena.kind.value]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        chunks = arena.descriptors()
        with ours:
            fdpass.send_fds(ours, b"", [c.fd for c in chunks])
        fdpass.close_all([c.fd for c in chunks])

    def wait_for(self, word):
        line = self.process.stdout.readline().strip()
        assert line == word, (line, self.process.stderr.read())

    def end(self):
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def arena(request):
    made = Arena.create("test", 4 * MIB, request.param, POLICY)
    made.prefault()
    yield made
    made.close()


@pytest.mark.parametrize("arena", [ArenaKind.WRITE, ArenaKind.READ], indirect=True)
def test_a_client_can_neither_truncate_nor_seal_nor_write_what_is_read_only(arena):
    before = set(os.listdir("/dev/shm"))
    client = Client(arena)
    try:
        client.wait_for("held")
        client.wait_for("mapped")
        # Every page is still there: touching them would be SIGBUS otherwise, and take this process down.
        assert np.frombuffer(arena.view(0, arena.size), dtype=np.uint8).sum() == (
            sum(b"hello") if arena.kind is ArenaKind.WRITE else 0
        )
        assert set(os.listdir("/dev/shm")) == before
    finally:
        client.end()


@pytest.mark.parametrize("arena", [ArenaKind.WRITE], indirect=True)
def test_the_kernel_says_whether_a_process_can_still_write_an_arena(arena):
    assert not arena.has_foreign_writable_mapping()
    client = Client(arena)
    client.wait_for("held")
    client.wait_for("mapped")
    assert arena.has_foreign_writable_mapping(), "a mapping alone, its descriptors closed, must count"
    client.end()
    assert not arena.has_foreign_writable_mapping()


def test_an_arena_is_reused_inside_its_tenant_alone_and_only_when_nobody_can_write_it():
    pool = ArenaPool(POLICY)
    first = pool.acquire("a", 4 * MIB, ArenaKind.WRITE)
    client = Client(first)
    client.wait_for("held")
    client.wait_for("mapped")
    pool.release(first)
    assert pool.idle_bytes == 0, "still mapped by a process: closed, not kept"
    client.end()

    second = pool.acquire("a", 4 * MIB, ArenaKind.WRITE)
    fdpass.close_all([c.fd for c in second.descriptors()])
    pool.release(second)
    assert pool.idle_bytes == 4 * MIB
    other = pool.acquire("b", 4 * MIB, ArenaKind.WRITE)
    assert other is not second
    assert pool.acquire("a", 4 * MIB, ArenaKind.WRITE) is second
    pool.release(other)
    assert pool.reclaim(1) == 4 * MIB
    pool.close()


def test_a_read_arena_that_a_former_client_maps_is_not_reused_and_counts_until_that_client_ends():
    pool = ArenaPool(POLICY)
    arena = pool.acquire("a", 4 * MIB, ArenaKind.READ)
    client = Client(arena)
    client.wait_for("held")
    client.wait_for("mapped")
    assert arena.is_open_elsewhere()
    pool.release(arena)
    assert (pool.idle_bytes, pool.lingering_bytes()) == (0, 4 * MIB)
    client.end()
    assert pool.lingering_bytes() == 0


def test_a_read_arena_that_nobody_maps_any_more_is_kept_for_its_tenant():
    pool = ArenaPool(POLICY)
    arena = pool.acquire("a", 2 * MIB, ArenaKind.READ)
    fdpass.close_all([c.fd for c in arena.descriptors()])
    pool.release(arena)
    assert pool.idle_bytes == 2 * MIB
    assert pool.acquire("b", 2 * MIB, ArenaKind.READ) is not arena
    assert pool.acquire("a", 2 * MIB, ArenaKind.READ) is arena


@pytest.mark.parametrize("keep", [True, False])
def test_an_arena_leased_whole_is_one_memfd_and_is_kept_or_closed_once_its_client_has_ended(keep):
    pool = ArenaPool(POLICY, keep_bytes=0, keep_whole=keep)
    arena = pool.acquire("a", 8 * MIB, ArenaKind.WHOLE)
    assert len(arena.chunks) == 1
    client = Client(arena)
    client.wait_for("held")
    client.wait_for("mapped")
    pool.release(arena)
    assert (pool.idle_bytes, pool.lingering_bytes()) == (0, 8 * MIB)
    client.end()
    assert pool.lingering_bytes() == 0
    assert pool.idle_bytes == (8 * MIB if keep else 0)
    assert (pool.take_idle("a", 8 * MIB, ArenaKind.WHOLE) is arena) is keep
    assert pool.take_idle("b", 8 * MIB, ArenaKind.WHOLE) is None


def test_arenas_leave_descriptors_to_others_and_idle_ones_go_first():
    pool = ArenaPool(POLICY, most_memfds=3)
    kept = pool.acquire("a", 2 * MIB, ArenaKind.WRITE)
    idle = pool.acquire("a", 4 * MIB, ArenaKind.WHOLE)
    assert (pool.memfds_left, pool.memfds_of(kept.size)) == (1, 1)
    pool.release(idle)
    assert pool.memfds_left == 1, "an idle arena has its memfd still"
    others = [pool.acquire("b", 2 * MIB, ArenaKind.WHOLE) for _ in range(2)]
    assert (pool.idle_bytes, pool.memfds_left) == (0, 0)
    with pytest.raises(MemoryUnavailable, match=r"3 memfds, of 3 .* RLIMIT_NOFILE"):
        pool.acquire("b", 2 * MIB, ArenaKind.READ)
    pool.release(others.pop())
    pool.release(pool.acquire("c", 2 * MIB, ArenaKind.READ))
    for arena in (kept, *others):
        pool.release(arena)
    pool.close()
    assert pool.memfds_left == 3


PROBER = """
import fcntl, os, types
from hoststage.server.memory import arena as module

made = module.Arena.create("test", 2 << 20, module.ArenaKind.WRITE, module.MemoryPolicy(2 << 20, lock=False))
broken = []

def interrupted(fd, command, value=0):
    answer = fcntl.fcntl(fd, command, value)
    if command == fcntl.F_SETLEASE and value != fcntl.F_UNLCK:
        # What a client can do in this very moment, with what it was handed.
        try:
            os.close(os.open(f"/proc/self/fd/{made.chunks[0].fd}", os.O_RDWR | os.O_NONBLOCK))
        except BlockingIOError:
            broken.append(value)
    return answer

module.fcntl = types.SimpleNamespace(**{**vars(fcntl), "fcntl": interrupted})
made.has_foreign_writable_mapping()
made.is_open_elsewhere()
print(len(broken), "leases broken")
"""


def test_a_client_that_opens_its_memory_anew_during_the_probe_does_not_end_the_daemon():
    # The kernel tells whoever holds a lease that is broken by SIGIO, which ends a process that does not expect it.
    command = [sys.executable, "-c", PROBER]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "2 leases broken\n"), done.stderr


def test_a_write_arenas_pages_go_at_once_though_a_child_of_the_client_still_maps_them():
    arena = Arena.create("test", 4 * MIB, ArenaKind.WRITE, POLICY)
    arena.prefault()
    chunks = arena.descriptors()
    left_behind = Mapping.map(chunks, writable=True)
    left_behind.view(0, 5)[:] = b"hello"
    assert sum(os.fstat(c.fd).st_blocks for c in chunks) * 512 == 4 * MIB
    arena.close()
    assert sum(os.fstat(c.fd).st_blocks for c in chunks) == 0
    assert bytes(left_behind.view(0, 5)) == bytes(5)
    fdpass.close_all([c.fd for c in chunks])
    left_behind.unmap()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_exceeds_the_free_memory_is_refused_before_anything_is_taken(monkeypatch):
    monkeypatch.setattr("hoststage.server.memory.arena.free_bytes", lambda: 100 * MIB)
    before = open_descriptors()
    with pytest.raises(MemoryUnavailable, match="memory limit of the daemon's container") as raised:
        Arena.create("test", 64 * MIB, ArenaKind.WRITE, POLICY)
    assert (raised.value.requested, raised.value.available) == (64 * MIB, 36 * MIB)
    assert open_descriptors() == before


def test_warm_arenas_make_room_for_whoever_asks(monkeypatch):
    pool = ArenaPool(POLICY)
    pool.release(pool.acquire("a", 8 * MIB, ArenaKind.WRITE))
    monkeypatch.setattr("hoststage.server.memory.arena.free_bytes", lambda: 1 << 40 if not pool.idle_bytes else 0)
    made = pool.acquire("b", 4 * MIB, ArenaKind.WRITE)
    assert pool.idle_bytes == 0
    pool.release(made)
    pool.close()


def test_at_the_limit_of_open_files_the_error_names_it_and_nothing_leaks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))  # fewer than the chunks of this arena
    try:
        with pytest.raises(MemoryUnavailable, match="RLIMIT_NOFILE"):
            Arena.create("test", 256 * MIB, ArenaKind.WRITE, POLICY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() == before


def test_a_shortage_found_while_populating_is_an_error_and_the_pool_keeps_nothing(monkeypatch):
    def short(address, length, advice):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("hoststage.shm.libc.madvise", short)
    before = open_descriptors()
    with pytest.raises(MemoryUnavailable, match="Cannot allocate"):
        ArenaPool(POLICY).acquire("a", 4 * MIB, ArenaKind.WRITE)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", list(ArenaKind))
def test_a_kernel_that_cannot_populate_a_mapping_allocates_in_the_file(monkeypatch, kind):
    def unknown(address, length, advice):
        raise OSError(errno.EINVAL, "Invalid argument")

    arena = Arena.create("test", 5 * MIB, kind, POLICY)
    arena.view(0, 4)[:] = b"kept"
    monkeypatch.setattr("hoststage.shm.libc.madvise", unknown)
    arena.prefault()
    assert sum(os.fstat(c.fd).st_blocks for c in arena.chunks) * 512 == 5 * MIB
    assert bytes(arena.view(0, 4)) == b"kept"
    arena.close()


@pytest.mark.parametrize("kind", list(ArenaKind))
def test_populating_backs_every_page_and_keeps_what_is_there(kind):
    arena = Arena.create("test", 36 * MIB + 4096, kind, MemoryPolicy(4 * MIB, HugePages.OFF, lock=False))
    arena.view(arena.size - 4, 4)[:] = b"kept"
    arena.prefault(threads=3)
    assert arena.size == 36 * MIB + 4096
    assert sum(os.fstat(c.fd).st_blocks for c in arena.chunks) * 512 == arena.size
    assert bytes(arena.view(arena.size - 4, 4)) == b"kept"
    arena.close()
    arena.close()


def test_a_refused_numa_policy_is_said_and_harms_nothing():
    arena = Arena.create("test", 2 * MIB, ArenaKind.WRITE, POLICY)
    arena.interleave((1000, 1001))
    assert "NUMA nodes (1000, 1001)" in arena.prefault().reason
    arena.close()


def test_chunks_are_mapped_side_by_side_at_both_ends():
    arena = Arena.create("test", 5 * MIB, ArenaKind.WRITE, POLICY)
    arena.prefault()
    assert [c.size for c in arena.chunks] == [2 * MIB, 2 * MIB, MIB]
    chunks = arena.descriptors()
    mapping = Mapping.map(chunks, writable=True, require_seals=True)
    fdpass.close_all([c.fd for c in chunks])
    pattern = np.random.default_rng(0).integers(0, 256, arena.size, dtype=np.uint8)
    mapping.array(0, arena.size)[:] = pattern
    assert np.array_equal(np.frombuffer(arena.view(0, arena.size), dtype=np.uint8), pattern)
    mapping.unmap()
    arena.close()


def test_an_unsealed_memfd_is_not_mapped_where_seals_are_demanded():
    fd = os.memfd_create("loose")
    os.ftruncate(fd, 4096)
    with pytest.raises(MappingError, match="F_SEAL_SHRINK"):
        Mapping.map([Chunk(fd, 4096)], writable=False, require_seals=True)
    os.close(fd)


def test_huge_pages_fall_back_where_there_are_none_and_are_refused_where_required():
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    if free:
        pytest.skip("this host has huge pages free")
    made = Arena.create("test", 2 * MIB, ArenaKind.WRITE, MemoryPolicy(2 * MIB, HugePages.AUTO))
    assert made.prefault().bytes == 2 * MIB
    made.close()
    with pytest.raises(MemoryUnavailable, match=r"vm\.nr_hugepages"):
        Arena.create("test", 2 * MIB, ArenaKind.WRITE, MemoryPolicy(2 * MIB, HugePages.REQUIRED))


def pmd_mapped_bytes(address: int) -> int:
    """Bytes of the mapping at an address of this process that one entry of a page table covers 2 MiB of each."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.startswith(f"{address:x}-")
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.fixture
def gathers():
    """Skip where the kernel does not make huge pages of shared memory on demand."""
    probe = Arena.create("probe", 2 * MIB, ArenaKind.WRITE, MemoryPolicy(2 * MIB))
    able = probe.prefault().huge_pages
    probe.close()
    if not able:
        pytest.skip("this kernel, or its memory, gives no huge pages on demand")


@pytest.mark.parametrize("kind", ArenaKind)
def test_memory_is_gathered_into_huge_pages_that_no_operator_reserved(gathers, kind):
    size = 40 * MIB + 4096
    made = Arena.create("test", size, kind, MemoryPolicy(32 * MIB))
    assert made.prefault().huge_pages
    assert pmd_mapped_bytes(made.address) >= 32 * MIB
    pattern = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    np.frombuffer(made.view(0, size), dtype=np.uint8)[:] = pattern
    chunks = made.descriptors()
    mapping = Mapping.map(chunks, writable=False, require_seals=True)
    fdpass.close_all([c.fd for c in chunks])
    assert np.array_equal(mapping.array(0, size), pattern)
    mapping.unmap()
    assert made.prefault().huge_pages  # again, with what is there
    assert np.array_equal(np.frombuffer(made.view(0, size), dtype=np.uint8), pattern)
    made.close()


@pytest.mark.parametrize("why", ["off", "refused", "slow"])
def test_memory_in_small_pages_serves_as_well(monkeypatch, why):
    asked = []

    def collapse(address, length):
        asked.append(length)
        if why == "slow":
            time.sleep(0.25)
        return why == "slow"

    monkeypatch.setattr(libc, "collapse", collapse)
    policy = MemoryPolicy(64 * MIB, HugePages.OFF if why == "off" else HugePages.AUTO)
    made = Arena.create("test", 64 * MIB, ArenaKind.WRITE, policy)
    assert not made.prefault(1).huge_pages
    # Once is enough to know.
    assert asked == ([] if why == "off" else [16 * MIB])
    view = made.view(0, 64 * MIB)
    view[-1] = 7
    assert view[-1] == 7
    del view
    made.close()


def test_the_report_says_what_was_pinned_and_why_not_more():
    arena = Arena.create("test", 2 * MIB, ArenaKind.WRITE, POLICY)
    assert arena.report.achieved == "none"
    report = arena.prefault(lock=False)
    lines = Path("/proc/meminfo").read_text().splitlines()
    swap = any(line.split()[1] != "0" for line in lines if line.startswith("SwapTotal"))
    assert report.achieved == ("none" if swap else "resident")
    assert "not asked for" in report.reason
    without = arena.register_cuda()
    if without.achieved != "cuda":
        assert "not available" in without.reason or "cudaHostRegister" in without.reason
    arena.close()


def test_the_event_loop_stays_responsive_while_a_gigabyte_is_populated():
    async def run():
        lag = 0.0
        done = asyncio.Event()

        async def tick():
            nonlocal lag
            while not done.is_set():
                started = time.perf_counter()
                await asyncio.sleep(0.005)
                lag = max(lag, time.perf_counter() - started - 0.005)

        ticking = asyncio.create_task(tick())
        with ThreadPoolExecutor(1) as executor:
            loop = asyncio.get_running_loop()
            arena = await loop.run_in_executor(
                executor, Arena.create, "big", 1 << 30, ArenaKind.WRITE, MemoryPolicy(lock=False)
            )
            await loop.run_in_executor(executor, arena.prefault)
            await loop.run_in_executor(executor, arena.zero)
        done.set()
        await ticking
        arena.close()
        return lag

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lag = runner.run(run())
    print(f"worst lag {lag * 1000:.1f} ms")
    # Holding the GIL would stop the loop for the better part of a second.
    assert lag < 0.4
