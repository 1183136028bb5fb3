"""The gRPC services: sessions as streams, and verdicts without one."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.rpc import code_pb2, status_pb2

from hoststage.core.stack import PayloadPath
from hoststage.server.contract import LiveSession, Refusal, RequestError, TierService
from hoststage.server.memory.arena import MemoryUnavailable
from hoststage.server.rpc import status
from hoststage.server.rpc.connections import Connection, Connections, Outbox
from hoststage.server.rpc.convert_stack import (
    arena_to_proto,
    finding_to_proto,
    grant_to_proto,
    request_from_proto,
    verdict_to_proto,
)
from hoststage.server.rpc.dispatch import Dispatcher
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc as pb_grpc
from hoststage.v1.ops import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger(__name__)

FEATURES = ("lane", "inline", "pins", "holds", "whole_arenas", "credits")
OUTBOX_BYTES = 256 << 20
HELLO_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WireOptions:
    """What the wire needs to know. `token` empty: none is demanded. Paths are of the other two sockets."""

    server: str
    fd_path: str
    lane_path: str
    token: str
    max_message_bytes: int
    max_open_requests: int
    max_span_keys: int
    max_read_leases: int
    max_open_commits: int
    max_pin_ms: int
    max_credits: int

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
            wanted = request_from_proto(request.hello)
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
            await context.write(self._welcome(hello_id, hello, live, connection))
            await self._serve(request_iterator, context, connection)
        finally:
            self._connections.stream_ended(connection)

    async def _hello(
        self, requests: AsyncIterator[pb.ClientMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[int, pb.Hello]:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
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
        try:
            return await self._tier.open(request_from_proto(hello), connection)
        except RequestError as error:
            await status.abort(context, status.of_request_error(error))
        except Refusal as refusal:
            refused = status.of_verdict(refusal.verdict)
            log.info("session.refused", client=hello.client, worker=hello.worker, why=refused.message)
            await status.abort(context, refused)
        except MemoryUnavailable as error:
            log.error("session.no_memory", client=hello.client, error=str(error))
            await status.abort(context, status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=str(error)))

    def _welcome(self, request_id: int, hello: pb.Hello, live: LiveSession, connection: Connection) -> pb.ServerMessage:
        welcome = pb.Welcome(
            protocol=min(hello.protocol_max or 1, PROTOCOL_MAX),
            features=FEATURES,
            server=self._options.server,
            boot_epoch=self._tier.boot_epoch,
            session=live.session_id,
            grant=grant_to_proto(live.grant),
            findings=[finding_to_proto(f) for f in live.verdict.findings],
            limits=self._options.limits(),
        )
        if live.grant.path is PayloadPath.SHM:
            now = self._connections.now()
            welcome.arenas.extend(arena_to_proto(a) for a in live.arenas)
            welcome.fd_socket, welcome.lane_socket = self._options.fd_path, self._options.lane_path
            welcome.fd_token = self._connections.tickets.issue("fd", live.session_id, now)
            welcome.lane_token = self._connections.tickets.issue("lane", live.session_id, now)
        return pb.ServerMessage(request_id=request_id, welcome=welcome)

    async def _serve(
        self,
        requests: AsyncIterator[pb.ClientMessage],
        context: grpc.aio.ServicerContext[Any, Any],
        connection: Connection,
    ) -> None:
        """Read requests and write answers until either side ends."""
        dispatcher = Dispatcher(self._connections, connection, self._options.max_open_requests)

        async def read() -> None:
            async for message in requests:
                dispatcher.handle(message)

        async def write() -> None:
            while (message := await connection.outbox.get()) is not None:
                await context.write(message)
            if connection.outbox.overflowed:
                log.warning("session.too_slow", session=connection.session)

        tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, (asyncio.CancelledError, grpc.RpcError)):
                    log.warning("session.stream_broke", session=connection.session, error=repr(result))
