"""Open requests of one connection, and where their answers go.

The transports (`_lane`, `_stream`) hand every message that they read to a `Router`. Whoever waits for an answer holds a `Waiter`, and
waits by its transport's means: on the lane the waiting thread reads the socket itself, on the stream a thread reads for all.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from hoststage.client._status import error_of
from hoststage.client.errors import HostStageError, SessionLost
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

Message: TypeAlias = ops.HotMessage | pb.ServerMessage
Request: TypeAlias = ops.HotRequest | pb.ClientMessage
PushHandler: TypeAlias = Callable[[Message], None]


# The daemon is told a little less than what is left, so that its own answer comes before we give up.
SHARE_OF_DEADLINE = 0.9


class Deadline:
    """A point in monotonic time."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0 where it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def left_ms(self) -> int:
        """Milliseconds left as the wire has them: at least 1, as 0 would mean the daemon's default."""
        return max(1, min(0xFFFFFFFF, int(self.left * 1000)))

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


class Waiter:
    """One thing to wait for. It ends once, with a result or an error; `then` runs in the thread that ends it, before anyone wakes.

    `orphan`: called with an answer that came after the caller gave up, to let go of what it leases.
    """

    __slots__ = ("_claimed", "_lock", "_parked", "abandoned", "done", "error", "orphan", "request_id", "result", "then")

    def __init__(
        self, then: Callable[[Message], None] | None = None, orphan: Callable[[Message], None] | None = None
    ) -> None:
        self.done = False
        self.result: Message | None = None
        self.error: HostStageError | None = None
        self.then = then
        self.orphan = orphan
        self.abandoned = False
        self._claimed = False
        self.request_id = 0
        self._lock = allocate_lock()
        self._parked: list[LockType] = []

    def deliver(self, message: Message) -> bool:
        """Take an answer; return whether it was the last one."""
        self.finish(message)
        return True

    def finish(self, message: Message) -> None:
        """End with an answer."""
        with self._lock:
            self._claimed = not self.abandoned
        if not self._claimed:
            if self.orphan is not None:
                self.orphan(message)
            return
        if self.then is not None:
            self.then(message)
        self.result = message
        self._end()

    def fail(self, error: HostStageError) -> None:
        """End with an error, unless it has ended."""
        if not self.done:
            self.error = error
            self._end()

    def abandon(self) -> bool:
        """Give up; an answer that comes later goes to `orphan`. Returns False where one is being taken in right now."""
        with self._lock:
            self.abandoned = not (self._claimed or self.done)
            return self.abandoned

    def _end(self) -> None:
        with self._lock:
            self.done = True
            parked, self._parked = self._parked, []
        for lock in parked:
            lock.release()

    def nudge(self) -> None:
        """Wake one thread that is parked here, though nothing has ended: it is to read for all."""
        with self._lock:
            lock = self._parked.pop() if self._parked else None
        if lock is not None:
            lock.release()

    def ticket_to_park(self) -> LockType | None:
        """Return a held lock that is released when this ends or is nudged; None where it has ended."""
        lock = allocate_lock()
        lock.acquire()
        with self._lock:
            if self.done:
                return None
            self._parked.append(lock)
        return lock

    def forget(self, lock: LockType) -> bool:
        """Take a parked lock back after a timeout; return False where it was released meanwhile."""
        with self._lock:
            if lock in self._parked:
                self._parked.remove(lock)
                return True
        return False


class Router:
    """Open requests by id, and the handler of what the daemon pushes."""

    def __init__(self, on_push: PushHandler, on_lost: Callable[[], None] = lambda: None) -> None:
        self._open: dict[int, Waiter] = {}
        self._ids = count(2)  # 1 is the handshake's
        self._mutex = threading.Lock()
        self._on_push = on_push
        self._on_lost = on_lost
        self.lost: HostStageError | None = None

    def register(self, waiter: Waiter) -> int:
        """Take a waiter in and return its request id. Raises the error by which the connection was lost."""
        with self._mutex:
            if self.lost is not None:
                raise SessionLost(str(self.lost))
            request_id = next(self._ids)
            self._open[request_id] = waiter
        waiter.request_id = request_id
        return request_id

    def next_id(self) -> int:
        """Return the id of a request that goes another way than by the transport. Raises as `register`."""
        with self._mutex:
            if self.lost is not None:
                raise SessionLost(str(self.lost))
            return next(self._ids)

    def drop(self, waiter: Waiter) -> None:
        """Forget a request that was never sent."""
        with self._mutex:
            self._open.pop(waiter.request_id, None)

    def deliver(self, request_id: int, message: Message) -> None:
        """Hand a message to whoever waits for it, or to the push handler."""
        if request_id == 0:
            self._on_push(message)
            return
        waiter = self._open.get(request_id)
        if waiter is None:
            return
        if isinstance(message, pb.ServerMessage) and message.WhichOneof("body") == "error":
            # Ended before it is forgotten: an interruption between the two must not leave it waiting for ever.
            waiter.fail(error_of(message.error.status))
            self._open.pop(request_id, None)
        elif waiter.deliver(message):
            self._open.pop(request_id, None)

    def deliver_proto(self, envelope: pb.ServerMessage) -> None:
        """Hand an envelope over, a hot message in its plain form."""
        self.deliver(envelope.request_id, convert.from_proto(envelope) or envelope)

    def fail(self, reason: str) -> None:
        """The connection is lost: everything that waits ends now."""
        with self._mutex:
            if self.lost is not None:
                return
            self.lost = SessionLost(reason)
            waiters, self._open = list(self._open.values()), {}
        for waiter in waiters:
            waiter.fail(SessionLost(reason))
        self._on_lost()

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._open)


def park(waiter: Waiter, deadline: Deadline) -> bool:
    """Wait until the waiter ends, by another thread's reading. Returns whether it has."""
    while not waiter.done:
        lock = waiter.ticket_to_park()
        if lock is None:
            return True
        if not lock.acquire(timeout=deadline.left) and waiter.forget(lock):
            return waiter.done
    return True
