"""Frames of the local lane.

A frame is a 16-byte header and a body. Header, little-endian: body length `u32`, operation `u8`, three bytes of zero, request id `u64`
(0 for what the daemon pushes). The hot operations have fixed bodies, defined here alone; every other message travels as a
protobuf `ClientMessage` or `ServerMessage` in a frame of operation `PROTOBUF`, and the first frame of a lane is `ATTACH` with the session and its lane
token. Both ends read a stream with `FrameReader`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

import numpy as np

from hoststage.v1.ops import (
    Commit,
    CommitReply,
    HotMessage,
    Load,
    LoadReady,
    LoadReply,
    Lookup,
    LookupReply,
    Outcome,
    PoolRange,
    PoolSlots,
    Release,
    Reserve,
    ReserveReply,
    Span,
    Stored,
)

HEADER: Final = struct.Struct("<IBBHQ")
HEADER_BYTES: Final = HEADER.size
ATTACH_BODY: Final = struct.Struct("<Q16s")

_SPAN = struct.Struct("<HHHHI")
_RANGE = struct.Struct("<III")
_POOL_SLOTS = struct.Struct("<II")
_U32 = struct.Struct("<I")
_LOOKUP_REPLY = struct.Struct("<QI")
_LOAD = struct.Struct("<QIIB")
_LOAD_REPLY = struct.Struct("<QIBB")
_COMMIT_REPLY = struct.Struct("<B16s")
_STORED = struct.Struct("<16sQIB")
_RELEASE = struct.Struct("<II")
_NO_COMMIT = bytes(16)

MAX_RANGES: Final = 1024
"""Ranges of one span, and lists of slots of one commit. A stack has far fewer pools; unbounded, one frame could name millions."""
MAX_RELEASED: Final = 1 << 16
"""Loads and pins that one release names."""


class Op(IntEnum):
    """Operation of a frame."""

    ATTACH = 1
    PROTOBUF = 2
    RESERVE = 16
    RESERVE_REPLY = 17
    COMMIT = 18
    COMMIT_REPLY = 19
    LOOKUP = 20
    LOOKUP_REPLY = 21
    LOAD = 22
    LOAD_REPLY = 23
    RELEASE = 24
    STORED = 25
    LOAD_READY = 26


class FrameError(ValueError):
    """A frame is malformed; the message says where."""


def frame(op: int, request_id: int, body: bytes) -> bytes:
    """Return a whole frame."""
    return HEADER.pack(len(body), op, 0, 0, request_id) + body


# ------------------------------------------------------------------ parts


def _put_span(span: Span) -> bytes:
    parts = [
        _SPAN.pack(span.key_bytes, len(span.ranges), len(span.parent), 0, len(span)),
        span.keys,
        span.parent,
    ]
    parts.extend(_RANGE.pack(r.pool, r.first, r.count) for r in span.ranges)
    return b"".join(parts)


def _put_ranges(ranges: tuple[PoolRange, ...]) -> bytes:
    return _U32.pack(len(ranges)) + b"".join(_RANGE.pack(r.pool, r.first, r.count) for r in ranges)


def _put_slots(entries: tuple[PoolSlots, ...]) -> bytes:
    parts = [_U32.pack(len(entries))]
    for entry in entries:
        parts.append(_POOL_SLOTS.pack(entry.pool, len(entry.slots)))
        parts.append(entry.slots.astype("<u4", copy=False).tobytes())
        parts.append(entry.generations.astype("<u4", copy=False).tobytes())
    return b"".join(parts)


class _Cursor:
    """Reads a body from front to back, refusing to pass its end."""

    __slots__ = ("at", "body")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0

    def take(self, n: int) -> bytes:
        end = self.at + n
        if end > len(self.body):
            raise FrameError(f"body ends at byte {len(self.body)}, {n} bytes were expected from byte {self.at}")
        out = self.body[self.at : end]
        self.at = end
        return out

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        at = self.at
        if at + layout.size > len(self.body):
            raise FrameError(f"body ends at byte {len(self.body)}, {layout.size} bytes were expected from byte {at}")
        self.at = at + layout.size
        return layout.unpack_from(self.body, at)

    def span(self) -> Span:
        key_bytes, n_ranges, parent_len, _, n_keys = self.unpack(_SPAN)
        if n_ranges > MAX_RANGES:
            raise FrameError(f"a span of {n_ranges} ranges; at most {MAX_RANGES} are allowed")
        keys = self.take(n_keys * key_bytes)
        parent = self.take(parent_len)
        return Span(keys, key_bytes, tuple(PoolRange(*self.unpack(_RANGE)) for _ in range(n_ranges)), parent)

    def ranges(self) -> tuple[PoolRange, ...]:
        (n,) = self.unpack(_U32)
        return tuple(PoolRange(*self.unpack(_RANGE)) for _ in range(n))

    def slots(self) -> tuple[PoolSlots, ...]:
        (n,) = self.unpack(_U32)
        if n > MAX_RANGES:
            raise FrameError(f"{n} lists of slots; at most {MAX_RANGES} are allowed")
        out = []
        for _ in range(n):
            pool, count = self.unpack(_POOL_SLOTS)
            slots = np.frombuffer(self.take(count * 4), dtype="<u4")
            out.append(PoolSlots(pool, slots, np.frombuffer(self.take(count * 4), dtype="<u4")))
        return tuple(out)

    def text(self) -> str:
        """The rest of the body."""
        return self.take(len(self.body) - self.at).decode("utf-8", "replace")


# ------------------------------------------------------------------ messages


def _put_reserve(m: Reserve) -> bytes:
    return _U32.pack(m.wait_ms) + _put_span(m.span)


def _get_reserve(c: _Cursor) -> Reserve:
    (wait_ms,) = c.unpack(_U32)
    return Reserve(c.span(), wait_ms)


def _put_reserve_reply(m: ReserveReply) -> bytes:
    return bytes((m.outcome,)) + _put_slots(m.slots) + m.detail.encode()


def _get_reserve_reply(c: _Cursor) -> ReserveReply:
    outcome = Outcome(c.take(1)[0])
    slots = c.slots()
    return ReserveReply(outcome, slots, c.text())


def _put_commit(m: Commit) -> bytes:
    return _put_span(m.span) + _put_slots(m.slots)


def _get_commit(c: _Cursor) -> Commit:
    span = c.span()
    return Commit(span, c.slots())


def _put_commit_reply(m: CommitReply) -> bytes:
    return _COMMIT_REPLY.pack(m.outcome, m.commit_id) + _put_slots(m.credits) + m.detail.encode()


def _commit_id(raw: bytes) -> bytes:
    return b"" if raw == _NO_COMMIT else raw


def _get_commit_reply(c: _Cursor) -> CommitReply:
    outcome = Outcome(c.take(1)[0])
    commit_id = _commit_id(c.take(16))
    slots = c.slots()
    return CommitReply(outcome, commit_id, slots, c.text())


def _put_lookup(m: Lookup) -> bytes:
    return _U32.pack(m.pin_ms) + _put_span(m.span)


def _get_lookup(c: _Cursor) -> Lookup:
    (pin_ms,) = c.unpack(_U32)
    return Lookup(c.span(), pin_ms)


def _put_lookup_reply(m: LookupReply) -> bytes:
    runs = m.runs
    return _LOOKUP_REPLY.pack(m.pin, len(runs)) + b"".join(struct.pack("<II", *run) for run in runs)


def _get_lookup_reply(c: _Cursor) -> LookupReply:
    pin, n = c.unpack(_LOOKUP_REPLY)
    return LookupReply(tuple((run[0], run[1]) for run in (c.unpack(_POOL_SLOTS) for _ in range(n))), pin)


def _put_load(m: Load) -> bytes:
    return _LOAD.pack(m.pin, m.prefix, m.deadline_ms, m.accept_shorter) + _put_span(m.span)


def _get_load(c: _Cursor) -> Load:
    pin, prefix, deadline_ms, shorter = c.unpack(_LOAD)
    return Load(c.span(), prefix, pin, deadline_ms, bool(shorter))


def _put_load_result(m: LoadReply | LoadReady) -> bytes:
    last = m.last if isinstance(m, LoadReady) else True
    head = _LOAD_REPLY.pack(m.load_id, m.prefix, m.outcome, last)
    return head + _put_ranges(m.ranges) + _put_slots(m.slots) + m.detail.encode()


def _get_load_reply(c: _Cursor) -> LoadReply:
    load_id, prefix, outcome, _ = c.unpack(_LOAD_REPLY)
    ranges = c.ranges()
    slots = c.slots()
    return LoadReply(Outcome(outcome), load_id, prefix, ranges, slots, c.text())


def _get_load_ready(c: _Cursor) -> LoadReady:
    load_id, prefix, outcome, last = c.unpack(_LOAD_REPLY)
    ranges = c.ranges()
    slots = c.slots()
    return LoadReady(load_id, Outcome(outcome), bool(last), prefix, ranges, slots, c.text())


def _put_release(m: Release) -> bytes:
    ids = m.load_ids + m.pins
    return _RELEASE.pack(len(m.load_ids), len(m.pins)) + struct.pack(f"<{len(ids)}Q", *ids)


def _get_release(c: _Cursor) -> Release:
    n_loads, n_pins = c.unpack(_RELEASE)
    if n_loads + n_pins > MAX_RELEASED:
        raise FrameError(f"a release of {n_loads} loads and {n_pins} pins; at most {MAX_RELEASED} are allowed")
    if (n_loads + n_pins) * 8 > len(c.body):
        raise FrameError(f"{n_loads} loads and {n_pins} pins do not fit a body of {len(c.body)} bytes")
    ids = struct.unpack(f"<{n_loads + n_pins}Q", c.take((n_loads + n_pins) * 8))
    return Release(ids[:n_loads], ids[n_loads:])


def _put_stored(m: Stored) -> bytes:
    return _STORED.pack(m.commit_id, m.commit_request, m.pages, m.outcome) + m.detail.encode()


def _get_stored(c: _Cursor) -> Stored:
    raw = c.take(_STORED.size)
    commit_id, commit_request, pages, outcome = _STORED.unpack(raw)
    return Stored(_commit_id(commit_id), commit_request, Outcome(outcome), pages, c.text())


_ENCODERS: dict[type, tuple[int, Callable[..., bytes]]] = {
    Reserve: (Op.RESERVE, _put_reserve),
    ReserveReply: (Op.RESERVE_REPLY, _put_reserve_reply),
    Commit: (Op.COMMIT, _put_commit),
    CommitReply: (Op.COMMIT_REPLY, _put_commit_reply),
    Lookup: (Op.LOOKUP, _put_lookup),
    LookupReply: (Op.LOOKUP_REPLY, _put_lookup_reply),
    Load: (Op.LOAD, _put_load),
    LoadReply: (Op.LOAD_REPLY, _put_load_result),
    Release: (Op.RELEASE, _put_release),
    Stored: (Op.STORED, _put_stored),
    LoadReady: (Op.LOAD_READY, _put_load_result),
}

_DECODERS: dict[int, Callable[[_Cursor], HotMessage]] = {
    Op.RESERVE: _get_reserve,
    Op.RESERVE_REPLY: _get_reserve_reply,
    Op.COMMIT: _get_commit,
    Op.COMMIT_REPLY: _get_commit_reply,
    Op.LOOKUP: _get_lookup,
    Op.LOOKUP_REPLY: _get_lookup_reply,
    Op.LOAD: _get_load,
    Op.LOAD_REPLY: _get_load_reply,
    Op.RELEASE: _get_release,
    Op.STORED: _get_stored,
    Op.LOAD_READY: _get_load_ready,
}


def is_hot(op: int) -> bool:
    """Return whether the operation has a fixed frame."""
    return op in _DECODERS


def encode(message: HotMessage, request_id: int) -> bytes:
    """Return the frame of a hot message."""
    op, put = _ENCODERS[type(message)]
    body = put(message)
    return HEADER.pack(len(body), op, 0, 0, request_id) + body


def decode(op: int, body: bytes) -> HotMessage:
    """Return the hot message in a body. Raises `FrameError` where it is malformed or `op` has no fixed frame."""
    get = _DECODERS.get(op)
    if get is None:
        raise FrameError(f"operation {op} has no fixed frame")
    cursor = _Cursor(body)
    try:
        message = get(cursor)
    except (struct.error, IndexError) as error:
        raise FrameError(f"operation {op}: {error}") from error
    if cursor.at != len(body):
        raise FrameError(f"operation {op}: {len(body) - cursor.at} bytes are left over")
    return message


class FrameReader:
    """Cuts a byte stream into frames. `limit`: largest body in bytes, may be changed between frames; a larger one raises `FrameError`."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield `(operation, request id, body)` of every frame that `data` completes."""
        buffer = self._buffer
        if not buffer and len(data) >= HEADER_BYTES:
            # The usual case: exactly one whole frame, no copy into the buffer.
            length, op, _, _, request_id = HEADER.unpack_from(data)
            if length + HEADER_BYTES == len(data) and length <= self.limit:
                yield op, request_id, data[HEADER_BYTES:]
                return
        buffer += data
        while len(buffer) >= HEADER_BYTES:
            length, op, _, _, request_id = HEADER.unpack_from(buffer)
            if length > self.limit:
                raise FrameError(f"a body of {length} bytes exceeds the limit of {self.limit}")
            end = HEADER_BYTES + length
            if len(buffer) < end:
                return
            body = bytes(buffer[HEADER_BYTES:end])
            del buffer[:end]
            yield op, request_id, body
