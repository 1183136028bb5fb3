"""Keys and pages as callers hand them in: packed keys, rows of host or device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from hoststage.client import cuda
from hoststage.client._arenas import Arena
from hoststage.client.errors import StackError
from hoststage.shm.copy import Offsets, UnaddressableBuffer, address_of, copy_bytes, copy_pages, copy_range
from hoststage.shm.pageindex import Slots, array_of, numbers
from hoststage.v1 import ops
from hoststage.v1.ops import NO_SLOT, U32

Keys: TypeAlias = Sequence[bytes] | bytes
"""Keys of one length each, as a list, or as one bytes object with keys of 32 bytes one after the other."""

Rows: TypeAlias = Any
"""Pages of one pool: a list of buffers of one page each, or one C-contiguous array or tensor whose first axis is the page, or `ScatteredPages`."""

Mover: TypeAlias = Callable[[Offsets, Offsets, Offsets], object]
"""Copies bytes: called with the addresses to write, those to read, and the lengths; `int64[n]` each."""

PACKED_KEY_BYTES = 32
_FEW = 2
_LARGE = 4 << 20
MAX_KEY_BYTES = 64


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Keys packed one after the other."""

    packed: bytes
    key_bytes: int

    def __len__(self) -> int:
        return len(self.packed) // self.key_bytes

    def cut(self, start: int, end: int) -> bytes:
        """Return the packed keys `[start, end)`."""
        if start == 0 and end * self.key_bytes == len(self.packed):
            return self.packed
        return self.packed[start * self.key_bytes : end * self.key_bytes]


def pack_keys(keys: Keys) -> KeyRun:
    """Return keys packed. Raises `StackError` where there are none, they differ in length, or are too long."""
    if isinstance(keys, bytes | bytearray | memoryview):
        packed = bytes(keys)
        if not packed or len(packed) % PACKED_KEY_BYTES:
            raise StackError(
                "keys", f"{len(packed)} packed bytes", f"pass whole keys of {PACKED_KEY_BYTES} bytes, or a list of keys"
            )
        return KeyRun(packed, PACKED_KEY_BYTES)
    if not keys:
        raise StackError("keys", [], "pass at least one key")
    size = len(keys[0])
    if len(keys) == 1 and 1 <= size <= MAX_KEY_BYTES:
        return KeyRun(bytes(keys[0]), size)
    sizes = set(map(len, keys))
    if len(sizes) > 1 or not 1 <= size <= MAX_KEY_BYTES:
        raise StackError(
            "keys", f"keys of {sorted(sizes)} bytes", f"pass keys of one length, from 1 to {MAX_KEY_BYTES} bytes"
        )
    return KeyRun(b"".join(keys), size)


def adjacent(given: Slots) -> bool:
    """Return whether every slot is the next one after the one before it (none of them `NO_SLOT`)."""
    if isinstance(given, range):
        return given.step == 1
    slots = array_of(given)
    first, last = int(slots[0]), int(slots[-1])
    return last != NO_SLOT and last - first == len(slots) - 1 and bool((slots[1:] - slots[:-1] == 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredPages:
    """Pages of one pool whose bytes lie in several places of this process's memory, as layer-first layouts have them.

    addresses: `int64[pages, pieces]`. sizes: `int64[pieces]`, bytes of each piece, the same for every page; a page is its pieces one
    after the other. keep: whatever holds the memory alive and mapped while the pages are used; the addresses are taken at their word. mover: what
    copies, where a plain copy cannot reach the memory (a device's); piece by piece of all pages, and by default done when it returns.

    :raises StackError: where the two do not fit each other.
    """

    addresses: Offsets
    sizes: Offsets
    keep: object = None
    mover: Mover | None = None

    def __post_init__(self) -> None:
        fits = (
            self.addresses.ndim == 2 and self.sizes.shape == self.addresses.shape[1:] and bool((self.sizes > 0).all())
        )
        if not fits or self.addresses.dtype != np.int64 or self.sizes.dtype != np.int64:
            found = f"{self.addresses.dtype}{self.addresses.shape} with sizes {self.sizes.dtype}{self.sizes.shape}"
            raise StackError("pages", found, "pass int64[pages, pieces] and positive sizes int64[pieces]")

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.sizes.sum())

    def cut(self, start: int, end: int) -> ScatteredPages:
        """Return the pages `[start, end)`."""
        return ScatteredPages(self.addresses[start:end], self.sizes, self.keep, self.mover)

    @property
    def offsets(self) -> Offsets:
        """Place of each piece in its page."""
        return np.cumsum(self.sizes) - self.sizes


class PageRows:
    """Rows of one pool, addressed. Keeps the caller's memory alive as long as it is used. `threads`: how many may share a large copy."""

    def __init__(self, rows: Rows, pool: str, page_bytes: int, *, writable: bool, threads: int = 1) -> None:
        self._keep = rows
        self._page_bytes = page_bytes
        self._threads = threads
        self._addresses: Offsets | None = None
        # Where rows lie one after the other, the first one's address.
        self._base = 0
        self._tensors: list[Any] = []
        self._scattered: ScatteredPages | None = None
        if isinstance(rows, ScatteredPages):
            self.count = len(rows)
            self._take_scattered(rows, pool)
        elif isinstance(rows, list | tuple):
            self.count = len(rows)
            self._take_list(rows, pool, writable)
        else:
            self.count = self._take_array(rows, pool, writable)

    def _take_list(self, rows: Sequence[Any], pool: str, writable: bool) -> None:
        if any(cuda.on_device(row) for row in rows):
            self._tensors = [self._device_row(row, f"pages[{pool!r}][{i}]") for i, row in enumerate(rows)]
            return
        addresses = np.empty(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            addresses[i] = self._address(row, f"pages[{pool!r}][{i}]", self._page_bytes, writable)
        self._addresses = addresses

    def _take_scattered(self, rows: ScatteredPages, pool: str) -> None:
        if rows.page_bytes != self._page_bytes:
            raise StackError(
                f"pages[{pool!r}]", f"{rows.page_bytes} bytes", f"pages of this pool have {self._page_bytes} bytes"
            )
        self._scattered = rows

    def _take_array(self, rows: Any, pool: str, writable: bool) -> int:
        name = f"pages[{pool!r}]"
        shape = getattr(rows, "shape", ())
        if not shape:
            raise StackError(
                name, type(rows).__name__, "pass a list of buffers, or an array whose first axis is the page"
            )
        if cuda.on_device(rows):
            self._tensors = [self._device_row(row, name) for row in rows]
        else:
            base, size = self._address(rows, name, shape[0] * self._page_bytes, writable), self._page_bytes
            self._addresses = np.arange(base, base + shape[0] * size, size, dtype=np.int64)
            self._base = base
        return int(shape[0])

    def _address(self, buffer: Any, name: str, size: int, writable: bool) -> int:
        try:
            place = address_of(buffer)
        except UnaddressableBuffer as error:
            # A slice of a wider row is neither contiguous nor of the right size: the size is what its owner must see.
            given = getattr(buffer, "nbytes", size)
            if given != size:
                raise StackError(name, f"{given} bytes", f"{self._due(size)}; {error}") from error
            raise StackError(name, type(buffer).__name__, str(error)) from error
        if place.nbytes != size:
            raise StackError(name, f"{place.nbytes} bytes", self._due(size))
        if writable and place.readonly:
            raise StackError(name, "read-only", "pass memory that may be written")
        return place.address

    def _due(self, size: int) -> str:
        return f"{size} bytes are due: pages of this pool have {self._page_bytes}"

    def _device_row(self, row: Any, name: str) -> Any:
        if not cuda.on_device(row) or not row.is_contiguous() or row.nbytes != self._page_bytes:
            raise StackError(
                name, "a row", f"pass contiguous CUDA tensors of {self._page_bytes} bytes a page throughout"
            )
        return row

    def to_arena(self, first: int, arena: Arena, slots: U32) -> None:
        """Copy rows from `first` on into slots; rows whose slot is `NO_SLOT` are skipped."""
        self._copy(first, arena, slots, to_arena=True)

    def from_arena(self, first: int, arena: Arena, slots: Slots, pieces: slice = slice(None)) -> None:
        """Copy slots into rows from `first` on; of scattered pages, those `pieces` of each."""
        self._copy(first, arena, slots, to_arena=False, pieces=pieces)

    def _copy(self, first: int, arena: Arena, given: Slots, *, to_arena: bool, pieces: slice = slice(None)) -> None:
        if self._addresses is not None and len(given) <= _FEW and (self._threads == 1 or self._page_bytes < _LARGE):
            self._copy_few(first, arena, numbers(given), to_arena=to_arena)
            return
        if self._base and arena.stride == self._page_bytes and adjacent(given):
            self._copy_run(first, arena, int(given[0]), len(given), to_arena=to_arena)
            return
        slots = array_of(given)
        wanted = np.flatnonzero(slots != NO_SLOT)
        if not len(wanted):
            return
        if self._tensors:
            pages = arena.views(slots[wanted])
            cuda.copy_rows(
                [(self._tensors[first + i], page) for i, page in zip(wanted.tolist(), pages, strict=True)],
                to_device=not to_arena,
            )
            return
        # It keeps the range mapped, should the session be lost and its arenas given back meanwhile.
        guard = arena.guard()
        rows, places, lengths = self._places(first + wanted, arena.addresses(slots[wanted]), pieces)
        to, source = (places, rows) if to_arena else (rows, places)
        if self._scattered is not None and self._scattered.mover is not None:
            self._scattered.mover(to, source, np.asarray(lengths))
        else:
            copy_pages(0, to, 0, source, lengths, threads=self._threads)
        del guard

    def _copy_few(self, first: int, arena: Arena, slots: Sequence[int], *, to_arena: bool) -> None:
        """The same for whole rows of host memory, without numpy's fixed cost a call."""
        assert self._addresses is not None
        base, stride, size, guard = arena.mapping.address, arena.stride, self._page_bytes, arena.guard()
        for i, slot in enumerate(slots):
            if slot == NO_SLOT:
                continue
            row, place = int(self._addresses[first + i]), base + slot * stride
            if to_arena:
                copy_bytes(place, row, size)
            else:
                copy_bytes(row, place, size)
        del guard

    def _copy_run(self, first: int, arena: Arena, start: int, count: int, *, to_arena: bool) -> None:
        """The same where both sides are one range: `count` slots from `start` on."""
        size, guard = self._page_bytes, arena.guard()
        row, place = self._base + first * size, arena.mapping.address + start * size
        copy_range(*((place, row) if to_arena else (row, place)), count * size, threads=self._threads)
        del guard

    def _places(self, wanted: Offsets, slots: Offsets, chosen: slice) -> tuple[Offsets, Offsets, Offsets | int]:
        """Return where the chosen pieces of the wanted rows lie here, where in the slots at those addresses, and their lengths."""
        if self._scattered is None:
            assert self._addresses is not None
            return self._addresses[wanted], slots, self._page_bytes
        pieces = self._scattered
        rows = pieces.addresses[wanted][:, chosen]
        places = slots[:, None] + pieces.offsets[chosen]
        lengths = np.broadcast_to(pieces.sizes[chosen], rows.shape)
        if pieces.mover is not None:
            # One piece of all pages after the other: equal lengths at equal steps, which a device copies in one go.
            rows, places, lengths = rows.T, places.T, lengths.T
        return rows.ravel(), places.ravel(), lengths.ravel()

    @property
    def on_host(self) -> bool:
        """Whether the rows are memory that this process itself reads and writes: no tensors of a device, no pieces that a mover moves."""
        return not self._tensors and (self._scattered is None or self._scattered.mover is None)

    def views(self, rows: Sequence[int]) -> list[memoryview]:
        """Return the bytes of host rows as they follow each other, rows that are adjacent in memory in one view.

        Valid while the rows are; writable whatever the caller's memory is, so only for rows that were checked for what is done with them.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        if not len(wanted):
            return []
        at, _, lengths = self._places(wanted, np.zeros(len(wanted), dtype=np.int64), slice(None))
        sizes = np.broadcast_to(np.asarray(lengths, dtype=np.int64), at.shape)
        starts = np.flatnonzero(np.concatenate(([True], at[1:] != at[:-1] + sizes[:-1])))
        runs = zip(at[starts].tolist(), np.add.reduceat(sizes, starts).tolist(), strict=True)
        return [memoryview((ctypes.c_char * size).from_address(address)).cast("B") for address, size in runs]

    def row_bytes(self, i: int) -> bytes:
        """Return the bytes of one row, for messages."""
        if self._tensors:
            import torch

            host = self._tensors[i].reshape(-1).view(torch.uint8).cpu()
            return cast(bytes, host.numpy().tobytes())
        if self._scattered is not None:
            pieces = zip(self._scattered.addresses[i].tolist(), self._scattered.sizes.tolist(), strict=True)
            return b"".join(ctypes.string_at(at, size) for at, size in pieces)
        assert self._addresses is not None
        return ctypes.string_at(int(self._addresses[i]), self._page_bytes)

    def fill_row(self, i: int, data: memoryview) -> None:
        """Write bytes of a message into one row."""
        if self._tensors:
            cuda.copy_rows([(self._tensors[i], data)], to_device=True)
            return
        source = address_of(data)
        if self._scattered is not None:
            if source.nbytes != self._page_bytes:
                raise ValueError(f"a page of {source.nbytes} bytes came where {self._page_bytes} were due")
            pieces = self._scattered
            froms = source.address + pieces.offsets
            copy_pages(0, pieces.addresses[i], 0, froms, pieces.sizes)
            return
        assert self._addresses is not None
        ctypes.memmove(int(self._addresses[i]), source.address, self._page_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one pool in a span: row `row` is the page of key `first`."""

    pool: int
    first: int
    count: int
    row: int

    @property
    def range(self) -> ops.PoolRange:
        return ops.PoolRange(self.pool, self.first, self.count)


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys `[start, end)` of a run that make one commit; the parts count from `start`."""

    start: int
    end: int
    parts: tuple[Part, ...]


def split(keys: int, ranges: Sequence[ops.PoolRange], room: Sequence[int], most_keys: int) -> list[Piece]:
    """Cut a run into consecutive commits.

    ranges: pages of each pool in the run. room: per range, the most pages that one commit may have. most_keys: of one span. Where the whole
    run does not fit, pieces of half the room are cut, so that one drains while the next is written.
    """
    if keys <= most_keys and all(r.count <= n for r, n in zip(ranges, room, strict=True)):
        return [Piece(0, keys, tuple(Part(r.pool, r.first, r.count, 0) for r in ranges if r.count))]
    caps = [max(1, n // 2) for n in room]
    out = []
    start = 0
    while start < keys:
        end = min(keys, start + most_keys)
        for r, cap in zip(ranges, caps, strict=True):
            begin = max(start, r.first)
            if r.first + r.count > begin + cap:
                end = min(end, begin + cap)
        parts = []
        for r in ranges:
            low, high = max(start, r.first), min(end, r.first + r.count)
            if low < high:
                parts.append(Part(r.pool, low - start, high - low, low - r.first))
        if parts:
            out.append(Piece(start, end, tuple(parts)))
        start = end
    return out
