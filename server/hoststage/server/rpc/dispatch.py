"""Requests as protobuf messages, the same from the stream and from the lane."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import structlog

from hoststage.server.contract import ArenaDescriptor, HoldKey, LiveSession, RequestError
from hoststage.server.rpc import bounds, imported, inline, status
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.convert_stack import arena_kind_to_proto, arena_to_proto, text_of
from hoststage.server.telemetry.wire import Road
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

log = structlog.get_logger(__name__)

_UNANSWERED = frozenset({"release", "revoke_ack", "touch"})
_COLD = frozenset({"hold", "seal_hold", "restore", "discard", "lease_arena", "return_arena", "budget"})


def error_message(request_id: int, error: RequestError) -> pb.ServerMessage:
    """Return the answer to a request that failed as a whole."""
    return pb.ServerMessage(request_id=request_id, error=pb.Error(status=status.of_request_error(error)))


def too_many(waiting: int) -> RequestError:
    """Return the refusal of a request beyond the limit."""
    return RequestError(
        "TOO_MANY_REQUESTS",
        f"{waiting} requests have no answer yet",
        code="RESOURCE_EXHAUSTED",
        remedy="wait for answers; the limit is max_open_requests of the handshake",
    )


def fault(session: int, error: Exception) -> RequestError:
    """Log a fault of the daemon's own, and return what the client is told of it."""
    log.error("request.fault", session=session, error=repr(error), exc_info=error)
    return RequestError("INTERNAL", f"the daemon failed: {error!r}", code="INTERNAL", remedy="report it with the log")


def _hold_key(m: pb.HoldId) -> HoldKey:
    return HoldKey(m.owner_token, m.request, m.attempt)


class Dispatcher:
    """Carries out one client's messages of one road and answers them by `send`."""

    def __init__(
        self,
        connections: Connections,
        connection: Connection,
        road: Road,
        send: Callable[[pb.ServerMessage], bool],
        max_open: int,
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._road: Road = road
        self._send = send
        self._max_open = max_open
        self._open: dict[int, tuple[str, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def _live(self) -> LiveSession:
        assert self._connection.live is not None
        return self._connection.live

    async def idle(self) -> None:
        """Wait until no request is without its answer."""
        await self._idle.wait()

    def handle(self, message: pb.ClientMessage) -> None:
        """Carry out one message. Whatever is wrong with it is answered; nothing is raised."""
        request_id = message.request_id
        name = message.WhichOneof("body") or "unknown"
        part_of_known = name == "inline_store" and request_id in self._connection.inline_parts
        try:
            if name not in _UNANSWERED and not part_of_known:
                self._admit(request_id, name)
            self._check(message)
            self._route(name, message, request_id)
        except RequestError as error:
            self._fail(request_id, error, keep=error.reason == "REQUEST_ID")
        except Exception as error:
            self._fail(request_id, fault(self._connection.session, error))

    def _check(self, message: pb.ClientMessage) -> None:
        try:
            bounds.check(message)
        except RequestError:
            inline.abandon(self._connection, message.request_id)
            raise

    def _admit(self, request_id: int, name: str) -> None:
        if request_id == 0 or request_id in self._open:
            raise RequestError(
                "REQUEST_ID",
                f"request id {request_id} is {'0' if request_id == 0 else 'open already'}",
                field="request_id",
                remedy="choose a number that is not 0 and that no open request has",
            )
        if len(self._open) >= self._max_open:
            raise too_many(len(self._open))
        self._open[request_id] = (name, perf_counter())
        self._idle.clear()

    def _close(self, request_id: int) -> None:
        found = self._open.pop(request_id, None)
        if found is not None:
            self._connections.metrics.latency(self._road, found[0]).observe(perf_counter() - found[1])
        if not self._open:
            self._idle.set()

    def _answer(self, message: pb.ServerMessage) -> None:
        self._close(message.request_id)
        self._send(message)

    def _fail(self, request_id: int, error: RequestError, *, keep: bool = False) -> None:
        if not keep:
            self._close(request_id)
        self._connections.metrics.errors[error.reason] += 1
        self._send(error_message(request_id, error))

    def _route(self, name: str, message: pb.ClientMessage, request_id: int) -> None:
        hot = convert.from_proto(message)
        if hot is not None:
            self._live.submit(hot, request_id, self._reply(request_id))  # type: ignore[arg-type]  # requests alone
            return
        match name:
            case "inline_store":
                part = message.inline_store
                inline.store(self._connections, self._connection, request_id, part, self._reply(request_id))
            case "inline_load":
                self._inline_load(message.inline_load, request_id)
            case "ping":
                self._answer(pb.ServerMessage(request_id=request_id, pong=pb.Pong(payload=message.ping.payload)))
            case "abort":
                self._live.abort(convert.slots_from_proto(message.abort.slots))
                self._done(request_id)
            case "cancel_load":
                self._live.cancel_load(message.cancel_load.load_id)
                self._done(request_id)
            case "revoke_ack":
                self._live.revoke_ack(message.revoke_ack.revocation)
            case "touch":
                touch = message.touch
                self._live.touch(touch.lookups, touch.loads, [(entry.pool, entry.slots) for entry in touch.slots])
            case "goodbye":
                self._goodbye(request_id)
            case "open_data":
                self._answer(inline.data_token(self._connections, self._connection, request_id))
            case "hello":
                raise RequestError("SECOND_HELLO", "the session is open already", code="FAILED_PRECONDITION")
            case _ if name in imported.OPERATIONS:
                self._spawn(request_id, self._imported(message))
            case _ if name in _COLD:
                self._spawn(request_id, self._cold(name, message, request_id))
            case _:
                raise RequestError(
                    "UNKNOWN_OPERATION",
                    "the message holds no operation that this daemon knows",
                    code="UNIMPLEMENTED",
                    remedy="compare the features of the handshake",
                )

    def _reply(self, request_id: int) -> Callable[[ops.HotReply], None]:
        def reply(answer: ops.HotReply) -> None:
            envelope = convert.to_proto(answer, request_id)
            assert isinstance(envelope, pb.ServerMessage)
            self._answer(envelope)

        return reply

    def _inline_load(self, m: pb.InlineLoad, request_id: int) -> None:
        if self._road == "lane":
            raise RequestError(
                "INLINE_ON_LANE",
                "pages travel in messages on the gRPC stream alone",
                code="FAILED_PRECONDITION",
                remedy="send InlineLoad on the stream, or Load on the lane",
            )
        inline.load(self._connections, self._connection, request_id, convert.load_from_proto(m.load), self._answer)

    def _done(self, request_id: int) -> None:
        self._answer(pb.ServerMessage(request_id=request_id, done=pb.Done()))

    def _goodbye(self, request_id: int) -> None:
        self._connection.goodbye = True
        self._done(request_id)
        # Let the answer leave before the connection goes.
        asyncio.get_running_loop().call_later(0.05, self._connections.finish, self._connection, "goodbye")

    # -------------------------------------------------------------- requests that take time

    def _spawn(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(request_id, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RequestError as error:
            self._fail(request_id, error)
        except Exception as error:
            self._fail(request_id, fault(self._connection.session, error))

    async def _cold(self, name: str, message: pb.ClientMessage, request_id: int) -> None:
        answer = pb.ServerMessage(request_id=request_id)
        match name:
            case "hold":
                ask = message.hold
                ranges = [ops.PoolRange(r.pool, r.first, r.count) for r in ask.ranges]
                held = await self._live.hold(_hold_key(ask.id), ranges, ask.durable, ask.ttl_ms)
                answer.hold_reply.outcome = int(held.outcome)  # type: ignore[assignment]
                answer.hold_reply.slots.extend(convert.slots_to_proto(held.slots))
                answer.hold_reply.detail = held.detail
            case "seal_hold":
                await self._live.seal_hold(_hold_key(message.seal_hold.id), message.seal_hold.note)
                answer.done.SetInParent()
            case "restore":
                found = await self._live.restore(_hold_key(message.restore.id))
                reply = answer.restore_reply
                reply.outcome = int(found.outcome)  # type: ignore[assignment]
                reply.arena = arena_kind_to_proto(found.arena)
                reply.slots.extend(convert.slots_to_proto(found.slots))
                reply.note, reply.load_id, reply.detail = found.note, found.load_id, found.detail
            case "discard":
                await self._live.discard(_hold_key(message.discard.id))
                answer.done.SetInParent()
            case "lease_arena":
                lease = await self._live.lease_arena(
                    text_of(message.lease_arena.name, "lease_arena.name"), message.lease_arena.bytes
                )
                answer.lease_arena_reply.arena.CopyFrom(arena_to_proto(lease.arena))
                answer.lease_arena_reply.fd_token = self._ticket_for(lease.descriptors)
                answer.lease_arena_reply.warm = lease.warm
            case "return_arena":
                await self._live.return_arena(message.return_arena.arena_id)
                answer.done.SetInParent()
            case "budget":
                budget = await self._live.budget()
                answer.budget_reply.budget_bytes = budget.budget_bytes
                answer.budget_reply.free_bytes = budget.free_bytes
        self._answer(answer)

    async def _imported(self, message: pb.ClientMessage) -> None:
        self._answer(await imported.carry_out(self._connections, self._connection, message))

    def _ticket_for(self, descriptors: list[ArenaDescriptor]) -> bytes:
        """Return a token for descriptors beyond the handshake's; they are closed if nobody comes for them."""

        def close() -> None:
            for d in descriptors:
                os.close(d.fd)

        tickets = self._connections.tickets
        return tickets.issue("fd", self._connection.session, self._connections.now(), descriptors, close)
