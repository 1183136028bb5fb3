"""The pages of one family of pools, over a session of its own: the part that talks to the daemon, and never raises at the engine.

What the engine hears is a miss or a page that was not stored, whatever happened. Trouble is logged once when it begins and once when it is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hoststage.client._imported import Imported, ImportedPages
from hoststage.client._pages import ScatteredPages
from hoststage.client.engines.sglang.settings import Settings
from hoststage.client.engines.sglang.sharedpools import SharedPool
from hoststage.client.errors import DaemonUnavailable, HostStageError, Refused, RequestRejected
from hoststage.client.session import Session, connect
from hoststage.client.stack import PayloadPath, StackSpec
from hoststage.v1.imported import MAX_PLACES
from hoststage.v1.ops import Outcome

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_FIRST = 0.5
_RETRY_MOST = 10.0
_RETRY_REFUSED = 30.0
_LOOKUP_KEYS = 4096
"""Keys of one lookup; each answers for itself, so that a long run may be asked in parts."""


class Channel:
    """One family's pages. Any number of threads may call; the daemon may come and go."""

    def __init__(
        self,
        stack: StackSpec,
        settings: Settings,
        worker: str,
        register: str = "never",
        shared: Mapping[str, SharedPool] | None = None,
    ) -> None:
        self.stack = stack
        self._shared = dict(shared or {})
        self._imported: dict[str, Imported] = {}
        self.names = tuple(pool.name for pool in stack.pools)
        self._settings = settings
        self._worker = worker
        self._register = register
        self._session: Session | None = None
        self._opening = threading.Lock()
        self._retry_after = _RETRY_FIRST
        self._not_before = 0.0
        self._trouble: HostStageError | None = None
        self._missed_calls = 0
        self._load_pages = 1 << 20
        self._closed = False

    # -------------------------------------------------------------- the session

    def open(self) -> Session:
        """Return the session, opened where it is not. Raises what `connect` raises, or `DaemonUnavailable` while a retry is not due."""
        if self._session is not None:
            return self._session
        with self._opening:
            if self._session is not None:
                return self._session
            if self._closed:
                raise DaemonUnavailable("the backend is closed")
            if self._trouble is not None and time.monotonic() < self._not_before:
                raise self._trouble
            try:
                self._session = self._connect()
            except HostStageError as error:
                self._trouble = error
                wait = _RETRY_REFUSED if isinstance(error, Refused) else self._retry_after
                self._retry_after = min(_RETRY_MOST, self._retry_after * 2)
                self._not_before = time.monotonic() + wait
                raise
            grant = self._session.grant
            pools = ", ".join(f"{p.pool}: {p.write_slots} write, {p.read_slots} read slots" for p in grant.pools)
            _log.info("hoststage granted %s over %s (%s)", grant.mode.value, grant.path.value, pools)
            return self._session

    def _connect(self) -> Session:
        """Return a session that reads and writes the pools' own memory, where they are shared and the daemon takes it, else one that copies."""
        if self._shared:
            session = self._connect_over((PayloadPath.IMPORTED, *self.stack.paths))
            if session.grant.path is not PayloadPath.IMPORTED:
                self._say_copied(f"the daemon grants the path {session.grant.path.value}")
                return session
            try:
                for name, pool in self._shared.items():
                    self._imported[name] = session.import_memory(pool.fds, pool.sizes, name=name)
            except RequestRejected as error:
                self._say_copied(str(error))
                self._shared = {}
                self._imported = {}
                session.close()
            except BaseException:
                session.close()
                raise
            else:
                return session
        return self._connect_over(self.stack.paths)

    def _connect_over(self, paths: tuple[PayloadPath, ...]) -> Session:
        settings = self._settings
        return connect(
            settings.address,
            stack=replace(self.stack, paths=paths),
            worker=self._worker,
            client="hoststage.sglang",
            token=settings.token,
            timeout=settings.connect_timeout,
            register=self._register,
        )

    def _say_copied(self, why: str) -> None:
        _log.warning("hoststage copies the pages of %s in this process: %s", "+".join(self.names), why)

    def _rows(self, session: Session, rows: Mapping[str, ScatteredPages]) -> dict[str, ScatteredPages | ImportedPages]:
        """Return pages as the session moves them: by their place in imported memory, where all of them lie there."""
        mine = session.grant.path is PayloadPath.IMPORTED and all(
            name in self._imported and pages.keep is self._shared[name].pool for name, pages in rows.items()
        )
        if not mine:
            return dict(rows)
        return {name: self._shared[name].places(pages, self._imported[name]) for name, pages in rows.items()}

    def close(self) -> None:
        """End the session. Safe to repeat."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _usable(self) -> Session:
        """Return the session for a call. Raises what `open` raises."""
        return self.open()

    def _attempt(self, what: str, call: Callable[[Session], _T], otherwise: _T) -> _T:
        """Do one thing with the daemon; `otherwise` where it cannot be done now."""
        try:
            result = call(self._usable())
        except HostStageError as error:
            if self._missed_calls == 0:
                _log.warning(
                    "hoststage cannot %s %s: %s. Until it can, lookups miss and backups are dropped.",
                    what,
                    "+".join(self.names),
                    error,
                )
            self._trouble = error
            self._missed_calls += 1
            return otherwise
        if self._missed_calls:
            _log.warning("hoststage serves %s again; %d calls missed", "+".join(self.names), self._missed_calls)
            self._missed_calls, self._trouble, self._retry_after = 0, None, _RETRY_FIRST
        return result

    # -------------------------------------------------------------- pages

    def present(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its pages are there, in every pool of the family and of one commit."""
        out = np.zeros(len(keys), dtype=np.bool_)

        def ask(session: Session) -> bool:
            most = min(_LOOKUP_KEYS, session.limits.max_span_keys or _LOOKUP_KEYS)
            for start in range(0, len(keys), most):
                match = session.lookup(keys[start : start + most], timeout=self._settings.lookup_timeout)
                for first, last in match.runs:
                    out[start + first - 1 : start + last] = True
            return True

        if not self._attempt("look up", ask, False):
            out[:] = False
        return out

    def read(self, keys: Sequence[bytes], rows: Mapping[str, ScatteredPages]) -> int:
        """Copy the pages of these keys to `rows`, a row a key; return how many, counted from the first, came."""
        return self._attempt("load", lambda session: self._read(session, keys, rows), 0)

    def _read(self, session: Session, keys: Sequence[bytes], given: Mapping[str, ScatteredPages]) -> int:
        rows = self._rows(session, given)
        if any(isinstance(pages, ImportedPages) for pages in rows.values()):
            pieces = sum(len(pages.sizes) for pages in rows.values())
            self._load_pages = min(self._load_pages, max(1, MAX_PLACES // pieces))
        done = 0
        end = len(keys)
        while done < end:
            count = min(self._load_pages, end - done)
            loaded = session.load(
                keys[done : done + count],
                into={pool: pages.cut(done, done + count) for pool, pages in rows.items()},
                ranges=dict.fromkeys(rows, (0, count)),
                timeout=self._settings.load_timeout,
            )
            if loaded:
                done += count
            elif loaded.outcome is Outcome.OVERSIZE and count > 1:
                self._load_pages = count // 2
            elif loaded.outcome is Outcome.MISS and count > 1:
                # Something went since the lookup. What lies before it is as good as ever.
                there = self.present(keys[done : done + count])
                left = int(np.argmin(there)) if not there.all() else 0
                if left == 0:
                    break
                end = done + left
            else:
                break
        return done

    def write(self, keys: Sequence[bytes], rows: Mapping[str, ScatteredPages]) -> bool:
        """Store the pages of these keys in one commit, or several where they are many; return whether every one is stored."""

        def put(session: Session) -> bool:
            ticket = session.store(keys, self._rows(session, rows), timeout=self._settings.store_timeout)
            return ticket.wait(self._settings.store_timeout).ok

        return self._attempt("store", put, False)
