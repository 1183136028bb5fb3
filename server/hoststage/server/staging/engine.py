"""Carries out what the core decides: copies in threads, store I/O, answers and pushes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy as np
import structlog

from hoststage.core import effects as fx
from hoststage.core.commits import Commit, CommitPage
from hoststage.core.loads import GROUP_KEYS, Fetch
from hoststage.core.tier import Tier
from hoststage.server.staging.arenas import PoolArena
from hoststage.server.staging.hold_records import hold_space, is_hold_key, store_key
from hoststage.server.store.base import PageRead, PageWrite, ReadOutcome, Store, WriteOutcome
from hoststage.shm.copy import copy_pages

log = structlog.get_logger(__name__)

_READ = {
    ReadOutcome.HIT: fx.Fetched.HIT,
    ReadOutcome.MISS: fx.Fetched.MISS,
    ReadOutcome.CORRUPT: fx.Fetched.CORRUPT,
    ReadOutcome.FAILED: fx.Fetched.FAILED,
}
_WRITTEN = {
    WriteOutcome.STORED: fx.Written.STORED,
    WriteOutcome.FULL: fx.Written.FULL,
    WriteOutcome.FAILED: fx.Written.FAILED,
}
_TICK_SECONDS = 0.025


class Listener(Protocol):
    """A session, as far as the engine has something to tell it."""

    def load_result(self, result: fx.LoadResult) -> None: ...
    def commit_ended(self, ended: fx.CommitEnded) -> None: ...
    def reserve_ended(self, ended: fx.ReserveEnded) -> None: ...
    def leases_revoked(self, revoke: fx.Revoke) -> None: ...


class Engine:
    """Runs the effects of one `Tier`. `settle` is called after every event that came from outside.

    `on_session_over` is told when nothing of a session's write arenas is in use any more.
    """

    def __init__(
        self, tier: Tier, store: Store | None, executor: Executor, on_session_over: Callable[[int], None]
    ) -> None:
        self.tier = tier
        self.store = store
        self.listeners: dict[int, Listener] = {}
        self.write_arenas: dict[int, list[PoolArena]] = {}
        self.read_arenas: dict[str, list[PoolArena]] = {}
        self.daemon_copies = 0
        self._executor = executor
        self._on_session_over = on_session_over
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = False

    @staticmethod
    def now() -> float:
        """Seconds of the clock that the core is given."""
        return time.monotonic()

    # -------------------------------------------------------------- running effects

    def settle(self) -> None:
        """Carry out what the last event asked for, and what that asks for in turn."""
        if self._settling:
            return
        self._settling = True
        try:
            while True:
                todo = self.tier.effects()
                if not todo:
                    return
                for effect in todo:
                    self._run(effect)
        finally:
            self._settling = False

    def _run(self, effect: fx.Effect) -> None:
        match effect:
            case fx.LoadResult():
                if (listener := self.listeners.get(effect.session)) is not None:
                    listener.load_result(effect)
            case fx.CommitEnded():
                if effect.outcome not in (fx.Outcome.STORED, fx.Outcome.RESIDENT):
                    log.warning(
                        "commit.dropped",
                        session=effect.session,
                        commit=effect.commit_id.hex(),
                        outcome=effect.outcome.name,
                        pages=effect.pages,
                        detail=effect.detail,
                    )
                if (listener := self.listeners.get(effect.session)) is not None:
                    listener.commit_ended(effect)
            case fx.ReserveEnded():
                if (listener := self.listeners.get(effect.session)) is not None:
                    listener.reserve_ended(effect)
            case fx.Publish():
                self.spawn(self._publish(effect.commit))
            case fx.StoreWrite():
                self.spawn(self._write(effect.commit))
            case fx.StoreRead():
                for fetches in _groups(effect.fetches):
                    self.spawn(self._read(effect.namespace, fetches))
            case fx.Revoke():
                log.info("leases.asked_back", session=effect.session, loads=effect.load_ids, reason=effect.reason)
                if (listener := self.listeners.get(effect.session)) is not None:
                    listener.leases_revoked(effect)
            case fx.SessionOver():
                self._on_session_over(effect.session)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a piece of work that the engine owns until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The work itself reports failures to the core; an error here is a fault of ours, and must be seen.
            log.error("staging.fault", error=repr(error), exc_info=error)

    # -------------------------------------------------------------- copies

    async def copy(
        self, dst: int, dst_at: np.ndarray[Any, Any], src: int, src_at: np.ndarray[Any, Any], size: int
    ) -> None:
        """Copy pages of one size between arenas in a worker thread."""
        lengths = np.full(len(dst_at), size, dtype=np.int64)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, copy_pages, dst, dst_at, src, src_at, lengths)

    async def _publish(self, commit: Commit) -> None:
        ok = False
        try:
            write, read = self.write_arenas[commit.session], self.read_arenas[commit.namespace]
            for pool, slots in commit.write_slots().items():
                to, src = read[pool], write[pool]
                assert to.arena is not None
                assert src.arena is not None
                await self.copy(
                    to.arena.address,
                    to.offsets(commit.read_slots()[pool]),
                    src.arena.address,
                    src.offsets(slots),
                    to.rule.page_bytes,
                )
                self.daemon_copies += len(slots)
            ok = True
        finally:
            self.tier.published(commit, ok, self.now())
            self.settle()

    # -------------------------------------------------------------- store

    def _page_write(self, commit: Commit, page: CommitPage) -> PageWrite:
        if page.read_slot >= 0:
            arena, slot = self.read_arenas[commit.namespace][page.pool], page.read_slot
        else:
            arena, slot = self.write_arenas[commit.session][page.pool], page.slot
        return PageWrite(
            arena.rule.name,
            page.key,
            commit.commit_id,
            arena.view(slot),
            arena.address(slot),
            arena.rule.stride,
        )

    async def _write(self, commit: Commit) -> None:
        pages = commit.unstored
        outcomes = [fx.Written.FAILED] * len(pages)
        detail = "the store is gone"
        try:
            if self.store is not None:
                writes = [self._page_write(commit, p) for p in pages]
                results = await self.store.write_from(commit.namespace, writes)
                outcomes = [_WRITTEN[r.outcome] for r in results]
                detail = next((r.detail for r in results if r.outcome is not WriteOutcome.STORED), "")
        except Exception as error:
            detail = repr(error)
            raise
        finally:
            self.tier.written(commit, outcomes, detail, self.now())
            self.settle()

    async def _read(self, namespace: str, fetches: Sequence[Fetch]) -> None:
        outcomes = [(f, fx.Fetched.FAILED, b"") for f in fetches]
        try:
            if self.store is not None:
                arenas = self.read_arenas[namespace]
                # The fetches of one load are of one kind: content, or the pages of a hold, which have a namespace of their own.
                held = is_hold_key(fetches[0].key)
                reads = []
                for f in fetches:
                    arena = arenas[f.pool]
                    key = store_key(f.key) if held else f.key
                    reads.append(
                        PageRead(arena.rule.name, key, arena.view(f.slot), arena.address(f.slot), arena.rule.stride)
                    )
                results = await self.store.read_into(hold_space(namespace) if held else namespace, reads)
                outcomes = [(f, _READ[r.outcome], r.commit_id) for f, r in zip(fetches, results, strict=True)]
        finally:
            space = self.tier.namespaces[namespace]
            self.tier.fetched(space, outcomes)
            self.settle()

    # -------------------------------------------------------------- time

    async def ticking(self) -> None:
        """Let the core's clock run; to be supervised for as long as the daemon lives."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.tier.tick(self.now())
            self.settle()

    async def idle(self) -> None:
        """Wait until no work of the engine is under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def in_use(self, namespace: str) -> bool:
        """Return whether I/O on the read arenas of a namespace is under way or leases on them are out."""
        space = self.tier.namespaces[namespace]
        loads = space.loads
        return bool(space.sessions or any(space.in_flight) or loads.fetches or loads.forgotten or loads.loads)


def _groups(fetches: Sequence[Fetch]) -> list[Sequence[Fetch]]:
    """Cut fetches into batches that arrive one after the other, all pools of a stretch of keys together."""
    if len(fetches) <= GROUP_KEYS:
        return [fetches]
    order: dict[bytes, list[Fetch]] = {}
    for fetch in fetches:
        order.setdefault(fetch.key, []).append(fetch)
    keys = list(order)
    return [[f for key in keys[i : i + GROUP_KEYS] for f in order[key]] for i in range(0, len(keys), GROUP_KEYS)]
