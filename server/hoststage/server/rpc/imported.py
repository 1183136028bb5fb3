"""Imported memory on the wire: its messages, and its descriptors as they come over the fd socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hoststage.server.contract import LiveSession, RequestError
from hoststage.server.memory.imports import ImportProblem, open_memory
from hoststage.server.rpc import status
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.convert_stack import text_of
from hoststage.shm import fdpass
from hoststage.v1 import convert, fdsocket
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import imported as wire

OPERATIONS = frozenset({"import_memory", "drop_import", "imported_store", "imported_load"})
_TICKET = "import"


async def carry_out(connections: Connections, connection: Connection, message: pb.ClientMessage) -> pb.ServerMessage:
    """Carry out one message and return its answer. Raises `RequestError`."""
    live = connection.live
    assert live is not None
    answer = pb.ServerMessage(request_id=message.request_id)
    try:
        match message.WhichOneof("body"):
            case "import_memory":
                answer.import_memory_reply.CopyFrom(_announce(connections, live, message.import_memory))
            case "drop_import":
                await live.imported.drop(message.drop_import.import_id)
                answer.done.SetInParent()
            case "imported_store":
                ask = wire.store_from_proto(message.imported_store)
                stored = convert.to_proto(await live.imported.store(ask, message.request_id), message.request_id)
                assert isinstance(stored, pb.ServerMessage)
                answer = stored
            case "imported_load":
                loaded = await live.imported.load(wire.load_from_proto(message.imported_load))
                answer.imported_load_reply.CopyFrom(wire.load_reply_to_proto(loaded))
    except wire.PlacesError as error:
        raise RequestError("PLACES", str(error), field=error.field, remedy=error.remedy) from error
    return answer


def _announce(connections: Connections, live: LiveSession, m: pb.ImportMemory) -> pb.ImportMemoryReply:
    import_id = live.imported.announce(text_of(m.name, "import_memory.name"), list(m.bytes))
    token = connections.tickets.issue(
        _TICKET, live.session_id, connections.now(), import_id, lambda: live.imported.forget(import_id)
    )
    return pb.ImportMemoryReply(import_id=import_id, fd_token=token)


# ------------------------------------------------------------------ the fd socket, in a worker thread


@dataclass(frozen=True, slots=True)
class Desk:
    """What a worker of the fd socket needs to hand imports to the loop. `timeout`: seconds that the loop may take."""

    connections: Connections
    loop: asyncio.AbstractEventLoop
    timeout: float


def take_in(client: socket.socket, token: bytes, memfds: Sequence[int], pidfd: int, desk: Desk) -> str:
    """Check the descriptors that came with a token and hand them to their session. Returns how it went, for the metrics.

    Takes all descriptors over.
    """
    try:
        asked = asyncio.run_coroutine_threadsafe(_announced(desk.connections, token), desk.loop)
        found = asked.result(desk.timeout)
        if found is None:
            fdpass.send_fds(client, fdsocket.encode_refusal("the token is unknown, used or expired"), [])
            return "refused"
        session, import_id, sizes = found
        try:
            files = open_memory(memfds, sizes)
            # Before the client has its answer: what it drops after that must be closed then.
            fdpass.close_all(memfds)
            memfds = ()
        except ImportProblem as problem:
            desk.loop.call_soon_threadsafe(_forget, desk.connections, session, import_id)
            error = RequestError(
                problem.reason, str(problem), code="FAILED_PRECONDITION", field=problem.field, remedy=problem.remedy
            )
            fdpass.send_fds(client, fdsocket.encode_status(status.of_request_error(error).SerializeToString()), [])
            return "refused"
        given, pidfd = pidfd, -1
        attached = _attach(desk.connections, session, import_id, files, given)
        kept = asyncio.run_coroutine_threadsafe(attached, desk.loop).result(desk.timeout)
    finally:
        fdpass.close_all(memfds)
        if pidfd >= 0:
            os.close(pidfd)
    if not kept:
        fdpass.send_fds(client, fdsocket.encode_refusal("the session is over"), [])
        return "refused"
    records = [fdsocket.Described(import_id, i, size) for i, size in enumerate(sizes)]
    fdpass.send_fds(client, fdsocket.encode_reply(records, last=True), [])
    return "granted"


async def _announced(connections: Connections, token: bytes) -> tuple[int, int, tuple[int, ...]] | None:
    """On the loop: use the token up. Returns session, import and announced sizes."""
    redeemed = connections.tickets.redeem(_TICKET, token, connections.now())
    connection = connections.find(redeemed[0]) if redeemed else None
    if redeemed is None or connection is None or connection.live is None:
        return None
    import_id = redeemed[1]
    assert isinstance(import_id, int)
    sizes = connection.live.imported.awaited(import_id)
    return None if sizes is None else (redeemed[0], import_id, sizes)


async def _attach(connections: Connections, session: int, import_id: int, files: list[int], pidfd: int) -> bool:
    """On the loop: hand the descriptors to the session and watch the process. Takes both over, whoever still waits for the answer."""
    connection = connections.find(session)
    if connection is None or connection.live is None or not connection.live.imported.attach(import_id, files):
        fdpass.close_all([*files, pidfd])
        return False
    connections.watch(session, pidfd)
    return True


def _forget(connections: Connections, session: int, import_id: int) -> None:
    connection = connections.find(session)
    if connection is not None and connection.live is not None:
        connection.live.imported.forget(import_id)
