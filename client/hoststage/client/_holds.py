"""Holds: pages of a retracted decode request, parked in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from hoststage.client._core import Core
from hoststage.client._link import Link
from hoststage.client._wire import Deadline, Message
from hoststage.client.errors import StackError
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import stack_pb2
from hoststage.v1.convert import slots_from_proto
from hoststage.v1.ops import Outcome, PoolSlots, Release


class HoldBatch:
    """Hold slots to be written in place and then sealed; falsy where none were granted.

    `views[pool]` has one writable page for each page asked for. As a context manager it discards the hold where it was not sealed.
    """

    def __init__(self, core: Core, link: Link, name: pb.HoldId, reply: pb.HoldReply, *, durable: bool = False) -> None:
        self.durable = durable
        self.outcome = Outcome(reply.outcome)
        self.detail = reply.detail
        self.sealed = False
        self._core, self._link, self._name = core, link, name
        self.views: dict[str, list[memoryview]] = {}
        if self:
            self.views = views_of(core, link, slots_from_proto(reply.slots), write=True)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.ACCEPTED

    def seal(self, note: bytes = b"", timeout: float | None = None) -> None:
        """Say that the pages are written. `note`: at most 64 KiB that `restore` gives back.

        A durable hold is in the store when this returns, and its slots, with `views`, are given back. Raises `RequestRejected`, for a durable one with
        the reason HOLD_STORE_FULL or HOLD_STORE_FAILED where it is not stored: seal again, or discard it.
        """
        message = pb.ClientMessage(seal_hold=pb.SealHold(id=self._name, note=note))
        self._link.call(message, pb.Done, self._core.deadline(timeout))
        self.sealed = True
        if self.durable:
            self.views = {}

    def discard(self) -> None:
        """Give the slots back; nobody is told whether they were there."""
        self.views = {}
        if self:
            self._link.post(pb.ClientMessage(discard=pb.Discard(id=self._name)))

    def __enter__(self) -> HoldBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.sealed:
            self.discard()


class RestoredHold:
    """Pages of a hold; falsy where there is none, `outcome` and `detail` say why. `discard` it after use.

    `views[pool]`: the pages, in the session's own slots, or read-only in leased ones where a durable hold came from the store
    (`taken_over`). `release` gives those leases up and leaves the hold where it is, for a retry or another worker.
    """

    def __init__(self, core: Core, link: Link, name: pb.HoldId, reply: pb.RestoreReply) -> None:
        self.outcome = Outcome(reply.outcome)
        self.detail = reply.detail
        self.note = reply.note
        self._link, self._name = link, name
        self._load_id = reply.load_id
        self.views: dict[str, list[memoryview]] = {}
        if self:
            write = reply.arena != stack_pb2.ARENA_KIND_READ
            self.views = views_of(core, link, slots_from_proto(reply.slots), write=write)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.READY

    @property
    def taken_over(self) -> bool:
        """Whether the pages are leased in the read arena, and not yet released."""
        return bool(self._load_id)

    def discard(self) -> None:
        """Free the hold."""
        self.views = {}
        if self:
            self.release()
            self._link.post(pb.ClientMessage(discard=pb.Discard(id=self._name)))

    def release(self) -> None:
        """Give up the leases of pages that came from the store; safe to repeat."""
        load_id, self._load_id = self._load_id, 0
        if load_id:
            self.views = {}
            self._link.post(Release((load_id,)))


def views_of(core: Core, link: Link, slots: Sequence[PoolSlots], *, write: bool) -> dict[str, list[memoryview]]:
    """Return the pages in slots, by pool."""
    arenas = link.arenas.write if write else link.arenas.read
    names = core.names
    return {names[entry.pool]: arenas[entry.pool].views(entry.slots) for entry in slots}


def hold_id(owner_token: bytes, request: str, attempt: int) -> pb.HoldId:
    """Return the name of a hold on the wire. Raises `StackError`."""
    if not 1 <= len(owner_token) <= 64:
        raise StackError("owner_token", f"{len(owner_token)} bytes", "pass 1 to 64 bytes")
    if not 1 <= len(request.encode()) <= 256:
        raise StackError("request", request, "pass a text of 1 to 256 bytes")
    if not 0 <= attempt < 1 << 32:
        raise StackError("attempt", attempt, "pass 0 to 2^32 - 1")
    return pb.HoldId(owner_token=owner_token, request=request, attempt=attempt)


def hold(
    core: Core, name: pb.HoldId, counts: Mapping[str, int], durable: bool, ttl_seconds: float, deadline: Deadline
) -> HoldBatch:
    """Ask for hold slots; see `Session.hold`."""
    link = _shared(core, deadline)
    index_of = core.options.stack.index_of
    ranges = [pb.PoolRange(pool=index_of(pool), count=n) for pool, n in counts.items() if n]
    message = pb.Hold(id=name, ranges=ranges, durable=durable, ttl_ms=int(ttl_seconds * 1000))

    def give_back(answer: Message) -> None:
        if isinstance(answer, pb.ServerMessage) and Outcome(answer.hold_reply.outcome) is Outcome.ACCEPTED:
            link.post(pb.ClientMessage(discard=pb.Discard(id=name)))

    reply = link.call(pb.ClientMessage(hold=message), pb.HoldReply, deadline, give_back)
    return HoldBatch(core, link, name, reply, durable=durable)


def restore(core: Core, name: pb.HoldId, deadline: Deadline) -> RestoredHold:
    """Find a sealed hold; see `Session.restore`."""
    link = _shared(core, deadline)

    def give_back(answer: Message) -> None:
        if isinstance(answer, pb.ServerMessage) and answer.restore_reply.load_id:
            link.post(Release((answer.restore_reply.load_id,)))

    reply = link.call(pb.ClientMessage(restore=pb.Restore(id=name)), pb.RestoreReply, deadline, give_back)
    return RestoredHold(core, link, name, reply)


def _shared(core: Core, deadline: Deadline) -> Link:
    link = core.ready(deadline)
    if not link.maps:
        raise StackError(
            "path", link.grant.path.value, "holds live in shared memory: connect over the shm path, or keep CPU tensors"
        )
    return link
