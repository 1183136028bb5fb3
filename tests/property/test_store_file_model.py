"""Any sequence of calls leaves the file store saying what a dict would say, also after reopening it."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store_support import NAMESPACE, OTHER, commit, content, options, page, target

from hoststage.server.store import DirectIo, ReadOutcome, Store, WriteOutcome
from hoststage.server.store.base import NO_COMMIT
from hoststage.server.store.file import FileStore
from hoststage.server.store.file.layout import (
    BLOCK,
    SegmentHeader,
    Trailer,
    slot_bytes_for,
    unpack_segment,
    unpack_trailer,
)
from hoststage.server.store.memory import MemoryStore

NAMESPACES = st.sampled_from([NAMESPACE, OTHER])
POOLS = st.sampled_from(["kv", "swa", "draft"])
KEYS = st.sampled_from([bytes([n]) * (n + 1) for n in range(6)])
SIZES = st.sampled_from([1, 4095, 4096, 5000, 12288])

Model = dict[tuple[str, str, bytes], tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Write:
    namespace: str
    pages: list[tuple[str, bytes, int]]
    aligned: bool


@dataclass(frozen=True, slots=True)
class Delete:
    namespace: str
    pool: str
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class Clear:
    namespace: str


@dataclass(frozen=True, slots=True)
class Reopen:
    with_snapshot: bool


PAGES = st.lists(st.tuples(POOLS, KEYS, SIZES), min_size=1, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.builds(Write, NAMESPACES, PAGES, st.booleans()),
        st.builds(Write, NAMESPACES, PAGES, st.booleans()),
        st.builds(Delete, NAMESPACES, POOLS, st.lists(KEYS, max_size=3)),
        st.builds(Clear, NAMESPACES),
        st.builds(Reopen, st.booleans()),
    ),
    max_size=14,
)


async def apply(store: Store, model: Model, step: Write | Delete | Clear, number: int) -> None:
    """Do one step with the store and with the model, and compare what they answer."""
    match step:
        case Write(namespace, pages, aligned):
            commit_id = commit(number)
            writes = [
                page(pool, key, content((number, at), size), commit_id, aligned=aligned)
                for at, (pool, key, size) in enumerate(pages)
            ]
            results = await store.write_from(namespace, writes)
            assert {result.outcome for result in results} == {WriteOutcome.STORED}
            for write in writes:
                model[namespace, write.pool, write.key] = (bytes(write.data), commit_id)
        case Delete(namespace, pool, keys):
            doomed = {(namespace, pool, key) for key in keys} & model.keys()
            assert await store.delete(namespace, pool, keys) == len(doomed)
            for name in doomed:
                del model[name]
        case Clear(namespace):
            doomed = {name for name in model if name[0] == namespace}
            assert await store.clear(namespace) == len(doomed)
            for name in doomed:
                del model[name]


async def compare(store: Store, model: Model) -> None:
    """Check that the store holds exactly the model's pages."""
    assert store.stats().pages == len(model)
    for (namespace, pool, key), (data, commit_id) in model.items():
        read = target(pool, key, len(data))
        (result,) = await store.read_into(namespace, [read])
        assert (result.outcome, result.commit_id, bytes(read.into)) == (ReadOutcome.HIT, commit_id, data)
        assert await store.exists(namespace, pool, [key]) == [commit_id]
    for namespace in (NAMESPACE, OTHER):
        for pool in ("kv", "swa", "draft"):
            keys = [bytes([n]) * (n + 1) for n in range(6)]
            for key, found in zip(keys, await store.exists(namespace, pool, keys), strict=True):
                assert (found is not None) == ((namespace, pool, key) in model)


async def drive_file(root: Path, steps: list[Write | Delete | Clear | Reopen], direct: DirectIo) -> None:
    settings = options(direct_io=direct, segment_bytes=8 * BLOCK)
    model: Model = {}
    store = await FileStore.open(root, settings)
    try:
        for number, step in enumerate(steps):
            if isinstance(step, Reopen):
                await store.close()
                if not step.with_snapshot:
                    (root / "v1" / "INDEX").unlink()
                store = await FileStore.open(root, settings)
                assert store.stats().corrupt == 0
            else:
                await apply(store, model, step, number)
        await compare(store, model)
        await store.delete(NAMESPACE, "kv", [])  # returns when all that waits has been freed
        slots = sum(slot_bytes_for(len(data)) for data, _ in model.values())
        assert store.stats().bytes == slots
    finally:
        await store.close()


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([DirectIo.AUTO, DirectIo.OFF]))
def test_the_file_store_behaves_like_a_dict(steps: list[Write | Delete | Clear | Reopen], direct: DirectIo) -> None:
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(drive_file(Path(root), steps, direct))


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_the_store_in_memory_behaves_like_a_dict(steps: list[Write | Delete | Clear | Reopen]) -> None:
    async def drive() -> None:
        store = MemoryStore()
        model: Model = {}
        for number, step in enumerate(steps):
            if not isinstance(step, Reopen):
                await apply(store, model, step, number)
        await compare(store, model)

    asyncio.run(drive())


TRAILERS = st.builds(
    Trailer,
    st.sampled_from([NAMESPACE, OTHER]),
    st.from_regex(r"[a-z0-9_]{1,64}", fullmatch=True),
    st.binary(min_size=1, max_size=64),
    st.integers(1, 1 << 40),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.one_of(st.just(NO_COMMIT), st.binary(min_size=16, max_size=16)),
)


@given(TRAILERS)
def test_a_trailer_comes_back_as_it_was(trailer: Trailer) -> None:
    block = trailer.pack()
    assert len(block) == BLOCK
    assert unpack_trailer(block) == trailer
    assert unpack_segment(block) is None


@given(TRAILERS, st.integers(0, 200), st.integers(1, 255))
def test_a_trailer_with_any_byte_changed_is_none(trailer: Trailer, at: int, change: int) -> None:
    block = bytearray(trailer.pack())
    block[at] ^= change
    assert unpack_trailer(bytes(block)) is None


def test_zeros_are_neither_a_trailer_nor_a_segment() -> None:
    assert unpack_trailer(bytes(BLOCK)) is None
    assert unpack_segment(bytes(BLOCK)) is None


@given(st.from_regex(r"[a-z0-9_]{1,64}", fullmatch=True), st.integers(2, 1 << 20), st.integers(1, 1 << 20))
def test_a_segment_header_comes_back_as_it_was(pool: str, slot_blocks: int, slots: int) -> None:
    header = SegmentHeader(NAMESPACE, pool, slot_blocks * BLOCK, slots)
    assert unpack_segment(header.pack()) == header
