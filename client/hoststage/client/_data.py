"""Data connections of an `inline` session: raw bytes straight between the caller's pages and a socket, beside the gRPC stream.

`hoststage.v1.data` has the frames. A connection serves one call at a time; it is opened when a call finds none idle, and where it cannot be opened, the
session's pages travel on the stream from then on.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from hoststage.client._status import error_of
from hoststage.client._wire import Deadline, Router
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, HostStageError, SessionLost
from hoststage.shm import bulk
from hoststage.v1 import data, lane, ops
from hoststage.v1 import hoststage_pb2 as pb

_log = logging.getLogger(__name__)
_FRAME_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0
_M = TypeVar("_M", bound=ops.HotMessage)

Place = str | tuple[str, int]
"""Where data connections are taken: the path of a Unix socket, or host and port."""


def data_place(address: str, welcome: pb.Welcome) -> Place | None:
    """Return where a session may open data connections, None where it may not."""
    if not welcome.limits.max_data_connections:
        return None
    if welcome.data_socket:
        return str(welcome.data_socket)
    if welcome.data_port:
        host = address.removeprefix("dns:").lstrip("/").rpartition(":")[0]
        return host.strip("[]"), int(welcome.data_port)
    return None


class DataConnection:
    """One attached connection, in the hands of one call. `settled`: no request is under way on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.settled = True
        self._sock = sock
        self._deadline = Deadline(0.0)

    @classmethod
    def open(cls, place: Place, session: int, token: bytes, deadline: Deadline) -> DataConnection:
        """Connect and attach. Raises `OSError`, `FrameError`, or `DaemonUnavailable` where the daemon refuses."""
        seconds = max(0.001, min(deadline.left, _CONNECT_SECONDS))
        if isinstance(place, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = socket.create_connection(place, timeout=seconds)
        try:
            if isinstance(place, str):
                sock.settimeout(seconds)
                sock.connect(place)
            bulk.prepare(sock)
            made = cls(sock)
            limit = Deadline(seconds)
            bulk.send(sock, [lane.frame(lane.Op.ATTACH, 1, lane.ATTACH_BODY.pack(session, token))], lambda: limit.left)
            op, _, body = data.receive_frame(sock, _FRAME_BYTES, lambda: limit.left)
            if op != lane.Op.ATTACH or body[:1] != b"\x00":
                raise DaemonUnavailable(f"the daemon refused a data connection: {body[1:].decode('utf-8', 'replace')}")
        except BaseException:
            sock.close()
            raise
        return made

    @property
    def alive(self) -> bool:
        """Whether an idle connection may be used: the daemon says nothing unasked, so what can be read there is its end."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def lend(self, deadline: Deadline) -> None:
        """Begin a call, which ends by that time."""
        self._deadline = deadline

    def ask(self, message: ops.HotRequest, request_id: int, kind: type[_M]) -> _M:
        """Send a request and return its answer. Raises what the daemon answered."""
        self.settled = False
        self.send([lane.encode(message, request_id)])
        return self.answer(request_id, kind)

    def answer(self, request_id: int, kind: type[_M]) -> _M:
        """Return the answer of that kind. Raises what the daemon answered instead, or `DaemonUnavailable`."""
        op, body = self._frame(request_id)
        if op == lane.Op.PROTOBUF:
            envelope = pb.ServerMessage.FromString(body)
            self.settled = True
            raise error_of(envelope.error.status)
        message = lane.decode(op, body)
        if not isinstance(message, kind):
            raise DaemonUnavailable(f"the daemon answered with {type(message).__name__}, {kind.__name__} was due")
        return message

    def expect(self, request_id: int, due: data.Op) -> bytes:
        """Return the body of a frame that must come now."""
        op, body = self._frame(request_id)
        if op != due:
            raise lane.FrameError(f"operation {op} came, {due.name} was due")
        return body

    def _frame(self, request_id: int) -> tuple[int, bytes]:
        op, its_id, body = data.receive_frame(self._sock, _FRAME_BYTES, self._left)
        if its_id != request_id:
            raise lane.FrameError(f"an answer to request {its_id} came, one to {request_id} was due")
        return op, body

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send bytes."""
        bulk.send(self._sock, parts, self._left)

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Fill memory."""
        bulk.receive(self._sock, parts, self._left)

    def _left(self) -> float:
        return self._deadline.left

    def interrupt(self) -> None:
        """Wake the thread that uses it: its call fails."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; only by who has it."""
        self._sock.close()

    def disown(self) -> None:
        """In a forked child: let go of the inherited descriptor."""
        with suppress(OSError):
            os.close(self._sock.detach())


class DataConnections:
    """The data connections of one link, at most `most`."""

    def __init__(
        self, place: Place, session: int, most: int, token: Callable[[Deadline], bytes], router: Router
    ) -> None:
        self._place = place
        self._session = session
        self._most = most
        self._token = token
        self._router = router
        self._changed = threading.Condition()
        self._all: set[DataConnection] = set()
        self._idle: list[DataConnection] = []
        self._opening = 0
        self._closed = False

    @contextmanager
    def borrow(self, deadline: Deadline, what: str) -> Iterator[DataConnection | None]:
        """Yield a connection for one call, None where there are none to be had: then the stream must do.

        Whatever of the connection fails is raised as what it means to the caller: `SessionLost` or `DeadlineExceeded`. A connection
        on which a call ended half-way is closed, by which the daemon gives the call up.
        """
        taken = self._take(deadline, what)
        if taken is None:
            yield None
            return
        taken.lend(deadline)
        try:
            yield taken
        except bulk.Stalled as error:
            raise DeadlineExceeded(f"{what}: no answer within the deadline") from error
        except HostStageError:
            raise
        except (OSError, lane.FrameError) as error:
            lost = self._router.lost
            raise SessionLost(str(lost) if lost else f"{what}: the data connection broke: {error}") from error
        finally:
            self._give_back(taken)

    def _take(self, deadline: Deadline, what: str) -> DataConnection | None:
        with self._changed:
            while True:
                if self._closed:
                    return None
                while self._idle:
                    found = self._idle.pop()
                    if found.alive:
                        return found
                    self._all.discard(found)
                    found.close()
                if len(self._all) + self._opening < self._most:
                    self._opening += 1
                    break
                if not self._changed.wait(deadline.left):
                    raise DeadlineExceeded(f"{what}: other calls use all {self._most} data connections")
        made: DataConnection | None = None
        try:
            made = self._open(deadline)
        finally:
            with self._changed:
                self._opening -= 1
                if made is not None:
                    self._all.add(made)
                self._changed.notify()
        return made

    def _open(self, deadline: Deadline) -> DataConnection | None:
        token = self._token(deadline)
        try:
            return DataConnection.open(self._place, self._session, token, deadline)
        except (OSError, lane.FrameError) as error:
            if self._router.lost is not None:
                raise SessionLost(str(self._router.lost)) from error
            if deadline.passed:
                raise DeadlineExceeded(f"no data connection to {self._place} within the deadline") from error
            with self._changed:
                if self._all:
                    # Others work, so this one is beyond what the daemon allows, or it is short of something for the moment.
                    self._most = len(self._all)
                else:
                    self._closed = True
            _log.warning(
                "no data connection to %s: %s; pages travel on the gRPC stream, which is slower", self._place, error
            )
            return None

    def _give_back(self, connection: DataConnection) -> None:
        with self._changed:
            if connection.settled and not self._closed:
                self._idle.append(connection)
            else:
                self._all.discard(connection)
                connection.close()
            self._changed.notify()

    def close(self) -> None:
        """End all; calls under way fail. Safe to repeat."""
        with self._changed:
            self._closed = True
            for idle in self._idle:
                self._all.discard(idle)
                idle.close()
            self._idle.clear()
            for busy in self._all:
                busy.interrupt()
            self._changed.notify_all()

    def disown(self) -> None:
        """In a forked child, without a lock that another thread may have held."""
        for connection in list(self._all):
            connection.disown()
