"""The linker's session: a channel whose calls come from the scheduler's thread, which must never wait for a daemon that is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from hoststage.client._load import LoadStream
from hoststage.client._loaded import Match
from hoststage.client._pages import Keys, ScatteredPages
from hoststage.client._ticket import StoreTicket
from hoststage.client.engines.sglang.channel import Channel
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, HostStageError
from hoststage.client.session import Session

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_PAUSE_FIRST = 1.0
_PAUSE_MOST = 30.0


class LinkChannel(Channel):
    """One session with a stack of several pools. What cannot be done now is None; trouble is logged once when it begins and once when it is over."""

    _opener: threading.Thread | None = None
    _pause = _PAUSE_FIRST
    _silent_until = 0.0

    @property
    def session(self) -> Session | None:
        """The session as it stands, None where it was never opened."""
        return self._session

    def _usable(self) -> Session:
        """Return the session if it is connected; it comes back by itself otherwise. Raises `DaemonUnavailable` meanwhile."""
        session = self._session
        if session is None:
            self._open_aside()
            raise self._trouble or DaemonUnavailable("the daemon is away")
        if time.monotonic() < self._silent_until:
            raise self._trouble or DaemonUnavailable("the daemon did not answer in time")
        if not session.connected:
            raise DaemonUnavailable("the connection is lost")
        if session.draining:
            raise DaemonUnavailable("the daemon is draining")
        return session

    def _open_aside(self) -> None:
        """Open the session in a thread of its own: mapping and registering memory takes a while."""
        busy = self._opener is not None and self._opener.is_alive()
        if self._closed or busy or time.monotonic() < self._not_before:
            return

        def attempt() -> None:
            try:
                self.open()
            except HostStageError as error:
                _log.debug("hoststage is still away: %s", error)
            if self._closed:
                self.close()

        self._opener = threading.Thread(target=attempt, name="hoststage-open", daemon=True)
        self._opener.start()

    def _now(self, what: str, call: Callable[[Session], _T]) -> _T | None:
        def timed(session: Session) -> _T | None:
            try:
                return call(session)
            except DeadlineExceeded:
                # Each further call would make the scheduler wait as long.
                self._silent_until = time.monotonic() + self._pause
                self._pause = min(_PAUSE_MOST, self._pause * 2)
                raise

        done = self._attempt(what, timed, None)
        if done is not None:
            self._pause = _PAUSE_FIRST
        return done

    def find(self, keys: Keys, pin_seconds: float) -> Match | None:
        """Look the keys up and pin what is answered."""
        timeout = self._settings.lookup_timeout
        return self._now("look up", lambda s: s.lookup(keys, pin_seconds=pin_seconds, timeout=timeout))

    def begin(self, keys: Keys, pin: Match | None, ranges: Mapping[str, tuple[int, int]]) -> LoadStream | None:
        """Start a load of these pages and return before they are there."""
        timeout = self._settings.load_timeout
        return self._now("load", lambda s: s.load_groups(keys, pin=pin or 0, ranges=ranges, timeout=timeout))

    def put(
        self, keys: Keys, rows: Mapping[str, ScatteredPages], first: Mapping[str, int], timeout: float
    ) -> StoreTicket | None:
        """Copy pages out and commit them; returns before they are stored."""
        return self._now("store", lambda s: s.store(keys, rows, first=first, timeout=timeout))
