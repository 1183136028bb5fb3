"""What becomes of a store: the ticket that covers its commits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hoststage.client._link import Link
from hoststage.client._wire import Deadline, Message, Waiter
from hoststage.client.errors import DeadlineExceeded, HostStageError, SessionLost
from hoststage.v1 import ops
from hoststage.v1.ops import Outcome

_log = logging.getLogger(__name__)
GOOD = (Outcome.STORED, Outcome.RESIDENT, Outcome.BELIEVED_STORED)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store. `pages`: pages that this store wrote; what was believed stored is not among them.

    outcome: STORED, RESIDENT (there is no store: kept in host memory), BELIEVED_STORED where all pages were, else the first
    reason why a part was not taken. `detail` says it in words.
    """

    outcome: Outcome
    pages: int = 0
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything is stored, resident or believed stored."""
        return self.outcome in GOOD

    def __bool__(self) -> bool:
        return self.ok


@dataclass(slots=True)
class _Ending:
    """How one commit ended: nothing yet, a result or an error."""

    result: StoreResult | None = None
    error: HostStageError | None = None


class CommitPart:
    """One commit of a ticket. The ticket keeps its ending alone: two that knew each other would be left to the garbage collector, which engines turn off."""

    __slots__ = ("answered", "ending", "over", "ticket")

    def __init__(self, ticket: StoreTicket, ending: _Ending) -> None:
        self.ticket = ticket
        self.ending = ending
        self.answered = False
        self.over = False

    def accept(self) -> None:
        """The daemon has the commit."""
        self.ticket._answered(self)

    def take(self, message: Message) -> bool:
        assert isinstance(message, ops.Stored)
        self.end(StoreResult(message.outcome, message.pages, message.detail))
        return True

    def lose(self, error: HostStageError) -> None:
        """End by the loss of the connection, or of the call; the first ending counts."""
        if self.ticket._claim(self):
            self.ending.error = error
            self.ticket._part_ended()

    def refuse(self, outcome: Outcome, detail: str) -> None:
        self.end(StoreResult(outcome, 0, detail))

    def end(self, result: StoreResult) -> None:
        if self.ticket._claim(self):
            self.ending.result = result
            self.ticket._part_ended()


class StoreTicket:
    """What became of a store, as it becomes known. A ticket covers every commit of its run."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._endings: list[_Ending] = []
        self._open = 0
        self._unanswered = 0
        self._sealed = False
        self._waiter = Waiter()
        self._acceptance = Waiter()
        self._callbacks: list[Callable[[StoreTicket], object]] = []

    # The storing side.

    def _begin(self) -> CommitPart:
        part = CommitPart(self, _Ending())
        with self._lock:
            self._endings.append(part.ending)
            self._open += 1
            self._unanswered += 1
        return part

    def _claim(self, part: CommitPart) -> bool:
        with self._lock:
            was, part.over = part.over, True
        self._answered(part)
        return not was

    def _answered(self, part: CommitPart) -> None:
        with self._lock:
            if part.answered:
                return
            part.answered = True
            self._unanswered -= 1
        self._maybe_accepted()

    def _maybe_accepted(self) -> None:
        if self._sealed and not self._unanswered and not self._acceptance.done:
            self._acceptance.finish(ops.Release())

    def _part_ended(self) -> None:
        with self._lock:
            self._open -= 1
        self._maybe_end()

    def _seal(self) -> None:
        with self._lock:
            self._sealed = True
        self._maybe_accepted()
        self._maybe_end()

    def _maybe_end(self) -> None:
        with self._lock:
            if self._waiter.done or self._open or not self._sealed:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._waiter.finish(ops.Release())
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                # It runs in the thread that reads for all: one caller's mistake must not end another's call.
                _log.exception("a callback of a store ticket failed")

    # The caller's side.

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._waiter.done

    @property
    def outcome(self) -> Outcome:
        """PENDING until everything is known, then as in `StoreResult`; CANCELLED where the session was lost."""
        if not self.done:
            return Outcome.PENDING
        return Outcome.CANCELLED if self._error() else self._result().outcome

    def add_done_callback(self, callback: Callable[[StoreTicket], object]) -> None:
        """Call back once the outcome is known, in the thread that reads; at once where it is. It must neither block nor raise."""
        with self._lock:
            if not self._waiter.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def wait_accepted(self, timeout: float | None = None) -> None:
        """Wait until the daemon has answered every commit: it is accepted, or has ended.

        :raises DeadlineExceeded: where that takes longer than `timeout` seconds (None: the session's timeout).
        """
        seconds = self._link.options.timeout if timeout is None else timeout
        if not self._acceptance.done and not self._link.transport.wait(self._acceptance, Deadline(seconds)):
            raise DeadlineExceeded(f"the daemon did not answer the commit within {seconds:g} seconds")

    def wait(self, timeout: float | None = None) -> StoreResult:
        """Wait until every page is stored or dropped.

        :raises DeadlineExceeded: where that takes longer than `timeout` seconds (None: the session's timeout).
        :raises SessionLost: where the connection broke first: whether the pages were stored is not known.
        """
        seconds = self._link.options.timeout if timeout is None else timeout
        if not self._link.transport.wait(self._waiter, Deadline(seconds)):
            raise DeadlineExceeded(
                f"the pages were not stored within {seconds:g} seconds; the ticket may be waited for again"
            )
        error = self._error() or self._waiter.error
        if error is not None:
            raise SessionLost(str(error)) if isinstance(error, SessionLost) else error
        return self._result()

    def _error(self) -> HostStageError | None:
        return next((ending.error for ending in self._endings if ending.error is not None), None)

    def _result(self) -> StoreResult:
        results = [ending.result for ending in self._endings if ending.result is not None]
        pages = sum(r.pages for r in results if r.outcome in (Outcome.STORED, Outcome.RESIDENT))
        failed = [r for r in results if not r.ok]
        written = [r for r in results if r.outcome is not Outcome.BELIEVED_STORED]
        for found in (*failed[:1], *written[:1]):
            return StoreResult(found.outcome, pages, found.detail)
        return StoreResult(Outcome.BELIEVED_STORED)
