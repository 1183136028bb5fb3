"""The writing side of the tier: from a reservation to `stored`."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from hoststage.core.commits import Commit, CommitPage, CommitState
from hoststage.core.effects import (
    CommitEnded,
    CommitResult,
    Outcome,
    PartSlots,
    Publish,
    ReserveEnded,
    ReserveResult,
    SessionOver,
    StoreWrite,
    Written,
)
from hoststage.core.reading import Reading
from hoststage.core.sessions import (
    NamespaceCore,
    QueuedReserve,
    SessionCore,
    SessionState,
    SpanPart,
    granted,
)
from hoststage.core.slots import NO_SLOT, Slots, SlotState, as_slots
from hoststage.core.stack import Mode


class Writing(Reading):
    """Events of reservations, commits, copies and store writes. What frees room lets loads go on, hence the base."""

    __slots__ = ()

    def reserve(
        self, session: SessionCore, parts: Sequence[SpanPart], parent: bytes, request_id: int, wait: float, now: float
    ) -> ReserveResult | None:
        """Grant write slots, or say why not. None: queued for up to `wait` seconds; `ReserveEnded` follows."""
        refusal = self._refuse_write(session, parts, parent)
        if refusal is not None:
            return self._count_reserve(refusal)
        if session.queued:
            result = None
        else:
            result = self._grant(session, parts)
        if result is None and wait > 0 and len(session.queued) < self.limits.max_queued_reserves:
            session.queued.append(QueuedReserve(request_id, parts, now + wait))
            return None
        if result is None:
            result = ReserveResult(Outcome.POOL_FULL, detail=self._full_words(session, parts))
        return self._count_reserve(result)

    def _count_reserve(self, result: ReserveResult) -> ReserveResult:
        self.counters["reserve", result.outcome.name.lower()] += 1
        return result

    def _refuse_write(self, session: SessionCore, parts: Sequence[SpanPart], parent: bytes) -> ReserveResult | None:
        if self.draining:
            return ReserveResult(Outcome.DRAINING, detail="the daemon is draining")
        wanted: Counter[int] = Counter()
        for part in parts:
            wanted[part.pool] += part.count
        for pool, n in wanted.items():
            if n > session.write[pool].usable:
                name = session.namespace.rules.pools[pool].name
                return ReserveResult(
                    Outcome.OVERSIZE,
                    detail=f"{n} pages of pool {name} can never stage: the write arena has {session.write[pool].usable}",
                )
        ahead = Counter({part.pool: part.count for part in parts if not part.keys})
        for pool, n in ahead.items():
            if session.write[pool].credits + n > self.limits.max_credits:
                name = session.namespace.rules.pools[pool].name
                return ReserveResult(
                    Outcome.QUOTA,
                    detail=f"{n} slots of pool {name} ahead of need, where {session.write[pool].credits} are granted "
                    f"already; a session may have {self.limits.max_credits}: commit them, or give them back",
                )
        if parent and not session.namespace.covered(parent):
            return ReserveResult(
                Outcome.PARENT_UNCOVERED, detail=f"the parent {parent.hex()} is neither stored nor on its way"
            )
        return None

    def _grant(self, session: SessionCore, parts: Sequence[SpanPart]) -> ReserveResult | None:
        skip = session.namespace.believed(parts) if any(p.keys for p in parts) else [set() for _ in parts]
        if parts and all(part.keys and len(there) == part.count for part, there in zip(parts, skip, strict=True)):
            result: ReserveResult | None = ReserveResult(Outcome.BELIEVED_STORED)
        else:
            result = granted(session, parts, skip)
        if result is not None:
            self.counters["believed_pages", ""] += sum(map(len, skip))
        return result

    def _full_words(self, session: SessionCore, parts: Iterable[SpanPart]) -> str:
        rules = session.namespace.rules.pools
        return "no free write slots: " + ", ".join(
            f"{rules[i].name} {session.write[i].room} of {session.write[i].usable} free"
            for i in sorted({p.pool for p in parts})
        )

    def abort(self, session: SessionCore, parts: Sequence[SpanPart]) -> None:
        """Give reserved slots back. Raises `SlotError` for a stale reference, after which nothing was changed."""
        for pool, slots in self._checked(session, parts).items():
            session.write[pool].give_back(slots)
        self._serve_queued(session)

    def _checked(self, session: SessionCore, parts: Sequence[SpanPart]) -> dict[int, Slots]:
        """Return the slots of parts by pool. Raises `SlotError` unless each is reserved, of its generation, and named once."""
        seen: dict[int, list[tuple[Slots, Slots]]] = {}
        for part in parts:
            seen.setdefault(part.pool, []).append(self._real(part))
        out = {}
        for pool, pairs in seen.items():
            if len(pairs) == 1:
                slots, gens = pairs[0]
            else:
                slots, gens = (np.concatenate(each) for each in zip(*pairs, strict=True))
            session.write[pool].table.check(slots, gens, SlotState.RESERVED)
            out[pool] = slots
        return out

    @staticmethod
    def _real(part: SpanPart) -> tuple[Slots, Slots]:
        """Slots and generations of a part, without the pages that have none."""
        if part.slots is None or part.generations is None:
            return as_slots(()), as_slots(())
        if NO_SLOT not in part.slots.tolist():
            return part.slots, part.generations
        mask = part.slots != NO_SLOT
        return part.slots[mask], part.generations[mask]

    def commit(
        self,
        session: SessionCore,
        parts: Sequence[SpanPart],
        parent: bytes,
        request_id: int,
        now: float,
        placed: Sequence[Slots] | None = None,
    ) -> CommitResult:
        """Take written slots over. Raises `SlotError` for a stale reference; any refusal leaves the slots the session's.

        placed: of `place_ahead`, where the pages lie there and not in the write slots; a refusal leaves these the caller's too.
        """
        self._checked(session, parts)
        space = session.namespace
        if len(session.commits) >= self.limits.max_open_commits:
            return self._count_commit(
                CommitResult(Outcome.BACKLOG_FULL, detail=f"{len(session.commits)} commits are not yet stored")
            )
        if self.draining:
            return self._count_commit(CommitResult(Outcome.DRAINING, detail="the daemon is draining"))
        if parent and not space.covered(parent):
            return self._count_commit(CommitResult(Outcome.PARENT_UNCOVERED))
        pages, unneeded = self._pages(session, parts)
        if placed is not None:
            self._take_placed(space, parts, placed, pages)
            publish = bool(pages)
        else:
            publish = bool(pages) and session.mode is Mode.CACHE and self._place_publish(space, pages)
        if pages and not publish and not space.has_store:
            return self._count_commit(
                CommitResult(Outcome.POOL_FULL, detail="no store is configured and the read arena has no room")
            )
        for pool, idle in unneeded.items():
            session.write[pool].give_back(as_slots(idle))
        if not pages:
            result = CommitResult(Outcome.BELIEVED_STORED, credits=self._credit(session, parts))
        else:
            commit = self._accept(session, pages, parent, request_id, publish, now)
            if placed is not None:
                self.published(commit, True, now)
            elif publish:
                self._effects.append(Publish(commit))
            result = CommitResult(Outcome.ACCEPTED, commit.commit_id, self._credit(session, parts))
        self._serve_queued(session)
        return self._count_commit(result)

    def _count_commit(self, result: CommitResult) -> CommitResult:
        self.counters["commit", result.outcome.name.lower()] += 1
        return result

    def _pages(self, session: SessionCore, parts: Sequence[SpanPart]) -> tuple[list[CommitPage], dict[int, list[int]]]:
        """Return the pages to store in store order, and write slots whose pages are believed stored already."""
        pages: list[CommitPage] = []
        unneeded: dict[int, list[int]] = {}
        for part, there in zip(parts, session.namespace.believed(parts), strict=True):
            assert part.slots is not None
            slots, pool = part.slots.tolist(), part.pool
            if not there and NO_SLOT not in slots:
                pages += [CommitPage(pool, key, slot) for key, slot in zip(part.keys, slots, strict=True)]
                continue
            for i, (key, slot) in enumerate(zip(part.keys, slots, strict=True)):
                if slot == NO_SLOT:
                    continue
                if i in there:
                    unneeded.setdefault(pool, []).append(slot)
                else:
                    pages.append(CommitPage(pool, key, slot))
        if len(parts) > 1:
            rank = {pool: i for i, pool in enumerate(session.namespace.rules.store_order)}
            pages.sort(key=lambda p: rank[p.pool])
        return pages, unneeded

    def _accept(
        self, session: SessionCore, pages: list[CommitPage], parent: bytes, request_id: int, publish: bool, now: float
    ) -> Commit:
        space = session.namespace
        commit = Commit(
            self.epoch + struct.pack("<Q", next(self._ids)),
            session.session,
            space.name,
            request_id,
            pages,
            parent,
            space.rules.anchor,
            now,
            now + self.policy.deadline,
        )
        session.commits[commit.commit_id] = commit
        for pool, slots in commit.write_slots().items():
            session.write[pool].commit(slots)
        for page in pages:
            space.in_flight[page.pool][page.key] = commit
        if publish:
            commit.state = CommitState.PUBLISHING
        else:
            if session.mode is Mode.CACHE:
                self.counters["publish_skipped", ""] += 1
            self._drain(commit, now)
        return commit

    def _credit(self, session: SessionCore, parts: Sequence[SpanPart]) -> tuple[PartSlots, ...]:
        """Slots in place of those that a commit took, for a session that stores from slots granted ahead."""
        if not session.credits or session.queued:
            return ()
        taken: dict[int, int] = {}
        for part in parts:
            taken[part.pool] = taken.get(part.pool, 0) + len(self._real(part)[0])
        ahead = []
        for pool, n in taken.items():
            write = session.write[pool]
            due = min(n, write.room, session.credits - write.credits)
            if due > 0:
                ahead.append(SpanPart(pool, 0, due))
        result = granted(session, ahead, [set() for _ in ahead])
        return result.parts if result else ()

    # -------------------------------------------------------------- publishing

    def place_ahead(self, session: SessionCore, parts: Sequence[SpanPart]) -> list[Slots] | None:
        """Take read slots for the reserved pages of parts, whose bytes the daemon is about to put straight there.

        One array a part, an entry for each page that has a write slot. `commit` takes them over, `unplace` gives them back. None where
        nothing is published, or there is no room for all: the pages then go into the write slots.
        """
        if session.mode is not Mode.CACHE:
            return None
        space = session.namespace
        taken: list[Slots] = []
        for part in parts:
            n = len(self._real(part)[0])
            slots = space.pools[part.pool].place_publish(n, loads_wait=bool(space.loads.parked))
            if slots is None:
                self.unplace(session, parts, taken)
                return None
            taken.append(slots)
        return taken

    def unplace(self, session: SessionCore, parts: Sequence[SpanPart], placed: Sequence[Slots]) -> None:
        """Give read slots of `place_ahead` back."""
        space = session.namespace
        for part, slots in zip(parts, placed, strict=False):
            space.pools[part.pool].unfilled(slots, load=False)
        self._retry(space)

    @staticmethod
    def _take_placed(
        space: NamespaceCore, parts: Sequence[SpanPart], placed: Sequence[Slots], pages: Sequence[CommitPage]
    ) -> None:
        """Let the pages of a commit be where they were placed, and free the places of those that turned out to be stored."""
        where = {(page.pool, page.slot): page for page in pages}
        for part, slots in zip(parts, placed, strict=True):
            assert part.slots is not None
            unneeded = []
            for write, read in zip((s for s in part.slots.tolist() if s != NO_SLOT), slots.tolist(), strict=True):
                page = where.get((part.pool, write))
                if page is None:
                    unneeded.append(read)
                else:
                    page.read_slot = read
            if unneeded:
                space.pools[part.pool].unfilled(as_slots(unneeded), load=False)

    @staticmethod
    def _place_publish(space: NamespaceCore, pages: Sequence[CommitPage]) -> bool:
        """Take read slots for every page of a commit, or for none."""
        taken: list[tuple[int, Slots]] = []
        for pool in {p.pool: None for p in pages}:
            mine = [p for p in pages if p.pool == pool]
            slots = space.pools[pool].place_publish(len(mine), loads_wait=bool(space.loads.parked))
            if slots is None:
                for other, given in taken:
                    space.pools[other].unfilled(given, load=False)
                for page in pages:
                    page.read_slot = -1
                return False
            taken.append((pool, slots))
            for page, slot in zip(mine, slots.tolist(), strict=True):
                page.read_slot = slot
        return True

    def published(self, commit: Commit, ok: bool, now: float) -> None:
        """The copies of a `Publish` are made (`ok`), or could not be."""
        space = self.namespaces[commit.namespace]
        for pool, slots in commit.read_slots().items():
            read = space.pools[pool]
            if not ok:
                read.unfilled(slots, load=False)
                continue
            keys = [p.key for p in commit.pages if p.pool == pool]
            if space.has_store:
                read.begin_drain(slots)
            read.filled(slots, keys, [commit.commit_id] * len(keys), load=False)
        if ok:
            self._replace_groups(space, commit)
            self.counters["published_pages", ""] += len(commit.pages)
            self._free_write_slots(commit, SlotState.COMMITTED)
        else:
            commit.forget_read_slots()
        if not space.has_store:
            self._finish(commit, Outcome.RESIDENT if ok else Outcome.POOL_FULL)
        elif commit.parent_failed:
            self._finish(commit, Outcome.PARENT_FAILED)
        else:
            self._drain(commit, now)
        self._retry(space)

    @staticmethod
    def _replace_groups(space: NamespaceCore, commit: Commit) -> None:
        """Pages of an older commit leave the index where the rest of their group was just replaced."""
        for page in commit.pages:
            for place in space.rules.group_of(page.pool):
                pool = space.pools[place]
                slot = pool.index.get(page.key)
                if slot is not None and pool.commits[slot] != commit.commit_id:
                    pool.drop((page.key,))

    def _free_write_slots(self, commit: Commit, state: SlotState) -> None:
        session = self.sessions[commit.session]
        for pool, slots in commit.write_slots().items():
            session.write[pool].table.release(slots, state)
        commit.forget_write_slots()
        self._serve_queued(session)

    # -------------------------------------------------------------- draining

    def _drain(self, commit: Commit, now: float) -> None:
        self.drains.add(commit)
        self._start_drains(now)

    def _start_drains(self, now: float) -> None:
        for commit in self.drains.start(now):
            if commit.attempts == 0:
                session = self.sessions[commit.session]
                for pool, slots in commit.write_slots().items():
                    session.write[pool].table.move(slots, SlotState.COMMITTED, SlotState.DRAINING)
            self._effects.append(StoreWrite(commit))

    def written(self, commit: Commit, outcomes: list[Written], detail: str, now: float) -> None:
        """The store I/O of a `StoreWrite` has ended: one outcome for each page that was not yet stored."""
        self.drains.ended(commit, outcomes)
        commit.detail = detail
        if all(p.stored for p in commit.pages):
            space = self.namespaces[commit.namespace]
            for page in commit.pages:
                space.beliefs[page.pool].add((page.key,))
            self._finish(commit, Outcome.STORED)
        elif commit.parent_failed:
            self._finish(commit, Outcome.PARENT_FAILED)
        else:
            full = Written.FULL in outcomes
            at = now + self.policy.backoff(commit.attempts)
            if at >= commit.deadline:
                self._finish(commit, Outcome.STORE_FULL if full else Outcome.STORE_FAILED)
            else:
                self.counters["store_retries", "full" if full else "failed"] += 1
                self.drains.retry(commit, at)
        self._start_drains(now)

    def _finish(self, commit: Commit, outcome: Outcome) -> None:
        """End a commit, and drop what builds on it where it failed."""
        self._close(commit, outcome)
        if outcome not in (Outcome.STORED, Outcome.RESIDENT):
            self._drop_descendants(commit)
        self._retry(self.namespaces[commit.namespace])

    def _close(self, commit: Commit, outcome: Outcome) -> None:
        """Free what a commit held and tell its session."""
        space = self.namespaces[commit.namespace]
        session = self.sessions[commit.session]
        state = SlotState.COMMITTED if commit.attempts == 0 else SlotState.DRAINING
        commit.state = CommitState.DONE
        self._free_write_slots(commit, state)
        for pool, slots in commit.read_slots().items():
            if space.has_store and outcome is not Outcome.POOL_FULL:
                space.pools[pool].end_drain(slots)
        for page in commit.pages:
            in_flight = space.in_flight[page.pool]
            if in_flight.get(page.key) is commit:
                del in_flight[page.key]
        session.commits.pop(commit.commit_id, None)
        self.counters["commit_ended", outcome.name.lower()] += 1
        self.counters["pages_ended", outcome.name.lower()] += len(commit.pages)
        self._effects.append(
            CommitEnded(session.session, commit.commit_id, commit.request_id, outcome, len(commit.pages), commit.detail)
        )
        self._settle_session(session)

    def _drop_descendants(self, failed: Commit) -> None:
        """Drop the waiting commits that build on one that failed, and theirs; those under I/O are dropped when it ends."""
        space = self.namespaces[failed.namespace]
        children: dict[bytes, list[Commit]] = {}
        for session in space.sessions:
            for commit in self.sessions[session].commits.values():
                if commit.parent:
                    children.setdefault(commit.parent, []).append(commit)
        gone: list[Commit] = []
        failures = [failed]
        while failures:
            parent = failures.pop()
            for key in parent.anchor_keys():
                # What another commit brings, or the store has, is no hole in the prefix.
                orphans = [] if space.has(space.rules.anchor, key) else children.pop(key, [])
                for commit in orphans:
                    if commit.state not in (CommitState.QUEUED, CommitState.WAITING):
                        commit.parent_failed = True
                        continue
                    commit.detail = f"its parent commit {parent.commit_id.hex()} was dropped: {parent.detail}"[:500]
                    gone.append(commit)
                    failures.append(commit)
                    self._close(commit, Outcome.PARENT_FAILED)
        if gone:
            self.drains.remove(gone)

    def _serve_queued(self, session: SessionCore) -> None:
        while session.queued and session.state is SessionState.ACTIVE:
            head = session.queued[0]
            result = self._grant(session, head.wants)
            if result is None:
                return
            session.queued.popleft()
            self._count_reserve(result)
            self._effects.append(ReserveEnded(session.session, head.request_id, result))

    def _settle_session(self, session: SessionCore) -> None:
        over = session.state is SessionState.ENDING and session.idle and not session.commits
        if over and self.sessions.pop(session.session, None) is not None:
            session.namespace.sessions.discard(session.session)
            self._effects.append(SessionOver(session.session))
