"""Inline payload: pages as bytes in messages, in parts where they are large.

What a session and the daemon hold of such bytes is bounded where a request is admitted: an inline load is charged before its pages
come, so that a client that does not read them cannot make the daemon hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hoststage.core.stack import PayloadPath
from hoststage.server.contract import LiveSession, RequestError
from hoststage.server.rpc.connections import Connection, Connections
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

_PART_BYTES = 1 << 20
"""Payload of one message of a load: well below the 4 MiB that gRPC takes by default, and small enough for both ends to work at once."""


@dataclass(slots=True, eq=False)
class Charge:
    """Payload that the daemon holds for a session, from admission until `settle`, which counts once."""

    connections: Connections
    connection: Connection
    size: int

    @classmethod
    def take(cls, connections: Connections, connection: Connection, size: int, field: str) -> Charge:
        """Charge a session. Raises `RequestError` where it, or all together, would hold too much."""
        limits = connections.inline_limits
        mine, everyones = connection.inline_bytes, connections.inline_bytes
        if mine + size > limits.session_bytes or everyones + size > limits.daemon_bytes:
            raise RequestError(
                "INLINE_TOO_LARGE",
                f"{size} bytes of pages, with {mine} of this session under way (at most {limits.session_bytes}) "
                f"and {everyones} of all (at most {limits.daemon_bytes})",
                code="RESOURCE_EXHAUSTED",
                field=field,
                remedy="move fewer pages at once, or share memory with the daemon",
            )
        charge = cls(connections, connection, size)
        connection.inline_bytes += size
        connections.inline_bytes += size
        connection.charges.add(charge)
        return charge

    def settle(self) -> None:
        """The bytes are no longer held."""
        if self in self.connection.charges:
            self.connection.charges.discard(self)
            self.connection.inline_bytes -= self.size
            self.connections.inline_bytes -= self.size


def drop(connection: Connection) -> None:
    """The session's stream is gone: what had come of its stores is dropped, and nothing stays charged."""
    connection.inline_parts.clear()
    for charge in list(connection.charges):
        charge.settle()


@dataclass(slots=True)
class Assembly:
    """A store whose parts are still coming. `sizes`: bytes of a page, per range; `filled`: bytes that have arrived of each page.

    A page that comes in one part stays as it came; memory is made only for one whose parts must be put together.
    """

    span: ops.Span
    wait_ms: int
    pages: list[list[bytes | bytearray]]
    sizes: list[int]
    filled: list[list[int]]
    charge: Charge

    def missing(self) -> str:
        """Return the first page that is not whole, "" where all are."""
        for at, (size, filled) in enumerate(zip(self.sizes, self.filled, strict=True)):
            for i, n in enumerate(filled):
                if n != size:
                    return f"{n} bytes came of the {size} of page {i} of range {at}"
        return ""


def data_token(connections: Connections, connection: Connection, request_id: int) -> pb.ServerMessage:
    """Return the answer to a wish for a data connection. Raises `RequestError`."""
    live = connection.live
    assert live is not None
    if live.grant.path is PayloadPath.SHM:
        raise RequestError(
            "DATA_PATH",
            "the session shares memory with the daemon",
            code="FAILED_PRECONDITION",
            remedy="write and read the pages there; data connections are for the paths inline and imported",
        )
    token = connections.tickets.issue("data", live.session_id, connections.now())
    return pb.ServerMessage(request_id=request_id, open_data_reply=pb.OpenDataReply(token=token))


# ------------------------------------------------------------------ storing


def abandon(connection: Connection, request_id: int) -> None:
    """A part of a store was refused: what had come of it is dropped."""
    assembly = connection.inline_parts.pop(request_id, None)
    if assembly is not None:
        assembly.charge.settle()


def assemble(connections: Connections, connection: Connection, request_id: int, m: pb.InlineStore) -> Assembly | None:
    """Take one part of a store; return the whole once the last one is here.

    The whole stays charged to the session. Raises `RequestError`, and drops what had come.
    """
    parts = connection.inline_parts
    assembly = parts.get(request_id)
    try:
        if assembly is None:
            assembly = parts[request_id] = _begin(connections, connection, m)
        for page in m.pages:
            _fill(assembly, page)
        if not m.last:
            return None
        if missing := assembly.missing():
            raise RequestError("PAGE_SIZE", missing, field="inline_store.pages")
    except RequestError:
        parts.pop(request_id, None)
        if assembly is not None:
            assembly.charge.settle()
        raise
    del parts[request_id]
    return assembly


def _begin(connections: Connections, connection: Connection, m: pb.InlineStore) -> Assembly:
    live = connection.live
    assert live is not None
    span = convert.span_from_proto(m.span)
    keys, seen, shapes = len(span), set(), []
    for i, r in enumerate(span.ranges):
        if r.pool >= live.pool_count:
            raise RequestError(
                "RANGES", f"pool {r.pool}: the stack has {live.pool_count}", field=f"span.ranges[{i}].pool"
            )
        if r.pool in seen:
            raise RequestError("RANGES", f"pool {r.pool} has two ranges", field=f"span.ranges[{i}].pool")
        seen.add(r.pool)
        # Checked before anything of that size is made: a count is four bytes on the wire.
        if r.first + r.count > keys:
            raise RequestError(
                "RANGES", f"keys [{r.first}, {r.first + r.count}) of {keys}", field=f"span.ranges[{i}].count"
            )
        shapes.append((r.count, live.page_bytes(r.pool)))
    charge = Charge.take(
        connections, connection, sum(count * page_bytes for count, page_bytes in shapes), "inline_store.span"
    )
    pages: list[list[bytes | bytearray]] = [[b""] * count for count, _ in shapes]
    return Assembly(span, m.wait_ms, pages, [size for _, size in shapes], [[0] * count for count, _ in shapes], charge)


def _fill(assembly: Assembly, page: pb.InlinePage) -> None:
    if page.range >= len(assembly.pages) or page.page >= len(assembly.pages[page.range]):
        raise RequestError("RANGES", f"page {page.page} of range {page.range} was not announced", field="pages")
    size, filled = assembly.sizes[page.range], assembly.filled[page.range]
    data = page.data
    end = page.offset + len(data)
    if page.offset != filled[page.page] or end > size:
        raise RequestError(
            "PAGE_SIZE",
            f"bytes [{page.offset}, {end}) of page {page.page} of range {page.range}, which has {size} bytes "
            f"and {filled[page.page]} of them already",
            field="pages.offset",
            remedy="send the parts of a page in order",
        )
    pages = assembly.pages[page.range]
    if len(data) == size:
        pages[page.page] = data
    elif data:
        target = pages[page.page] or bytearray(size)
        assert isinstance(target, bytearray)
        target[page.offset : end] = data
        pages[page.page] = target
    filled[page.page] = end


def store(
    connections: Connections,
    connection: Connection,
    request_id: int,
    m: pb.InlineStore,
    reply: Callable[[ops.HotReply], None],
) -> None:
    """Carry out one part of an inline store."""
    whole = assemble(connections, connection, request_id, m)
    if whole is None:
        return
    assert connection.live is not None
    charge = whole.charge

    def answered(answer: ops.HotReply) -> None:
        charge.settle()
        reply(answer)

    try:
        connection.live.inline_store(whole.span, whole.pages, request_id, whole.wait_ms, answered)
    except BaseException:
        charge.settle()
        raise


# ------------------------------------------------------------------ loading


def _most(live: LiveSession, op: ops.Load) -> int:
    """Return the most bytes that a load may bring. Raises `RequestError`."""
    if op.prefix > len(op.span):
        raise RequestError("RANGES", f"a prefix of {op.prefix} pages of {len(op.span)} keys", field="load.prefix")
    for i, r in enumerate(op.span.ranges):
        if r.pool >= live.pool_count:
            raise RequestError(
                "RANGES", f"pool {r.pool}: the stack has {live.pool_count}", field=f"span.ranges[{i}].pool"
            )
    if op.span.ranges:
        return sum(live.page_bytes(r.pool) * min(r.count, op.prefix) for r in op.span.ranges)
    return sum(live.page_bytes(p) * op.prefix for p in range(live.pool_count))


def load(
    connections: Connections,
    connection: Connection,
    request_id: int,
    op: ops.Load,
    send: Callable[[pb.ServerMessage], None],
) -> None:
    """Carry out an inline load; its pages go out in messages of a few MiB, and `send` gets the last one as well."""
    live = connection.live
    assert live is not None
    charge = Charge.take(connections, connection, _most(live, op), "inline_load.load.prefix")
    outbox = connection.outbox

    def group(message: ops.LoadReady, views: list[list[memoryview]]) -> None:
        ranges: Sequence[pb.PoolRange]
        ranges = [pb.PoolRange(pool=r.pool, first=r.first, count=r.count) for r in message.ranges]
        for pages in _messages(views):
            part = pb.InlinePages(outcome=pb.OUTCOME_READY, ranges=ranges, pages=pages)
            outbox.put(pb.ServerMessage(request_id=request_id, inline_pages=part), counted=False)
            ranges = ()
        if message.last:
            end = pb.InlinePages(
                outcome=int(message.outcome),  # type: ignore[arg-type]
                prefix=message.prefix,
                last=True,
                detail=message.detail,
            )
            send(pb.ServerMessage(request_id=request_id, inline_pages=end))
            outbox.when_sent(charge.settle)

    try:
        live.inline_load(op, group)
    except BaseException:
        charge.settle()
        raise


def _messages(views: Sequence[Sequence[memoryview]]) -> Iterator[list[pb.InlinePage]]:
    """Cut pages into messages of at most `_PART_BYTES` of payload."""
    batch: list[pb.InlinePage] = []
    room = _PART_BYTES
    for range_at, pages in enumerate(views):
        for page_at, view in enumerate(pages):
            for offset in range(0, len(view), _PART_BYTES):
                data = bytes(view[offset : offset + _PART_BYTES])
                if batch and room < len(data):
                    yield batch
                    batch, room = [], _PART_BYTES
                batch.append(pb.InlinePage(range=range_at, page=page_at, offset=offset, data=data))
                room -= len(data)
    if batch:
        yield batch
