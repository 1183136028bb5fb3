"""Where data connections come in: the sockets, and the token without which nothing is served."""

from __future__ import annotations

import asyncio
import socket

import structlog

from hoststage.server.rpc.connections import Connection, Connections
from hoststage.server.rpc.data import DataConnection
from hoststage.shm import bulk
from hoststage.v1 import data, lane

log = structlog.get_logger(__name__)

ATTACH_SECONDS = 5.0
MAX_UNATTACHED = 128
_STOP_SECONDS = 5.0


class DataServer:
    """Accepts data connections on listening sockets. Before ATTACH with a token of a session next to nothing is read, for a few seconds, from a few."""

    def __init__(self, connections: Connections, max_message: int) -> None:
        self._connections = connections
        self._max_message = max_message
        self._listeners: list[socket.socket] = []
        self._unattached: dict[asyncio.Task[None], None] = {}
        self._open: set[DataConnection] = set()
        self._serving: asyncio.Task[None] | None = None

    def listen_tcp(self, address: str) -> int:
        """Listen on `host:port` and return the port. Raises `OSError`."""
        host, _, port = address.rpartition(":")
        [(family, *_), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        made = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=MAX_UNATTACHED)
        self.listen(made)
        return int(made.getsockname()[1])

    def listen(self, listener: socket.socket) -> None:
        """Take a listening socket over; it is closed at `stop`."""
        listener.setblocking(False)
        self._listeners.append(listener)

    async def serving(self) -> None:
        """Accept until cancelled; to be supervised."""
        self._serving = asyncio.current_task()
        async with asyncio.TaskGroup() as group:
            for listener in self._listeners:
                group.create_task(self._accepting(listener))

    async def _accepting(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError as error:
                # Out of descriptors: whoever waits longest has said nothing yet, and goes.
                log.error("data.accept_failed", error=str(error))
                self._drop_oldest()
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = loop.create_task(self._attach(sock))
            self._unattached[task] = None
            task.add_done_callback(self._attached)
            if len(self._unattached) > MAX_UNATTACHED:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self._unattached:
            next(iter(self._unattached)).cancel()

    def _attached(self, task: asyncio.Task[None]) -> None:
        self._unattached.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("data.fault", error=repr(error), exc_info=error)

    async def _attach(self, sock: socket.socket) -> None:
        kind = "unattached"
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                request_id, session, token = await _attach_frame(sock)
            found = self._admitted(session, token)
            if isinstance(found, Connection):
                self._start(found, sock, request_id)
                return
            kind = "refused"
            log.info("data.refused", session=session, reason=found)
            answer = lane.frame(lane.Op.ATTACH, request_id, b"\x01" + found.encode())
            async with asyncio.timeout(ATTACH_SECONDS):
                await asyncio.get_running_loop().sock_sendall(sock, answer)
        except (OSError, TimeoutError, lane.FrameError) as error:
            log.info("data.unattached", reason=str(error) or "no ATTACH in time")
        except asyncio.CancelledError:
            sock.close()
            raise
        self._connections.metrics.closed["data", kind] += 1
        sock.close()

    def _admitted(self, session: int, token: bytes) -> Connection | str:
        """Return the connection whose token that is, or why there is none."""
        redeemed = self._connections.tickets.redeem("data", token, self._connections.now())
        connection = self._connections.find(session)
        if redeemed is None or redeemed[0] != session or connection is None or connection.live is None:
            return "the data token is unknown, used or expired"
        if len(connection.data) >= data.CONNECTION_LIMIT:
            return (
                f"the session has {len(connection.data)} data connections; at most {data.CONNECTION_LIMIT} are allowed"
            )
        return connection

    def _start(self, connection: Connection, sock: socket.socket, request_id: int) -> None:
        try:
            bulk.prepare(sock)
            made = DataConnection(self._connections, connection, sock, request_id, self._max_message)
            made.start()
        except BaseException:
            sock.close()
            raise
        self._open = {c for c in self._open if not c.ended.is_set()} | {made}

    async def stop(self) -> None:
        """End every connection and wait until no thread uses a session's memory any more."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for task in list(self._unattached):
            task.cancel()
        still = [c for c in self._open if not c.ended.is_set()]
        for connection in still:
            connection.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                for connection in still:
                    await connection.ended.wait()
        except TimeoutError:
            log.error("data.undead", connections=sum(not c.ended.is_set() for c in still))


async def _attach_frame(sock: socket.socket) -> tuple[int, int, bytes]:
    """Return `(request id, session, token)`. Raises `FrameError` for anything that is no ATTACH."""
    size = lane.HEADER_BYTES + lane.ATTACH_BODY.size
    loop, got = asyncio.get_running_loop(), bytearray()
    while len(got) < size:
        part = await loop.sock_recv(sock, size - len(got))
        if not part:
            raise lane.FrameError("end of file before ATTACH")
        got += part
    length, op, _, _, request_id = lane.HEADER.unpack_from(got)
    if op != lane.Op.ATTACH or length != lane.ATTACH_BODY.size:
        raise lane.FrameError("the first frame must be ATTACH")
    session, token = lane.ATTACH_BODY.unpack_from(got, lane.HEADER_BYTES)
    return request_id, session, token
