"""Passes descriptors with a payload over a connected Unix stream socket (``SCM_RIGHTS``).

One message is a little-endian header (payload bytes, descriptors), the payload, and one filler byte for each further
batch of descriptors, because the kernel passes at most 253 at a time and only together with a byte. The sockets are blocking ones: uvloop's transports
drop received descriptors. A timeout is the socket's own.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence

_HEADER = struct.Struct("<II")
MAX_BATCH = 250
_FILLER = b"\0"


class FdPassError(ConnectionError):
    """The peer's message is malformed, over a limit, cut short, or lost descriptors on the way."""


def send_fds(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> None:
    """Sends ``payload`` with ``fds``; the caller keeps its own descriptors open and its own to close.

    :raises OSError: as the socket does (``BrokenPipeError``, ``TimeoutError``).
    """
    batches = [fds[start : start + MAX_BATCH] for start in range(0, len(fds), MAX_BATCH)] or [()]
    _send_with(sock, _HEADER.pack(len(payload), len(fds)) + payload, batches[0])
    for batch in batches[1:]:
        _send_with(sock, _FILLER, batch)


def recv_fds(sock: socket.socket, max_payload: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receives one message; the descriptors are close-on-exec and belong to the caller.

    Whatever arrived is closed before an error is raised.

    :param max_payload: the largest payload to accept, in bytes.
    :param max_fds: the most descriptors to accept.
    :raises FdPassError: on end-of-file (also before the first byte), a limit, or truncated descriptors.
    :raises OSError: as the socket does (``TimeoutError``, ``ConnectionResetError``).
    """
    fds: list[int] = []
    try:
        payload_bytes, count = _HEADER.unpack(_recv_exactly(sock, _HEADER.size, fds, max_fds))
        if payload_bytes > max_payload:
            raise FdPassError(f"the peer announces a payload of {payload_bytes} bytes, at most {max_payload} allowed")
        if count > max_fds:
            raise FdPassError(f"the peer announces {count} descriptors, at most {max_fds} allowed")
        payload = _recv_exactly(sock, payload_bytes, fds, max_fds)
        for _ in range((count - 1) // MAX_BATCH if count else 0):
            _recv_exactly(sock, len(_FILLER), fds, max_fds)
        if len(fds) != count:
            raise FdPassError(f"the peer announced {count} descriptors, {len(fds)} arrived")
    except BaseException:
        close_all(fds)
        raise
    return payload, fds


def close_all(fds: Sequence[int]) -> None:
    """Closes every descriptor; one that is already closed does not keep the others open."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def _send_with(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    if sent < len(data):
        # The descriptors went with the first byte; only bytes are left to send.
        sock.sendall(data[sent:])


def _recv_exactly(sock: socket.socket, count: int, fds: list[int], max_fds: int) -> bytes:
    data = bytearray()
    space = socket.CMSG_SPACE(MAX_BATCH * array.array("i").itemsize)
    while len(data) < count:
        part, ancillary, flags, _ = sock.recvmsg(count - len(data), space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise FdPassError(
                "descriptors were lost on the way (MSG_CTRUNC): the peer sent more than one batch at once, or this "
                "process is at its descriptor limit; raise RLIMIT_NOFILE"
            )
        if len(fds) > max_fds:
            raise FdPassError(f"the peer sent more than {max_fds} descriptors")
        if not part:
            raise FdPassError(f"the peer closed the socket {count - len(data)} bytes before the end of a message")
        data += part
    return bytes(data)
