"""Memory of the client's own, read and written by a real daemon by descriptor: bytes, bounds, truncation, death, copies."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hoststage.client import (
    DaemonUnavailable,
    DeadlineExceeded,
    Identity,
    Imported,
    ImportedPages,
    Mode,
    ModeWish,
    Outcome,
    PayloadPath,
    PoolKind,
    PoolSpec,
    RequestRejected,
    Session,
    StackError,
    StackSpec,
    _pages,
    aio,
    connect,
)
from hoststage.shm import copy
from hoststage.v1 import imported as wire
from tests.integration.daemon import Daemon, eventually
from tests.life_support import counter, sessions, slots_in_use, worker

SIZES = np.array([512, 8192, 100], dtype=np.int64)
PAGE = int(SIZES.sum())
SIDE = 1000
ALL = (PayloadPath.IMPORTED, PayloadPath.SHM, PayloadPath.INLINE)


class Memory:
    """A populated memfd of the test's own, mapped here."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.fd = os.memfd_create("client", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    def page(self, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
        return b"".join(self.bytes[at : at + size].tobytes() for at, size in zip(offsets, sizes, strict=True))


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="256MiB").start()
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture
def own_node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="128MiB").start()
        yield daemon
        daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()


def stack(model: str, *, side: bool = False, mode: Mode = Mode.BUFFER_ONLY, slots: int = 64, **changes) -> StackSpec:
    pools = [PoolSpec("kv", PoolKind.KV, PAGE, 16, host_slots=slots)]
    if side:
        pools.append(PoolSpec("indexer", PoolKind.SIDECAR, SIDE, 16, indices_from_pool="kv"))
    return StackSpec(Identity(model), tuple(pools), paths=ALL, modes=(ModeWish(mode, True),), **changes)


def keys_of(n: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, i]) * 16 for i in range(n)]


def table(count: int, base: int = 0, *, gap: int = 64, backwards: bool = False) -> np.ndarray:
    """Offsets of pages whose pieces of one size lie side by side, with gaps, as in a layer-first pool."""
    at, columns = base, []
    for size in SIZES.tolist():
        rows = [at + page * (size + gap) for page in range(count)]
        columns.append(rows[::-1] if backwards else rows)
        at += count * (size + gap)
    return np.array(columns, dtype=np.int64).T.copy()


def span_bytes(count: int, gap: int = 64) -> int:
    return count * (PAGE + gap * len(SIZES))


def rows(imported: Imported, offsets: np.ndarray) -> ImportedPages:
    return ImportedPages(imported, offsets, SIZES)


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
@pytest.mark.parametrize("gap", [0, 64])
def test_pages_go_from_the_clients_memory_to_the_store_and_back_without_a_copy_in_the_client(
    node: Daemon, monkeypatch: pytest.MonkeyPatch, mode: Mode, gap: int
) -> None:
    def forbidden(*_: object) -> int:
        raise AssertionError("the client copied a page")

    for module, name in ((_pages, "copy_pages"), (copy, "copy_pages"), (copy, "copy_bytes")):
        monkeypatch.setattr(module, name, forbidden)
    memory = Memory(4 << 20)
    copies = counter(node, "daemon_copies")
    with connect(node.address, stack=stack(f"round {mode.value} {gap}", mode=mode)) as session:
        assert session.grant.path is PayloadPath.IMPORTED
        assert session.arenas == ()
        imported = session.import_memory(memory.fd, name="pool")
        keys, source = keys_of(20), table(20, gap=gap, backwards=True)
        wanted = [memory.page(row, SIZES) for row in source.tolist()]
        ticket = session.store(keys, {"kv": rows(imported, source)})
        ticket.wait_accepted()
        result = ticket.wait()
        assert (result.outcome, result.pages) == (Outcome.STORED, 20)
        # One a page, in `cache` straight into the read arena.
        assert counter(node, "daemon_copies") - copies == 20
        assert session.lookup(keys).longest == 20
        target = table(20, base=2 << 20, gap=gap)
        before = memory.bytes.copy()
        copies = counter(node, "daemon_copies")
        loaded = session.load(keys, into={"kv": rows(imported, target)})
        assert (bool(loaded), loaded.prefix, loaded.first("kv")) == (True, 20, 0)
        assert counter(node, "daemon_copies") - copies == 20
        assert [memory.page(row, SIZES) for row in target.tolist()] == wanted
        # Nothing beside the pieces was touched.
        for row in target.tolist():
            for at, size in zip(row, SIZES.tolist(), strict=True):
                before[at : at + size] = memory.bytes[at : at + size]
        assert np.array_equal(before, memory.bytes)
        again = session.store(keys, {"kv": rows(imported, source)}).wait()
        assert again.outcome is Outcome.BELIEVED_STORED
    assert os.fstat(memory.fd).st_size == memory.size
    eventually(lambda: not slots_in_use(node))


def test_what_is_stored_from_imported_memory_is_loaded_over_every_path(node: Daemon) -> None:
    memory = Memory(1 << 20)
    keys, source = keys_of(8), table(8)
    wanted = [memory.page(row, SIZES) for row in source.tolist()]
    with connect(node.address, stack=stack("paths")) as session:
        imported = session.import_memory(memory.fd)
        assert session.store(keys, {"kv": rows(imported, source)}).wait().ok
        # What does not lie in imported memory travels in messages, in the same session.
        with session.load(keys) as loaded:
            assert [bytes(page) for page in loaded.pages("kv")] == wanted
        other = [bytes([i]) * PAGE for i in range(3)]
        assert session.store(keys_of(3, 9), {"kv": other}).wait().ok
        assert session.load(keys_of(3, 9), into={"kv": rows(imported, source[:3])})
        assert [memory.page(row, SIZES) for row in source[:3].tolist()] == other
        for call in (lambda: session.reserve(keys, {"kv": 1}), lambda: list(session.load_groups(keys))):
            with pytest.raises(StackError, match="imported"):
                call()
        with pytest.raises(StackError, match="imported memory, or none"):
            session.store(keys[:1], {"kv": rows(imported, source[:1]), "indexer": [b""]})
    for path in (PayloadPath.SHM, PayloadPath.INLINE):
        plain = StackSpec(Identity("paths"), stack("paths").pools, paths=(path,), modes=stack("paths").modes)
        with connect(node.address, stack=plain) as session, session.load(keys) as loaded:
            assert [bytes(page) for page in loaded.pages("kv")] == wanted
            with pytest.raises(StackError, match="IMPORTED first"):
                session.import_memory(memory.fd)


def test_pools_with_several_memfds_are_stored_in_one_commit_and_come_back_together(node: Daemon) -> None:
    parts, side = [Memory(256 << 10, seed) for seed in (1, 2, 3)], Memory(256 << 10, 4)
    keys = keys_of(6)
    offsets = np.array([[page * 512, page * 8192, 7 + page * 100] for page in range(6)], dtype=np.int64)
    memfds = np.arange(3, dtype=np.int64)

    def page(row: int) -> bytes:
        return b"".join(parts[i].page([int(offsets[row, i])], [int(size)]) for i, size in enumerate(SIZES.tolist()))

    with connect(node.address, stack=stack("several", side=True)) as session:
        pool = session.import_memory([m.fd for m in parts], name="kv")
        other = session.import_memory([side.fd], name="indexer")
        sides = ImportedPages(other, np.arange(6, dtype=np.int64)[:, None] * SIDE, np.array([SIDE], dtype=np.int64))
        wanted = [page(i) for i in range(6)], side.bytes[: 6 * SIDE].tobytes()
        result = session.store(keys, {"kv": ImportedPages(pool, offsets, SIZES, memfds), "indexer": sides}).wait()
        assert (result.outcome, result.pages) == (Outcome.STORED, 12)
        for memory in (*parts, side):
            memory.bytes[:] = 0
        # A shorter prefix than the places: the rest of them stays as it was.
        loaded = session.load(keys, 4, into={"kv": ImportedPages(pool, offsets, SIZES, memfds), "indexer": sides})
        assert loaded
        assert [page(i) for i in range(6)] == [*wanted[0][:4], bytes(PAGE), bytes(PAGE)]
        assert side.bytes.tobytes()[: 6 * SIDE] == wanted[1][: 4 * SIDE] + bytes(2 * SIDE)
        # A miss touches nothing.
        before = side.bytes.copy()
        missing = session.load(
            keys_of(2, 77), into={"kv": ImportedPages(pool, offsets, SIZES, memfds), "indexer": sides}
        )
        assert not missing
        assert missing.outcome is Outcome.MISS
        assert np.array_equal(before, side.bytes)


def test_a_run_larger_than_the_write_arena_goes_in_several_commits(node: Daemon) -> None:
    memory = Memory(2 * span_bytes(90))
    keys, source, target = keys_of(90), table(90), table(90, base=span_bytes(90))
    with connect(node.address, stack=stack("parts", slots=40)) as session:
        imported = session.import_memory(memory.fd)
        assert session.store(keys, {"kv": rows(imported, source)}).wait().pages == 90
        for start in range(0, 90, 10):
            end = start + 10
            loaded = session.load(
                keys[start:end], into={"kv": rows(imported, target[start:end])}, ranges={"kv": (0, 10)}
            )
            assert loaded
        assert [memory.page(r, SIZES) for r in target.tolist()] == [memory.page(r, SIZES) for r in source.tolist()]


async def test_the_asyncio_face_moves_imported_pages_too(node: Daemon) -> None:
    memory = Memory(1 << 20)
    source, target = table(8), table(8, base=1 << 19)
    async with await aio.connect(node.address, stack=stack("aio")) as session:
        imported = await session.import_memory(memory.fd, name="pool")
        ticket = await session.store(keys_of(8), {"kv": rows(imported, source)})
        assert (await ticket).ok
        assert await session.load(keys_of(8), into={"kv": rows(imported, target)})
    assert [memory.page(r, SIZES) for r in target.tolist()] == [memory.page(r, SIZES) for r in source.tolist()]


def test_more_pieces_than_one_request_may_name_go_in_several_stores(node: Daemon, monkeypatch) -> None:
    memory = Memory(1 << 20)
    monkeypatch.setattr(wire, "MAX_PLACES", 30)
    with connect(node.address, stack=stack("many")) as session:
        imported = session.import_memory(memory.fd)
        assert session.store(keys_of(25), {"kv": rows(imported, table(25))}).wait().pages == 25
        with pytest.raises(StackError, match="at most 30 pieces"):
            session.load(keys_of(25), into={"kv": rows(imported, table(25))})
        assert session.load(keys_of(10), into={"kv": rows(imported, table(10))})


# -------------------------------------------------------------- what is not taken


def _pipe() -> int:
    a, b = os.pipe()
    os.close(b)
    return a


def _sealed_by_size() -> int:
    fd = os.memfd_create("empty", os.MFD_CLOEXEC)
    os.ftruncate(fd, 1 << 20)
    return fd


def _read_only() -> int:
    memory = Memory(1 << 20)
    return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)


def _path_only() -> int:
    memory = Memory(1 << 20)
    return os.open(f"/proc/self/fd/{memory.fd}", os.O_PATH)


@pytest.mark.parametrize(
    ("make", "reason", "remedy"),
    [
        (_pipe, "IMPORT_KIND", "pass a memfd"),
        (lambda: os.open("/tmp", os.O_RDONLY), "IMPORT_KIND", "pass a memfd"),
        (lambda: os.open("/dev/shm", os.O_RDONLY), "IMPORT_KIND", "pass a memfd"),
        (lambda: os.open(__file__, os.O_RDWR), "IMPORT_KIND", "pass a memfd"),
        (lambda: socket.socket().detach(), "IMPORT_KIND", "pass a memfd"),
        (_path_only, "IMPORT_KIND", "pass a memfd"),
        (_read_only, "IMPORT_KIND", "O_RDWR"),
        (_sealed_by_size, "IMPORT_NOT_POPULATED", "MADV_POPULATE_WRITE"),
        (lambda: os.dup(Memory(4096).fd), "IMPORT_TRUNCATED", "keep the memory as large"),
    ],
)
def test_a_descriptor_that_is_no_memory_of_that_size_is_refused_with_a_remedy(node, make, reason, remedy) -> None:
    fd, good = make(), Memory(1 << 20)
    try:
        with connect(node.address, stack=stack("kinds")) as session:
            with pytest.raises(RequestRejected, match=remedy) as refused:
                # The descriptor itself is what is looked at: the good one beside it does not help.
                _import_raw(session, [good.fd, fd], [1 << 20, 1 << 20])
            assert refused.value.reason == reason
            assert refused.value.field == "memfds[1]"
            assert session.import_memory(good.fd)
    finally:
        os.close(fd)


def _import_raw(session: Session, fds: list[int], sizes: list[int]) -> Imported:
    """Import without what the library itself would find."""
    core = session._core
    imported = Imported(core, [fds[0]], [sizes[0]], "raw")
    imported._fds += [os.dup(fd) for fd in fds[1:]]
    imported.sizes = tuple(sizes)
    imported.id_on(core.link, core.deadline(5))
    return imported


def test_places_that_do_not_lie_in_the_memory_are_refused_by_name(node: Daemon) -> None:
    memory = Memory(1 << 20)
    with connect(node.address, stack=stack("bounds")) as session:
        imported = session.import_memory(memory.fd)
        good = table(4)
        for offsets, memfds in (
            (good + (1 << 20) - 4 * 512, None),
            (good + (1 << 50), None),
            (good, np.array([0, 1, 0], dtype=np.int64)),
        ):
            pages = ImportedPages(imported, offsets, SIZES, memfds)
            with pytest.raises(RequestRejected) as refused:
                session.store(keys_of(4), {"kv": pages})
            assert (refused.value.reason, refused.value.field[:8]) == ("IMPORT_BOUNDS", "pages[0]")
            assert "memfd" in refused.value.remedy
            with pytest.raises(RequestRejected) as refused:
                session.load(keys_of(4), into={"kv": pages})
            assert refused.value.field.startswith("into[0]")
        with pytest.raises(StackError, match="pages of this pool"):
            session.store(keys_of(1), {"kv": ImportedPages(imported, good[:1, :2], SIZES[:2])})
        imported.close()
        with pytest.raises(StackError, match="closed"):
            session.store(keys_of(4), {"kv": rows(imported, good)})
        assert not session.lookup(keys_of(4))
    assert not slots_in_use(node)


def _held(node: Daemon, name: str) -> int:
    """Return how many descriptors of memfds of that name the daemon has."""
    found = 0
    for fd in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += f"/memfd:{name}" in os.readlink(fd)
    return found


def test_dropped_memory_is_closed_by_the_daemon(own_node: Daemon) -> None:
    memory = Memory(1 << 20)
    with connect(own_node.address, stack=stack("drop")) as session:
        one, _ = session.import_memory(memory.fd), session.import_memory([memory.fd, memory.fd])
        assert _held(own_node, "client") == 3
        told = own_node.status()["imports"]
        assert (told["descriptors"], told["bytes"]) == (3, 3 << 20)
        assert "hoststage_imported_bytes 3.145728e+06" in own_node.get("/metrics")
        one.close()
        assert _held(own_node, "client") == 2
    eventually(lambda: not _held(own_node, "client"))


# -------------------------------------------------------------- truncation


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_a_client_that_truncates_its_memory_gets_a_typed_error_and_the_file_never_grows(
    node: Daemon, mode: Mode
) -> None:
    memory, other = Memory(1 << 20), Memory(1 << 20)
    keys = keys_of(8)
    with (
        connect(node.address, stack=stack(f"truncated {mode.value}", mode=mode)) as session,
        connect(node.address, stack=stack(f"unharmed {mode.value}", mode=mode)) as unharmed,
    ):
        imported, fine = session.import_memory(memory.fd), unharmed.import_memory(other.fd)
        assert session.store(keys, {"kv": rows(imported, table(8))}).wait().ok
        os.ftruncate(memory.fd, 4096)
        with pytest.raises(RequestRejected, match="keep the memory as large") as failed:
            session.store(keys_of(8, 1), {"kv": rows(imported, table(8))})
        assert failed.value.reason == "IMPORT_TRUNCATED"
        with pytest.raises(RequestRejected) as failed:
            session.load(keys, into={"kv": rows(imported, table(8))})
        assert failed.value.reason == "IMPORT_TRUNCATED"
        assert os.fstat(memory.fd).st_size == 4096
        # Grown again it has holes, which a write would fill at the daemon's expense.
        os.ftruncate(memory.fd, memory.size)
        with pytest.raises(RequestRejected) as failed:
            session.load(keys, into={"kv": rows(imported, table(8))})
        assert failed.value.reason == "IMPORT_NOT_POPULATED"
        assert os.fstat(memory.fd).st_blocks * 512 == 4096
        assert not session.lookup(keys_of(8, 1))
        # The session itself goes on, and so does everybody else.
        with session.load(keys) as loaded:
            assert loaded.prefix == 8
        assert unharmed.store(keys, {"kv": rows(fine, table(8))}).wait().ok
        assert unharmed.load(keys, into={"kv": rows(fine, table(8, base=1 << 19))})
    eventually(lambda: not slots_in_use(node))


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_truncation_in_the_middle_of_transfers_never_grows_the_file_nor_yields_wrong_bytes(
    own_node: Daemon, mode: Mode
) -> None:
    pages = 400
    memory = Memory(2 * span_bytes(pages))
    stop = threading.Event()
    most = [0]

    def cut() -> None:
        while not stop.is_set():
            for size in (memory.size // 3, memory.size // 7):
                os.ftruncate(memory.fd, size)
                most[0] = max(most[0], os.fstat(memory.fd).st_size)

    source = table(pages)
    wanted = [memory.page(row, SIZES) for row in source.tolist()]
    with connect(own_node.address, stack=stack("middle", slots=1000, mode=mode)) as session:
        imported = session.import_memory(memory.fd)
        good = keys_of(200) + keys_of(200, 1)
        assert session.store(good, {"kv": rows(imported, source)}).wait().ok
        # From here on nothing of this process touches the mapping: a page beyond the end would kill it.
        thread = threading.Thread(target=cut)
        thread.start()
        try:
            for i in range(8):
                with pytest.raises(RequestRejected) as failed:
                    session.load(good, into={"kv": rows(imported, table(pages, base=span_bytes(pages)))})
                assert failed.value.reason == "IMPORT_TRUNCATED"
                with pytest.raises(RequestRejected) as failed:
                    session.store(keys_of(200, 10 + i) + keys_of(200, 30 + i), {"kv": rows(imported, source)})
                assert failed.value.reason == "IMPORT_TRUNCATED"
        finally:
            stop.set()
            thread.join()
        assert most[0] == memory.size // 3
        with session.load(good) as loaded:
            assert [bytes(page) for page in loaded.pages("kv")] == wanted
        assert not any(session.lookup(keys_of(1, 10 + i)) for i in range(8))
    eventually(lambda: not slots_in_use(own_node))


# -------------------------------------------------------------- waiting, death, restarts


def test_a_client_that_gave_up_is_sure_that_its_memory_is_left_alone(own_node: Daemon) -> None:
    memory = Memory(1 << 20)
    keys = keys_of(8)
    with connect(own_node.address, stack=stack("gave up"), timeout=10) as session:
        imported = session.import_memory(memory.fd)
        source = table(8)
        wanted = [memory.page(row, SIZES) for row in source.tolist()]
        assert session.store(keys, {"kv": rows(imported, source)}).wait().ok
        own_node.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            session.load(keys, into={"kv": rows(imported, source)}, timeout=0.3)
        with pytest.raises(DeadlineExceeded):
            session.store(keys_of(8, 1), {"kv": rows(imported, source)}, timeout=0.3)
        # Ours again: the engine puts other pages there. Both requests are still on their way.
        memory.bytes[:] = 7
        own_node.process.send_signal(signal.SIGCONT)
        session.ping()
        eventually(lambda: not slots_in_use(own_node))
        assert (memory.bytes == 7).all()
        assert not session.lookup(keys_of(8, 1))
        assert session.load(keys, into={"kv": rows(imported, source)})
        assert [memory.page(row, SIZES) for row in source.tolist()] == wanted


def test_memory_is_imported_anew_when_the_daemon_was_restarted(own_node: Daemon) -> None:
    memory = Memory(1 << 20)
    keys, source = keys_of(8), table(8)
    wanted = [memory.page(row, SIZES) for row in source.tolist()]
    with connect(own_node.address, stack=stack("restart"), timeout=10) as session:
        imported = session.import_memory(memory.fd)
        assert session.store(keys, {"kv": rows(imported, source)}).wait().ok
        own_node.kill()
        with pytest.raises(DaemonUnavailable):
            for _ in range(100):
                session.load(keys, into={"kv": rows(imported, source)}, timeout=2)
        own_node.start()
        eventually(lambda: session.connected)
        memory.bytes[:] = 0
        assert session.load(keys, into={"kv": rows(imported, source)})
        assert [memory.page(row, SIZES) for row in source.tolist()] == wanted


@pytest.mark.parametrize("stage", ["store", "load"])
def test_a_client_killed_in_the_middle_of_transfers_leaves_nothing_and_harms_nobody(own_node: Daemon, stage) -> None:
    memory = Memory(1 << 20)
    keys, source = keys_of(8), table(8)
    with connect(own_node.address, stack=stack("bystander")) as session:
        imported = session.import_memory(memory.fd)
        assert session.store(keys, {"kv": rows(imported, source)}).wait().ok
        for _ in range(3):
            with worker(stage, own_node.address, module="tests.integration.imported_worker") as process:
                number = max(sessions(own_node))
                os.kill(process.pid, signal.SIGKILL)
                eventually(lambda n=number: n not in sessions(own_node), 5)
            assert session.load(keys, into={"kv": rows(imported, table(8, base=1 << 19))})
        eventually(lambda: not slots_in_use(own_node))
        eventually(lambda: not _held(own_node, "victim"))
    assert own_node.stop() == 0


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_bytes_that_change_while_they_are_read_are_stored_as_they_were_read(own_node: Daemon, mode: Mode) -> None:
    memory = Memory(8 << 20)
    stop = threading.Event()

    def scribble() -> None:
        rng = np.random.default_rng(5)
        while not stop.is_set():
            at = int(rng.integers(0, 7 << 20))
            memory.bytes[at : at + (1 << 20)] = rng.integers(0, 256)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        with connect(own_node.address, stack=stack("changing", slots=1000, mode=mode)) as session:
            imported = session.import_memory(memory.fd)
            for i in range(5):
                keys = keys_of(200, i)
                assert session.store(keys, {"kv": rows(imported, table(200))}).wait().ok
                # A page whose checksum was taken of other bytes would be a miss.
                with session.load(keys) as loaded:
                    assert loaded.prefix == 200
    finally:
        stop.set()
        thread.join()
    assert "corrupt_pages_total 0.0" in own_node.get("/metrics")
