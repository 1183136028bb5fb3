"""How durable holds lie in the store: names, keys and records.

A hold's pages live in a store namespace of their own, derived from the namespace of the stack, so that no content key ever meets one.
Their keys are made of a digest of the hold's name and of a number drawn anew at each seal. The owner token
itself is never stored. Two records of one block say what belongs together: the *manifest*, found by the digest and written last, which
makes a hold restorable; and the *entry*, found by its number in the index of this daemon and written first, from
which a daemon that starts knows what there is to expire or to clear away.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Final

from hoststage.core.holds import HoldName
from hoststage.core.stack import MAX_KEY_BYTES

RECORD_BYTES: Final = 4096
NOTE_BYTES: Final = 64 * 1024
MANIFEST_POOL: Final = "hold_manifest"
NOTE_POOL: Final = "hold_note"
ENTRY_POOL: Final = "hold_entry"

_MAGIC: Final = b"HSHOLD\x00\x01"
_HEAD: Final = struct.Struct("<8s64s32s16sQQIHB")
_POOL: Final = struct.Struct("<BI")
_DIGEST_BYTES: Final = 32
_SEAL_BYTES: Final = 16
_STORE_KEY_BYTES: Final = _DIGEST_BYTES + _SEAL_BYTES + 4
# Longer than any key of a client: in the index of a read arena a hold's page can never be taken for content.
_MARK: Final = b"hold".ljust(MAX_KEY_BYTES + 1 - _STORE_KEY_BYTES, b"\x00")


def hold_space(namespace: str) -> str:
    """Return the store namespace of the holds of a namespace."""
    return hashlib.blake2b(namespace.encode(), digest_size=32, person=b"hoststage-holds").hexdigest()


def index_space(identity: str) -> str:
    """Return the store namespace of the index of one daemon."""
    return hashlib.blake2b(identity.encode(), digest_size=32, person=b"hoststage-hindex").hexdigest()


def digest_of(name: HoldName) -> bytes:
    """Return what a hold is found by; who has it knows neither the owner token nor a way to ask for the hold."""
    namespace, token, request, attempt = name
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"hoststage-hold")
    for part in (namespace.encode(), token, request.encode(), struct.pack("<I", attempt)):
        digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


def is_hold_key(key: bytes) -> bool:
    """Return whether a key of a read arena's index names a page of a hold."""
    return len(key) > MAX_KEY_BYTES


def store_key(core_key: bytes) -> bytes:
    """Return the store's key of a page of a hold."""
    return core_key[len(_MARK) :]


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """What the store says of a durable hold. Times in milliseconds of the wall clock. `pools`: `(name, pages)` each."""

    namespace: str
    digest: bytes
    seal_id: bytes
    sealed_ms: int
    expires_ms: int
    pools: tuple[tuple[str, int], ...]
    note_bytes: int = 0
    note: bytes | None = b""

    @property
    def space(self) -> str:
        """The store namespace of its pages."""
        return hold_space(self.namespace)

    @property
    def pages(self) -> int:
        """Pages in all pools."""
        return sum(n for _, n in self.pools)

    def key(self, index: int) -> bytes:
        """Return the store's key of the page at `index` in any pool."""
        return self.digest + self.seal_id + struct.pack("<I", index)

    def core_key(self, index: int) -> bytes:
        """Return the key of that page in the index of a read arena."""
        return _MARK + self.key(index)

    def remaining(self, now_ms: int) -> float:
        """Seconds until it expires, never more than its whole life: a wall clock that was set back grants no longer one."""
        life = self.expires_ms - self.sealed_ms
        return min(self.expires_ms - now_ms, life) / 1000

    def encode(self) -> bytes:
        """Return one block. A note that does not fit beside the rest is left out: it has a page of its own."""
        note = self.note or b""
        body = b"".join(_POOL.pack(len(name), n) + name.encode() for name, n in self.pools)
        inline = _HEAD.size + len(body) + len(note) <= RECORD_BYTES
        head = _HEAD.pack(
            _MAGIC,
            self.namespace.encode(),
            self.digest,
            self.seal_id,
            self.sealed_ms,
            self.expires_ms,
            self.note_bytes,
            len(self.pools),
            inline,
        )
        return (head + body + (note if inline else b"")).ljust(RECORD_BYTES, b"\x00")

    @property
    def note_apart(self) -> bool:
        """Whether the note needs a page of its own."""
        body = sum(_POOL.size + len(name) for name, _ in self.pools)
        return _HEAD.size + body + self.note_bytes > RECORD_BYTES

    def without_note(self) -> HoldRecord:
        """Return what the index keeps in memory."""
        return replace(self, note=None)


def decode(block: bytes | bytearray | memoryview) -> HoldRecord:
    """Return the record of a block; its note is None where it lies apart. Raises `ValueError` for what is none."""
    data = bytes(block)
    if len(data) != RECORD_BYTES:
        raise ValueError(f"a record has {RECORD_BYTES} bytes, not {len(data)}")
    magic, namespace, digest, seal_id, sealed, expires, note_bytes, count, inline = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"a record begins with {_MAGIC!r}, not {magic!r}")
    at, pools = _HEAD.size, []
    for _ in range(count):
        size, pages = _POOL.unpack_from(data, at)
        at += _POOL.size
        pools.append((data[at : at + size].decode("ascii"), pages))
        at += size
    note = data[at : at + note_bytes] if inline else None
    return HoldRecord(namespace.decode("ascii"), digest, seal_id, sealed, expires, tuple(pools), note_bytes, note)
