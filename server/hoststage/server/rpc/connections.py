"""Connections: one a session, with its stream, its lane, its death watch, and what it is told unasked."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from hoststage.server.contract import LiveSession, Push, RevokedLeases, TierService
from hoststage.server.rpc.tickets import Tickets
from hoststage.v1 import convert, lane
from hoststage.v1 import hoststage_pb2 as pb

log = structlog.get_logger(__name__)


def push_to_proto(message: Push) -> pb.ServerMessage:
    """Return the envelope of a pushed message."""
    if isinstance(message, RevokedLeases):
        return pb.ServerMessage(
            lease_revoked=pb.LeaseRevoked(
                revocation=message.revocation,
                load_ids=message.load_ids,
                write_slots=convert.slots_to_proto(message.write_slots),
                reason=message.reason,
            )
        )
    envelope = convert.to_proto(message, 0)
    assert isinstance(envelope, pb.ServerMessage)
    return envelope


class Outbox:
    """Messages on their way into a gRPC stream, bounded in bytes: a client that never reads costs no more than that."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._queue: asyncio.Queue[tuple[pb.ServerMessage | None, int]] = asyncio.Queue()
        self.overflowed = False

    def put(self, message: pb.ServerMessage) -> bool:
        """Queue a message; False where the peer is too slow, after which nothing more is taken."""
        size = message.ByteSize()
        # One message is always taken, however large: only a queue that is not drained overflows.
        if self.overflowed or (self._held and self._held + size > self._limit):
            self.overflowed = True
            self._queue.put_nowait((None, 0))
            return False
        self._held += size
        self._queue.put_nowait((message, size))
        return True

    def end(self) -> None:
        """No more messages."""
        self._queue.put_nowait((None, 0))

    async def get(self) -> pb.ServerMessage | None:
        """Return the next message, None at the end."""
        message, size = await self._queue.get()
        self._held -= size
        return message


@dataclass(slots=True, eq=False)
class Connection:
    """Implements `Port` for one session. `lane_write` is set while a lane is attached."""

    outbox: Outbox
    live: LiveSession | None = None
    lane_write: Callable[[bytes], bool] | None = None
    lane_close: Callable[[str], None] | None = None
    stream_open: bool = True
    goodbye: bool = False
    handed_out: bool = False
    pidfd: int = -1
    inline_parts: dict[int, object] = field(default_factory=dict)
    inline_bytes: int = 0

    @property
    def session(self) -> int:
        assert self.live is not None
        return self.live.session_id

    def push(self, message: Push) -> bool:
        if self.lane_write is not None:
            if isinstance(message, RevokedLeases):
                body = push_to_proto(message).SerializeToString()
                return self.lane_write(lane.frame(lane.Op.PROTOBUF, 0, body))
            return self.lane_write(lane.encode(message, 0))
        return self.stream_open and self.outbox.put(push_to_proto(message))

    def send(self, message: pb.ServerMessage) -> bool:
        """Send a message that has no fixed frame, by the lane where there is one."""
        if self.lane_write is not None:
            return self.lane_write(lane.frame(lane.Op.PROTOBUF, message.request_id, message.SerializeToString()))
        return self.stream_open and self.outbox.put(message)


class Connections:
    """All connections, and the rules of how a session ends."""

    def __init__(self, tier: TierService) -> None:
        self.tier = tier
        self.tickets = Tickets()
        self._by_session: dict[int, Connection] = {}

    @staticmethod
    def now() -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def add(self, connection: Connection) -> None:
        """A session was opened."""
        self._by_session[connection.session] = connection

    def find(self, session: int) -> Connection | None:
        """Return the connection of a session that has not ended."""
        return self._by_session.get(session)

    def all(self) -> list[Connection]:
        """Every connection of a session that has not ended."""
        return list(self._by_session.values())

    # -------------------------------------------------------------- death

    def watch(self, session: int, pidfd: int) -> None:
        """Watch the client's process; the descriptor is ours from now on."""
        connection = self._by_session.get(session)
        if connection is None or connection.pidfd >= 0:
            os.close(pidfd)
            return
        connection.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._died, connection)

    def _died(self, connection: Connection) -> None:
        self.finish(connection, "its process died")

    def finish(self, connection: Connection, reason: str) -> None:
        """The session is over: its process is gone, or it said goodbye."""
        if self._by_session.pop(connection.session, None) is None:
            return
        self._unwatch(connection)
        if connection.lane_close is not None:
            connection.lane_close(reason)
        connection.stream_open = False
        connection.outbox.end()
        self.tier.end(connection.session, reason)

    def _unwatch(self, connection: Connection) -> None:
        if connection.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = -1

    def stream_ended(self, connection: Connection) -> None:
        """The gRPC stream is gone. A session whose memory nobody else can write is over; else its lane or its process decides."""
        connection.stream_open = False
        if connection.live is None or self._by_session.get(connection.session) is not connection:
            return
        if connection.goodbye or not connection.handed_out:
            self.finish(connection, "goodbye" if connection.goodbye else "its stream ended")
        elif connection.lane_write is None:
            self.tier.quarantine(connection.session, "its stream ended without a goodbye")

    def lane_ended(self, connection: Connection, reason: str) -> None:
        """The lane is gone: end-of-file without a goodbye only quarantines, since a child may hold a copy of the socket or the
        process may live."""
        connection.lane_write = connection.lane_close = None
        if self._by_session.get(connection.session) is not connection:
            return
        if connection.goodbye:
            self.finish(connection, "goodbye")
        else:
            self.tier.quarantine(connection.session, f"its lane ended: {reason}")

    def announce_draining(self, grace_seconds: float) -> None:
        """Tell every client that no new work is taken."""
        message = pb.ServerMessage(draining=pb.Draining(grace_ms=int(grace_seconds * 1000)))
        for connection in self._by_session.values():
            connection.send(message)

    def close(self) -> None:
        """End every session."""
        for connection in list(self._by_session.values()):
            self.finish(connection, "the daemon stops")
