"""Single-use tokens of the handshake: what a client shows on the fd socket and on the local lane."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hoststage.v1.fdsocket import TOKEN_BYTES

LIFE_SECONDS = 10.0
MOST_OF_SESSION = 64
"""Tokens of one session at a time; a further one lets its oldest expire. Some stand for descriptors that are open until they are redeemed."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    kind: str
    session: int
    expires: float
    payload: object
    on_expiry: Callable[[], None] | None


class Tickets:
    """Tokens that work once, for one session and one purpose, within ten seconds. Time is passed in."""

    def __init__(self) -> None:
        # All live equally long, so that the oldest, which come first, expire first.
        self._tickets: dict[bytes, _Ticket] = {}
        self._of: dict[int, dict[bytes, None]] = {}

    def issue(
        self, kind: str, session: int, now: float, payload: object = None, on_expiry: Callable[[], None] | None = None
    ) -> bytes:
        """Return a new token. `on_expiry` is called if nobody redeems it."""
        self.sweep(now)
        mine = self._of.get(session, {})
        if len(mine) >= MOST_OF_SESSION:
            self._expire([next(iter(mine))])
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tickets[token] = _Ticket(kind, session, now + LIFE_SECONDS, payload, on_expiry)
        self._of.setdefault(session, {})[token] = None
        return token

    def redeem(self, kind: str, token: bytes, now: float) -> tuple[int, object] | None:
        """Return `(session, payload)` of a live token of that kind and use it up, None for any other."""
        self.sweep(now)
        ticket = self._tickets.get(token)
        if ticket is None or ticket.kind != kind:
            return None
        self._forget(token)
        return ticket.session, ticket.payload

    def revoke(self, session: int) -> None:
        """Let the tokens of a session that is over expire now."""
        self._expire(list(self._of.get(session, ())))

    def sweep(self, now: float) -> None:
        """Let tokens expire."""
        while self._tickets:
            token, ticket = next(iter(self._tickets.items()))
            if ticket.expires > now:
                return
            self._expire([token])

    def _expire(self, tokens: Iterable[bytes]) -> None:
        for token in tokens:
            expired = self._forget(token)
            if expired.on_expiry is not None:
                expired.on_expiry()

    def _forget(self, token: bytes) -> _Ticket:
        ticket = self._tickets.pop(token)
        mine = self._of[ticket.session]
        del mine[token]
        if not mine:
            del self._of[ticket.session]
        return ticket
