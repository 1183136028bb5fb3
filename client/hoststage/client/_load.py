"""Reading: lookups and their pins, loads and what they hand out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hoststage.client._core import Core
from hoststage.client._inline import InlineLoading, load_raw
from hoststage.client._link import Link
from hoststage.client._loaded import Loaded, LoadGroup, Match
from hoststage.client._loadop import LoadOp
from hoststage.client._pages import KeyRun, Keys, PageRows, Rows, pack_keys
from hoststage.client._selfserve import SelfService
from hoststage.client._wire import SHARE_OF_DEADLINE, Deadline, Message, Waiter
from hoststage.client.errors import DeadlineExceeded, SessionLost, StackError
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1.ops import Outcome


def lookup(core: Core, keys: Keys, pin_seconds: float, deadline: Deadline) -> Match:
    """Ask which prefixes can be restored; see `Session.lookup`."""
    run = pack_keys(keys)
    link = core.ready(deadline)
    if pin_seconds <= 0 and link.self_service is not None and link.self_service.holds(run):
        return Match(((1, len(run)),), 0, link)
    request = ops.Lookup(ops.Span(run.packed, run.key_bytes), int(pin_seconds * 1000))

    def unpin(message: Message) -> None:
        if isinstance(message, ops.LookupReply) and message.pin:
            link.post(ops.Release((), (message.pin,)))

    reply = link.call(request, ops.LookupReply, deadline, unpin)
    return Match(reply.runs, reply.pin, link)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What `Session.load` was asked."""

    run: KeyRun
    prefix: int
    pin: int | Match
    ranges: tuple[ops.PoolRange, ...]
    accept_shorter: bool

    def pin_for(self, link: Link) -> int:
        """Return the pin as that connection knows it."""
        return _pin_on(link, self.pin)

    def message(self, link: Link, deadline: Deadline) -> ops.Load:
        """Return the request for a connection."""
        pin = self.pin_for(link)
        span = ops.Span(self.run.packed, self.run.key_bytes, self.ranges)
        due = max(1, int(deadline.left_ms * SHARE_OF_DEADLINE))
        return ops.Load(span, self.prefix, pin, due, self.accept_shorter)


def _pin_on(link: Link, pin: int | Match) -> int:
    return pin.pin_for(link) if isinstance(pin, Match) else pin


def _spend(link: Link, pin: int | Match) -> None:
    """A load that asked nobody consumes its pin all the same."""
    known = _pin_on(link, pin)
    if known:
        link.post(ops.Release((), (known,)))


def load_request(
    core: Core,
    run: KeyRun,
    prefix: int | None,
    pin: int | Match,
    ranges: Mapping[str, tuple[int, int]] | None,
    accept_shorter: bool,
) -> LoadRequest:
    """Check the arguments of a load. Raises `StackError`."""
    n = len(run) if prefix is None else prefix
    if not 1 <= n <= len(run):
        raise StackError("prefix", n, f"pass 1 to {len(run)}, the number of keys")
    return LoadRequest(run, n, pin, _places_of(core, ranges), accept_shorter)


def _places_of(core: Core, ranges: Mapping[str, tuple[int, int]] | None) -> tuple[ops.PoolRange, ...]:
    if not ranges:
        return ()
    index_of = core.options.stack.index_of
    return tuple(ops.PoolRange(index_of(name), *given) for name, given in ranges.items())


def start_load(link: Link, request: LoadRequest, deadline: Deadline) -> LoadOp:
    """Send a load and wait for its reply, not for its pages."""
    op = LoadOp(link)
    waiter = Waiter(op.on_reply, op.orphaned)
    link.start(request.message(link, deadline), waiter, deadline)
    try:
        link.expect(link.finish(waiter, deadline, "load"), ops.LoadReply)
    except BaseException:
        op.give_up()
        raise
    return op


def load(core: Core, request: LoadRequest, into: Mapping[str, Rows] | None, deadline: Deadline) -> Loaded:
    """Load a prefix; see `Session.load`."""
    targets = _targets(core, into) if into else {}
    link = core.ready(deadline)
    names = core.names
    if not link.maps:
        return _load_inline(core, link, request, targets, deadline, names)
    if into is not None and link.self_service is not None:
        loaded = _serve_oneself(link, link.self_service, request, targets, names)
        if loaded is not None:
            return loaded
    op = start_load(link, request, deadline)
    try:
        ended = link.transport.wait(op.final, deadline)
    except BaseException:
        op.give_up()
        raise
    if not ended:
        op.give_up()
        raise DeadlineExceeded("load: the pages did not arrive within the deadline")
    if op.final.error is not None:
        raise SessionLost(str(op.final.error))
    if op.outcome is not Outcome.READY:
        return Loaded(names, 0, op.outcome, op.detail)
    extents = op.extents()
    loaded = Loaded.of_slots(names, op, extents, views=into is None)
    if into is not None:
        try:
            _check_rows(names, targets, {pool: sum(len(e.slots) for e in parts) for pool, parts in extents.items()})
            for pool, rows in targets.items():
                at = 0
                for extent in extents.get(pool, ()):
                    rows.from_arena(at, link.arenas.read[pool], extent.slots)
                    at += len(extent.slots)
            if link.lost is not None:
                # The daemon is gone, and with it the promise that nobody wrote these slots while we copied.
                raise SessionLost(str(link.lost))
        finally:
            loaded.release()
    return loaded


def _serve_oneself(
    link: Link, service: SelfService, request: LoadRequest, targets: Mapping[int, PageRows], names: Sequence[str]
) -> Loaded | None:
    """Copy resident pages without asking the daemon; None where it must be asked."""
    first = service.copy(request.run, request.prefix, targets, request.ranges)
    if first is None:
        return None
    _spend(link, request.pin)
    if link.lost is not None:
        # The daemon is gone, and with it the promise that an index says so before a page is overwritten.
        raise SessionLost(str(link.lost))
    return Loaded.copied(names, request.prefix, first)


def lease_views(
    core: Core, run: KeyRun, prefix: int | None, pin: int | Match, ranges: Mapping[str, tuple[int, int]] | None
) -> Loaded | None:
    """Lease resident pages without asking the daemon; None where it must be asked, or there is something wrong with the arguments."""
    link = core.open_link()
    service = link.self_service if link is not None else None
    if link is None or service is None or not service.board_pages:
        return None
    n = len(run) if prefix is None else prefix
    leased = service.lease(run, n, _places_of(core, ranges)) if 1 <= n <= len(run) else None
    if leased is None:
        return None
    own, pages = leased
    if link.lost is not None:
        # The daemon is gone, and with it the promise that it looks at our board.
        own.release()
        raise SessionLost(str(link.lost))
    loaded = Loaded.listed(core.names, n, link, own, pages)
    _spend(link, pin)
    return loaded


def _targets(core: Core, into: Mapping[str, Rows]) -> dict[int, PageRows]:
    stack, threads = core.options.stack, core.options.copy_threads
    return {
        stack.index_of(name): PageRows(
            given, name, stack.pools[stack.index_of(name)].page_bytes, writable=True, threads=threads
        )
        for name, given in into.items()
    }


def _check_rows(names: Sequence[str], targets: Mapping[int, PageRows], counts: Mapping[int, int]) -> None:
    for pool, rows in targets.items():
        if rows.count < counts.get(pool, 0):
            raise StackError(f"into[{names[pool]!r}]", f"{rows.count} rows", f"{counts[pool]} pages were loaded")


def _load_inline(
    core: Core,
    link: Link,
    request: LoadRequest,
    targets: Mapping[int, PageRows],
    deadline: Deadline,
    names: Sequence[str],
) -> Loaded:
    sizes = [pool.page_bytes for pool in core.options.stack.pools]
    if link.data is not None:
        with link.data.borrow(deadline, "inline load") as connection:
            if connection is not None:
                message = request.message(link, deadline)
                check = partial(_check_rows, names, targets)
                loaded = Loaded.of_bytes(names, load_raw(link, connection, message, sizes, targets, check))
                if targets:
                    loaded.release()
                return loaded
    wire = convert.to_proto(request.message(link, deadline), 0)
    assert isinstance(wire, pb.ClientMessage)
    answers = InlineLoading(sizes)
    link.start(pb.ClientMessage(inline_load=pb.InlineLoad(load=wire.load)), answers, deadline, over=link.stream)
    link.finish(answers, deadline, "inline load", link.stream)
    loaded = Loaded.of_bytes(names, answers)
    if loaded and targets:
        _check_rows(names, targets, {pool: len(loaded.pages(names[pool])) for pool in targets})
        for pool, rows in targets.items():
            for i, page in enumerate(loaded.pages(names[pool])):
                rows.fill_row(i, page)
    if targets:
        loaded.release()
    return loaded


class LoadStream:
    """The groups of a load as they arrive; iterate once. `loaded` holds the whole afterwards, and what is to be released.

    A group may be used as soon as it is yielded, though the whole may still turn out shorter or a miss: `loaded` is then falsy and
    nothing of what was yielded may be used. Leaving the iteration early cancels the load.
    """

    def __init__(self, op: LoadOp | Loaded, names: Sequence[str], deadline: Deadline) -> None:
        """op: a load under way, or pages that are there already: one group."""
        self.loaded = op if isinstance(op, Loaded) else Loaded(names)
        self._op = op if isinstance(op, LoadOp) else None
        self._names = names
        self._deadline = deadline

    def __iter__(self) -> Generator[LoadGroup, None, None]:
        op, names, finished = self._op, self._names, False
        if op is None:
            yield from self._at_once()
            return
        try:
            for group in op.each(self._deadline):
                first = {names[pool]: parts[0].first for pool, parts in group.items()}
                pages = {
                    names[pool]: op.link.arenas.read[pool].views(np.concatenate([part.slots for part in parts]))
                    for pool, parts in group.items()
                }
                yield LoadGroup(first, pages)
            finished = True
        finally:
            if not finished:
                op.give_up()
        if op.outcome is Outcome.READY:
            self.loaded = Loaded.of_slots(names, op, op.extents(), views=True)
        else:
            self.loaded = Loaded(names, 0, op.outcome, op.detail)

    def _at_once(self) -> Generator[LoadGroup, None, None]:
        loaded, finished = self.loaded, False
        try:
            pools = loaded.pools
            yield LoadGroup({pool: loaded.first(pool) for pool in pools}, {pool: loaded.pages(pool) for pool in pools})
            finished = True
        finally:
            if not finished:
                self.cancel()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come, so that `wait` returns at once."""
        return self._op is None or self._op.final.done

    def wait(self) -> Loaded:
        """Wait for all groups at once and return the whole, falsy for a miss. Raises what the iteration raises."""
        if self._op is not None:
            for _ in self:
                pass
        return self.loaded

    def cancel(self) -> None:
        """Give the load up; what it leased goes back."""
        if self._op is not None:
            self._op.give_up()
        else:
            self.loaded.release()
            self.loaded = Loaded(self._names)
