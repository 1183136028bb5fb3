"""The page index: which resident page lies in which slot of a read arena, in memory that clients read without asking.

The daemon alone writes it. Layout, little-endian: a header of 64 bytes; an entry of 36 bytes for every slot (32 bytes of key, padded
with zeros, and the version `u32`); a hash table of `u32` (slot + 1, 0 for empty) with linear probing.

A version has its lowest bit clear while the entry stands, set while it does not; then come six bits with the key's length (0: nothing ever stood there) and a counter. The daemon sets the bit *before* the slot may be given to another page, so
that a reader which finds a key that stands, copies the page, and finds the same version afterwards has copied that page and
nothing else. Everything else may be wrong without harm: a key that is not found is asked of the daemon. Keys of more than 32 bytes
are never here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.shm.fence import fence, full_fence

KEY_BYTES = 32
_HEADER_BYTES = 64
_ENTRY_BYTES = 36
_ENTRY_WORDS = _ENTRY_BYTES // 4
_VERSION_WORD = KEY_BYTES // 4
_COUNTER_BIT, _MOST_COUNT = 7, (1 << 25) - 1
_HEADER = struct.Struct("<8sII")
_MAGIC = b"hspages2"
_STANDS = (1 << _COUNTER_BIT) - 1
"""The bits of a version that say that a key of some length stands."""
_REACH = 32
"""Places from its home at which a key may stand."""
_MOST_MOVES = 64
_FEW = 8
"""Lookups of up to so many keys go key by key: numpy's fixed cost a call is larger than that."""
_LANES = struct.Struct("<4Q")
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MIX = 0xFF51AFD7ED558CCD
_U64 = (1 << 64) - 1

U32 = npt.NDArray[np.uint32]
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Slots of an arena, one a page."""
Found = tuple[list[int], list[int]] | tuple[range, U32] | tuple[npt.NDArray[np.int64], U32]
"""Slots and their versions, one a key: lists for a few keys, for many a range where the slots follow one another, else an array."""


def numbers(slots: Slots) -> Sequence[int]:
    """Return slots as plain numbers."""
    return slots.tolist() if isinstance(slots, np.ndarray) else slots


def array_of(slots: Slots) -> U32:
    """Return slots as an array. numpy by itself goes through a range number by number."""
    if isinstance(slots, range):
        return np.arange(slots.start, slots.stop, dtype=np.uint32)
    return np.asarray(slots, dtype=np.uint32)


class PageIndexError(ValueError):
    """The memory is no page index of the size that was said."""


def table_size(slots: int) -> int:
    """Return the places in the hash table for so many slots: a power of two, at most two thirds of it in use."""
    return int(1 << max(4, (slots + slots // 2).bit_length()))


def index_bytes(slots: int) -> int:
    """Return the bytes that an index of so many slots takes."""
    return _HEADER_BYTES + slots * _ENTRY_BYTES + 4 * table_size(slots)


def _home(padded: bytes) -> int:
    """Return the hash of a padded key. The same as `_homes`."""
    a, b, c, d = _LANES.unpack(padded)
    f = _FACTORS
    h = (a * f[0] + b * f[1] + c * f[2] + d * f[3]) & _U64
    return int((((h ^ (h >> 32)) * _MIX) & _U64) >> 32)


def _homes(lanes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the hashes of padded keys, `uint64[n, 4]`."""
    factors = np.array(_FACTORS, dtype=np.uint64)
    with np.errstate(over="ignore"):
        h = (lanes * factors).sum(axis=1, dtype=np.uint64)
        mixed: npt.NDArray[np.uint64] = ((h ^ (h >> np.uint64(32))) * np.uint64(_MIX)) >> np.uint64(32)
    return mixed.astype(np.int64)


class _Layout:
    """The three parts of the memory, each in forms for single items and for batches."""

    def __init__(self, memory: memoryview, slots: int) -> None:
        if memory.nbytes < index_bytes(slots):
            raise PageIndexError(f"{memory.nbytes} bytes, an index of {slots} slots takes {index_bytes(slots)}")
        end = _HEADER_BYTES + slots * _ENTRY_BYTES
        self.slots = slots
        self.bytes = memory[_HEADER_BYTES:end]
        self.words = self.bytes.cast("I")
        self.table = memory[end : end + 4 * table_size(slots)].cast("I")
        self.mask = table_size(slots) - 1


class PageIndexWriter:
    """The daemon's end. `memory`: at least `index_bytes(slots)` writable bytes, which it clears."""

    def __init__(self, memory: memoryview, slots: int) -> None:
        self._layout = _Layout(memory, slots)
        self._memory = memory
        self._suspended: set[int] = set()
        np.frombuffer(memory, dtype=np.uint8)[:] = 0
        _HEADER.pack_into(memory, 0, _MAGIC, slots, table_size(slots))

    def put(self, key: bytes, slot: int) -> None:
        """The page of `key` stands in `slot` from now on. A key that is too long, or has no place near its home, is left out."""
        if len(key) > KEY_BYTES:
            return
        it = self._layout
        padded = key.ljust(KEY_BYTES, b"\0")
        home = _home(padded)
        table, mask = it.table, it.mask
        for step in range(_REACH):
            at = (home + step) & mask
            if not table[at]:
                break
        else:
            return
        word = slot * _ENTRY_WORDS + _VERSION_WORD
        version = it.words[word] | 1
        it.words[word] = version
        fence()
        it.bytes[slot * _ENTRY_BYTES : slot * _ENTRY_BYTES + KEY_BYTES] = padded
        fence()
        it.words[word] = ((version >> _COUNTER_BIT) + 1 & _MOST_COUNT) << _COUNTER_BIT | len(key) << 1
        table[at] = slot + 1

    def drop(self, slot: int) -> None:
        """What stands in `slot` may be overwritten from now on."""
        it = self._layout
        word = slot * _ENTRY_WORDS + _VERSION_WORD
        version = it.words[word]
        if slot in self._suspended:
            self._suspended.discard(slot)
        elif version & 1 or not version:
            return
        it.words[word] = version | 1
        fence()
        home = _home(bytes(it.bytes[slot * _ENTRY_BYTES : slot * _ENTRY_BYTES + KEY_BYTES]))
        for step in range(_REACH):
            at = (home + step) & it.mask
            if it.table[at] == slot + 1:
                self._vacate(at)
                return

    def suspend(self, slots: Iterable[int]) -> None:
        """What stands in these slots may have to go: nobody may rely on it until `resume`, or `drop`."""
        words = self._layout.words
        for slot in slots:
            word = slot * _ENTRY_WORDS + _VERSION_WORD
            version = words[word]
            if version and not version & 1:
                words[word] = version | 1
                self._suspended.add(slot)

    def resume(self, slots: Iterable[int]) -> None:
        """What stands in these slots has stood there all the time, and stays: the versions are those of before."""
        words = self._layout.words
        for slot in slots:
            if slot in self._suspended:
                self._suspended.discard(slot)
                words[slot * _ENTRY_WORDS + _VERSION_WORD] &= ~1

    def barrier(self) -> None:
        """All that was done here is seen by everybody before what the caller reads next."""
        full_fence()

    def _vacate(self, hole: int) -> None:
        """Empty a place and move up what would not be found behind it. Readers may miss a key meanwhile, which does no harm."""
        it = self._layout
        for _ in range(_MOST_MOVES):
            moved = False
            for step in range(1, _REACH):
                at = (hole + step) & it.mask
                value = it.table[at]
                if not value:
                    break
                place = (value - 1) * _ENTRY_BYTES
                home = _home(bytes(it.bytes[place : place + KEY_BYTES]))
                if ((at - home) & it.mask) >= step:
                    it.table[hole], hole, moved = value, at, True
                    break
            if not moved:
                break
        it.table[hole] = 0

    def close(self) -> None:
        """Nothing that is here may be relied on any more."""
        words = np.frombuffer(self._layout.words, dtype=np.uint32).reshape(-1, _ENTRY_WORDS)
        words[:, _VERSION_WORD] |= 1
        fence()
        np.frombuffer(self._layout.table, dtype=np.uint32)[:] = 0


class PageIndex:
    """A client's end. `memory`: the daemon's, mapped read-only.

    :raises PageIndexError: where it is no index of so many slots.
    """

    def __init__(self, memory: memoryview, slots: int) -> None:
        self._layout = it = _Layout(memory, slots)
        magic, said, table = _HEADER.unpack_from(memory, 0)
        if magic != _MAGIC or said != slots or table != table_size(slots):
            raise PageIndexError(f"no page index of {slots} slots: magic {magic!r}, {said} slots, a table of {table}")
        words = np.frombuffer(it.words, dtype=np.uint32).reshape(-1, _ENTRY_WORDS)
        self._versions = words[:, _VERSION_WORD]
        self._keys = words[:, :_VERSION_WORD]
        self._table = np.frombuffer(it.table, dtype=np.uint32)

    def find(self, packed: bytes, key_bytes: int) -> Found | None:
        """Return where every one of the keys stands, or None where one does not.

        packed: keys of `key_bytes` each, one after the other.
        """
        if key_bytes > KEY_BYTES:
            return None
        return self._few(packed, key_bytes) if len(packed) <= _FEW * key_bytes else self._many(packed, key_bytes)

    def _few(self, packed: bytes, key_bytes: int) -> Found | None:
        it = self._layout
        table, words, mask = it.table, it.words, it.mask
        slots: list[int] = []
        versions: list[int] = []
        for start in range(0, len(packed), key_bytes):
            padded = packed[start : start + key_bytes].ljust(KEY_BYTES, b"\0")
            home = _home(padded)
            for step in range(_REACH):
                value = table[(home + step) & mask]
                if not value:
                    return None
                slot = value - 1
                version = words[slot * _ENTRY_WORDS + _VERSION_WORD]
                fence()
                same = it.bytes[slot * _ENTRY_BYTES : slot * _ENTRY_BYTES + KEY_BYTES] == padded
                if same and version & _STANDS == key_bytes << 1:
                    slots.append(slot)
                    versions.append(version)
                    break
            else:
                return None
        return slots, versions

    def _many(self, packed: bytes, key_bytes: int) -> Found | None:
        n = len(packed) // key_bytes
        first = self._few(packed[:key_bytes], key_bytes)
        if first is None:
            return None
        if key_bytes == KEY_BYTES:
            padded = np.frombuffer(packed, dtype=np.uint8).reshape(n, KEY_BYTES)
        else:
            padded = np.zeros((n, KEY_BYTES), dtype=np.uint8)
            padded[:, :key_bytes] = np.frombuffer(packed, dtype=np.uint8).reshape(n, key_bytes)
        keys, start = padded.view(np.uint32), first[0][0]
        # What was stored together mostly lies together: no search, and memory is read in order.
        beside = slice(start, start + n)
        versions = self._versions[beside].copy()
        fence()
        if len(versions) == n:
            same = (self._keys[beside] == keys).all(axis=1)
            same &= (versions & _STANDS) == key_bytes << 1
            if same.all():
                return range(start, start + n), versions
            slots = np.arange(start, start + n)
        else:
            slots = np.minimum(np.arange(start, start + n), self._layout.slots - 1)
            same, versions = self._matches(slots, keys, key_bytes)
        lanes = padded.view(np.uint64)
        todo = np.flatnonzero(~same)
        at = _homes(lanes[todo])
        for _ in range(_REACH):
            if len(todo) <= _FEW:
                return self._finish(packed, key_bytes, todo, slots, versions)
            value = self._table[at & self._layout.mask].astype(np.int64)
            if not value.all():
                return None
            slot = value - 1
            same, version = self._matches(slot, keys[todo], key_bytes)
            slots[todo[same]], versions[todo[same]] = slot[same], version[same]
            todo, at = todo[~same], at[~same] + 1
        return None

    def _matches(self, slots: npt.NDArray[np.int64], keys: U32, key_bytes: int) -> tuple[npt.NDArray[np.bool_], U32]:
        """Return which of the keys stand in which of the slots, and the versions there."""
        version = self._versions[slots]
        fence()
        return (self._keys[slots] == keys).all(axis=1) & ((version & _STANDS) == key_bytes << 1), version

    def _finish(
        self, packed: bytes, key_bytes: int, todo: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], versions: U32
    ) -> Found | None:
        """Find the last few of many keys."""
        for place in todo.tolist():
            found = self._few(packed[place * key_bytes : (place + 1) * key_bytes], key_bytes)
            if found is None:
                return None
            slots[place], versions[place] = found[0][0], found[1][0]
        return slots, versions

    def stands(self, found: Found) -> bool:
        """Return whether every page still stands where it was found, and so stood there all the time in between."""
        fence()
        slots, versions = found
        if len(slots) <= _FEW:
            words = self._layout.words
            for slot, version in zip(slots, versions, strict=True):
                if words[slot * _ENTRY_WORDS + _VERSION_WORD] != version:
                    return False
            return True
        now = self._versions[slots.start : slots.stop] if isinstance(slots, range) else self._versions[slots]
        return bool((now == versions).all())
