"""Pages as bytes in messages, for clients that share no memory with the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from hoststage.client._link import Link
from hoststage.client._pages import PageRows, Piece
from hoststage.client._wire import SHARE_OF_DEADLINE, Deadline, Message, Waiter
from hoststage.client.errors import DaemonUnavailable, HostStageError
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1.ops import Outcome


class Part(Protocol):
    """A commit of a ticket, as `_store` keeps it."""

    def take(self, message: Message) -> bool: ...
    def lose(self, error: HostStageError) -> None: ...
    def refuse(self, outcome: Outcome, detail: str) -> None: ...


def inline_store(
    link: Link, part: Part, span: ops.Span, piece: Piece, rows: Mapping[int, PageRows], deadline: Deadline
) -> bool:
    """Send one commit with its bytes; returns whether the next one may follow."""
    waiter = Waiter()
    try:
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
    except HostStageError as error:
        part.lose(error)
        raise
    if reply.outcome is Outcome.ACCEPTED:
        return True
    link.commits.pop(waiter.request_id, None)
    part.refuse(reply.outcome, reply.detail)
    return reply.outcome is Outcome.BELIEVED_STORED


def _messages(
    link: Link, span: ops.Span, piece: Piece, rows: Mapping[int, PageRows], deadline: Deadline
) -> Iterator[pb.InlineStore]:
    """Cut a commit into messages of the size that the daemon takes; pages larger than that go in parts."""
    room = link.message_room - len(span.keys) - len(span.parent)
    wire_span = convert.to_proto(ops.Reserve(span), 0)
    assert isinstance(wire_span, pb.ClientMessage)
    message = pb.InlineStore(span=wire_span.reserve.span, wait_ms=max(1, int(deadline.left_ms * SHARE_OF_DEADLINE)))
    filled = 0
    for page in _cut(piece, rows, min(link.message_room, max(4096, room))):
        if filled and filled + len(page.data) > room:
            yield message
            message, filled, room = pb.InlineStore(), 0, link.message_room
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
