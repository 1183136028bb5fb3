"""The bytes on disk: segment files, their header, and the trailer behind every page.

A segment file holds pages of one size class of one pool::

    +-----------------+---------------------------+---------------------------+-----
    | segment header  | slot 0: page    | trailer | slot 1: page    | trailer | ...
    | one block       | rounded up      | 1 block | rounded up      | 1 block |
    +-----------------+---------------------------+---------------------------+-----

The block that describes a page lies *behind* it. One ``pwritev([page, trailer])`` writes both; the kernel
works through a vector in order, so when the daemon is killed in the middle a trailer on disk implies the
whole page before it, and recovery can trust trailers without reading pages. (After a power failure it cannot,
but every read verifies the page's checksum.) A free slot is a hole: its trailer reads as zeros, which is no
trailer.

All integers are little-endian. Checksums are xxh3_64.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from hoststage.server.store.base import ALIGNMENT

BLOCK: Final = ALIGNMENT
FORMAT_VERSION: Final = 1
MAX_SLOTS: Final = 1 << 22

_SEGMENT_MAGIC: Final = b"HSTSEGMT"
_TRAILER_MAGIC: Final = b"HSTPAGE\n"
# magic, version, namespace, pool, slot bytes, slots
_SEGMENT: Final = struct.Struct("<8sI32s64sQQ")
# magic, version, key length, page bytes, sequence, page checksum, commit id, key, namespace, pool
_TRAILER: Final = struct.Struct("<8sIIQQQ16s64s32s64s")
_CHECKSUM: Final = struct.Struct("<Q")


def round_up(size: int) -> int:
    """Return the smallest multiple of ``BLOCK`` that is at least ``size``."""
    return -(-size // BLOCK) * BLOCK


def slot_bytes_for(page_bytes: int) -> int:
    """Return the size of the slot that a page of ``page_bytes`` takes, trailer included."""
    return round_up(page_bytes) + BLOCK


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first block of a segment file says."""

    namespace: str
    pool: str
    slot_bytes: int
    slots: int

    @property
    def file_bytes(self) -> int:
        """The apparent size of the file."""
        return BLOCK + self.slots * self.slot_bytes

    def pack(self) -> bytes:
        """Return the header as one block."""
        body = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            FORMAT_VERSION,
            bytes.fromhex(self.namespace),
            self.pool.encode(),
            self.slot_bytes,
            self.slots,
        )
        return _sealed(body)


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the block behind a page says about it."""

    namespace: str
    pool: str
    key: bytes
    page_bytes: int
    sequence: int
    checksum: int
    commit_id: bytes

    def pack(self) -> bytes:
        """Return the trailer as one block."""
        body = _TRAILER.pack(
            _TRAILER_MAGIC,
            FORMAT_VERSION,
            len(self.key),
            self.page_bytes,
            self.sequence,
            self.checksum,
            self.commit_id,
            self.key,
            bytes.fromhex(self.namespace),
            self.pool.encode(),
        )
        return _sealed(body)


def unpack_segment(block: bytes | memoryview) -> SegmentHeader | None:
    """Return the header in ``block``, or ``None`` where it holds none that is whole."""
    if not _is_sealed(block, _SEGMENT.size):
        return None
    magic, version, namespace, pool, slot_bytes, slots = _SEGMENT.unpack_from(block)
    if magic != _SEGMENT_MAGIC or version != FORMAT_VERSION:
        return None
    if slot_bytes % BLOCK or slot_bytes < 2 * BLOCK or not 1 <= slots <= MAX_SLOTS:
        return None
    return SegmentHeader(namespace.hex(), pool.rstrip(b"\0").decode(), slot_bytes, slots)


def unpack_trailer(block: bytes | memoryview) -> Trailer | None:
    """Return the trailer in ``block``, or ``None`` where it holds none that is whole."""
    if not _is_sealed(block, _TRAILER.size):
        return None
    magic, version, key_bytes, page_bytes, sequence, checksum, commit_id, key, namespace, pool = _TRAILER.unpack_from(
        block
    )
    if magic != _TRAILER_MAGIC or version != FORMAT_VERSION or not 1 <= key_bytes <= len(key):
        return None
    return Trailer(
        namespace.hex(),
        pool.rstrip(b"\0").decode(),
        key[:key_bytes],
        page_bytes,
        sequence,
        checksum,
        commit_id,
    )


def _sealed(body: bytes) -> bytes:
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(BLOCK, b"\0")


def _is_sealed(block: bytes | memoryview, size: int) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(block, size)
    return bool(checksum == xxhash.xxh3_64_intdigest(block[:size]))
