"""Connections: one a session, with its stream, its lane, its death watch, and what it is told unasked."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from hoststage.server.contract import LiveSession, Push, RequestError, RevokedLeases, TierService
from hoststage.server.rpc.outbox import Outbox
from hoststage.server.rpc.peers import PeerPolicy
from hoststage.server.rpc.tickets import Tickets
from hoststage.server.telemetry.wire import WireMetrics
from hoststage.v1 import convert, lane
from hoststage.v1 import hoststage_pb2 as pb

if TYPE_CHECKING:
    from hoststage.server.rpc.data import DataConnection
    from hoststage.server.rpc.inline import Assembly, Charge

log = structlog.get_logger(__name__)


def session_limit() -> int:
    """Return how many sessions may be open: a sixteenth of the files that the daemon may open, of which each takes a few beside its arenas'."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16)


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


@dataclass(frozen=True, slots=True)
class InlineLimits:
    """Payload in messages that the daemon holds at most, for one session and for all."""

    session_bytes: int = 2 << 30
    daemon_bytes: int = 4 << 30


@dataclass(slots=True, eq=False)
class Connection:
    """Implements `Port` for one session. `lane_write` is set while a lane is attached.

    `handed_out`: descriptors of the session's memory have left the daemon. `inline_bytes`: payload of its inline requests that is
    held in the daemon.
    """

    outbox: Outbox
    live: LiveSession | None = None
    lane_write: Callable[[bytes], bool] | None = None
    lane_close: Callable[[str], None] | None = None
    stream_open: bool = True
    goodbye: bool = False
    handed_out: bool = False
    pidfd: int = -1
    inline_parts: dict[int, Assembly] = field(default_factory=dict)
    charges: set[Charge] = field(default_factory=set)
    inline_bytes: int = 0
    data: set[DataConnection] = field(default_factory=set)

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
        return self.send_by_stream(push_to_proto(message))

    def send_by_stream(self, message: pb.ServerMessage) -> bool:
        """Send a message on the gRPC stream; False where it is gone or too slow."""
        return self.stream_open and self.outbox.put(message)

    def send_by_lane(self, message: pb.ServerMessage) -> bool:
        """Send a message on the lane; False where it is gone or too slow."""
        write = self.lane_write
        return write is not None and write(
            lane.frame(lane.Op.PROTOBUF, message.request_id, message.SerializeToString())
        )

    def announce(self, message: pb.ServerMessage) -> bool:
        """Tell the client something unasked, by the lane where there is one."""
        return self.send_by_lane(message) if self.lane_write is not None else self.send_by_stream(message)


class Connections:
    """All connections, and the rules of how a session ends."""

    def __init__(
        self,
        tier: TierService,
        policy: PeerPolicy | None = None,
        metrics: WireMetrics | None = None,
        inline_limits: InlineLimits | None = None,
    ) -> None:
        self.tier = tier
        self.inline_limits = inline_limits or InlineLimits()
        self.policy = policy or PeerPolicy()
        self.metrics = metrics or WireMetrics()
        self.tickets = Tickets()
        self.max_sessions = session_limit()
        self._opening = 0
        self.draining = False
        self.inline_bytes = 0
        self._by_session: dict[int, Connection] = {}

    @staticmethod
    def now() -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    @contextmanager
    def opening(self, previous: int) -> Iterator[None]:
        """Count a session while it is being opened, in the place of the one that its client has left. Raises `RequestError` where there are too many."""
        taken = len(self._by_session) + self._opening - (previous in self._by_session)
        if taken >= self.max_sessions:
            raise RequestError(
                "SESSIONS",
                f"{taken} sessions are open, at most {self.max_sessions} are allowed",
                code="RESOURCE_EXHAUSTED",
                remedy="close sessions that are not needed, or raise RLIMIT_NOFILE of the daemon: there may be one for every 16 files",
            )
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def add(self, connection: Connection) -> None:
        """A session was opened."""
        self._by_session[connection.session] = connection

    def find(self, session: int) -> Connection | None:
        """Return the connection of a session that has not ended."""
        return self._by_session.get(session)

    def all(self) -> list[Connection]:
        """Every connection of a session that has not ended."""
        return list(self._by_session.values())

    def forget_replaced(self, session: int) -> None:
        """Stop watching for a session that the tier has ended because its client opened another in its place."""
        connection = self._by_session.get(session)
        if connection is None:
            return
        if not any(s.session == session and s.state != "ending" for s in self.tier.facts().sessions):
            self.finish(connection, "replaced by its own client")

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
        self.tickets.revoke(connection.session)
        if connection.lane_close is not None:
            connection.lane_close(reason)
        for carrier in list(connection.data):
            carrier.close()
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
        connection.outbox.end()
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
        if connection.goodbye or not (connection.handed_out or connection.stream_open):
            self.finish(connection, "goodbye" if connection.goodbye else "its stream and its lane ended")
        else:
            self.tier.quarantine(connection.session, f"its lane ended: {reason}")

    def announce_draining(self, grace_seconds: float) -> None:
        """Tell every client that no new work is taken. `grace_seconds` 0: no end is set."""
        self.draining = True
        message = pb.ServerMessage(draining=pb.Draining(grace_ms=int(grace_seconds * 1000)))
        for connection in self.all():
            connection.announce(message)

    def close(self) -> None:
        """End every session."""
        for connection in self.all():
            self.finish(connection, "the daemon stops")
