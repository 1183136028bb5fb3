"""Memory of a client, by descriptor: what is taken, what is read and written, and that nothing ever grows."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from hoststage.server.memory import imports
from hoststage.server.memory.imports import ImportProblem, Pieces, open_memory, read_pieces, write_pieces
from hoststage.shm import claims, libc

SIZE = 1 << 16


def _memory(size: int = SIZE) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, os.urandom(size))
    return fd


def _pieces(fd: int, offsets, sizes, buffer: np.ndarray) -> Pieces:
    sizes = np.array(sizes, dtype=np.int64)
    addresses = buffer.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
    return Pieces(fd, os.fstat(fd).st_size, "memfd 0", np.array(offsets, dtype=np.int64), addresses, sizes)


def test_a_descriptor_is_opened_anew_so_that_its_flags_are_ours():
    fd = _memory()
    [ours] = open_memory([fd], [SIZE])
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    write_pieces(_pieces(ours, [0], [100], np.full(100, 7, dtype=np.uint8)))
    assert os.fstat(fd).st_size == SIZE
    assert os.pread(fd, 100, 0) == bytes([7]) * 100


def test_a_lease_on_the_file_keeps_nobody_waiting():
    path = f"/dev/shm/hoststage-test-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.write(fd, bytes(SIZE))
        fcntl.fcntl(fd, fcntl.F_SETSIG, 23)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(ImportProblem) as told:
            open_memory([fd], [SIZE])
        assert told.value.reason == "IMPORT_OPEN"
    finally:
        os.close(fd)
        os.unlink(path)


def test_nothing_stays_open_where_one_of_several_is_refused():
    before = len(os.listdir("/proc/self/fd"))
    good, pipe = _memory(), os.pipe()
    with pytest.raises(ImportProblem, match=r"memfds\[1\]"):
        open_memory([good, pipe[0]], [SIZE, SIZE])
    with pytest.raises(ImportProblem, match="1 descriptors came where 2"):
        open_memory([good], [SIZE, SIZE])
    for fd in (good, *pipe):
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pieces_go_out_and_come_back_in_any_order_with_few_calls(monkeypatch: pytest.MonkeyPatch):
    fd, calls = _memory(), []
    preadv = libc.preadv
    monkeypatch.setattr(libc, "preadv", lambda *given: calls.append(given) or preadv(*given))
    whole = os.pread(fd, SIZE, 0)
    # Three runs of the file, named in an order of their own.
    offsets = [5000, 0, 100, 300, 9000, 5200, 9001]
    sizes = [200, 100, 200, 50, 1, 300, 7]
    buffer = np.zeros(sum(sizes), dtype=np.uint8)
    read_pieces(_pieces(fd, offsets, sizes, buffer))
    wanted = b"".join(whole[at : at + n] for at, n in zip(offsets, sizes, strict=True))
    assert buffer.tobytes() == wanted
    assert len(calls) == 3
    other = _memory()
    write_pieces(_pieces(other, offsets, sizes, buffer))
    assert all(os.pread(other, n, at) == whole[at : at + n] for at, n in zip(offsets, sizes, strict=True))


def test_runs_longer_than_one_call_takes_are_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(imports, "_RUN_BYTES", 1000)
    fd = _memory()
    sizes = [7] * 3000
    offsets = (np.arange(3000) * 7).tolist()
    buffer = np.zeros(21_000, dtype=np.uint8)
    read_pieces(_pieces(fd, offsets, sizes, buffer))
    assert buffer.tobytes() == os.pread(fd, 21_000, 0)


def test_the_parts_of_a_move_are_all_of_it():
    fd = _memory()
    buffer = np.zeros(10_000, dtype=np.uint8)
    pieces = _pieces(fd, (np.arange(100)[::-1] * 300).tolist(), [100] * 100, buffer)
    parts = list(pieces.parts(2500))
    assert len(parts) == 5
    assert sum(part.total for part in parts) == pieces.total == 10_000
    for part in parts:
        read_pieces(part)
    wanted = b"".join(os.pread(fd, 100, at) for at in pieces.offsets.tolist())
    assert buffer.tobytes() == wanted


def test_what_was_cut_off_is_neither_read_nor_written():
    fd, buffer = _memory(), np.zeros(4096, dtype=np.uint8)
    pieces = _pieces(fd, [SIZE - 4096], [4096], buffer)
    os.ftruncate(fd, SIZE - 1000)
    for move in (read_pieces, write_pieces):
        with pytest.raises(ImportProblem) as told:
            move(pieces)
        assert told.value.reason == "IMPORT_TRUNCATED"
    assert os.fstat(fd).st_size == SIZE - 1000


def test_a_hole_is_not_filled():
    fd, buffer = _memory(), np.zeros(4096, dtype=np.uint8)
    pieces = _pieces(fd, [0], [4096], buffer)
    libc.punch_hole(fd, 8192, 4096)
    with pytest.raises(ImportProblem) as told:
        write_pieces(pieces)
    assert told.value.reason == "IMPORT_NOT_POPULATED"
    assert "charged" in told.value.remedy


def test_memory_that_is_sealed_against_writing_is_read_and_not_written():
    fd, buffer = _memory(), np.zeros(4096, dtype=np.uint8)
    pieces = _pieces(fd, [0], [4096], buffer)
    fcntl.fcntl(fd, libc.F_ADD_SEALS, int(libc.Seal.WRITE))
    read_pieces(pieces)
    assert buffer.tobytes() == os.pread(fd, 4096, 0)
    with pytest.raises(ImportProblem) as told:
        write_pieces(pieces)
    assert told.value.reason == "IMPORT_WRITE"


def test_a_claim_is_had_by_one_open_file_at_a_time_and_goes_with_it():
    fd = _memory()
    [ours], [theirs] = open_memory([fd], [SIZE]), open_memory([fd], [SIZE])
    far = (1 << 62) - 1
    assert claims.take(ours, 5)
    assert not claims.take(theirs, 5)
    assert claims.take(theirs, 6)
    assert claims.take(theirs, far)
    claims.give_back(ours, 5)
    assert claims.take(theirs, 5)
    os.close(theirs)
    claims.wait_and_take(ours, 5)
    assert claims.take(ours, far)
    assert os.fstat(fd).st_size == SIZE
