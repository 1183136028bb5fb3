"""The local lane: a Unix socket that carries a session's hot path without gRPC's machinery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import structlog
from google.protobuf.message import DecodeError

from hoststage.server.contract import LiveSession, RequestError
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.dispatch import Dispatcher, error_message
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane, ops

log = structlog.get_logger(__name__)

WRITE_LIMIT_BYTES = 16 << 20
ATTACH_SECONDS = 5.0


class LaneProtocol(asyncio.Protocol):
    """One lane. Nothing is served before ATTACH with a session's lane token."""

    def __init__(self, connections: Connections, max_message: int, max_open: int) -> None:
        self._connections = connections
        self._max_open = max_open
        self._reader = lane.FrameReader(max_message)
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._live: LiveSession | None = None
        self._dispatcher: Dispatcher | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = "end of file"

    # -------------------------------------------------------------- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 20)
        self._timer = asyncio.get_running_loop().call_later(ATTACH_SECONDS, self._close, "no ATTACH in time")

    def data_received(self, data: bytes) -> None:
        try:
            for op, request_id, body in self._reader.feed(data):
                self._frame(op, request_id, body)
        except (lane.FrameError, DecodeError) as error:
            self._close(f"malformed frame: {error}")

    def pause_writing(self) -> None:
        # A client that does not read its answers gets no further requests served.
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        connection, self._connection, self._live = self._connection, None, None
        if connection is not None:
            self._connections.lane_ended(connection, str(exc) if exc else self._reason)

    def _close(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            log.info("lane.closed", session=self._connection.session if self._connection else 0, reason=reason)
            self._transport.close()

    def _write(self, data: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > WRITE_LIMIT_BYTES:
            self._reason = "the client does not read"
            transport.abort()
            return False
        transport.write(data)
        return True

    # -------------------------------------------------------------- frames

    def _frame(self, op: int, request_id: int, body: bytes) -> None:
        live = self._live
        if live is None:
            self._attach(op, request_id, body)
        elif op == lane.Op.PROTOBUF:
            assert self._dispatcher is not None
            self._dispatcher.handle(pb.ClientMessage.FromString(body))
        else:
            message = lane.decode(op, body)
            try:
                live.submit(message, request_id, self._reply(request_id))  # type: ignore[arg-type]
            except RequestError as error:
                self._send_error(request_id, error)

    def _reply(self, request_id: int) -> Callable[[ops.HotReply], None]:
        def reply(answer: ops.HotReply) -> None:
            self._write(lane.encode(answer, request_id))

        return reply

    def _send_error(self, request_id: int, error: RequestError) -> None:
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
            self._close("a wrong lane token")
            return
        if self._timer is not None:
            self._timer.cancel()
        self._connection, self._live = connection, connection.live
        connection.lane_write, connection.lane_close = self._write, self._close
        self._dispatcher = Dispatcher(self._connections, connection, self._max_open)
        self._write(lane.frame(lane.Op.ATTACH, request_id, b"\x00"))
