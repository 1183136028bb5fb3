"""Runs one batch on a few threads of a pool, so that a long batch does not shut out a short one."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Final, Generic, TypeVar

_TURN: Final = 4

Job = TypeVar("Job")


class _Batch(Generic[Job]):
    """Threads take jobs from one queue. After a few each goes to the back of the pool's own queue."""

    def __init__(
        self,
        executor: Executor,
        jobs: Iterable[Job],
        work: Callable[[Job], None],
        width: int,
    ) -> None:
        self._executor = executor
        self._jobs = deque(jobs)
        self._work = work
        self._running = min(width, len(self._jobs))
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        if not self._running:
            self.done.set_result(None)
        for _ in range(self._running):
            self._executor.submit(self._take_turn)

    def _take_turn(self) -> None:
        for _ in range(_TURN):
            try:
                job = self._jobs.popleft()
            except IndexError:
                self._leave()
                return
            try:
                self._work(job)
            except BaseException as error:  # delivered to the caller when the last thread has left
                self._error = error
                self._jobs.clear()
        self._executor.submit(self._take_turn)

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self.done.done():  # only the end of the whole loop cancels it
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(None)


async def fan_out(executor: Executor, jobs: Iterable[Job], work: Callable[[Job], None], width: int) -> None:
    """Run ``work`` on every job with at most ``width`` threads, and return when the last one has let go.

    Raises what ``work`` raised, then without having run all jobs. Must not be cancelled (see
    ``uninterrupted``).
    """
    batch = _Batch(executor, jobs, work, width)
    batch.start()
    await batch.done


Result = TypeVar("Result")


async def uninterrupted(task: asyncio.Task[Result]) -> Result:
    """Wait for a task to end even if the caller is cancelled meanwhile; then pass the cancellation on."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
