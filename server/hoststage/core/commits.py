"""Commits: pages of all pools that a client made visible together, on their way to the store."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from hoststage.core.effects import Written
from hoststage.core.slots import Slots, as_slots


class CommitState(Enum):
    """PUBLISHING and DRAINING: the daemon's copy, or its store I/O, is under way."""

    PUBLISHING = "publishing"
    QUEUED = "queued"
    DRAINING = "draining"
    WAITING = "waiting"
    DONE = "done"


@dataclass(slots=True)
class CommitPage:
    """One page. `slot` is its write slot, -1 once that is free; `read_slot` its published copy, -1 for none."""

    pool: int
    key: bytes
    slot: int
    read_slot: int = -1
    stored: bool = False


@dataclass(slots=True, eq=False)
class Commit:
    """`pages` are in store order: sidecars first, the anchor last. Times in seconds of the caller's clock.

    place: its place among all commits that were ever queued. parent_failed: the commit that it builds on was dropped while this one
    was under I/O; it is dropped too as soon as that has ended, unless it got stored.
    """

    commit_id: bytes
    session: int
    namespace: str
    request_id: int
    pages: list[CommitPage]
    parent: bytes
    anchor: int
    accepted_at: float
    deadline: float
    state: CommitState = CommitState.QUEUED
    attempts: int = 0
    detail: str = ""
    place: int = 0
    parent_failed: bool = False
    _write_slots: dict[int, Slots] | None = None
    _read_slots: dict[int, Slots] | None = None

    def write_slots(self) -> dict[int, Slots]:
        """Write slots still held, by pool."""
        if self._write_slots is None:
            self._write_slots = self._by_pool([(p.pool, p.slot) for p in self.pages if p.slot >= 0])
        return self._write_slots

    def read_slots(self) -> dict[int, Slots]:
        """Read slots of published copies, by pool. Pages have theirs before the commit is made."""
        if self._read_slots is None:
            self._read_slots = self._by_pool([(p.pool, p.read_slot) for p in self.pages if p.read_slot >= 0])
        return self._read_slots

    def forget_write_slots(self) -> None:
        """The write slots are free."""
        for page in self.pages:
            page.slot = -1
        self._write_slots = {}

    def forget_read_slots(self) -> None:
        """Nothing was published."""
        for page in self.pages:
            page.read_slot = -1
        self._read_slots = {}

    @staticmethod
    def _by_pool(pairs: list[tuple[int, int]]) -> dict[int, Slots]:
        out: dict[int, list[int]] = {}
        for pool, slot in pairs:
            out.setdefault(pool, []).append(slot)
        return {pool: as_slots(slots) for pool, slots in out.items()}

    @property
    def unstored(self) -> list[CommitPage]:
        """Pages that the store has not acknowledged."""
        return [p for p in self.pages if not p.stored]

    def anchor_keys(self) -> list[bytes]:
        """Keys of its anchor pages: what another commit may name as its parent."""
        return [p.key for p in self.pages if p.pool == self.anchor]


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """max_pages: pages under store I/O at once. retry_*: backoff between attempts. deadline: seconds from acceptance to a drop."""

    max_pages: int = 256
    retry_first: float = 0.05
    retry_most: float = 2.0
    deadline: float = 30.0

    def backoff(self, attempts: int) -> float:
        """Seconds to wait after that many failed attempts."""
        return min(self.retry_most, self.retry_first * 2.0 ** min(attempts - 1, 16))


@dataclass(slots=True)
class DrainQueue:
    """Commits waiting for the store: FIFO for each session, fair between sessions by pages, with a cap on what is under I/O."""

    policy: DrainPolicy
    pages_in_flight: int = 0
    _queues: dict[int, deque[Commit]] = field(default_factory=dict)
    _turn: deque[int] = field(default_factory=deque)
    _deficit: dict[int, int] = field(default_factory=dict)
    _retries: list[tuple[float, int, Commit]] = field(default_factory=list)
    _count: int = 0

    QUANTUM = 32

    def add(self, commit: Commit) -> None:
        """Queue a commit in its session's order: behind all that were queued for the first time before it."""
        commit.state = CommitState.QUEUED
        if commit.place == 0:
            self._count += 1
            commit.place = self._count
        queue = self._queues.get(commit.session)
        if queue is None:
            queue = self._queues[commit.session] = deque()
            self._turn.append(commit.session)
            self._deficit[commit.session] = 0
        at = len(queue)
        while at and queue[at - 1].place > commit.place:
            at -= 1
        queue.insert(at, commit)

    def retry(self, commit: Commit, at: float) -> None:
        """Queue a commit again, not before `at`."""
        commit.state = CommitState.WAITING
        heapq.heappush(self._retries, (at, commit.place, commit))

    @property
    def next_retry(self) -> float | None:
        """When the next retry is due, None where none is."""
        return self._retries[0][0] if self._retries else None

    @property
    def waiting(self) -> int:
        """Commits that wait for a retry."""
        return len(self._retries)

    def queued(self) -> Iterator[Commit]:
        """Every commit that waits, for its first attempt or another."""
        for queue in self._queues.values():
            yield from queue
        for _, _, commit in self._retries:
            yield commit

    def remove(self, commits: Collection[Commit]) -> None:
        """Take waiting commits out."""
        gone = set(commits)
        for session in {commit.session for commit in gone}:
            queue = self._queues.get(session)
            if queue is not None:
                self._queues[session] = deque(c for c in queue if c not in gone)
        self._retries = [r for r in self._retries if r[2] not in gone]
        heapq.heapify(self._retries)

    def start(self, now: float) -> list[Commit]:
        """Return the commits whose store I/O starts now (deficit round robin over sessions)."""
        while self._retries and self._retries[0][0] <= now:
            self.add(heapq.heappop(self._retries)[2])
        started: list[Commit] = []
        while self._turn and self.pages_in_flight < self.policy.max_pages:
            session = self._turn[0]
            queue = self._queues[session]
            if not queue:
                self._turn.popleft()
                del self._queues[session], self._deficit[session]
                continue
            need = len(queue[0].unstored)
            if self._deficit[session] < need:
                self._deficit[session] += self.QUANTUM
                self._turn.rotate(-1)
                continue
            self._deficit[session] -= need
            commit = queue.popleft()
            commit.state = CommitState.DRAINING
            self.pages_in_flight += need
            started.append(commit)
        return started

    def ended(self, commit: Commit, outcomes: list[Written]) -> None:
        """Its store I/O has ended; mark the pages that were acknowledged."""
        pages = commit.unstored
        self.pages_in_flight -= len(pages)
        for page, outcome in zip(pages, outcomes, strict=True):
            page.stored = outcome is Written.STORED
        commit.attempts += 1
