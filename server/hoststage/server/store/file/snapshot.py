"""The index as a file, so that a start after a clean close need not read the trailers.

It is written when a store closes and removed as soon as one opens: a snapshot that exists is true. Layout,
all integers little-endian: the file header, one record for each segment, one for each page (in the order of
last use), and the xxh3_64 of everything before it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import xxhash

from hoststage.server.store.file.layout import FORMAT_VERSION, SegmentHeader
from hoststage.server.store.file.segment import sync_directory

log = structlog.get_logger(__name__)

_NAME: Final = "INDEX"
_MAGIC: Final = b"HSTINDEX"
# magic, version, segments, pages
_HEAD: Final = struct.Struct("<8sIQQ")
# number, namespace, pool, slot bytes, slots
_SEGMENT: Final = struct.Struct("<Q32s64sQQ")
# segment, slot, page bytes, sequence, checksum, commit id, key length, key
_PAGE: Final = struct.Struct("<QQQQQ16sB64s")
_CHECKSUM: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class PageRecord:
    """One page: the number of its segment, its slot there, and what the index says of it."""

    segment: int
    slot: int
    page_bytes: int
    sequence: int
    checksum: int
    commit_id: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The segments by number, and the pages, least recently used first."""

    headers: Mapping[int, SegmentHeader]
    records: list[PageRecord]


def save(base: Path, headers: Mapping[int, SegmentHeader], records: Iterable[PageRecord]) -> None:
    """Write a snapshot under ``base``, durably and in one step. Raises ``OSError``."""
    body = bytearray()
    count = 0
    for number, header in headers.items():
        body += _SEGMENT.pack(
            number, bytes.fromhex(header.namespace), header.pool.encode(), header.slot_bytes, header.slots
        )
    for record in records:
        count += 1
        body += _PAGE.pack(
            record.segment,
            record.slot,
            record.page_bytes,
            record.sequence,
            record.checksum,
            record.commit_id,
            len(record.key),
            record.key,
        )
    data = _HEAD.pack(_MAGIC, FORMAT_VERSION, len(headers), count) + body
    temporary = base / f"{_NAME}.new"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.write(_CHECKSUM.pack(xxhash.xxh3_64_intdigest(data)))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(base / _NAME)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(base)


def load(base: Path) -> Snapshot | None:
    """Return the snapshot under ``base``, ``None`` where there is no whole one. Raises ``OSError``."""
    try:
        data = (base / _NAME).read_bytes()
    except FileNotFoundError:
        return None
    snapshot = _parse(data)
    if snapshot is None:
        log.warning("store_snapshot_damaged", path=str(base / _NAME), bytes=len(data))
    return snapshot


def invalidate(base: Path) -> None:
    """Remove the snapshot so that not even a power failure brings it back. Raises ``OSError``."""
    for name in (_NAME, f"{_NAME}.new"):
        (base / name).unlink(missing_ok=True)
    sync_directory(base)


def _parse(data: bytes) -> Snapshot | None:
    end = len(data) - _CHECKSUM.size
    if end < _HEAD.size:
        return None
    magic, version, segments, pages = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != FORMAT_VERSION:
        return None
    middle = _HEAD.size + segments * _SEGMENT.size
    if end != middle + pages * _PAGE.size:
        return None
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end]):
        return None
    headers = {
        number: SegmentHeader(namespace.hex(), pool.rstrip(b"\0").decode(), slot_bytes, slots)
        for number, namespace, pool, slot_bytes, slots in _SEGMENT.iter_unpack(data[_HEAD.size : middle])
    }
    records = [
        PageRecord(segment, slot, page_bytes, sequence, checksum, commit_id, key[:key_bytes])
        for segment, slot, page_bytes, sequence, checksum, commit_id, key_bytes, key in _PAGE.iter_unpack(
            data[middle:end]
        )
    ]
    return Snapshot(headers, records)
