"""Single-use tokens of the handshake: what a client shows on the fd socket and on the local lane."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from hoststage.v1.fdsocket import TOKEN_BYTES

LIFE_SECONDS = 10.0


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
        self._tickets: dict[bytes, _Ticket] = {}

    def issue(
        self, kind: str, session: int, now: float, payload: object = None, on_expiry: Callable[[], None] | None = None
    ) -> bytes:
        """Return a new token. `on_expiry` is called if nobody redeems it."""
        self.sweep(now)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tickets[token] = _Ticket(kind, session, now + LIFE_SECONDS, payload, on_expiry)
        return token

    def redeem(self, kind: str, token: bytes, now: float) -> tuple[int, object] | None:
        """Return `(session, payload)` of a live token of that kind and use it up, None for any other."""
        self.sweep(now)
        ticket = self._tickets.get(token)
        if ticket is None or ticket.kind != kind:
            return None
        del self._tickets[token]
        return ticket.session, ticket.payload

    def revoke(self, session: int) -> None:
        """Let the tokens of a session that is over expire now."""
        self._expire([t for t, ticket in self._tickets.items() if ticket.session == session])

    def sweep(self, now: float) -> None:
        """Let tokens expire."""
        self._expire([t for t, ticket in self._tickets.items() if ticket.expires <= now])

    def _expire(self, tokens: list[bytes]) -> None:
        for token in tokens:
            expired = self._tickets.pop(token)
            if expired.on_expiry is not None:
                expired.on_expiry()
