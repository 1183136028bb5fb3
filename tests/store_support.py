"""Pages whose bytes follow from their name, and what the store's tests share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from hoststage.server.store import (
    PageRead,
    PageReadResult,
    PageWrite,
    ReadOutcome,
    Store,
    StoreOptions,
    WriteOutcome,
)
from hoststage.server.store.file import FileStore
from hoststage.server.store.file.syscalls import AlignedBuffer

NAMESPACE = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
KIB = 1 << 10
MIB = 1 << 20


def options(**changes: object) -> StoreOptions:
    """Return small options: 256 MiB, a floor of nothing, two threads."""
    settings: dict[str, object] = {"limit_bytes": 256 * MIB, "min_free_bytes": 0, "io_threads": 2}
    return StoreOptions(**{**settings, **changes})  # type: ignore[arg-type]


def content(name: object, size: int) -> bytes:
    """Return ``size`` bytes that follow from ``name``, and differ everywhere from those of other names."""
    return hashlib.shake_128(repr(name).encode()).digest(size)


def commit(name: object) -> bytes:
    """Return the commit id of a name."""
    return content(("commit", name), 16)


def stride(size: int) -> int:
    """Return the distance of slots for pages of this size."""
    return -(-size // 4096) * 4096


def page(pool: str, key: bytes, data: bytes, commit_id: bytes, *, aligned: bool = True) -> PageWrite:
    """Return a page to write, in memory fit for direct I/O or not."""
    if not aligned:
        return PageWrite(pool, key, commit_id, memoryview(data), 0, len(data))
    buffer = AlignedBuffer(stride(len(data)))
    buffer.view[: len(data)] = data
    return PageWrite(pool, key, commit_id, buffer.view[: len(data)], buffer.address, stride(len(data)))


def target(pool: str, key: bytes, size: int, *, aligned: bool = True) -> PageRead:
    """Return a read into new memory of this size."""
    if not aligned:
        return PageRead(pool, key, memoryview(bytearray(size)), 0, size)
    buffer = AlignedBuffer(stride(size))
    return PageRead(pool, key, buffer.view[:size], buffer.address, stride(size))


async def put(store: Store, *pages: PageWrite, namespace: str = NAMESPACE) -> None:
    """Write pages that must be stored."""
    results = await store.write_from(namespace, pages)
    assert [result.outcome for result in results] == [WriteOutcome.STORED] * len(pages), results


async def get(
    store: Store, pool: str, key: bytes, size: int, *, namespace: str = NAMESPACE, aligned: bool = True
) -> tuple[PageReadResult, bytes]:
    """Read one page."""
    read = target(pool, key, size, aligned=aligned)
    (result,) = await store.read_into(namespace, [read])
    return result, bytes(read.into)


async def outcomes(store: Store, pool: str, keys: Sequence[bytes], size: int) -> list[ReadOutcome]:
    """Read some pages and return only how that went."""
    results = await store.read_into(NAMESPACE, [target(pool, key, size) for key in keys])
    return [result.outcome for result in results]


@contextlib.asynccontextmanager
async def opened(root: Path, **changes: object) -> AsyncIterator[FileStore]:
    """Open a file store for the length of a block."""
    store = await FileStore.open(root, options(**changes))
    try:
        yield store
    finally:
        await store.close()


def segments(root: Path) -> list[Path]:
    """Return the segment files under a store's directory."""
    return sorted(root.glob("v1/*/*/*.seg"))


def names(root: Path) -> set[str]:
    """Return the names of all files and folders under a store's directory."""
    return {path.name for path in root.rglob("*")}


def blocks(root: Path) -> int:
    """Return the bytes that the segment files really take."""
    return sum(path.stat().st_blocks * 512 for path in segments(root))


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount something for the length of a block; skip the test where that is not permitted."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["mount", *arguments, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)


@contextlib.contextmanager
def ext4(folder: Path, size: int) -> Iterator[Path]:
    """Mount a new ext4 of this size for the length of a block."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    made = subprocess.run(
        ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], capture_output=True, timeout=60, check=False
    )
    if made.returncode != 0:
        pytest.skip("mkfs.ext4 does not work here")
    with mounted(folder, "-o", "loop", str(image)):
        yield folder
