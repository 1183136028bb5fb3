"""The fd socket: descriptors to co-located clients, and the pidfd by which their death is seen.

Blocking sockets in threads, because uvloop drops received descriptors. One thread accepts and waits; a client costs a worker only once its whole
request is there, so that clients that connect and say nothing, or half of something, keep nobody waiting.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from hoststage.server.contract import ArenaDescriptor
from hoststage.server.memory.arena import MemoryUnavailable
from hoststage.server.rpc import imported
from hoststage.server.rpc.connections import Connections
from hoststage.shm import fdpass, peer
from hoststage.v1 import fdsocket

log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 5.0
"""From connecting to a whole request, and again from there to the answer."""
MAX_WAITING = 64
"""Clients without a whole request; beyond that the one that waited longest goes."""
_WORKERS = 4
_MAX_FDS_IN = fdsocket.MAX_DESCRIPTORS + 1
_RECHECK_SECONDS = 0.02
_PACKET_BYTES = len(fdsocket.encode_request(fdsocket.Kind.ARENAS, bytes(fdsocket.TOKEN_BYTES), has_pidfd=False))
_REQUEST_BYTES = 8 + _PACKET_BYTES
"""The frame's header and the request. A client that announces more is refused rather than waited for."""


class FdSocketServer:
    """Serves the fd socket on a listening socket; `close` ends it."""

    def __init__(self, listener: socket.socket, connections: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._connections = connections
        self._loop = loop
        self._workers = ThreadPoolExecutor(_WORKERS, "fd-socket-worker")
        self._thread = threading.Thread(target=self._run, name="fd-socket", daemon=True)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, float] = {}
        self._partial: set[socket.socket] = set()
        self._desk = imported.Desk(connections, loop, TIMEOUT_SECONDS)
        self._closing = False
        self._fault: BaseException | None = None

    def start(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    async def watching(self) -> None:
        """Return never; raise when the thread has died. To be supervised."""
        while self._thread.is_alive():  # noqa: ASYNC110 - a thread has no event of the loop's
            await asyncio.sleep(0.5)
        if not self._closing:
            raise RuntimeError("the thread of the fd socket died") from self._fault
        await asyncio.Event().wait()

    def close(self) -> None:
        """Stop accepting; requests under way end within their timeout."""
        self._closing = True
        self._wake.send(b"x")
        self._thread.join(TIMEOUT_SECONDS)
        self._workers.shutdown(wait=False, cancel_futures=True)
        for waiting in list(self._waiting):
            waiting.close()
        self._selector.close()
        for each in (self._listener, self._wake, self._woken):
            each.close()

    # -------------------------------------------------------------- waiting, in one thread

    def _run(self) -> None:
        try:
            while not self._closing:
                timeout = _RECHECK_SECONDS if self._partial else TIMEOUT_SECONDS / 4
                for key, _ in self._selector.select(timeout):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._woken:
                        assert isinstance(key.fileobj, socket.socket)
                        self._look(key.fileobj)
                for client in list(self._partial):
                    self._look(client)
                self._expire(time.monotonic())
        except BaseException as error:
            self._fault = error
            log.error("fd_socket.fault", error=repr(error), exc_info=error)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: whoever waits longest has said nothing yet, and goes.
            log.error("fd_socket.accept_failed", error=str(error))
            if self._waiting:
                self._drop(next(iter(self._waiting)), "out of descriptors")
            else:
                time.sleep(0.1)
            return
        client.setblocking(False)
        self._waiting[client] = time.monotonic() + TIMEOUT_SECONDS
        self._selector.register(client, selectors.EVENT_READ)
        if len(self._waiting) > MAX_WAITING:
            self._drop(next(iter(self._waiting)), "too many clients wait")

    def _look(self, client: socket.socket) -> None:
        """Hand the client to a worker once its request is whole."""
        try:
            there = len(client.recv(_REQUEST_BYTES, socket.MSG_PEEK))
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(client, str(error))
            return
        if there == 0:
            self._drop(client, "end of file")
        elif there < _REQUEST_BYTES:
            # Readable and not enough: looked at again by the clock, since the selector would fire at once.
            if client not in self._partial:
                self._partial.add(client)
                self._selector.unregister(client)
        else:
            self._forget(client)
            self._workers.submit(self._serve, client)

    def _expire(self, now: float) -> None:
        for client in [c for c, deadline in self._waiting.items() if deadline <= now]:
            self._drop(client, "no request in time")

    def _forget(self, client: socket.socket) -> None:
        self._waiting.pop(client, None)
        if client in self._partial:
            self._partial.discard(client)
        else:
            self._selector.unregister(client)

    def _drop(self, client: socket.socket, why: str) -> None:
        self._forget(client)
        client.close()
        log.info("fd_socket.client_failed", error=why)
        self._count("dropped")

    def _count(self, result: str) -> None:
        counts = self._connections.metrics.fd_requests
        self._loop.call_soon_threadsafe(lambda: counts.update((result,)))

    # -------------------------------------------------------------- serving, in a few

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                client.settimeout(TIMEOUT_SECONDS / 10)
                self._request(client)
        except (OSError, fdsocket.PacketError) as error:
            log.info("fd_socket.client_failed", error=str(error) or repr(error))
            self._count("malformed")
        except Exception as error:
            log.error("fd_socket.fault", error=repr(error), exc_info=error)
            self._count("fault")

    def _request(self, client: socket.socket) -> None:
        packet, received = fdpass.recv_fds(client, _PACKET_BYTES, _MAX_FDS_IN)
        try:
            request = fdsocket.decode_request(packet)
            refusal = self._connections.policy.refusal(peer.peer_credentials(client))
            pidfd = None if refusal else self._pidfd(client, request, received)
            if refusal:
                self._refuse(client, refusal)
            elif pidfd is None:
                self._refuse(client, "the kernel gives no pidfd of this process; send one with the request")
            elif request.kind is fdsocket.Kind.IMPORT:
                memfds = received[request.has_pidfd :]
                del received[request.has_pidfd :]
                self._count(imported.take_in(client, request.token, memfds, pidfd, self._desk))
            else:
                self._hand_out(client, request.token, pidfd)
        finally:
            fdpass.close_all(received)

    @staticmethod
    def _pidfd(client: socket.socket, request: fdsocket.Request, received: Sequence[int]) -> int | None:
        found = peer.peer_pidfd(client)
        if found is None and request.has_pidfd and received and peer.is_pidfd(received[0]):
            found = os.dup(received[0])
        return found

    def _hand_out(self, client: socket.socket, token: bytes, pidfd: int) -> None:
        asked: Future[Sequence[ArenaDescriptor] | None]
        asked = asyncio.run_coroutine_threadsafe(self._redeem(token, pidfd), self._loop)
        try:
            redeemed = asked.result(TIMEOUT_SECONDS)
        except TimeoutError:
            # The loop hangs; what it may still duplicate for us must not stay open.
            asked.add_done_callback(_close_late)
            raise
        except MemoryUnavailable as error:
            log.error("fd_socket.out_of_descriptors", error=str(error))
            self._refuse(client, str(error))
            return
        if redeemed is None:
            self._refuse(client, "the token is unknown, used or expired")
            return
        try:
            records = [fdsocket.Described(d.arena_id, d.chunk, d.size) for d in redeemed]
            fdpass.send_fds(client, fdsocket.encode_reply(records, last=True), [d.fd for d in redeemed])
        finally:
            fdpass.close_all([d.fd for d in redeemed])
        self._count("granted")

    async def _redeem(self, token: bytes, pidfd: int) -> Sequence[ArenaDescriptor] | None:
        """On the loop: use the token up, watch the process, and duplicate its session's descriptors. Takes the pidfd over."""
        redeemed = self._connections.tickets.redeem("fd", token, self._connections.now())
        connection = self._connections.find(redeemed[0]) if redeemed else None
        if redeemed is None or connection is None or connection.live is None:
            os.close(pidfd)
            return None
        connection.handed_out = True
        self._connections.watch(redeemed[0], pidfd)
        beyond = redeemed[1]
        return beyond if isinstance(beyond, list) else connection.live.descriptors()

    def _refuse(self, client: socket.socket, why: str) -> None:
        fdpass.send_fds(client, fdsocket.encode_refusal(why), [])
        self._count("refused")


def _close_late(asked: Future[Sequence[ArenaDescriptor] | None]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        fdpass.close_all([d.fd for d in asked.result() or ()])
