"""Pages that lie in pieces all over the caller's memory, over both payload paths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hoststage.client import (
    Identity,
    PayloadPath,
    PoolKind,
    PoolSpec,
    ScatteredPages,
    SessionLost,
    StackError,
    StackSpec,
    connect,
)
from hoststage.shm.copy import copy_pages
from tests.integration.daemon import Daemon, eventually

SIZES = np.array([512, 8192, 100], dtype=np.int64)
PAGE = int(SIZES.sum())


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="128MiB").start()
        yield daemon
        daemon.kill()


def _scattered(memory: np.ndarray, count: int) -> ScatteredPages:
    """Pages of one piece of each size, the pieces of one size side by side, with gaps and in reverse order."""
    base = memory.__array_interface__["data"][0]
    at, columns = base, []
    for size in SIZES.tolist():
        columns.append([at + page * (size + 64) for page in range(count)][::-1])
        at += count * (size + 64)
    return ScatteredPages(np.array(columns, dtype=np.int64).T.copy(), SIZES, memory)


def _page(memory: np.ndarray, pages: ScatteredPages, row: int) -> bytes:
    base = memory.__array_interface__["data"][0]
    parts = zip(pages.addresses[row].tolist(), SIZES.tolist(), strict=True)
    return b"".join(memory[at - base : at - base + size].tobytes() for at, size in parts)


@pytest.mark.parametrize("path", [PayloadPath.SHM, PayloadPath.INLINE])
def test_pieces_are_gathered_to_one_page_and_scattered_again(node: Daemon, path: PayloadPath) -> None:
    stack = StackSpec(Identity("m", tenant=path.value), (PoolSpec("kv", PoolKind.KV, PAGE, 16),), paths=(path,))
    memory = np.random.default_rng(1).integers(0, 256, 200_000, dtype=np.uint8)
    pages = _scattered(memory, 20)
    keys = [bytes([i]) * 32 for i in range(20)]
    with connect(node.address, stack=stack) as session:
        assert session.store(keys, {"kv": pages}).wait().ok
        with session.load(keys) as loaded:
            assert [bytes(page) for page in loaded.pages("kv")] == [_page(memory, pages, row) for row in range(20)]
        other = np.full(200_000, 7, dtype=np.uint8)
        into = _scattered(other, 20)
        assert session.load(keys[:15], into={"kv": into.cut(5, 20)})
        assert [_page(other, into, row) for row in range(5, 20)] == [_page(memory, pages, row) for row in range(15)]
        # Nothing beside the pieces was touched.
        assert np.count_nonzero(other != 7) <= 15 * PAGE
        assert bytes([7] * PAGE) == _page(other, into, 4)


def test_pieces_that_do_not_make_a_page_are_refused(node: Daemon) -> None:
    stack = StackSpec(Identity("m"), (PoolSpec("kv", PoolKind.KV, PAGE + 1, 16),))
    memory = np.zeros(20_000, dtype=np.uint8)
    with connect(node.address, stack=stack) as session, pytest.raises(StackError, match=f"{PAGE} bytes"):
        session.store([b"k" * 32], {"kv": _scattered(memory, 1)})
    with pytest.raises(StackError, match="int64"):
        ScatteredPages(np.zeros((2, 2), dtype=np.int32), SIZES[:2])
    with pytest.raises(StackError, match="positive"):
        ScatteredPages(np.zeros((2, 2), dtype=np.int64), np.zeros(2, dtype=np.int64))


def test_pieces_of_loaded_pages_are_copied_one_after_the_other(node: Daemon) -> None:
    stack = StackSpec(Identity("m", tenant="pieces"), (PoolSpec("kv", PoolKind.KV, PAGE, 16),))
    memory = np.random.default_rng(2).integers(0, 256, 200_000, dtype=np.uint8)
    pages = _scattered(memory, 12)
    keys = [bytes([i]) * 32 for i in range(12)]
    with connect(node.address, stack=stack) as session:
        assert session.store(keys, {"kv": pages}).wait().ok
        stream = session.load_groups(keys)
        loaded = stream.wait()
        assert loaded
        assert stream.ended
        other = np.full(200_000, 7, dtype=np.uint8)
        into = _scattered(other, 12)
        loaded.copy_pieces("kv", into, slice(1, 2))
        for row in range(12):
            there, wanted = _page(other, into, row), _page(memory, pages, row)
            assert there == bytes([7] * 512) + wanted[512 : 512 + 8192] + bytes([7] * 100)
        loaded.copy_pieces("kv", into, slice(0, 1))
        loaded.copy_pieces("kv", into, slice(2, 3))
        assert all(_page(other, into, row) == _page(memory, pages, row) for row in range(12))
        with pytest.raises(StackError, match="12 pages were loaded"):
            loaded.copy_pieces("kv", into.cut(0, 11))
        with pytest.raises(StackError, match="pool"):
            loaded.copy_pieces("swa", into)
        loaded.release()
        with pytest.raises(ValueError, match="released"):
            loaded.copy_pieces("kv", into)


def test_a_mover_copies_in_the_place_of_the_client_piece_by_piece(node: Daemon) -> None:
    stack = StackSpec(Identity("m", tenant="mover"), (PoolSpec("kv", PoolKind.KV, PAGE, 16),))
    memory = np.random.default_rng(3).integers(0, 256, 200_000, dtype=np.uint8)
    keys = [bytes([i]) * 32 for i in range(8)]
    seen: list[list[int]] = []

    def move(to: np.ndarray, source: np.ndarray, lengths: np.ndarray) -> None:
        seen.append(lengths.tolist())
        copy_pages(0, to, 0, source, lengths)

    def moved(memory: np.ndarray) -> ScatteredPages:
        plain = _scattered(memory, 8)
        return ScatteredPages(plain.addresses, plain.sizes, memory, move)

    by_piece = [size for size in SIZES.tolist() for _ in range(8)]
    with connect(node.address, stack=stack) as session:
        assert session.store(keys, {"kv": moved(memory)}).wait().ok
        assert seen == [by_piece]
        other = np.zeros(200_000, dtype=np.uint8)
        into = moved(other)
        assert session.load(keys, into={"kv": into.cut(0, 8)})
        assert seen == [by_piece, by_piece]
        plain = _scattered(memory, 8)
        assert all(_page(other, into, row) == _page(memory, plain, row) for row in range(8))


def test_pieces_copied_after_the_daemon_died_are_not_vouched_for() -> None:
    stack = StackSpec(Identity("m"), (PoolSpec("kv", PoolKind.KV, PAGE, 16),))
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="128MiB").start()
        memory = np.zeros(200_000, dtype=np.uint8)
        into = _scattered(memory, 8)
        keys = [bytes([i]) * 32 for i in range(8)]
        with connect(daemon.address, stack=stack) as session:
            assert session.store(keys, {"kv": into}).wait().ok
            match = session.lookup(keys, pin_seconds=20)
            assert match.standing
            loaded = session.load(keys, pin=match)
            loaded.check()
            daemon.kill()
            eventually(lambda: not match.standing)
            with pytest.raises(SessionLost):
                loaded.copy_pieces("kv", into)
            loaded.release()
