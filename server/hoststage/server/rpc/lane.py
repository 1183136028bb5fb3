"""The local lane: a Unix socket that carries a session's hot path without gRPC's machinery."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from time import perf_counter
from typing import cast

import structlog
from google.protobuf.message import DecodeError

from hoststage.server.contract import LiveSession, RequestError
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.dispatch import Dispatcher, error_message, fault, too_many
from hoststage.server.telemetry.wire import Latency
from hoststage.shm.peer import peer_credentials
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane, ops

log = structlog.get_logger(__name__)

WRITE_LIMIT_BYTES = 16 << 20
"""What may wait for a client to read it; a client behind by more is closed."""
ATTACH_SECONDS = 5.0
MAX_UNATTACHED = 128
_REQUESTS = frozenset((lane.Op.RESERVE, lane.Op.COMMIT, lane.Op.LOOKUP, lane.Op.LOAD, lane.Op.RELEASE))


class LaneProtocol(asyncio.Protocol):
    """One lane. Nothing is served, and next to nothing buffered, before ATTACH with a session's lane token.

    `unattached`: all lanes of the daemon that have not attached yet, in order of arrival.
    """

    def __init__(
        self, connections: Connections, unattached: dict[LaneProtocol, None], max_message: int, max_open: int
    ) -> None:
        self._connections = connections
        self._unattached = unattached
        self._max_message = max_message
        self._max_open = max_open
        self._open = 0
        self._fd = -1
        self._reader = lane.FrameReader(lane.ATTACH_BODY.size)
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._live: LiveSession | None = None
        self._dispatcher: Dispatcher | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = "end of file"
        self._latencies: dict[int, Latency] = {}

    # -------------------------------------------------------------- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.metrics.lanes += 1
        self._transport.set_write_buffer_limits(high=1 << 20)
        self._fd = self._transport.get_extra_info("socket").fileno()
        self._timer = asyncio.get_running_loop().call_later(
            ATTACH_SECONDS, self._close, "no ATTACH in time", "unattached"
        )
        self._unattached[self] = None
        if len(self._unattached) > MAX_UNATTACHED:
            next(iter(self._unattached))._close("too many lanes without ATTACH", "unattached")
        with _socket_of(self._transport) as made:
            refusal = self._connections.policy.refusal(peer_credentials(made))
        if refusal:
            self._write(lane.frame(lane.Op.ATTACH, 0, b"\x01" + refusal.encode()))
            self._close(refusal, "refused")

    def data_received(self, data: bytes) -> None:
        try:
            for op, request_id, body in self._reader.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self._frame(op, request_id, body)
        except lane.FrameError as error:
            self._close(f"malformed frame: {error}", "malformed")
        except Exception as error:
            log.error("lane.fault", session=self._session, error=repr(error), exc_info=error)
            self._close(f"a fault of the daemon: {error!r}", "fault")

    def pause_writing(self) -> None:
        # A client that does not read its answers gets no further requests served.
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.metrics.lanes -= 1
        self._attached_or_gone()
        self._transport = None
        connection, self._connection, self._live = self._connection, None, None
        if connection is not None:
            self._connections.lane_ended(connection, str(exc) if exc else self._reason)

    @property
    def _session(self) -> int:
        return self._connection.session if self._connection is not None else 0

    def _attached_or_gone(self) -> None:
        self._unattached.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, reason: str, kind: str = "ended") -> None:
        self._reason = reason
        self._unattached.pop(self, None)
        if self._transport is not None and not self._transport.is_closing():
            self._connections.metrics.closed["lane", kind] += 1
            log.info("lane.closed", session=self._session, reason=reason)
            self._transport.close()

    def _write(self, data: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > WRITE_LIMIT_BYTES:
            self._reason = "the client does not read"
            self._connections.metrics.closed["lane", "slow"] += 1
            log.warning("lane.too_slow", session=self._session)
            transport.abort()
            return False
        if not transport.get_write_buffer_size():
            data = self._write_now(data)
        if data:
            transport.write(data)
        return True

    def _write_now(self, data: bytes) -> bytes:
        """Write as much as goes at once and return the rest. A transport writes only after the callbacks that are due, which may be many."""
        try:
            return data[os.write(self._fd, data) :]
        except BrokenPipeError:
            # Nobody reads it any more. What the client said before it closed is still to be read, a goodbye perhaps: a transport that
            # fails to write reads no further.
            return b""
        except OSError:
            # What is wrong with the socket is for the transport to find out.
            return data

    # -------------------------------------------------------------- frames

    def _frame(self, op: int, request_id: int, body: bytes) -> None:
        live = self._live
        if live is None:
            self._attach(op, request_id, body)
            return
        if op == lane.Op.PROTOBUF:
            self._protobuf(request_id, body)
            return
        if op not in _REQUESTS:
            raise lane.FrameError(f"operation {op} is no request")
        message = lane.decode(op, body)
        try:
            if self._open >= self._max_open:
                raise too_many(self._open)
            if op == lane.Op.RELEASE:
                live.submit(message, request_id, _never)  # type: ignore[arg-type]
            else:
                self._submit(live, message, request_id, self._latency(op))
        except RequestError as error:
            self._send_error(request_id, error)
        except Exception as error:
            self._send_error(request_id, fault(self._session, error))

    def _latency(self, op: int) -> Latency:
        found = self._latencies.get(op)
        if found is None:
            found = self._latencies[op] = self._connections.metrics.latency("lane", lane.Op(op).name.lower())
        return found

    def _submit(self, live: LiveSession, message: ops.HotMessage, request_id: int, latency: Latency) -> None:
        started = perf_counter()

        def reply(answer: ops.HotReply) -> None:
            self._open -= 1
            latency.observe(perf_counter() - started)
            self._write(lane.encode(answer, request_id))

        self._open += 1
        try:
            live.submit(message, request_id, reply)  # type: ignore[arg-type]
        except BaseException:
            self._open -= 1
            raise

    def _protobuf(self, request_id: int, body: bytes) -> None:
        assert self._dispatcher is not None
        try:
            message = pb.ClientMessage.FromString(body)
        except DecodeError as error:
            # The frame is sound, so the next one will be: only this request fails.
            self._send_error(
                request_id, RequestError("MALFORMED", f"the frame holds no ClientMessage: {error}", field="frame")
            )
            return
        self._dispatcher.handle(message)

    def _send_error(self, request_id: int, error: RequestError) -> None:
        self._connections.metrics.errors[error.reason] += 1
        body = error_message(request_id, error).SerializeToString()
        self._write(lane.frame(lane.Op.PROTOBUF, request_id, body))

    def _attach(self, op: int, request_id: int, body: bytes) -> None:
        if op != lane.Op.ATTACH or len(body) != lane.ATTACH_BODY.size:
            raise lane.FrameError("the first frame must be ATTACH")
        session, token = lane.ATTACH_BODY.unpack(body)
        redeemed = self._connections.tickets.redeem("lane", token, self._connections.now())
        connection = self._connections.find(session)
        if redeemed is None or redeemed[0] != session or connection is None or connection.live is None:
            self._write(lane.frame(lane.Op.ATTACH, request_id, b"\x01the lane token is unknown, used or expired"))
            self._close("a wrong lane token", "refused")
            return
        self._attached_or_gone()
        self._reader.limit = self._max_message
        self._connection, self._live = connection, connection.live
        connection.lane_write, connection.lane_close = self._write, self._close
        self._dispatcher = Dispatcher(self._connections, connection, "lane", connection.send_by_lane, self._max_open)
        self._write(lane.frame(lane.Op.ATTACH, request_id, b"\x00"))


def _never(_: ops.HotReply) -> None:
    """Release has no answer."""


def _socket_of(transport: asyncio.Transport) -> socket.socket:
    # uvloop's socket object lacks options; a duplicate of our own closes itself.
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


Factory = Callable[[], LaneProtocol]


def lane_factory(connections: Connections, max_message: int, max_open: int) -> Factory:
    """Return what makes the protocol of each new lane of one daemon."""
    unattached: dict[LaneProtocol, None] = {}
    return lambda: LaneProtocol(connections, unattached, max_message, max_open)
