"""The gRPC services: sessions as streams, and verdicts without one."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from hoststage.core.fences import ProtocolRanges, no_common_version
from hoststage.core.findings import Verdict
from hoststage.core.stack import PayloadPath
from hoststage.server.contract import LiveSession, Refusal, RequestError, SessionRequest, TierService
from hoststage.server.memory.arena import MemoryUnavailable
from hoststage.server.rpc import inline, status
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.convert_stack import (
    arena_to_proto,
    finding_to_proto,
    grant_to_proto,
    request_from_proto,
    verdict_to_proto,
)
from hoststage.server.rpc.dispatch import Dispatcher
from hoststage.server.rpc.outbox import Outbox
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc as pb_grpc
from hoststage.v1.data import CONNECTION_LIMIT
from hoststage.v1.ops import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger(__name__)

FEATURES = (
    "lane",
    "inline",
    "imported",
    "data",
    "pins",
    "holds",
    "whole_arenas",
    "credits",
    "page_index",
    "lease_board",
)
OUTBOX_BYTES = 64 << 20
"""Answers and pushes that may wait for a client to read them."""
FLUSH_SECONDS = 30.0
HELLO_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WireOptions:
    """What the wire needs to know. `token` empty: none is demanded. Paths are of the other sockets. `data_port`: of data connections over TCP, 0: none."""

    server: str
    fd_path: str
    lane_path: str
    data_path: str
    token: str
    max_message_bytes: int
    max_open_requests: int
    max_span_keys: int
    max_read_leases: int
    max_open_commits: int
    max_pin_ms: int
    max_credits: int
    data_port: int = 0

    def limits(self) -> pb.Limits:
        """Return the limits that a Welcome tells."""
        return pb.Limits(
            max_span_keys=self.max_span_keys,
            max_message_bytes=self.max_message_bytes,
            max_open_requests=self.max_open_requests,
            max_read_leases=min(self.max_read_leases, 0xFFFFFFFF),
            max_open_commits=self.max_open_commits,
            max_pin_ms=self.max_pin_ms,
            max_credits=self.max_credits,
            max_data_connections=CONNECTION_LIMIT,
        )


class HostStageServicer(pb_grpc.HostStageServicer):
    """`HostStage` of the protocol."""

    def __init__(self, tier: TierService, connections: Connections, options: WireOptions) -> None:
        self._tier = tier
        self._connections = connections
        self._options = options

    async def Negotiate(
        self, request: pb.NegotiateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.NegotiateResponse:
        await self._authenticate(request.hello, context)
        try:
            wanted = _reachable(_understood(request.hello), context)
        except Refusal as refusal:
            return verdict_to_proto(refusal.verdict)
        except RequestError as error:
            await status.abort(context, status.of_request_error(error))
        answer = verdict_to_proto(self._tier.negotiate(wanted))
        low, high = wanted.protocol
        common = min(high, PROTOCOL_MAX)
        answer.protocol = common if common >= max(low, PROTOCOL_MIN) else 0
        return answer

    async def Session(  # type: ignore[override]  # the stubs know generators only, grpc.aio also takes context.write
        self,
        request_iterator: AsyncIterator[pb.ClientMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        connection = Connection(Outbox(OUTBOX_BYTES))
        try:
            hello_id, hello = await self._hello(request_iterator, context)
            live = await self._open(hello, connection, context)
            connection.live = live
            self._connections.add(connection)
            if hello.previous_session:
                self._connections.forget_replaced(hello.previous_session)
            self._connections.metrics.streams += 1
            local = context.peer().startswith("unix")
            await context.write(self._welcome(hello_id, hello, live, connection, local))
            await self._serve(request_iterator, context, connection)
        finally:
            self._connections.metrics.streams -= connection.live is not None
            inline.drop(connection)
            self._connections.stream_ended(connection)

    async def _hello(
        self, requests: AsyncIterator[pb.ClientMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[int, pb.Hello]:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        except DecodeError as broken:
            malformed = RequestError(
                "MALFORMED", f"the first message is no ClientMessage: {broken}", remedy="send serialized ClientMessages"
            )
            await status.abort(context, status.of_request_error(malformed))
        if first is None or first.WhichOneof("body") != "hello":
            error = RequestError("HELLO_EXPECTED", "the first message must be a Hello", code="FAILED_PRECONDITION")
            await status.abort(context, status.of_request_error(error))
        assert first is not None
        await self._authenticate(first.hello, context)
        return first.request_id, first.hello

    async def _authenticate(self, hello: pb.Hello, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        given = hello.token
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                given = given or value.removeprefix("Bearer ")
        if self._options.token and not hmac.compare_digest(given.encode(), self._options.token.encode()):
            error = RequestError(
                "TOKEN",
                "the bearer token is missing or wrong",
                code="UNAUTHENTICATED",
                field="token",
                remedy="pass the token of the daemon's auth.token_file (client: HOSTSTAGE_TOKEN)",
            )
            await status.abort(context, status.of_request_error(error))

    async def _open(
        self, hello: pb.Hello, connection: Connection, context: grpc.aio.ServicerContext[Any, Any]
    ) -> LiveSession:
        results = self._connections.metrics.handshakes
        try:
            with self._connections.opening(hello.previous_session):
                live = await self._tier.open(_reachable(_understood(hello), context), connection)
        except RequestError as error:
            results["refused" if error.reason == "SESSIONS" else "malformed"] += 1
            await status.abort(context, status.of_request_error(error))
        except Refusal as refusal:
            refused = status.of_verdict(refusal.verdict, draining=self._connections.draining)
            results["refused"] += 1
            log.info("session.refused", client=hello.client, worker=hello.worker, why=refused.message)
            await status.abort(context, refused)
        except MemoryUnavailable as error:
            results["no_memory"] += 1
            log.error("session.no_memory", client=hello.client, error=str(error))
            lacking = RequestError("BUDGET", str(error), code="RESOURCE_EXHAUSTED", remedy="see `hoststage doctor`")
            await status.abort(context, status.of_request_error(lacking))
        results["granted"] += 1
        return live

    def _welcome(
        self, request_id: int, hello: pb.Hello, live: LiveSession, connection: Connection, local: bool
    ) -> pb.ServerMessage:
        welcome = pb.Welcome(
            protocol=min(hello.protocol_max or 1, PROTOCOL_MAX),
            features=FEATURES,
            server=self._options.server,
            boot_epoch=self._tier.boot_epoch,
            session=live.session_id,
            resume_token=live.resume_token,
            grant=grant_to_proto(live.grant),
            findings=[finding_to_proto(f) for f in live.verdict.findings],
            limits=self._options.limits(),
        )
        if live.grant.path is not PayloadPath.INLINE:
            now = self._connections.now()
            welcome.fd_socket, welcome.lane_socket = self._options.fd_path, self._options.lane_path
            welcome.lane_token = self._connections.tickets.issue("lane", live.session_id, now)
            if live.grant.path is PayloadPath.SHM:
                welcome.arenas.extend(arena_to_proto(a) for a in live.arenas)
                welcome.fd_token = self._connections.tickets.issue("fd", live.session_id, now)
        if live.grant.path is not PayloadPath.SHM:
            if local:
                welcome.data_socket = self._options.data_path
            else:
                welcome.data_port = self._options.data_port
        return pb.ServerMessage(request_id=request_id, welcome=welcome)

    async def _serve(
        self,
        requests: AsyncIterator[pb.ClientMessage],
        context: grpc.aio.ServicerContext[Any, Any],
        connection: Connection,
    ) -> None:
        """Read requests and write answers until either side ends."""
        outbox = connection.outbox
        limit = self._options.max_open_requests
        dispatcher = Dispatcher(self._connections, connection, "stream", connection.send_by_stream, limit)

        async def read() -> None:
            async for message in requests:
                dispatcher.handle(message)
                # A client that does not read its answers gets no further requests served.
                await outbox.room()
            # It has said all that it will; what it asked is still answered.
            async with asyncio.timeout(FLUSH_SECONDS):
                await dispatcher.idle()
            outbox.end()

        async def write() -> None:
            while (message := await outbox.get()) is not None:
                await context.write(message)

        async def watch() -> None:
            await outbox.overflowed.wait()
            raise _TooSlow

        reading, writing = asyncio.create_task(read()), asyncio.create_task(write())
        tasks = {reading, writing, asyncio.create_task(watch())}
        try:
            done = await _until_over(tasks, reading)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            await self._explain(task.exception(), connection, context)

    async def _explain(
        self, error: BaseException | None, connection: Connection, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """End the stream with what went wrong on it."""
        if error is None or isinstance(error, (grpc.RpcError, TimeoutError)):
            return
        if isinstance(error, _TooSlow):
            log.warning("session.too_slow", session=connection.session)
            self._connections.metrics.closed["stream", "slow"] += 1
            slow = RequestError(
                "TOO_SLOW", "the client does not read its stream", code="RESOURCE_EXHAUSTED", remedy="read it"
            )
            await status.abort(context, status.of_request_error(slow))
        log.warning("session.stream_broke", session=connection.session, error=repr(error))
        self._connections.metrics.closed["stream", "malformed"] += 1
        broken = RequestError("MALFORMED", f"the stream broke: {error!r}", remedy="send serialized ClientMessages")
        await status.abort(context, status.of_request_error(broken))


class _TooSlow(Exception):
    """The client does not read."""


async def _until_over(tasks: set[asyncio.Task[None]], reading: asyncio.Task[None]) -> set[asyncio.Task[None]]:
    """Wait for the end of a stream: the first task to end, but that a reader that ended well leaves it to the writer."""
    waiting = set(tasks)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if done != {reading} or reading.exception() is not None:
            return done


def _understood(hello: pb.Hello) -> SessionRequest:
    """Return the request in a Hello. Raises `RequestError`, or `Refusal` where it speaks of a protocol that is not ours."""
    try:
        return request_from_proto(hello)
    except RequestError as error:
        ranges = ProtocolRanges(hello.protocol_min or 1, hello.protocol_max or 1, PROTOCOL_MIN, PROTOCOL_MAX)
        if ranges.common is None and ranges.client_min <= ranges.client_max:
            # What is unknown in it is what its versions brought: the versions are what has to be told.
            raise Refusal(Verdict(None, (no_common_version(ranges),))) from error
        raise


def _reachable(request: SessionRequest, context: grpc.aio.ServicerContext[Any, Any]) -> SessionRequest:
    """Without a Unix socket no memory can be shared, whatever the client wishes."""
    if context.peer().startswith("unix"):
        return request
    paths = tuple(p for p in request.stack.paths if p is PayloadPath.INLINE)
    return replace(request, stack=replace(request.stack, paths=paths))
