"""The tier: the whole life of slots, as a machine without I/O.

Each method is an event: it changes state at once and returns the answer and, through `effects`, what is to be
done outside. Time comes in as seconds of any monotonic clock. One thread calls it.
"""

from __future__ import annotations

from hoststage.core.effects import Outcome, ReserveEnded, ReserveResult
from hoststage.core.prefix import Present
from hoststage.core.sessions import SessionCore, SessionState
from hoststage.core.stack import Mode
from hoststage.core.writing import Writing


class Tier(Writing):
    """All sessions and namespaces of a daemon: their beginning and end, and time. The rest of its events are in the bases."""

    __slots__ = ()

    # -------------------------------------------------------------- sessions

    def open(self, session: SessionCore) -> None:
        """Add a session whose namespace is known."""
        self.sessions[session.session] = session
        session.namespace.sessions.add(session.session)
        if session.mode is Mode.CACHE:
            session.namespace.upgrade()
        for pool, board in session.boards.items():
            session.namespace.pools[pool].add_board(board)
        if session.boards:
            self._refuse_oversize(session.namespace)

    def quarantine(self, session: SessionCore) -> None:
        """Its connection broke; its process may still write its slots and read its leases: nobody gets them."""
        if session.state is not SessionState.ACTIVE:
            return
        session.state = SessionState.QUARANTINED
        session.queued.clear()
        for load in list(session.loads.values()):
            if not load.ready:
                self._end_load(session, load)
        for write in session.write:
            self.counters["quarantined_slots", ""] += write.quarantine()
        self._retry(session.namespace)

    def end(self, session: SessionCore) -> None:
        """Its process is gone, or it said goodbye: everything that it held is free. What it committed is still stored."""
        if session.state is SessionState.ENDING:
            return
        session.state = SessionState.ENDING
        session.queued.clear()
        for load in [*session.loads.values(), *session.pins.values()]:
            self._end_load(session, load)
        for pool, board in session.boards.items():
            session.namespace.pools[pool].remove_board(board)
        for write in session.write:
            write.owner_gone()
        self._retry(session.namespace)
        self._settle_session(session)

    def copy_began(self, session: SessionCore) -> None:
        """The daemon copies into reserved slots of the session, whose arenas must outlast the copy, though it may end."""
        session.copying += 1

    def copy_ended(self, session: SessionCore) -> None:
        """Such a copy has ended."""
        session.copying -= 1
        self._settle_session(session)

    def hold_io_ended(self, session: SessionCore) -> None:
        """The I/O of one of its holds has ended: a session that is gone may have waited for it."""
        self._settle_session(session)

    # -------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Let time pass: deadlines of loads, pins and queued reservations, and retries of the store."""
        for session in list(self.sessions.values()):
            late = [x for x in session.loads.values() if not x.ready and x.deadline <= now]
            for load in late:
                self._cancel(session, load, "its deadline passed")
            old = [x for x in session.pins.values() if x.deadline <= now]
            for load in old:
                self._end_load(session, load)
            if late or old:
                self._retry(session.namespace)
            expired = [q for q in session.queued if q.until <= now]
            for head in expired:
                session.queued.remove(head)
                result = ReserveResult(Outcome.POOL_FULL, detail=self._full_words(session, head.wants))
                self._effects.append(ReserveEnded(session.session, head.request_id, self._count_reserve(result)))
            if expired:
                self._serve_queued(session)
        for space in self.namespaces.values():
            # Boards are wiped without a word: whether a load that waits may go on is seen by looking.
            if space.sweep() or (space.loads.parked and any(pool.boards for pool in space.pools)):
                self._retry(space)
            self._ask_back(space, now)
        self._start_drains(now)

    def known(self, present: Present) -> int:
        """Return how many of the pages are there."""
        return sum(p is not None for p in present)

    def open_commits(self) -> int:
        """Commits that are accepted and neither stored nor dropped."""
        return sum(len(s.commits) for s in self.sessions.values())
