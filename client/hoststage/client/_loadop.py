"""A load under way, as the daemon's answers come in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hoststage.client._link import Link
from hoststage.client._wire import Deadline, Message, Waiter
from hoststage.client.errors import DeadlineExceeded, HostStageError, SessionLost
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import ops
from hoststage.v1.ops import U32, Outcome


@dataclass(slots=True)
class Extent:
    """Slots of consecutive pages."""

    first: int
    slots: U32


class LoadOp:
    """A load under way: fed in the thread that reads, awaited in the caller's."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.load_id = 0
        self.prefix = 0
        self.outcome = Outcome.PENDING
        self.detail = ""
        self.error: HostStageError | None = None
        self.groups: list[dict[int, list[Extent]]] = []
        self.final = Waiter()
        self._lock = threading.Lock()
        self._next = Waiter()
        self._given_up = False

    def on_reply(self, message: Message) -> None:
        """Take the reply, before the thread that reads goes on to pushes that follow it."""
        if not isinstance(message, ops.LoadReply):
            return
        self.load_id = message.load_id
        if message.outcome is Outcome.PENDING:
            self.link.leased.add(message.load_id)
            self.link.loads[message.load_id] = self
            self.link.alarm.ring()
            return
        if message.outcome is Outcome.READY:
            self.link.leased.add(message.load_id)
        self._arrived(message.outcome, message.prefix, message.ranges, message.slots, message.detail, last=True)

    def orphaned(self, message: Message) -> None:
        """The reply came after the caller had given up."""
        if isinstance(message, ops.LoadReply):
            self._given_up = True
            self.on_reply(message)
            if message.outcome is Outcome.PENDING:
                self._cancel()

    def take(self, message: Message) -> bool:
        assert isinstance(message, ops.LoadReady)
        self._arrived(message.outcome, message.prefix, message.ranges, message.slots, message.detail, last=message.last)
        return message.last

    def lose(self, error: HostStageError) -> None:
        with self._lock:
            self.error = error
            self._next.fail(error)
        self.final.fail(error)

    def _arrived(
        self,
        outcome: Outcome,
        prefix: int,
        ranges: Sequence[ops.PoolRange],
        slots: Sequence[ops.PoolSlots],
        detail: str,
        *,
        last: bool,
    ) -> None:
        group: dict[int, list[Extent]] = {}
        for r, entry in zip(ranges, slots, strict=False):
            group.setdefault(r.pool, []).append(Extent(r.first, entry.slots))
        with self._lock:
            if group:
                self.groups.append(group)
            if last:
                self.outcome, self.prefix, self.detail = outcome, prefix, detail
            waiter, self._next = self._next, Waiter()
            given_up = self._given_up
        if last:
            if given_up and outcome is Outcome.READY:
                self.link.release(self.load_id)
            elif outcome is not Outcome.READY:
                self.link.leased.discard(self.load_id)
                self.link.settle_revocations()
            self.final.finish(ops.Release())
        waiter.finish(ops.Release())

    def give_up(self) -> None:
        """Nobody wants the result any more: what is or will be leased goes back."""
        with self._lock:
            self._given_up = True
            over = self.outcome
        if over is Outcome.READY:
            self.link.release(self.load_id)
        elif over is Outcome.PENDING and self.load_id:
            self._cancel()

    def _cancel(self) -> None:
        self.link.post(pb.ClientMessage(cancel_load=pb.CancelLoad(load_id=self.load_id)))

    def each(self, deadline: Deadline) -> Iterator[dict[int, list[Extent]]]:
        """Yield groups as they arrive."""
        seen = 0
        while True:
            with self._lock:
                fresh, seen = self.groups[seen:], len(self.groups)
                over, waiter = self.outcome is not Outcome.PENDING, self._next
                if self.error is not None:
                    raise SessionLost(str(self.error))
            yield from fresh
            if over:
                return
            if not self.link.transport.wait(waiter, deadline):
                raise DeadlineExceeded("load: the pages did not arrive within the deadline")

    def extents(self) -> dict[int, list[Extent]]:
        """Return what lies within the prefix that is really there, by pool, in order."""
        out: dict[int, list[Extent]] = {}
        for group in self.groups:
            for pool, extents in group.items():
                for extent in extents:
                    keep = min(len(extent.slots), self.prefix - extent.first)
                    if keep > 0:
                        out.setdefault(pool, []).append(Extent(extent.first, extent.slots[:keep]))
        for pool_extents in out.values():
            pool_extents.sort(key=lambda extent: extent.first)
        return out
