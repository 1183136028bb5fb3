"""Storing: runs of keys in commits, each reserved, copied and committed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType

from hoststage.client._arenas import Arena
from hoststage.client._core import Core
from hoststage.client._inline import inline_store
from hoststage.client._link import Link
from hoststage.client._pages import KeyRun, Keys, PageRows, Piece, Rows, pack_keys, split
from hoststage.client._ticket import GOOD, CommitPart, StoreResult, StoreTicket
from hoststage.client._wire import SHARE_OF_DEADLINE, Deadline, Message, Waiter
from hoststage.client.errors import DeadlineExceeded, HostStageError, StackError
from hoststage.v1 import ops
from hoststage.v1.ops import NO_SLOT, Outcome, PoolRange

_log = logging.getLogger(__name__)
_BYTES_PER_PAGE_ON_WIRE = 8
_INLINE_COMMIT_BYTES = 64 << 20


def ranges_of(core: Core, keys: int, counts: Mapping[str, int], first: Mapping[str, int] | None) -> list[PoolRange]:
    """Return the range of each pool: by default the last pages of the run. Raises `StackError`."""
    out = []
    for pool, count in counts.items():
        place = core.options.stack.index_of(pool)
        at = keys - count if first is None or pool not in first else first[pool]
        if count < 0 or at < 0 or at + count > keys:
            raise StackError(f"pages[{pool!r}]", f"{count} pages from key {at}", f"the run has {keys} keys")
        if count:
            out.append(PoolRange(place, at, count))
    if not out:
        raise StackError("pages", dict(counts), "pass at least one page")
    return out


def store(
    core: Core,
    keys: Keys,
    pages: Mapping[str, Rows],
    first: Mapping[str, int] | None,
    parent: bytes,
    deadline: Deadline,
) -> StoreTicket:
    """Store a run; see `Session.store`."""
    run = pack_keys(keys)
    stack = core.options.stack
    rows: dict[int, PageRows] = {}
    counts: dict[str, int] = {}
    for name, given in pages.items():
        place = stack.index_of(name)
        rows[place] = PageRows(
            given, name, stack.pools[place].page_bytes, writable=False, threads=core.options.copy_threads
        )
        counts[name] = rows[place].count
    ranges = ranges_of(core, len(run), counts, first)
    link = core.ready(deadline)
    ticket = StoreTicket(link)
    try:
        room = room_of(link, ranges, by_message=not link.maps)
        pieces = split(len(run), ranges, room, _most_keys(link, run, ranges))
        for piece in pieces:
            before = run.cut(piece.start - 1, piece.start) if piece.start and parent else parent
            span = ops.Span(run.cut(piece.start, piece.end), run.key_bytes, tuple(p.range for p in piece.parts), before)
            if not link.maps:
                going_on = inline_store(link, ticket._begin(), span, piece, rows, deadline)
            else:
                going_on = _store_piece(link, ticket._begin(), span, piece, rows, deadline, last=piece is pieces[-1])
            if not going_on:
                # What follows in the prefix is of no use without this part.
                break
    finally:
        ticket._seal()
    return ticket


def room_of(link: Link, ranges: Sequence[PoolRange], *, by_message: bool) -> list[int]:
    """Return the pages of each range's pool that one commit may have. `by_message`: whether their bytes travel in messages."""
    room = [max(1, link.write_slots[r.pool]) for r in ranges]
    if by_message:
        # The daemon holds the bytes of a whole commit until it is complete.
        sizes = [link.options.stack.pools[r.pool].page_bytes for r in ranges]
        room = [max(1, min(n, _INLINE_COMMIT_BYTES // size)) for n, size in zip(room, sizes, strict=True)]
    return room


def _most_keys(link: Link, run: KeyRun, ranges: Sequence[PoolRange]) -> int:
    per_key = run.key_bytes + _BYTES_PER_PAGE_ON_WIRE * len(ranges)
    return max(1, min(link.max_span_keys or len(run), link.message_room // per_key))


def _store_piece(
    link: Link,
    part: CommitPart,
    span: ops.Span,
    piece: Piece,
    rows: Mapping[int, PageRows],
    deadline: Deadline,
    *,
    last: bool,
) -> bool:
    """Store one commit; returns whether the next one may follow."""
    try:
        slots = link.take_credits([(p.pool, p.count) for p in piece.parts])
        if slots is None:
            wait_ms = max(1, int(deadline.left_ms * SHARE_OF_DEADLINE))
            reply = link.reserve(span, wait_ms, deadline)
            if reply.outcome is not Outcome.ACCEPTED:
                part.end(StoreResult(reply.outcome, 0, reply.detail))
                return reply.outcome in GOOD
            slots = reply.slots
        try:
            for p, entry in zip(piece.parts, slots, strict=True):
                rows[p.pool].to_arena(p.row, link.arenas.write[p.pool], entry.slots)
        except BaseException:
            link.abort(slots)
            raise
        if last:
            # Nothing follows that would have to know the answer: the ticket tells it.
            post_commit(link, part, span, slots, deadline)
            return True
        return commit(link, part, span, slots, deadline)
    except HostStageError as error:
        part.lose(error)
        raise


class _Posted(Waiter):
    """The answer to a commit that nobody waits for, taken in by the thread that reads."""

    __slots__ = ("_link", "_part", "_slots")

    def __init__(self, link: Link, part: CommitPart, slots: tuple[ops.PoolSlots, ...]) -> None:
        super().__init__()
        self._link, self._part, self._slots = link, part, slots

    def finish(self, message: Message) -> None:
        assert isinstance(message, ops.CommitReply)
        _answered(self._link, self._part, self.request_id, self._slots, message)
        super().finish(message)

    def fail(self, error: HostStageError) -> None:
        super().fail(error)
        self._link.commits.pop(self.request_id, None)
        self._part.lose(error)
        self._link.abort(self._slots)  # a commit that was rejected took nothing


def post_commit(
    link: Link, part: CommitPart, span: ops.Span, slots: tuple[ops.PoolSlots, ...], deadline: Deadline
) -> None:
    """Commit written slots without waiting for the answer: what it says is the part's to tell."""
    _send(link, part, span, slots, _Posted(link, part, slots), deadline)


def _send(
    link: Link, part: CommitPart, span: ops.Span, slots: tuple[ops.PoolSlots, ...], waiter: Waiter, deadline: Deadline
) -> None:
    """Send a commit. Where that fails, its slots go back."""
    try:
        link.start(ops.Commit(span, slots), waiter, deadline, lambda request: link.commits.__setitem__(request, part))
    except BaseException:
        link.commits.pop(waiter.request_id, None)
        link.abort(slots)
        raise


def _answered(
    link: Link, part: CommitPart, request: int, slots: tuple[ops.PoolSlots, ...], reply: ops.CommitReply
) -> bool:
    """Take the answer to a commit in; returns whether the pages were taken or are there already."""
    _settle(link, slots, reply)
    if reply.outcome is Outcome.ACCEPTED:
        part.accept()
        return True
    link.commits.pop(request, None)
    part.end(StoreResult(reply.outcome, 0, reply.detail))
    return reply.outcome is Outcome.BELIEVED_STORED


def commit(link: Link, part: CommitPart, span: ops.Span, slots: tuple[ops.PoolSlots, ...], deadline: Deadline) -> bool:
    """Commit written slots for a part of a ticket; returns whether they were taken or already there.

    After a timeout the commit stands as the daemon had it: the part's outcome may still come.
    """

    def late(message: Message) -> None:
        """The answer came after the caller had given up."""
        if isinstance(message, ops.CommitReply):
            _answered(link, part, waiter.request_id, slots, message)

    waiter = Waiter(orphan=late)
    _send(link, part, span, slots, waiter, deadline)
    try:
        reply = link.expect(link.finish(waiter, deadline, "commit"), ops.CommitReply)
    except DeadlineExceeded:
        raise
    except HostStageError:
        link.commits.pop(waiter.request_id, None)
        link.abort(slots)  # a commit that was rejected took nothing
        raise
    return _answered(link, part, waiter.request_id, slots, reply)


def _settle(link: Link, slots: tuple[ops.PoolSlots, ...], reply: ops.CommitReply) -> None:
    """Keep what a commit granted, give back what it did not take."""
    if reply.outcome in (Outcome.ACCEPTED, Outcome.BELIEVED_STORED):
        link.written(slots)
    else:
        link.abort(slots)
    if reply.credits:
        link.keep_credits(reply.credits)


class WriteBatch:
    """Write slots reserved for a run, to be written in place and then committed, or aborted.

    As a context manager it aborts where nothing was committed. `views[pool]` has one writable page for each page of the pool's
    range, None for pages that are believed stored already. After `commit` or `abort` the views must not be written any more.
    """

    def __init__(self, link: Link, span: ops.Span, reply: ops.ReserveReply, names: Sequence[str]) -> None:
        self.outcome = reply.outcome
        self.detail = reply.detail
        self.views: dict[str, list[memoryview | None]] = {}
        self._link = link
        self._span = span
        self._slots = reply.slots if reply.outcome is Outcome.ACCEPTED else ()
        for r, entry in zip(span.ranges, self._slots, strict=False):
            self.views[names[r.pool]] = _slot_views(link.arenas.write[r.pool], entry)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.ACCEPTED

    @property
    def open(self) -> bool:
        """Whether slots are held that are neither committed nor aborted."""
        return bool(self._slots)

    def commit(self, timeout: float | None = None) -> StoreTicket:
        """Make the pages visible together; return once that is sent. The ticket tells when the daemon has them, and when they are stored.

        timeout: seconds that sending may take, where the daemon does not read; None: the session's. :raises SessionLost: where the connection broke.
        """
        ticket = StoreTicket(self._link)
        part = ticket._begin()
        slots, self._slots = self._slots, ()
        self.views = {}
        try:
            if not slots:
                part.end(
                    StoreResult(self.outcome if not self else Outcome.CANCELLED, 0, self.detail or "nothing is held")
                )
            else:
                seconds = self._link.options.timeout if timeout is None else timeout
                post_commit(self._link, part, self._span, slots, Deadline(seconds))
        finally:
            ticket._seal()
        return ticket

    def abort(self) -> None:
        """Give the slots back unwritten; safe to repeat."""
        slots, self._slots = self._slots, ()
        self.views = {}
        if slots:
            self._link.abort(slots)

    def __enter__(self) -> WriteBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _slot_views(arena: Arena, entry: ops.PoolSlots) -> list[memoryview | None]:
    whole, stride, size = arena.whole(), arena.stride, arena.page_bytes
    return [None if s == NO_SLOT else whole[s * stride : s * stride + size] for s in entry.slots.tolist()]


def reserve(
    core: Core,
    keys: Keys,
    counts: Mapping[str, int],
    first: Mapping[str, int] | None,
    parent: bytes,
    deadline: Deadline,
    wait: float,
) -> WriteBatch:
    """Reserve write slots for a run; see `Session.reserve`."""
    run = pack_keys(keys)
    ranges = ranges_of(core, len(run), counts, first)
    link = core.ready(deadline)
    if not link.maps:
        raise StackError("path", link.grant.path.value, "pages can be written in place over shm alone; use store()")
    span = ops.Span(run.packed, run.key_bytes, tuple(ranges), parent)
    names = core.names
    if len(run) <= _most_keys(link, run, ranges):
        ahead = link.take_credits([(r.pool, r.count) for r in ranges])
        if ahead is not None:
            return WriteBatch(link, span, ops.ReserveReply(Outcome.ACCEPTED, ahead), names)
    return WriteBatch(link, span, link.reserve(span, int(min(wait, deadline.left) * 1000), deadline), names)
