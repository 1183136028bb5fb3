"""SGLang's page hashes as keys: 32 bytes each, so that a run of them packs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

KEY_BYTES = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")


def key_of(page_hash: str) -> bytes:
    """Return the key of a page hash: the 32 bytes of a SHA-256 in hex, as SGLang makes them, else a SHA-256 of the text."""
    if _DIGEST.fullmatch(page_hash):
        return bytes.fromhex(page_hash)
    return hashlib.sha256(b"hoststage-sglang-key:" + page_hash.encode()).digest()


def packed_keys_of(page_hashes: Sequence[str]) -> bytes:
    """Return the keys of page hashes one after the other: what `keys_of` returns, for long runs in a fraction of the time."""
    text = "".join(page_hashes)
    if set(map(len, page_hashes)) == {64} and text == text.lower():
        try:
            packed = bytes.fromhex(text)
        except ValueError:
            packed = b""
        if len(packed) == KEY_BYTES * len(page_hashes):
            return packed
    return b"".join(keys_of(page_hashes))


def keys_of(page_hashes: Sequence[str]) -> list[bytes]:
    """Return the keys of page hashes."""
    return [key_of(page_hash) for page_hash in page_hashes]
