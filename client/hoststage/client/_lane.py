"""The client's end of the local lane.

Leader and followers: of the threads that wait, one reads the socket for all; when its own answer has come, it hands the socket to another.
So a lone thread pays no switch to a reader thread: it sends, polls and reads by itself. While nobody waits, the session's
housekeeper calls `drain`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from contextlib import suppress

from google.protobuf.message import DecodeError

from hoststage.client._wire import Deadline, Request, Router, Waiter
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, HostStageError, SessionLost
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane
from hoststage.v1.lane import FrameError, FrameReader, Op

_READ_BYTES = 256 * 1024
_ATTACH_LIMIT = 64 * 1024
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_LOST = "the lane to the daemon broke: {}; it was restarted, or closed this session"


class Lane:
    """An attached lane. Any number of threads may call at once."""

    def __init__(self, sock: socket.socket, router: Router, max_message_bytes: int) -> None:
        self.router = router
        self.max_message_bytes = max_message_bytes
        self._sock = sock
        self._poll_in = select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._reader = FrameReader(max_message_bytes)
        self._send_lock = threading.Lock()
        self._mutex = threading.Lock()
        self._leading = False
        self._followers: list[Waiter] = []

    @classmethod
    def attach(
        cls, path: str, session: int, token: bytes, router: Router, max_message_bytes: int, deadline: Deadline
    ) -> Lane:
        """Connect and present the lane token. Raises `DaemonUnavailable` where the daemon does not take it."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline.left))
            sock.connect(path)
            sock.sendall(lane.frame(Op.ATTACH, 1, lane.ATTACH_BODY.pack(session, token)))
            status, text = _attach_reply(sock)
            if status:
                raise DaemonUnavailable(f"the lane at {path} refused session {session}: {text or status}")
        except TimeoutError as error:
            sock.close()
            raise DeadlineExceeded(f"the lane at {path} did not answer in time") from error
        except (OSError, FrameError) as error:
            sock.close()
            if isinstance(error, DaemonUnavailable):
                raise
            raise DaemonUnavailable(f"cannot attach to the lane at {path}: {error}") from error
        sock.setblocking(True)
        return cls(sock, router, max_message_bytes)

    # -------------------------------------------------------------- sending

    def send(self, message: Request, request_id: int, deadline: Deadline) -> None:
        """Send one message. Raises `SessionLost`, or `DeadlineExceeded` where the daemon does not read in time."""
        if isinstance(message, pb.ClientMessage):
            message.request_id = request_id
            data = lane.frame(Op.PROTOBUF, request_id, message.SerializeToString())
        else:
            data = lane.encode(message, request_id)
        try:
            mine = self._send_lock.acquire(timeout=deadline.left)
        except BaseException:
            # Interrupted, before it had the lock or right after: nobody might ever give it back.
            self.close("a thread was interrupted while it sent a message")
            raise
        if not mine:
            raise DeadlineExceeded("other threads' messages were not taken by the daemon in time")
        try:
            self._send_all(data, deadline)
        finally:
            self._send_lock.release()

    def _send_all(self, data: bytes, deadline: Deadline) -> None:
        try:
            self._send_view(data, deadline)
        except HostStageError:
            raise
        except BaseException:
            # Interrupted: half a frame may be on its way, and nothing else may follow it.
            self.close("a thread was interrupted while it sent a message")
            raise

    def _send_view(self, data: bytes | memoryview, deadline: Deadline) -> None:
        sent = 0
        while sent < len(data):
            try:
                sent += self._sock.send(data if not sent else memoryview(data)[sent:], _SEND_FLAGS)
            except BlockingIOError:
                if not self._writable(deadline):
                    if sent:
                        # Half a frame is on its way: nothing else may follow it.
                        self.close("a message could not be sent whole in time")
                    raise DeadlineExceeded("the daemon does not read its lane") from None
            except OSError as error:
                self.close(_LOST.format(error.strerror))
                raise self.router.lost or error from error

    def _writable(self, deadline: Deadline) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return bool(poll.poll(deadline.left * 1000))

    # -------------------------------------------------------------- waiting

    def wait(self, waiter: Waiter, deadline: Deadline) -> bool:
        """Wait until the waiter ends; returns whether it has. The calling thread reads for all, or parks while another does."""
        while not waiter.done:
            lead, lock = False, None
            try:
                # An interruption between taking the lead and here would leave nobody to read.
                with self._mutex:
                    if not self._leading:
                        self._leading = lead = True
                    elif (lock := waiter.ticket_to_park()) is not None:
                        self._followers.append(waiter)
                while lead and not waiter.done and self._read(deadline.left):
                    pass
            finally:
                if lead:
                    # Not in a call, which might be interrupted before it did anything.
                    self._leading = False
                    self._nudge_one()
            if lead:
                if not waiter.done and self.router.lost is not None:
                    # It began to wait while the loss was being told to all others.
                    waiter.fail(SessionLost(str(self.router.lost)))
                if not waiter.done and deadline.passed:
                    return False
            elif lock is not None:
                woken = lock.acquire(timeout=deadline.left)
                with self._mutex, suppress(ValueError):
                    self._followers.remove(waiter)
                if not woken and waiter.forget(lock):
                    if not waiter.done:
                        return False
                elif not waiter.done and deadline.passed:
                    # Asked to lead at the last moment: pass it on, or nobody reads.
                    self._nudge_one()
                    return False
        return True

    @property
    def led(self) -> bool:
        """Whether a thread reads for all right now."""
        return self._leading

    def drain(self, timeout: float = 0.0, limit: int = 64) -> bool:
        """Read what has arrived, unless another thread is reading; returns whether this one did."""
        lead = False
        try:
            with self._mutex:
                if self._leading:
                    return False
                self._leading = lead = True
            if self._read(timeout):
                for _ in range(limit):
                    if not self._read(0.0):
                        break
        finally:
            if lead:
                self._leading = False
                self._nudge_one()
        return True

    def _nudge_one(self) -> None:
        """Have another one read, after this one. Whoever saw it read is among the followers by now."""
        with self._mutex:
            while self._followers:
                follower = self._followers.pop()
                if not follower.done:
                    follower.nudge()
                    return

    def _read(self, timeout: float) -> bool:
        """Read once, waiting at most so many seconds. Returns whether anything came; a lost lane ends all waiters."""
        if self.router.lost is not None or not self._poll_in.poll(timeout * 1000):
            return False
        try:
            return self._take()
        except BaseException:
            # Interrupted between taking bytes and delivering what they say: part of the stream may be lost, and an answer with it.
            # In `poll`, where a thread spends its wait, an interruption costs nothing.
            self.close("a thread was interrupted while it read an answer")
            raise

    def _take(self) -> bool:
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            self.close(_LOST.format(error.strerror))
            return False
        if not data:
            self.close(_LOST.format("end of file"))
            return False
        try:
            for op, request_id, body in self._reader.feed(data):
                self._deliver(op, request_id, body)
        except (FrameError, DecodeError) as error:
            self.close(f"the daemon sent a malformed frame: {error}")
            return False
        return True

    def _deliver(self, op: int, request_id: int, body: bytes) -> None:
        if op == Op.PROTOBUF:
            envelope = pb.ServerMessage.FromString(body)
            envelope.request_id = request_id
            self.router.deliver_proto(envelope)
        elif lane.is_hot(op):
            self.router.deliver(request_id, lane.decode(op, body))
        # A frame of an operation that we do not know is a newer daemon's: skipped.

    # -------------------------------------------------------------- ending

    def close(self, reason: str) -> None:
        """End the lane; everything that waits fails with `reason`. Safe to repeat."""
        self.router.fail(reason)
        with suppress(OSError):
            # Wakes a thread that polls; the descriptor itself stays until nobody can be inside a call.
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the descriptor, once no thread reads: at the latest when the last one has handed over."""
        with self._mutex:
            if self._leading:
                return
            self._leading = True  # nobody may read any more
        self._sock.close()

    def disown(self) -> None:
        """In a forked child: let go of the inherited descriptor, without a word to the daemon or a lock."""
        with suppress(OSError):
            os.close(self._sock.detach())


def _attach_reply(sock: socket.socket) -> tuple[int, str]:
    data = bytearray()
    while True:
        # Byte by byte frames are not over-read: what follows the reply belongs to the lane's reader.
        want = lane.HEADER_BYTES - len(data)
        if want <= 0:
            length, op, _, _, _ = lane.HEADER.unpack_from(data)
            if op != Op.ATTACH or not 1 <= length <= _ATTACH_LIMIT:
                raise FrameError(f"expected an attach reply, got operation {op} with {length} bytes")
            want = lane.HEADER_BYTES + length - len(data)
            if want == 0:
                body = bytes(data[lane.HEADER_BYTES :])
                return body[0], body[1:].decode("utf-8", "replace")
        part = sock.recv(want)
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the daemon closed the lane")
        data += part
