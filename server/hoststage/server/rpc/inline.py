"""Inline payload: pages as bytes in messages, in parts where they are large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoststage.server.contract import LiveSession, RequestError
from hoststage.server.rpc.connections import Connection
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

MAX_STORE_BYTES = 1 << 30
_PART_BYTES = 4 << 20


@dataclass(slots=True)
class _Assembly:
    """A store whose parts are still coming. `filled`: bytes that have arrived of each page."""

    span: ops.Span
    wait_ms: int
    pages: list[list[bytearray]]
    filled: int
    size: int


def assemble(connection: Connection, request_id: int, m: pb.InlineStore) -> _Assembly | None:
    """Take one part of a store; return the whole once the last one is here. Raises `RequestError`, and drops what had come."""
    parts = connection.inline_parts
    found = parts.get(request_id)
    assembly = found if isinstance(found, _Assembly) else None
    try:
        if assembly is None:
            assembly = _begin(connection, m)
            parts[request_id] = assembly
            connection.inline_bytes += assembly.size
        for page in m.pages:
            _fill(assembly, page)
        if not m.last:
            return None
        if assembly.filled != assembly.size:
            raise RequestError(
                "PAGE_SIZE", f"{assembly.filled} bytes came of {assembly.size}", field="inline_store.pages"
            )
    except RequestError:
        _forget(connection, request_id, assembly)
        raise
    _forget(connection, request_id, assembly)
    return assembly


def _forget(connection: Connection, request_id: int, assembly: _Assembly | None) -> None:
    if connection.inline_parts.pop(request_id, None) is not None and assembly is not None:
        connection.inline_bytes -= assembly.size


def _begin(connection: Connection, m: pb.InlineStore) -> _Assembly:
    live = connection.live
    assert live is not None
    span = convert.span_from_proto(m.span)
    by_pool = {a.pool: a for a in live.arenas if a.kind == "write"}
    shapes = []
    for i, r in enumerate(span.ranges):
        if r.pool not in by_pool:
            raise RequestError("RANGES", f"pool {r.pool} is not in the stack", field=f"span.ranges[{i}].pool")
        page_bytes = live.page_bytes(r.pool)
        shapes.append((r.count, page_bytes))
    size = sum(count * page_bytes for count, page_bytes in shapes)
    if connection.inline_bytes + size > MAX_STORE_BYTES:
        raise RequestError(
            "INLINE_TOO_LARGE",
            f"{size} bytes of pages, with {connection.inline_bytes} under way; at most {MAX_STORE_BYTES} at once",
            code="RESOURCE_EXHAUSTED",
            field="inline_store.span",
            remedy="store fewer pages at once",
        )
    pages = [[bytearray(page_bytes) for _ in range(count)] for count, page_bytes in shapes]
    return _Assembly(span, m.wait_ms, pages, 0, size)


def _fill(assembly: _Assembly, page: pb.InlinePage) -> None:
    if page.range >= len(assembly.pages) or page.page >= len(assembly.pages[page.range]):
        raise RequestError("RANGES", f"page {page.page} of range {page.range} was not announced", field="pages")
    target = assembly.pages[page.range][page.page]
    end = page.offset + len(page.data)
    if end > len(target):
        raise RequestError(
            "PAGE_SIZE", f"bytes [{page.offset}, {end}) of a page of {len(target)}", field="pages.offset"
        )
    target[page.offset : end] = page.data
    assembly.filled += len(page.data)


def store(connection: Connection, request_id: int, m: pb.InlineStore, reply: Callable[[ops.HotReply], None]) -> None:
    """Carry out one part of an inline store."""
    whole = assemble(connection, request_id, m)
    if whole is not None:
        assert connection.live is not None
        connection.live.inline_store(whole.span, whole.pages, request_id, whole.wait_ms, reply)


def load(live: LiveSession, request_id: int, op: ops.Load, send: Callable[[pb.ServerMessage], bool]) -> None:
    """Carry out an inline load; its pages go out in messages of a few MiB."""
    span_ranges = op.span.ranges
    pools = [r.pool for r in span_ranges] if span_ranges else None
    total = sum(live.page_bytes(p) * op.prefix for p in (pools or range(live.pool_count)))
    if total > 2 * MAX_STORE_BYTES:
        raise RequestError(
            "INLINE_TOO_LARGE",
            f"up to {total} bytes of pages in one load",
            code="RESOURCE_EXHAUSTED",
            field="inline_load.load.prefix",
            remedy="name ranges and load them one after the other",
        )

    def group(message: ops.LoadReady, views: list[list[memoryview]]) -> None:
        ranges = [pb.PoolRange(pool=r.pool, first=r.first, count=r.count) for r in message.ranges]
        first = True
        for pages in _messages(views):
            send(
                pb.ServerMessage(
                    request_id=request_id,
                    inline_pages=pb.InlinePages(outcome=pb.OUTCOME_READY, ranges=ranges if first else (), pages=pages),
                )
            )
            first = False
        if message.last:
            end = pb.InlinePages(
                outcome=int(message.outcome),  # type: ignore[arg-type]
                prefix=message.prefix,
                last=True,
                detail=message.detail,
            )
            send(pb.ServerMessage(request_id=request_id, inline_pages=end))

    live.inline_load(op, group)


def _messages(views: Sequence[Sequence[memoryview]]) -> list[list[pb.InlinePage]]:
    """Cut pages into messages of at most `_PART_BYTES` of payload."""
    out: list[list[pb.InlinePage]] = []
    room = 0
    for range_at, pages in enumerate(views):
        for page_at, view in enumerate(pages):
            for offset in range(0, len(view), _PART_BYTES):
                data = bytes(view[offset : offset + _PART_BYTES])
                if not out or room < len(data):
                    out.append([])
                    room = _PART_BYTES
                out[-1].append(pb.InlinePage(range=range_at, page=page_at, offset=offset, data=data))
                room -= len(data)
    return out
