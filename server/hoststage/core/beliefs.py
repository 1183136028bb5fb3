"""Existence beliefs: keys that the store is believed to have.

Advisory and bounded: a stale belief costs a recompute, never wrong bytes. A miss heals it.
"""

from __future__ import annotations

from collections.abc import Iterable


class Beliefs:
    """A bounded set of keys, the least recently confirmed first to go."""

    __slots__ = ("_keys", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def isdisjoint(self, keys: Iterable[bytes]) -> bool:
        """Return whether none of these is believed stored."""
        return self._keys.keys().isdisjoint(keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Believe that these are stored."""
        held = self._keys
        for key in keys:
            held.pop(key, None)
            held[key] = None
        while len(held) > self.limit:
            del held[next(iter(held))]

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forget these; return how many were believed."""
        return sum(self._keys.pop(key, b"") is None for key in keys)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
