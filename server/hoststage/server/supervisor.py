"""Watches background tasks: one that dies is restarted, or takes the daemon down visibly. None dies unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

_MOST_RESTARTS = 5
_FORGIVE_SECONDS = 60.0


class Supervisor:
    """Runs named tasks until `stop`. A task that fails too often calls `on_fatal` with the reason."""

    def __init__(self, on_fatal: Callable[[str], None]) -> None:
        self._on_fatal = on_fatal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.restarts = 0

    def run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work()` and start it anew, with backoff, when it ends."""
        self._tasks[name] = asyncio.get_running_loop().create_task(self._keep(name, work), name=name)

    async def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started = loop.time()
            try:
                await work()
                reason = "ended"
            except asyncio.CancelledError:
                raise
            except Exception as error:
                reason = repr(error)
                log.error("task.died", task=name, error=reason, exc_info=error)
            failures = 1 if loop.time() - started > _FORGIVE_SECONDS else failures + 1
            if failures > _MOST_RESTARTS:
                self._on_fatal(f"task {name} died {failures} times; the last time: {reason}")
                return
            self.restarts += 1
            log.warning("task.restarted", task=name, reason=reason, failures=failures)
            await asyncio.sleep(0.1 * 2**failures)

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
