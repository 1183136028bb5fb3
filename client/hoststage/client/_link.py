"""One connection of a session, from handshake to loss: stream, lane, arenas, and what is under way on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Protocol, TypeVar

from hoststage.client import cuda
from hoststage.client._alarm import Alarm
from hoststage.client._arenas import Arena, Arenas, fetch
from hoststage.client._credits import Credits, real_pairs, slots_of
from hoststage.client._data import DataConnections, data_place
from hoststage.client._lane import Lane
from hoststage.client._options import Options, Previous
from hoststage.client._populate import Populating
from hoststage.client._selfserve import SelfService, self_service
from hoststage.client._stream import Stream
from hoststage.client._wire import Deadline, Message, Request, Router, Waiter, park
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, HostStageError
from hoststage.client.stack import PayloadPath
from hoststage.client.verdict import Finding, Grant, findings_from
from hoststage.shm.mapping import Mapping
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import ops
from hoststage.v1.convert import slots_from_proto, slots_to_proto

_UNANSWERED = ("release", "revoke_ack", "touch")
_AT_ANY_TIME = ("release", "abort", "revoke_ack", "return_arena", "cancel_load")
"""What gives back something that has a number of its own, and so means the same later."""
_M = TypeVar("_M")


class Transport(Protocol):
    """What carries requests: the lane, or the stream."""

    def send(self, message: Request, request_id: int, deadline: Deadline) -> None: ...
    def wait(self, waiter: Waiter, deadline: Deadline) -> bool: ...


class Pushed(Protocol):
    """A load or a commit under way, fed by what the daemon pushes, in the thread that reads."""

    def take(self, message: Message) -> bool:
        """Take a push; returns whether nothing more will come."""
        ...

    def lose(self, error: HostStageError) -> None: ...


class Link:
    """An open connection."""

    def __init__(self, options: Options, on_push: Callable[[Link, Message], None]) -> None:
        self.options = options
        self.router = Router(self._pushed, self._lost)
        self.stream = Stream(options.address, self.router)
        self.lane: Lane | None = None
        self.data: DataConnections | None = None
        self.arenas = Arenas()
        self.self_service: SelfService | None = None
        self.registration: cuda.Registration | None = None
        self._populating: Populating | None = None
        self.credits = Credits()
        self.welcome = pb.Welcome()
        self.grant: Grant
        self.write_slots: list[int] = []
        self.max_span_keys = 0
        self.message_room = 4096
        self.findings: tuple[Finding, ...] = ()
        self.unreleased: deque[ops.Release] = deque()
        self._unsent: deque[Request] = deque()
        self.commits: dict[int, Pushed] = {}
        self.loads: dict[int, Pushed] = {}
        self.leased: set[int] = set()
        self._revocations: dict[int, tuple[set[int], set[tuple[int, int, int]]]] = {}
        self._revocation_lock = threading.Lock()
        self._on_push = on_push
        self.alarm = Alarm()

    @classmethod
    def open(
        cls, options: Options, previous: Previous, on_push: Callable[[Link, Message], None], deadline: Deadline
    ) -> Link:
        """Shake hands, map what was granted, attach. Whatever fails, nothing is left open."""
        hello = options.hello(previous)
        link = cls(options, on_push)
        try:
            link.welcome = welcome = link.stream.handshake(hello, deadline)
            link.grant = Grant.from_proto(welcome.grant)
            link._note_limits(welcome.limits)
            link.findings = findings_from(welcome.findings)
            if link.grant.path is not PayloadPath.INLINE:
                link._attach(welcome, deadline)
            if (place := data_place(options.address, welcome)) is not None:
                most = welcome.limits.max_data_connections
                link.data = DataConnections(place, welcome.session, most, link._data_token, link.router)
            link._ask_credits(deadline)
        except BaseException:
            link.unmap()
            with suppress(HostStageError):
                if link.welcome.session:
                    # The daemon need not wait for this process to end.
                    link.goodbye(Deadline(1.0))
            link.close()
            raise
        return link

    def _note_limits(self, limits: pb.Limits) -> None:
        """Keep at hand what every store asks: write slots by pool, and what one message may hold."""
        slots = {grant.pool: grant.write_slots for grant in self.grant.pools}
        self.write_slots = [slots.get(pool.name, 0) for pool in self.options.stack.pools]
        self.max_span_keys = limits.max_span_keys
        # With room for the message's frame and fields.
        self.message_room = max(4096, (limits.max_message_bytes or 4 << 20) - 64 * 1024)

    def _attach(self, welcome: pb.Welcome, deadline: Deadline) -> None:
        sizes = [pool.page_bytes for pool in self.options.stack.pools]
        if welcome.arenas:
            self.arenas = fetch(welcome.fd_socket, welcome.fd_token, welcome.arenas, sizes, deadline)
        if self.maps:
            self.self_service = self_service(self.arenas)
            self.registration = cuda.register_arenas(list(self.arenas), self.options.register)
            if not self.registration.arenas:
                # Registration would have touched every page.
                self._populating = Populating([*self.arenas.index.values(), *self.arenas])
        limit = welcome.limits.max_message_bytes or 64 << 20
        self.lane = Lane.attach(welcome.lane_socket, welcome.session, welcome.lane_token, self.router, limit, deadline)

    def _data_token(self, deadline: Deadline) -> bytes:
        return self.call(pb.ClientMessage(open_data=pb.OpenData()), pb.OpenDataReply, deadline).token

    def _ask_credits(self, deadline: Deadline) -> None:
        most = min(self.options.credits, self.welcome.limits.max_credits)
        if most <= 0 or not self.maps:
            return
        self.credits = Credits([min(most, slots // 2) for slots in self.write_slots])
        self.top_up_credits(deadline)

    def top_up_credits(self, deadline: Deadline) -> None:
        """Ask for slots ahead where they have run low; none are granted where the arena has none to spare."""
        lacking = self.credits.lacking()
        if not lacking:
            return
        span = ops.Span(b"", 1, tuple(ops.PoolRange(pool, 0, n) for pool, n in lacking))
        reply = self._reserve(span, 0, deadline)
        if reply.outcome is ops.Outcome.ACCEPTED:
            self.keep_credits(reply.slots)

    def take_credits(self, counts: Sequence[tuple[int, int]]) -> tuple[ops.PoolSlots, ...] | None:
        """Take slots granted ahead for every `(pool, count)`; None where there are too few."""
        if not self.credits.wanted:
            return None
        slots = self.credits.take(counts)
        if slots is None and self.lane is not None and self.lane.drain():
            # New ones come with the answers to earlier commits, which nobody may have read yet.
            slots = self.credits.take(counts)
        return slots

    def keep_credits(self, slots: Sequence[ops.PoolSlots]) -> None:
        """Keep slots for stores to come as far as wanted, give the rest back."""
        self.abort(self.credits.add(slots))

    def reserve(self, span: ops.Span, wait_ms: int, deadline: Deadline) -> ops.ReserveReply:
        """Ask for slots. What is kept ahead is given back where there are too few: a reservation would wait for it for ever."""
        if not self.credits.wanted:
            return self._reserve(span, wait_ms, deadline)
        reply = self._reserve(span, 0, deadline)
        if reply.outcome is not ops.Outcome.POOL_FULL:
            return reply
        pools = [r.pool for r in span.ranges]
        self.abort(self.credits.drain(pools))
        try:
            return self._reserve(span, wait_ms, deadline)
        finally:
            self.credits.drained(pools)

    def _reserve(self, span: ops.Span, wait_ms: int, deadline: Deadline) -> ops.ReserveReply:
        return self.call(ops.Reserve(span, wait_ms), ops.ReserveReply, deadline, self.abort_orphan)

    # -------------------------------------------------------------- facts

    @property
    def maps(self) -> bool:
        """Whether the daemon's arenas are mapped here. Where they are not, pages travel in messages, or lie in imported memory."""
        return self.grant.path is PayloadPath.SHM

    @property
    def transport(self) -> Transport:
        return self.stream if self.lane is None else self.lane

    @property
    def lost(self) -> HostStageError | None:
        """Why the connection is over, None while it lives."""
        return self.router.lost

    @property
    def open_work(self) -> bool:
        """Whether something is under way that may end, or is to be sent, without anybody who waits for it."""
        return bool(self.commits or self.loads or self.leased or self.unreleased or self._unsent or self.router.waiting)

    # -------------------------------------------------------------- requests

    def start(
        self,
        message: Request,
        waiter: Waiter,
        deadline: Deadline,
        then: Callable[[int], None] | None = None,
        over: Transport | None = None,
    ) -> None:
        """Send a request that the waiter awaits. `then` learns the request id before anything is sent. over: by default the lane, if there is one."""
        request_id = self.router.register(waiter)
        if then is not None:
            then(request_id)
        try:
            (over or self.transport).send(message, request_id, deadline)
        except BaseException:
            self.router.drop(waiter)
            raise
        if then is not None:
            # It goes on after its answer, when nobody may be waiting.
            self.alarm.ring()

    def finish(self, waiter: Waiter, deadline: Deadline, what: str, over: Transport | None = None) -> object:
        """Wait for the answer and return it. Raises what the daemon answered, or `DeadlineExceeded`."""
        try:
            ended = (over or self.transport).wait(waiter, deadline)
        except BaseException:
            # Interrupted: what the answer grants, now or later, has no owner any more.
            if not waiter.abandon() and waiter.result is not None and waiter.orphan is not None:
                waiter.orphan(waiter.result)
            raise
        if not ended and (waiter.abandon() or not park(waiter, Deadline(5.0))):
            raise DeadlineExceeded(f"{what}: no answer within the deadline")
        if waiter.error is not None:
            raise waiter.error
        return waiter.result

    def call(
        self, message: Request, kind: type[_M], deadline: Deadline, orphan: Callable[[Message], None] | None = None
    ) -> _M:
        """Send a request and return its answer, which must be of that kind."""
        waiter = Waiter(orphan=orphan)
        self.start(message, waiter, deadline)
        return self.expect(self.finish(waiter, deadline, _name(message)), kind)

    def expect(self, answer: object, kind: type[_M]) -> _M:
        """Return the answer as what it must be. Raises `DaemonUnavailable` for a daemon that answers something else."""
        if isinstance(answer, pb.ServerMessage) and not issubclass(kind, pb.ServerMessage):
            answer = getattr(answer, answer.WhichOneof("body") or "error")
        if not isinstance(answer, kind):
            raise DaemonUnavailable(f"the daemon answered with {type(answer).__name__}, {kind.__name__} was due")
        return answer

    def post(self, message: Request) -> None:
        """Send what has no answer, or one that nobody waits for. A lost connection swallows it; where the daemon does not read, it is sent later."""
        if not self._sent(message) and _name(message) in _AT_ANY_TIME:
            # What it gives back would be nobody's otherwise, for as long as the session lives.
            self._unsent.append(message)

    def _sent(self, message: Request) -> bool:
        """Send such a message; False where the daemon does not read for now."""
        try:
            if _name(message) in _UNANSWERED:
                self.transport.send(message, 0, Deadline(1.0))
            else:
                self.start(message, Waiter(), Deadline(1.0))
        except DeadlineExceeded:
            return False
        except HostStageError:
            return True
        return True

    def release(self, load_id: int) -> None:
        """Give the leases of a load up."""
        self.leased.discard(load_id)
        self.post(ops.Release((load_id,)))
        self.settle_revocations()

    def abort(self, slots: Sequence[ops.PoolSlots]) -> None:
        """Give reserved slots back unwritten."""
        real = [slots_of(e.pool, real_pairs(e)) for e in slots]
        real = [entry for entry in real if len(entry.slots)]
        if real:
            self.post(pb.ClientMessage(abort=pb.Abort(slots=slots_to_proto(real))))
            self.written(real)

    def written(self, slots: Sequence[ops.PoolSlots]) -> None:
        """Nobody here writes these slots any more."""
        if self._revocations:
            self.settle_revocations({(e.pool, *pair) for e in slots for pair in real_pairs(e)})

    def abort_orphan(self, message: Message) -> None:
        """Give back what a reservation was granted after its caller had given up."""
        if isinstance(message, ops.ReserveReply):
            self.abort(message.slots)

    def flush_released(self) -> None:
        """Send what could not be sent before, and releases of loads that were dropped without a release (their finalizers must not send)."""
        while self._unsent:
            message = self._unsent.popleft()
            if not self._sent(message):
                self._unsent.appendleft(message)
                return
        while self.unreleased:
            release = self.unreleased.popleft()
            self.leased.difference_update(release.load_ids)
            self.post(release)
            self.settle_revocations()
        if self.self_service is not None:
            self.self_service.flush()

    def tell_touched(self) -> None:
        """Tell the daemon what was read without asking it."""
        if self.self_service is not None and (news := self.self_service.news()) is not None:
            self.post(news)

    # -------------------------------------------------------------- pushes

    def _pushed(self, message: Message) -> None:
        if isinstance(message, ops.Stored):
            commit = self.commits.get(message.commit_request)
            if commit is not None and commit.take(message):
                self.commits.pop(message.commit_request, None)
        elif isinstance(message, ops.LoadReady):
            load = self.loads.get(message.load_id)
            if load is not None and load.take(message):
                self.loads.pop(message.load_id, None)
        elif isinstance(message, pb.ServerMessage) and message.WhichOneof("body") == "lease_revoked":
            self._revoked(message.lease_revoked)
        self._on_push(self, message)

    def _revoked(self, message: pb.LeaseRevoked) -> None:
        open_loads = set(message.load_ids) & self.leased
        # What is being written now is given up by its commit or abort: acknowledged before, the daemon could give it to another.
        writing = self.credits.withdraw(slots_from_proto(message.write_slots))
        with self._revocation_lock:
            self._revocations[message.revocation] = (open_loads, writing)
        self.settle_revocations()

    def settle_revocations(self, written: Set[tuple[int, int, int]] = frozenset()) -> None:
        """Acknowledge revocations whose loads have all been released, and whose slots nobody here writes any more."""
        with self._revocation_lock:
            for _, writing in self._revocations.values():
                writing.difference_update(written)
            over = [r for r, (loads, writing) in self._revocations.items() if not writing and not loads & self.leased]
            for revocation in over:
                del self._revocations[revocation]
        for revocation in over:
            self.post(pb.ClientMessage(revoke_ack=pb.RevokeAck(revocation=revocation)))

    def _lost(self) -> None:
        assert self.router.lost is not None
        for table in (self.commits, self.loads):
            for pushed in list(table.values()):
                pushed.lose(self.router.lost)
            table.clear()
        self._on_push(self, pb.ServerMessage())

    # -------------------------------------------------------------- ending

    def unmap(self) -> list[Mapping]:
        """Unregister and unmap every arena; returns mappings that views of the caller still hold."""
        if self._populating is not None:
            self._populating.stop()
        if self.registration is not None:
            self.registration.close()
            self.registration = None
        if self.self_service is not None:
            # It stays, and finds nothing from now on: other threads may be about to ask it.
            self.self_service.close()
        return self.arenas.unmap()

    def close(self, reason: str = "the session was closed") -> None:
        """End the connection without a word; safe to repeat."""
        self.router.fail(reason)
        if self.data is not None:
            self.data.close()
        if self.lane is not None:
            self.lane.close(reason)
            self.lane.dispose()
        self.stream.close()

    def fetch_whole(self, reply: pb.LeaseArenaReply, deadline: Deadline) -> Arena:
        """Map an arena that was leased whole; one that cannot be mapped goes back."""
        try:
            got = fetch(self.welcome.fd_socket, reply.fd_token, [reply.arena], (), deadline)
        except BaseException:
            self.return_orphan(reply)
            raise
        arena = got.whole[reply.arena.arena_id]
        arena.warm = reply.warm
        self.arenas.add(arena)
        return arena

    def return_orphan(self, reply: object) -> None:
        """Give back an arena that nobody has mapped: its caller had given up."""
        if isinstance(reply, pb.ServerMessage):
            reply = reply.lease_arena_reply
        if isinstance(reply, pb.LeaseArenaReply):
            self.post(pb.ClientMessage(return_arena=pb.ReturnArena(arena_id=reply.arena.arena_id)))

    def goodbye(self, deadline: Deadline) -> None:
        """Say goodbye, after everything was unmapped."""
        if self.lost is None:
            self.call(pb.ClientMessage(goodbye=pb.Goodbye()), pb.Done, deadline)


def _name(message: Request) -> str:
    if isinstance(message, pb.ClientMessage):
        return message.WhichOneof("body") or "request"
    return type(message).__name__.lower()
