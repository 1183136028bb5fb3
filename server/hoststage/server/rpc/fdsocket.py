"""The fd socket: descriptors to co-located clients, and the pidfd by which their death is seen.

A plain blocking socket in threads, because uvloop drops received descriptors.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from hoststage.server.contract import ArenaDescriptor
from hoststage.server.rpc.connections import Connections
from hoststage.shm import fdpass, peer
from hoststage.v1 import fdsocket

log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 5.0
_MAX_CLIENTS = 32
_MAX_FDS_IN = 64


class FdSocketServer:
    """Serves the fd socket on a listening socket; `close` ends it."""

    def __init__(self, listener: socket.socket, connections: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._connections = connections
        self._loop = loop
        self._workers = ThreadPoolExecutor(_MAX_CLIENTS, "fd-socket")
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._thread = threading.Thread(target=self._accept, name="fd-socket", daemon=True)
        self._closing = False

    def start(self) -> None:
        """Start accepting."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; requests under way end within their timeout."""
        self._closing = True
        # A blocked accept is woken by shutting the listener down, not by closing it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_SECONDS)
        self._listener.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while not self._closing:
            self._slots.acquire()
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                self._slots.release()
                if not self._closing:
                    log.error("fd_socket.accept_failed", error=str(error))
                    threading.Event().wait(0.1)
                continue
            self._workers.submit(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                client.settimeout(TIMEOUT_SECONDS)
                self._request(client)
        except (OSError, fdsocket.PacketError) as error:
            log.info("fd_socket.client_failed", error=str(error))
        except Exception as error:
            log.error("fd_socket.fault", error=repr(error), exc_info=error)
        finally:
            self._slots.release()

    def _request(self, client: socket.socket) -> None:
        packet, received = fdpass.recv_fds(client, 4096, _MAX_FDS_IN)
        try:
            request = fdsocket.decode_request(packet)
            pidfd = peer.peer_pidfd(client)
            if pidfd is None and request.has_pidfd and received and peer.is_pidfd(received[0]):
                pidfd = os.dup(received[0])
            if request.kind is not fdsocket.Kind.ARENAS:
                self._refuse(client, "this daemon does not take imported memory")
            else:
                self._hand_out(client, request.token, pidfd)
        finally:
            fdpass.close_all(received)

    def _hand_out(self, client: socket.socket, token: bytes, pidfd: int | None) -> None:
        redeemed = asyncio.run_coroutine_threadsafe(self._redeem(token, pidfd), self._loop).result(TIMEOUT_SECONDS)
        if redeemed is None:
            if pidfd is not None:
                os.close(pidfd)
            self._refuse(client, "the token is unknown, used or expired")
            return
        try:
            records = [fdsocket.Described(d.arena_id, d.chunk, d.size) for d in redeemed]
            fdpass.send_fds(client, fdsocket.encode_reply(records, last=True), [d.fd for d in redeemed])
        finally:
            fdpass.close_all([d.fd for d in redeemed])

    async def _redeem(self, token: bytes, pidfd: int | None) -> Sequence[ArenaDescriptor] | None:
        """On the loop: use the token up, watch the process, and duplicate its session's descriptors."""
        redeemed = self._connections.tickets.redeem("fd", token, self._connections.now())
        connection = self._connections.find(redeemed[0]) if redeemed else None
        if redeemed is None or connection is None or connection.live is None:
            return None
        connection.handed_out = True
        if pidfd is not None:
            self._connections.watch(redeemed[0], pidfd)
        else:
            log.warning("session.no_pidfd", session=redeemed[0])
        beyond = redeemed[1]
        return beyond if isinstance(beyond, list) else connection.live.descriptors()

    @staticmethod
    def _refuse(client: socket.socket, why: str) -> None:
        fdpass.send_fds(client, fdsocket.encode_refusal(why), [])
