"""Pages as bytes, for clients that share no memory with the daemon: on a data connection where there is one, else in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hoststage.client._data import DataConnection
from hoststage.client._link import Link
from hoststage.client._pages import PageRows, Piece
from hoststage.client._wire import SHARE_OF_DEADLINE, Deadline, Message, Waiter
from hoststage.client.errors import DaemonUnavailable, HostStageError, SessionLost
from hoststage.v1 import convert, data, lane, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1.ops import NO_SLOT, Outcome

_MESSAGE_BYTES = (4 << 20) + (64 << 10)


class Part(Protocol):
    """A commit of a ticket, as `_store` keeps it."""

    def accept(self) -> None: ...
    def take(self, message: Message) -> bool: ...
    def lose(self, error: HostStageError) -> None: ...
    def refuse(self, outcome: Outcome, detail: str) -> None: ...


def inline_store(
    link: Link, part: Part, span: ops.Span, piece: Piece, rows: Mapping[int, PageRows], deadline: Deadline
) -> bool:
    """Send one commit with its bytes; returns whether the next one may follow."""
    try:
        if link.data is not None:
            with link.data.borrow(deadline, "inline store") as connection:
                if connection is not None:
                    return _store_raw(link, connection, part, span, piece, rows, deadline)
        return _store_in_messages(link, part, span, piece, rows, deadline)
    except HostStageError as error:
        part.lose(error)
        raise


# ------------------------------------------------------------------ on a data connection


def _store_raw(
    link: Link,
    connection: DataConnection,
    part: Part,
    span: ops.Span,
    piece: Piece,
    rows: Mapping[int, PageRows],
    deadline: Deadline,
) -> bool:
    request_id = link.router.next_id()
    # What becomes of the commit is pushed on the stream, perhaps before its answer is here.
    link.commits[request_id] = part
    taken = False
    try:
        wait_ms = max(1, int(deadline.left_ms * SHARE_OF_DEADLINE))
        granted = connection.ask(ops.Reserve(span, wait_ms), request_id, ops.ReserveReply)
        outcome, detail = granted.outcome, granted.detail
        if outcome is Outcome.ACCEPTED:
            views = _wanted(granted, piece, rows)
            announced = data.pages(request_id, sum(map(len, views)))
            connection.send([announced, *views])
            reply = connection.answer(request_id, ops.CommitReply)
            outcome, detail = reply.outcome, reply.detail
        connection.settled = True
        taken = outcome is Outcome.ACCEPTED
    finally:
        if not taken:
            link.commits.pop(request_id, None)
    if taken:
        part.accept()
    else:
        part.refuse(outcome, detail)
    return taken or outcome is Outcome.BELIEVED_STORED


def _wanted(granted: ops.ReserveReply, piece: Piece, rows: Mapping[int, PageRows]) -> list[memoryview]:
    """Return the bytes of the pages that were given a slot, in the order of the ranges."""
    out: list[memoryview] = []
    if [(e.pool, len(e.slots)) for e in granted.slots] != [(p.pool, p.count) for p in piece.parts]:
        raise DaemonUnavailable("the daemon granted slots for other pages than were to be stored")
    for p, entry in zip(piece.parts, granted.slots, strict=True):
        source = rows[p.pool]
        wanted = (p.row + np.flatnonzero(entry.slots != NO_SLOT)).tolist()
        if source.on_host:
            out += source.views(wanted)
        else:
            out += [memoryview(source.row_bytes(row)) for row in wanted]
    return out


@dataclass(slots=True)
class InlineLoaded:
    """What a load brought, by pool and place in the prefix. What went to the caller's memory has an empty view here."""

    outcome: Outcome
    prefix: int = 0
    text: str = ""
    pages: dict[tuple[int, int], memoryview] = field(default_factory=dict)


def load_raw(
    link: Link,
    connection: DataConnection,
    message: ops.Load,
    page_bytes: Sequence[int],
    targets: Mapping[int, PageRows],
    check: Callable[[Mapping[int, int]], None],
) -> InlineLoaded:
    """Load by a data connection, into `targets` where there are any.

    check: told how many pages of each pool come, before anything is written; what it raises ends the load. Where the load breaks off
    half-way the targets hold part of it.
    """
    request_id = link.router.next_id()
    reply = connection.ask(message, request_id, ops.LoadReply)
    loaded = InlineLoaded(reply.outcome, reply.prefix, reply.detail)
    if reply.outcome is not Outcome.READY:
        connection.settled = True
        return loaded
    counts: dict[int, int] = {}
    for r in reply.ranges:
        counts[r.pool] = counts.get(r.pool, 0) + r.count
    check(counts)
    due = sum(n * page_bytes[pool] for pool, n in counts.items())
    if (announced := data.pages_bytes(connection.expect(request_id, data.Op.PAGES))) != due:
        raise lane.FrameError(f"{announced} bytes are announced for pages of {due}")
    views: list[memoryview] = []
    at = dict.fromkeys(counts, 0)
    late: list[tuple[PageRows, int, memoryview]] = []
    for r in reply.ranges:
        target, places = targets.get(r.pool), range(r.first, r.first + r.count)
        if target is not None and target.on_host:
            views += target.views(range(at[r.pool], at[r.pool] + r.count))
            loaded.pages.update({(r.pool, place): memoryview(b"") for place in places})
        else:
            fresh = np.empty((r.count, page_bytes[r.pool]), dtype=np.uint8)
            views.append(fresh.reshape(-1).data)
            loaded.pages.update({(r.pool, place): fresh[i].data for i, place in enumerate(places)})
            if target is not None:
                late += [(target, at[r.pool] + i, fresh[i].data) for i in range(r.count)]
        at[r.pool] += r.count
    connection.receive(views)
    if not data.is_whole(connection.expect(request_id, data.Op.SENT)):
        raise SessionLost("the session ended while its pages were on their way")
    connection.settled = True
    for target, row, page in late:
        target.fill_row(row, page)
    return loaded


# ------------------------------------------------------------------ in messages


def _store_in_messages(
    link: Link, part: Part, span: ops.Span, piece: Piece, rows: Mapping[int, PageRows], deadline: Deadline
) -> bool:
    waiter = Waiter()
    messages = _messages(link, span, piece, rows, deadline)
    link.start(
        pb.ClientMessage(inline_store=next(messages)),
        waiter,
        deadline,
        lambda request: link.commits.__setitem__(request, part),
        link.stream,
    )
    for message in messages:
        if waiter.done:
            break  # refused before it was whole
        link.stream.send(pb.ClientMessage(inline_store=message), waiter.request_id, deadline)
    reply = link.expect(link.finish(waiter, deadline, "inline store", link.stream), ops.CommitReply)
    if reply.outcome is Outcome.ACCEPTED:
        part.accept()
        return True
    link.commits.pop(waiter.request_id, None)
    part.refuse(reply.outcome, reply.detail)
    return reply.outcome is Outcome.BELIEVED_STORED


def _messages(
    link: Link, span: ops.Span, piece: Piece, rows: Mapping[int, PageRows], deadline: Deadline
) -> Iterator[pb.InlineStore]:
    """Cut a commit into messages of a few MiB, so that both ends work at once; pages larger than that go in parts."""
    most = min(link.message_room, _MESSAGE_BYTES)
    room = min(most, link.message_room - len(span.keys) - len(span.parent))
    wire_span = convert.to_proto(ops.Reserve(span), 0)
    assert isinstance(wire_span, pb.ClientMessage)
    message = pb.InlineStore(span=wire_span.reserve.span, wait_ms=max(1, int(deadline.left_ms * SHARE_OF_DEADLINE)))
    filled = 0
    for page in _cut(piece, rows, max(4096, room)):
        if filled and filled + len(page.data) > room:
            yield message
            message, filled, room = pb.InlineStore(), 0, most
        message.pages.append(page)
        filled += len(page.data) + 64
    message.last = True
    yield message


def _cut(piece: Piece, rows: Mapping[int, PageRows], most: int) -> Iterator[pb.InlinePage]:
    for index, part in enumerate(piece.parts):
        for page in range(part.count):
            data = rows[part.pool].row_bytes(part.row + page)
            for offset in range(0, len(data), most):
                yield pb.InlinePage(range=index, page=page, offset=offset, data=data[offset : offset + most])


class InlineLoading(Waiter):
    """The answers to one inline load: pages are put together as their parts come, by pool and place in the prefix."""

    __slots__ = ("_page_bytes", "outcome", "pages", "prefix", "ranges", "text")

    def __init__(self, page_bytes: Sequence[int]) -> None:
        super().__init__()
        self._page_bytes = page_bytes
        self.ranges: tuple[ops.PoolRange, ...] = ()
        self.pages: dict[tuple[int, int], bytearray] = {}
        self.outcome = Outcome.PENDING
        self.prefix = 0
        self.text = ""

    def deliver(self, message: Message) -> bool:
        """Take one answer; True for the last one."""
        if not isinstance(message, pb.ServerMessage) or message.WhichOneof("body") != "inline_pages":
            self.fail(DaemonUnavailable(f"the daemon answered an inline load with {type(message).__name__}"))
            return True
        answer = message.inline_pages
        if answer.ranges:
            self.ranges = tuple(ops.PoolRange(r.pool, r.first, r.count) for r in answer.ranges)
        for page in answer.pages:
            self._put(page)
        if not answer.last:
            return False
        self.outcome, self.prefix, self.text = Outcome(answer.outcome), answer.prefix, answer.detail
        self.finish(message)
        return True

    def _put(self, page: pb.InlinePage) -> None:
        if page.range >= len(self.ranges):
            return
        r = self.ranges[page.range]
        size = self._page_bytes[r.pool]
        buffer = self.pages.get((r.pool, r.first + page.page))
        if buffer is None:
            buffer = self.pages[r.pool, r.first + page.page] = bytearray(size)
        end = page.offset + len(page.data)
        if end <= size:
            buffer[page.offset : end] = page.data
