"""Operations on imported memory as plain data, and their conversion to and from the protobuf messages.

Pages of one pool are tables: which memfd each piece of a page lies in and how large it is, the same for every page, and the
offset of every piece of every page. What comes off the wire is checked for its form here; whether it lies within the memory, only the
daemon can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

I64: TypeAlias = NDArray[np.int64]

MAX_PIECES = 1 << 16
"""Pieces of one page; with the limit of a piece's bytes their sum can never overflow."""
MAX_PIECE_BYTES = 1 << 30
MAX_PLACES = 1 << 17
"""Pieces of all pages of one request: what is read from a message in a few milliseconds."""
MAX_OFFSET = (1 << 62) - 1


class PlacesError(ValueError):
    """Places that mean nothing. `field`, `value` and `remedy` say what, and what would do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field} is {value}: {remedy}")


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where pages of the pool at place `pool` of the stack lie in the memory `import_id`.

    memfds: `int64[pieces]`, index of the memfd of each piece. sizes: `int64[pieces]`, its bytes. offsets: `int64[pages, pieces]`, where it begins. A
    page is its pieces one after the other.
    """

    import_id: int
    pool: int
    memfds: I64
    sizes: I64
    offsets: I64

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.sizes.sum())

    def cut(self, start: int, end: int) -> Places:
        """Return the pages `[start, end)`."""
        return Places(self.import_id, self.pool, self.memfds, self.sizes, self.offsets[start:end])


@dataclass(frozen=True, slots=True, eq=False)
class ImportedStore:
    """Store a span from imported memory: one table of places a range, in the ranges' order. `claim`: see the message; 0 for none."""

    span: ops.Span
    pages: tuple[Places, ...]
    wait_ms: int = 0
    claim: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ImportedLoad:
    """Load into imported memory: at most one table of places a pool. `claim`: see the message; 0 for none."""

    load: ops.Load
    into: tuple[Places, ...]
    claim: int = 0


@dataclass(frozen=True, slots=True)
class ImportedLoadReply:
    """How such a load ended; `ranges`: which pages came, one entry a pool."""

    outcome: ops.Outcome
    prefix: int = 0
    ranges: tuple[ops.PoolRange, ...] = ()
    detail: str = ""


def places_to_proto(places: Places) -> pb.ImportedPages:
    """Return the message of a table of places."""
    return pb.ImportedPages(
        import_id=places.import_id,
        pool=places.pool,
        memfds=places.memfds.tolist(),
        offsets=places.offsets.ravel().tolist(),
        piece_bytes=places.sizes.tolist(),
    )


def places_from_proto(m: pb.ImportedPages, at: str) -> Places:
    """Return the table in a message; `at` names it in errors. Raises `PlacesError`."""
    pieces = len(m.piece_bytes)
    if pieces == 0 or len(m.memfds) != pieces:
        raise PlacesError(
            f"{at}.memfds",
            f"{len(m.memfds)} entries for {pieces} of piece_bytes",
            "name one memfd for each piece of a page",
        )
    if pieces > MAX_PIECES:
        raise PlacesError(f"{at}.piece_bytes", f"{pieces} entries", f"a page has at most {MAX_PIECES} pieces")
    if len(m.offsets) % pieces:
        raise PlacesError(
            f"{at}.offsets", f"{len(m.offsets)} entries", f"name {pieces} offsets, one a piece, for each page"
        )
    sizes = np.fromiter(m.piece_bytes, dtype=np.uint64, count=pieces)
    offsets = np.fromiter(m.offsets, dtype=np.uint64, count=len(m.offsets))
    if not bool(((sizes > 0) & (sizes <= MAX_PIECE_BYTES)).all()):
        raise PlacesError(f"{at}.piece_bytes", sizes.tolist(), f"pieces have 1 to {MAX_PIECE_BYTES} bytes")
    if len(offsets) and int(offsets.max()) > MAX_OFFSET:
        raise PlacesError(f"{at}.offsets", int(offsets.max()), "name offsets within the memfd")
    memfds = np.fromiter(m.memfds, dtype=np.int64, count=pieces)
    table = offsets.astype(np.int64).reshape(-1, pieces)
    return Places(m.import_id, m.pool, memfds, sizes.astype(np.int64), table)


def _tables(pages: Sequence[pb.ImportedPages], field: str) -> tuple[Places, ...]:
    count = sum(len(p.offsets) for p in pages)
    if count > MAX_PLACES:
        raise PlacesError(f"{field}.offsets", f"{count} pieces", f"move at most {MAX_PLACES} pieces in one request")
    return tuple(places_from_proto(p, f"{field}[{i}]") for i, p in enumerate(pages))


def _claim(value: int) -> int:
    if value > MAX_OFFSET:
        raise PlacesError("claim", value, "name a number less than 2^62, or 0 for no claim")
    return value


def store_to_proto(m: ImportedStore) -> pb.ImportedStore:
    """Return the message of a store."""
    pages = [places_to_proto(p) for p in m.pages]
    return pb.ImportedStore(span=convert.span_to_proto(m.span), pages=pages, wait_ms=m.wait_ms, claim=m.claim)


def store_from_proto(m: pb.ImportedStore) -> ImportedStore:
    """Return the store in a message. Raises `PlacesError`."""
    return ImportedStore(convert.span_from_proto(m.span), _tables(m.pages, "pages"), m.wait_ms, _claim(m.claim))


def load_to_proto(m: ImportedLoad) -> pb.ImportedLoad:
    """Return the message of a load."""
    into = [places_to_proto(p) for p in m.into]
    return pb.ImportedLoad(load=convert.load_to_proto(m.load), into=into, claim=m.claim)


def load_from_proto(m: pb.ImportedLoad) -> ImportedLoad:
    """Return the load in a message. Raises `PlacesError`."""
    return ImportedLoad(convert.load_from_proto(m.load), _tables(m.into, "into"), _claim(m.claim))


def load_reply_to_proto(m: ImportedLoadReply) -> pb.ImportedLoadReply:
    """Return the message of a load's end."""
    return pb.ImportedLoadReply(
        outcome=int(m.outcome),  # type: ignore[arg-type]
        prefix=m.prefix,
        ranges=[pb.PoolRange(pool=r.pool, first=r.first, count=r.count) for r in m.ranges],
        detail=m.detail,
    )


def load_reply_from_proto(m: pb.ImportedLoadReply) -> ImportedLoadReply:
    """Return the load's end in a message."""
    ranges = tuple(ops.PoolRange(r.pool, r.first, r.count) for r in m.ranges)
    return ImportedLoadReply(ops.Outcome(m.outcome), m.prefix, ranges, m.detail)
