"""Pages that the daemon moves between a session's slots and a socket itself, without a copy of its own.

A thread of the wire fills write slots, or sends read slots, while the loop goes on. Meanwhile the session's memory stays, even if the session
ends; what it held is given up only when the thread says that it has let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hoststage.core.sessions import SessionState
from hoststage.server.contract import PagesInPlace, Reply, RequestError
from hoststage.server.staging.arenas import PoolArena
from hoststage.v1 import ops

if TYPE_CHECKING:
    from hoststage.server.staging.session import Session

ToFill: TypeAlias = Callable[[ops.ReserveReply, list[PagesInPlace]], None]
ToSend: TypeAlias = Callable[[ops.LoadReply, list[PagesInPlace]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Implements `hoststage.server.contract.PagesInPlace`: slots of one arena. Views are made by the thread that needs them: of many pages that takes a while."""

    arena: PoolArena
    slots: ops.U32

    @property
    def nbytes(self) -> int:
        return len(self.slots) * self.arena.rule.page_bytes

    def views(self) -> list[memoryview]:
        rule, arena = self.arena.rule, self.arena.arena
        if rule.page_bytes != rule.stride or arena is None:
            return [self.arena.view(slot) for slot in self.slots.tolist()]
        slots = self.slots.astype(np.int64)
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
        counts = np.diff(starts, append=len(slots))
        runs = zip(slots[starts].tolist(), counts.tolist(), strict=True)
        return [arena.view(slot * rule.stride, count * rule.stride) for slot, count in runs]


class Moves:
    """Implements `hoststage.server.contract.PageMoves` for one session."""

    def __init__(self, session: Session, write: Sequence[PoolArena], read: Sequence[PoolArena]) -> None:
        self._session = session
        self._core = session.core
        self._write = write
        self._read = read

    # -------------------------------------------------------------- storing

    def reserve(self, op: ops.Reserve, request_id: int, reply: ToFill) -> None:
        if not op.span.keys:
            raise RequestError("RANGES", "a store names no keys", field="span.keys")

        def reserved(answer: ops.HotReply) -> None:
            assert isinstance(answer, ops.ReserveReply)
            pages: list[PagesInPlace] = []
            if answer.outcome is ops.Outcome.ACCEPTED:
                self._session.copy_began()
                for entry in answer.slots:
                    pages.append(Pages(self._write[entry.pool], entry.slots[entry.slots != ops.NO_SLOT]))
            reply(answer, pages)

        self._session.submit(op, request_id, reserved)

    def filled(self, span: ops.Span, slots: tuple[ops.PoolSlots, ...], request_id: int, reply: Reply) -> None:
        self._session.copy_ended()
        self._session.commit_filled(span, slots, request_id, reply)

    def not_filled(self, slots: tuple[ops.PoolSlots, ...]) -> None:
        self._session.copy_ended()
        if self._core.state is SessionState.ACTIVE:
            self._session.abort_refused(slots)

    # -------------------------------------------------------------- loading

    def load(self, op: ops.Load, reply: ToSend) -> int:
        parts: list[tuple[ops.PoolRange, ops.PoolSlots]] = []

        def arrived(message: ops.LoadReady) -> None:
            parts.extend(zip(message.ranges, message.slots, strict=True))
            if not message.last:
                return
            if message.outcome is ops.Outcome.READY:
                self._ready(message, parts, reply)
                return
            self._session.end_own_load(message.load_id)
            reply(ops.LoadReply(message.outcome, message.load_id, detail=message.detail), [])

        return self._session.begin_own_load(op, arrived)

    def _ready(
        self, message: ops.LoadReady, parts: Sequence[tuple[ops.PoolRange, ops.PoolSlots]], reply: ToSend
    ) -> None:
        ranges: list[ops.PoolRange] = []
        pages: list[PagesInPlace] = []
        for r, entry in sorted(parts, key=lambda part: (part[0].pool, part[0].first)):
            # What lies beyond the prefix that is really there is void.
            count = min(r.count, message.prefix - r.first)
            if count > 0:
                ranges.append(ops.PoolRange(r.pool, r.first, count))
                pages.append(Pages(self._read[r.pool], entry.slots[:count]))
        self._session.copy_began()
        reply(
            ops.LoadReply(message.outcome, message.load_id, message.prefix, tuple(ranges), detail=message.detail), pages
        )

    def sent(self, load_id: int) -> bool:
        leased = self._core.state is SessionState.ACTIVE and load_id in self._core.loads
        self._session.end_own_load(load_id)
        self._session.copy_ended()
        return leased
