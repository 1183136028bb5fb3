"""Packets of the fd socket, on which descriptors cross by `SCM_RIGHTS`.

The socket is a stream; `hoststage.shm.fdpass` frames a packet together with its descriptors. The client sends one request packet: magic,
version, kind and the 16-byte token of the handshake. With it comes its own pidfd where it has one (for daemons on kernels without
`SO_PEERPIDFD`), and for `IMPORT` its memfds after that. The daemon answers with one packet: one `Described` record a descriptor, in order, or a
refusal with text; what is wrong with memfds is told as a serialized `google.rpc.Status`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

TOKEN_BYTES: Final = 16
MAX_DESCRIPTORS: Final = 250
MAX_PACKET_BYTES: Final = 64 * 1024

_MAGIC = b"HSFD"
_VERSION = 1
_REQUEST = struct.Struct(f"<4sBBBB{TOKEN_BYTES}s")
_REPLY = struct.Struct("<BBH")
_RECORD = struct.Struct("<QIQ")
_STATUS = 2


class Kind(IntEnum):
    """What is asked for: the descriptors of the token's arenas, or to hand over memfds of the client's own."""

    ARENAS = 1
    IMPORT = 2


class PacketError(ValueError):
    """A packet is malformed; the message says how."""


@dataclass(frozen=True, slots=True)
class Request:
    """`has_pidfd`: the first descriptor with the packet is the client's own pidfd."""

    kind: Kind
    token: bytes
    has_pidfd: bool


@dataclass(frozen=True, slots=True)
class Described:
    """What one descriptor of a reply is: chunk number `chunk`, of `size` bytes, of an arena (or import)."""

    arena_id: int
    chunk: int
    size: int


@dataclass(frozen=True, slots=True)
class Reply:
    """`refusal` is empty where the request was granted. `status`: the refusal as a serialized `google.rpc.Status`, where there is one."""

    records: tuple[Described, ...]
    last: bool
    refusal: str = ""
    status: bytes = b""


def encode_request(kind: Kind, token: bytes, *, has_pidfd: bool) -> bytes:
    """Return the request packet."""
    return _REQUEST.pack(_MAGIC, _VERSION, kind, has_pidfd, 0, token)


def decode_request(packet: bytes) -> Request:
    """Return the request in a packet. Raises `PacketError`."""
    if len(packet) != _REQUEST.size:
        raise PacketError(f"a request has {_REQUEST.size} bytes, not {len(packet)}")
    magic, version, kind, has_pidfd, _, token = _REQUEST.unpack(packet)
    if magic != _MAGIC or version != _VERSION:
        raise PacketError(f"magic {magic!r}, version {version}: expected {_MAGIC!r}, {_VERSION}")
    try:
        return Request(Kind(kind), token, bool(has_pidfd))
    except ValueError as error:
        raise PacketError(f"unknown kind {kind}") from error


def encode_reply(records: Sequence[Described], *, last: bool) -> bytes:
    """Return one reply packet for at most `MAX_DESCRIPTORS` descriptors."""
    body = b"".join(_RECORD.pack(r.arena_id, r.chunk, r.size) for r in records)
    return _REPLY.pack(0, last, len(records)) + body


def encode_refusal(text: str) -> bytes:
    """Return a refusal packet."""
    return _REPLY.pack(1, True, 0) + text.encode()


def encode_status(status: bytes, /) -> bytes:
    """Return a refusal packet that holds a serialized `google.rpc.Status`."""
    return _REPLY.pack(_STATUS, True, 0) + status


def decode_reply(packet: bytes) -> Reply:
    """Return the reply in a packet. Raises `PacketError`."""
    if len(packet) < _REPLY.size:
        raise PacketError(f"a reply has at least {_REPLY.size} bytes, not {len(packet)}")
    status, last, count = _REPLY.unpack_from(packet)
    body = packet[_REPLY.size :]
    if status == _STATUS:
        return Reply((), True, "refused with a status", body)
    if status:
        return Reply((), True, body.decode("utf-8", "replace") or "refused")
    if len(body) != count * _RECORD.size:
        raise PacketError(f"{count} records need {count * _RECORD.size} bytes, not {len(body)}")
    return Reply(tuple(Described(*r) for r in _RECORD.iter_unpack(body)), bool(last))
