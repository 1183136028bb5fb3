"""Frames of a data connection: pages of an `inline` session as raw bytes, beside its gRPC stream.

Header and hot bodies are those of the local lane (`lane.py`); two operations are added. A connection carries one request at a
time. The client attaches with the token of `OpenDataReply` (`ATTACH`, answered as on the lane), and then, as often as it likes:

- **store**: `RESERVE` with the span; the answer is `RESERVE_REPLY`. Where that says ACCEPTED the client sends `PAGES`, followed by the bytes of every page
  that was given a slot, in the order of the ranges; the answer is `COMMIT_REPLY`. `Stored` is pushed on the stream, with this request's id.
- **load**: `LOAD`; the answer is one `LOAD_REPLY`, sent when the load has ended, without slots. Where that says READY it is followed by `PAGES` and the
  bytes of the pages of its ranges, in their order, and then by `SENT`: unless that says whole, the bytes are void.

A request that fails as a whole is answered by `PROTOBUF` with a `ServerMessage` that holds an `Error`. To give a store up, close the connection.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Final

from hoststage.shm import bulk
from hoststage.v1 import lane
from hoststage.v1.lane import FrameError

CONNECTION_LIMIT: Final = 4
"""Data connections of one session."""

_PAGES = struct.Struct("<Q")
_SENT = struct.Struct("<B")


class Op(IntEnum):
    """Operations that the lane does not have."""

    PAGES = 64
    SENT = 65


def pages(request_id: int, nbytes: int) -> bytes:
    """Return the frame that announces so many raw bytes behind it."""
    return lane.frame(Op.PAGES, request_id, _PAGES.pack(nbytes))


def pages_bytes(body: bytes) -> int:
    """Return how many raw bytes follow. Raises `FrameError`."""
    if len(body) != _PAGES.size:
        raise FrameError(f"PAGES has a body of {_PAGES.size} bytes, not {len(body)}")
    return int(_PAGES.unpack(body)[0])


def sent(request_id: int, *, whole: bool) -> bytes:
    """Return the frame that ends a load's pages. whole: they were leased until the last byte had gone out."""
    return lane.frame(Op.SENT, request_id, _SENT.pack(whole))


def is_whole(body: bytes) -> bool:
    """Return what `SENT` says. Raises `FrameError`."""
    if len(body) != _SENT.size:
        raise FrameError(f"SENT has a body of {_SENT.size} byte, not {len(body)}")
    return bool(body[0])


def receive_frame(
    sock: socket.socket, most: int, left: bulk.Left, *, idle: bulk.Left | None = None
) -> tuple[int, int, bytes]:
    """Return `(operation, request id, body)` of one frame of the lane's layout. idle: how long to wait for its first byte.

    Raises as `bulk.receive`, and `FrameError` where the body is larger than `most`.
    """
    head = bytearray(lane.HEADER_BYTES)
    if idle is not None:
        bulk.receive(sock, [memoryview(head)[:1]], idle)
        bulk.receive(sock, [memoryview(head)[1:]], left)
    else:
        bulk.receive(sock, [memoryview(head)], left)
    length, op, _, _, request_id = lane.HEADER.unpack(head)
    if length > most:
        raise FrameError(f"a body of {length} bytes exceeds the limit of {most}")
    body = bytearray(length)
    bulk.receive(sock, [memoryview(body)], left)
    return op, request_id, bytes(body)
