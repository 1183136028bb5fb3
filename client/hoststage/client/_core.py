"""The core that every face shares: the open connection, its replacement after a loss, and the housekeeper."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from hoststage.client._alarm import Alarm
from hoststage.client._link import Link
from hoststage.client._options import Options, Previous
from hoststage.client._wire import Deadline, Message, Request
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, ForkedSession, HostStageError, SessionClosed
from hoststage.shm.mapping import Mapping
from hoststage.v1 import hoststage_pb2 as pb

_log = logging.getLogger(__name__)

_TICK = 0.02
_LONGEST_BUSY_TICK = 0.08
_LONGEST_TICK = 0.25
_LINGER = 0.1
_BACKOFF_FIRST = 0.05
_BACKOFF_MOST = 2.0
_CREDIT_TICKS = 10
_M = TypeVar("_M")

_forks = 0
_cores: weakref.WeakSet[Core] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child owns nothing of a session: it closes the inherited lane, lest the daemon wait for an end that does not come."""
    global _forks
    _forks += 1
    for core in list(_cores):
        core.disown()


os.register_at_fork(after_in_child=_in_child)


class Closable(Protocol):
    """What ends with the session."""

    def close(self, timeout: float | None = None) -> None: ...
    def disown(self) -> None: ...


class Core:
    """A session over any number of connections, one at a time."""

    def __init__(self, options: Options, on_push: Callable[[Message], None] | None = None) -> None:
        self.options = options
        self.names = tuple(pool.name for pool in options.stack.pools)
        self.draining = False
        self._forks = _forks
        self._closed = False
        self._on_push = on_push
        self._reconnect = threading.RLock()
        self._previous = Previous()
        self._kept: list[Mapping] = []
        self.imports: set[Closable] = set()
        self._failure: HostStageError | None = None
        self._backoff = _BACKOFF_FIRST
        self._not_before = 0.0
        self.reconnects = 0
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.eventfd)
        self._push_hook = _weakly(weakref.WeakMethod(self._pushed))
        self._link = Link.open(options, self._previous, self._push_hook, Deadline(options.timeout))
        _cores.add(self)
        self.eager = False
        self._pause = _TICK
        self.alarm = Alarm()
        self._link.alarm = self.alarm
        self._stop = threading.Event()
        threading.Thread(
            target=_housekeeping,
            args=(weakref.ref(self), self._stop, self.alarm),
            name="hoststage-housekeeper",
            daemon=True,
        ).start()

    # -------------------------------------------------------------- requests

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline of a call; the session's own timeout where the call names none."""
        return Deadline(self.options.timeout if timeout is None else timeout)

    def ready(self, deadline: Deadline) -> Link:
        """Return the open connection, a new one where the last was lost. Raises `DaemonUnavailable` where there is none now."""
        self._check()
        link = self._link
        return link if link.lost is None else self._replaced(link, deadline)

    def call(self, message: Request, kind: type[_M], deadline: Deadline) -> _M:
        """Send a request and return its answer."""
        return self.ready(deadline).call(message, kind, deadline)

    def open_link(self) -> Link | None:
        """Return the open connection, None where it was lost; see `ready`."""
        self._check()
        link = self._link
        return link if link.lost is None else None

    @property
    def link(self) -> Link:
        """The connection of now, lost or not."""
        return self._link

    def _check(self) -> None:
        if self._forks != _forks:
            raise ForkedSession
        if self._closed:
            raise SessionClosed

    # -------------------------------------------------------------- loss and replacement

    def _replaced(self, lost: Link, deadline: Deadline) -> Link:
        try:
            if not self._reconnect.acquire(timeout=deadline.left):
                raise DeadlineExceeded("the session is being opened anew; that took longer than this call may")
            self._check()
            if self._link is not lost and self._link.lost is None:
                return self._link
            if time.monotonic() < self._not_before and self._failure is not None:
                raise DaemonUnavailable(f"the daemon is away; last attempt: {self._failure}")
            return self._open_anew(deadline)
        finally:
            try:  # noqa: SIM105 - a call before the release might be interrupted
                self._reconnect.release()
            except RuntimeError:
                pass  # it is not ours: it was not to be had, or the wait was interrupted

    def _open_anew(self, deadline: Deadline) -> Link:
        old = self._link
        self._retire(old)
        previous = self._previous
        retained = self.retained_bytes
        hello = replace(previous, retained_bytes=retained)
        try:
            link = Link.open(self.options, hello, self._push_hook, Deadline(min(deadline.left, self.options.timeout)))
        except HostStageError as error:
            self._failure = error
            self._not_before = time.monotonic() + self._backoff
            self._backoff = min(_BACKOFF_MOST, self._backoff * 2)
            raise
        link.alarm = self.alarm
        self._link, self._failure, self._backoff, self.draining = link, None, _BACKOFF_FIRST, False
        self.reconnects += 1
        return link

    def _retire(self, link: Link) -> None:
        """Give a lost connection's memory back, before a new one is granted: what stays mapped stays allocated."""
        if link.welcome.session and link.welcome.session != self._previous.session:
            welcome = link.welcome
            self._previous = Previous(welcome.session, welcome.boot_epoch, token=welcome.resume_token)
        self._keep(link.unmap())
        link.close("the connection was replaced")

    def _keep(self, mappings: Sequence[Mapping]) -> None:
        """Note what could not be unmapped, once: a connection is retired anew at each attempt to replace it."""
        self._kept += [mapping for mapping in mappings if mapping not in self._kept]

    @property
    def retained_bytes(self) -> int:
        """Bytes of former arenas that views still hold."""
        self._kept = [mapping for mapping in self._kept if mapping.resident]
        return sum(mapping.size for mapping in self._kept)

    # -------------------------------------------------------------- pushes

    def _pushed(self, link: Link, message: Message) -> None:
        if isinstance(message, pb.ServerMessage) and message.WhichOneof("body") == "draining":
            self.draining = True
        with suppress(OSError):
            os.eventfd_write(self.eventfd, 1)
        if self._on_push is not None:
            try:
                self._on_push(message)
            except Exception:
                # It runs in the thread that reads for all: one caller's mistake must not end another's call.
                _log.exception("on_push failed")

    def tick(self, count: int) -> float:
        """Housekeeping: read what came, release what was dropped, reconnect. Returns seconds until the next time."""
        link = self._link
        if self._closed:
            return self._linger(link)
        if link.lost is not None:
            with suppress(HostStageError):
                self._replaced(link, Deadline(self.options.timeout))
            return _TICK
        pause = self._pace(link)
        if link.lane is not None and link.lane.drain(_TICK if self.eager else 0.0) and self.eager:
            # It was here that the time passed.
            pause = 0.0
        link.flush_released()
        link.tell_touched()
        if link.credits.wanted and (count % _CREDIT_TICKS == 0 or pause > _TICK) and not self.draining:
            with suppress(HostStageError):
                link.top_up_credits(Deadline(1.0))
        return pause

    def _pace(self, link: Link) -> float:
        """Return seconds until the next time: ever more while nothing is open that only the housekeeper would notice.

        Many sessions on few cores would else do little but wake up. What is begun while it sleeps long sets the alarm.
        """
        longest = _LONGEST_TICK
        # Said before the look: what begins after it rings.
        self.alarm.dozing = True
        if link.open_work:
            # Whoever waits on the lane reads for all.
            longest = _LONGEST_BUSY_TICK if link.lane is not None and link.lane.led else _TICK
        self._pause = min(longest, self._pause * 2)
        self.alarm.dozing = self._pause > _LONGEST_BUSY_TICK
        return self._pause

    # -------------------------------------------------------------- ending

    def close(self, timeout: float = 5.0) -> None:
        """Unmap everything, say goodbye, end. Safe to repeat."""
        if self._forks != _forks:
            raise ForkedSession
        if self._closed:
            return
        deadline = Deadline(timeout)
        for imported in list(self.imports):
            imported.close(deadline.left / 2)
        self._closed = True
        held = self._reconnect.acquire(timeout=deadline.left)
        try:
            self._link.flush_released()
            self._keep(self._link.unmap())
            if retained := self.retained_bytes:
                _log.warning(
                    "session %d was closed while views of its pages are alive: %d bytes stay mapped and count against the daemon's budget, "
                    "and the session lingers there, until they are dropped",
                    self._link.welcome.session,
                    retained,
                )
            else:
                self._part(deadline)
        finally:
            if held:
                self._reconnect.release()

    def _part(self, deadline: Deadline) -> None:
        self._stop.set()
        self.alarm.ring()
        with suppress(HostStageError):
            self._link.goodbye(deadline)
        self._link.close()

    def _linger(self, link: Link) -> float:
        """Closed while views of the caller still live: a goodbye says that nothing is mapped any more, so it waits for them."""
        if link.lane is not None:
            link.lane.drain()
        if link.lost is not None or not self.retained_bytes:
            self._part(Deadline(1.0))
        return _LINGER

    def disown(self) -> None:
        """In a forked child: drop the inherited descriptors."""
        if self._link.lane is not None:
            self._link.lane.disown()
        if self._link.data is not None:
            self._link.data.disown()
        for imported in self.imports:
            imported.disown()


def _weakly(method: weakref.WeakMethod[Callable[[Link, Message], None]]) -> Callable[[Link, Message], None]:
    """Return a handler that keeps nothing alive: the threads of a connection outlive a session that was merely dropped."""

    def handle(link: Link, message: Message) -> None:
        target = method()
        if target is not None:
            target(link, message)

    return handle


def _see_off(link: Link, alarm: Alarm) -> None:
    """End the connection of a session that was dropped, once nothing of its memory is mapped any more: it would be in quarantine for as long as this process lives."""
    busy = link.unmap()
    while link.lost is None and any(mapping.resident for mapping in busy):
        if link.lane is not None:
            link.lane.drain()
        alarm.sleep(_LINGER)
    with suppress(HostStageError):
        link.goodbye(Deadline(1.0))
    link.close("the session was dropped")


def _housekeeping(ref: weakref.ref[Core], stop: threading.Event, alarm: Alarm) -> None:
    """Runs while the session lives. It holds no strong reference between ticks, so that a dropped session ends."""
    count = 0
    link: Link | None = None
    while not stop.is_set():
        core = ref()
        if core is None:
            if link is not None:
                _see_off(link, alarm)
            return
        link = core.link
        try:
            pause = core.tick(count)
        except Exception:
            # Whatever it is, the next tick may do better; without a housekeeper pushes would go unread.
            _log.exception("housekeeping failed")
            pause = _BACKOFF_MOST
        del core
        count += 1
        if pause:
            alarm.sleep(pause)
