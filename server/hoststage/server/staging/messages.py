"""Pages in messages: copied from them into write slots, and shown in read slots for those that put them into messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from hoststage.core.sessions import SessionState, SpanPart
from hoststage.server.contract import Reply, RequestError
from hoststage.server.staging.arenas import PoolArena
from hoststage.shm.copy import address_of, copy_bytes
from hoststage.v1 import ops

if TYPE_CHECKING:
    from hoststage.server.staging.session import Session

InlineReply = Callable[[ops.LoadReady, list[list[memoryview]]], None]


class PagesInMessages:
    """The payload in messages of one session."""

    def __init__(
        self, session: Session, write: Sequence[PoolArena], read: Sequence[PoolArena], executor: Executor
    ) -> None:
        self._session = session
        self._write = write
        self._read = read
        self._executor = executor

    def load(self, op: ops.Load, reply: InlineReply) -> None:
        """Begin a load whose groups go to `reply` with their pages, which are good until it returns."""

        def arrived(message: ops.LoadReady) -> None:
            pages = [[self._read[entry.pool].view(slot) for slot in entry.slots.tolist()] for entry in message.slots]
            try:
                reply(message, pages)
            finally:
                if message.last:
                    self._session.end_own_load(message.load_id)

        self._session.begin_own_load(op, arrived)

    def store(
        self,
        span: ops.Span,
        parts: Sequence[SpanPart],
        pages: Sequence[Sequence[bytes | bytearray]],
        request_id: int,
        wait_ms: int,
        reply: Reply,
    ) -> None:
        """Reserve slots for the pages, copy them there, and commit. Raises `RequestError`."""
        for i, (part, given) in enumerate(zip(parts, pages, strict=False)):
            want = self._write[part.pool].rule.page_bytes
            wrong = next((len(p) for p in given if len(p) != want), None)
            if len(given) != part.count or wrong is not None:
                raise RequestError(
                    "PAGE_SIZE",
                    f"range {i}: {len(given)} pages for {part.count}, of {wrong or want} bytes; pages of this pool have {want}",
                    field=f"pages[{i}]",
                )
        if len(pages) != len(parts):
            raise RequestError("RANGES", f"{len(pages)} lists of pages for {len(parts)} ranges", field="pages")

        def reserved(answer: ops.HotReply) -> None:
            assert isinstance(answer, ops.ReserveReply)
            if answer.outcome is not ops.Outcome.ACCEPTED:
                reply(ops.CommitReply(answer.outcome, detail=answer.detail))
                return
            # Before anything else can happen: until the copy has ended the arenas stay, even if the session ends now.
            self._session.copy_began()
            self._session.engine.spawn(self._copy(span, pages, answer.slots, request_id, reply))

        self._session.submit(ops.Reserve(span, wait_ms), request_id, reserved)

    async def _copy(
        self,
        span: ops.Span,
        pages: Sequence[Sequence[bytes | bytearray]],
        slots: tuple[ops.PoolSlots, ...],
        request_id: int,
        reply: Reply,
    ) -> None:
        try:
            todo = []
            for entry, given in zip(slots, pages, strict=True):
                arena = self._write[entry.pool]
                todo += [
                    (arena.address(slot), page)
                    for slot, page in zip(entry.slots.tolist(), given, strict=True)
                    if slot != ops.NO_SLOT
                ]
            await asyncio.get_running_loop().run_in_executor(self._executor, _copy_in, todo)
        finally:
            self._session.copy_ended()
        if self._session.core.state is SessionState.ACTIVE:
            self._session.commit_filled(span, slots, request_id, reply)


def _copy_in(todo: Sequence[tuple[int, bytes | bytearray]]) -> None:
    for address, page in todo:
        copy_bytes(address, address_of(page).address, len(page))
