"""Lookups of requests that wait, and the pins that make a load after a hit certain.

SGLang asks again at every turn of its scheduler while a request waits, and asks once more right before it loads. So an answer that is pinned is
given again while its pin is fresh, and where room for pins is short, older ones of other waiting requests make way: they will ask again. Younger ones
do not: a scheduler that looks at its whole queue in one turn would otherwise have each request fetched and none of them kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoststage.client._loaded import Match
from hoststage.client.engines.sglang.keys import KEY_BYTES, packed_keys_of
from hoststage.client.engines.sglang.linkchannel import LinkChannel

_YOUNG_SECONDS = 0.1

MOST_KEYS = 65_536
"""Keys of one lookup; what lies beyond is recomputed."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An answer under its pin: what was asked, and when. whole: whether it is all that could be restored.

    asked: how many pages, and the hash of the last. Each hash is chained to those before it, so that the two name the run.
    """

    asked: tuple[int, str]
    match: Match
    whole: bool
    since: float


class Pins:
    """The pinned answers, by request. Used by the scheduler's thread alone."""

    def __init__(self, channel: LinkChannel, pin_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._wanted = pin_seconds
        self._clock = clock
        self._held: dict[str, _Held] = {}

    @property
    def _seconds(self) -> float:
        """How long a pin lives: what was asked for, or the most that the daemon gives."""
        session = self._channel.session
        most = session.limits.max_pin_ms / 1000 if session is not None else 0.0
        return min(self._wanted, most) if most else self._wanted

    def __len__(self) -> int:
        return len(self._held)

    def lookup(self, rid: str, hashes: Sequence[str]) -> list[int]:
        """Return every prefix length that can be restored and is pinned, ascending; nothing where no pin could be had."""
        self._expire()
        wanted = hashes[:MOST_KEYS]
        asked = (len(wanted), wanted[-1])
        held = self._held.get(rid)
        # A load that follows an answer given again has at least half of the pin's life left.
        if held is not None and held.whole and held.asked == asked and self._age(held) < self._seconds / 2:
            return _lengths(held.match)
        match, whole = self._ask(rid, packed_keys_of(wanted))
        # The new pin first: what both hold is not free for a moment.
        self.drop(rid)
        if match is None:
            return []
        self._held[rid] = _Held(asked, match, whole, self._clock())
        return _lengths(match)

    def take(self, rid: str) -> Match | None:
        """Hand a request's pin over to its load."""
        held = self._held.pop(rid, None)
        return None if held is None else held.match

    def drop(self, rid: str) -> None:
        """Give a request's pin up."""
        held = self._held.pop(rid, None)
        if held is not None:
            held.match.release()

    def clear(self) -> None:
        """Give all pins up."""
        for rid in list(self._held):
            self.drop(rid)

    def _expire(self) -> None:
        for rid, held in list(self._held.items()):
            if self._age(held) >= self._seconds or not held.match.standing:
                self.drop(rid)

    def _age(self, held: _Held) -> float:
        return self._clock() - held.since

    def _ask(self, rid: str, keys: bytes) -> tuple[Match | None, bool]:
        """Return an answer with a pin, None for a miss, and whether it is all that could be restored."""
        match, whole = self._channel.find(keys, self._seconds), True
        if match and not match.pin and self._make_way(rid):
            match = self._channel.find(keys, self._seconds)
        while match and not match.pin:
            # Not all of it fits. The front of it is better than nothing, and what is not pinned must not be promised.
            shorter = match.longest_at_most(match.longest // 2)
            match, whole = (self._channel.find(keys[: shorter * KEY_BYTES], self._seconds) if shorter else None), False
        return match or None, whole

    def _make_way(self, rid: str) -> bool:
        others = [other for other, held in self._held.items() if other != rid and self._age(held) > _YOUNG_SECONDS]
        for other in others:
            self.drop(other)
        return bool(others)


def _lengths(match: Match) -> list[int]:
    return [length for first, last in match.runs for length in range(first, last + 1)]
