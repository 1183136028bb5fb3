"""The path `imported`: pages between a client's own memory and the session's slots, by descriptor.

Storing: slots of the session's write arena are the bounce, or, where the pages are to be published, the read slots that they will have there. The client can
write neither, so the bytes that are hashed and stored are those that were read, whatever it does to its memory meanwhile. Loading: the pages are leased in the read arena like any others, written out, and given up. Slots, admission,
single flight and draining are those of every other session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hoststage.core.sessions import SessionState, SpanPart
from hoststage.core.stack import PayloadPath
from hoststage.server.contract import RequestError
from hoststage.server.memory.imports import ImportProblem, Pieces, read_pieces, write_pieces
from hoststage.server.staging.arenas import PoolArena
from hoststage.server.staging.imports import DescriptorBudget, Import, Imports
from hoststage.server.staging.wire_spans import keys_of, parts_of
from hoststage.shm import claims
from hoststage.v1 import ops
from hoststage.v1.imported import I64, ImportedLoad, ImportedLoadReply, ImportedStore, Places

if TYPE_CHECKING:
    from hoststage.server.staging.session import Session

_T = TypeVar("_T")

_TAKEN = (ops.Outcome.ACCEPTED, ops.Outcome.BELIEVED_STORED)
_TASK_BYTES = 8 << 20
"""What one thread moves at a time, so that a large transfer neither waits for one thread nor keeps others from theirs."""


class ImportedPath:
    """Implements `hoststage.server.contract.ImportedMemory` for one session."""

    def __init__(self, session: Session, executor: Executor, budget: DescriptorBudget) -> None:
        self.imports = Imports(budget)
        self._session = session
        self._executor = executor
        self._waiting: set[asyncio.Future[Any]] = set()

    # -------------------------------------------------------------- memory

    def announce(self, name: str, sizes: Sequence[int]) -> int:
        self._check()
        return self.imports.announce(name, sizes)

    def awaited(self, import_id: int) -> tuple[int, ...] | None:
        return self.imports.awaited(import_id)

    def attach(self, import_id: int, files: Sequence[int]) -> bool:
        return self.imports.attach(import_id, files)

    def forget(self, import_id: int) -> None:
        self.imports.forget(import_id)

    async def drop(self, import_id: int) -> None:
        await self.imports.drop(import_id)

    def interrupted(self) -> None:
        """The session is cut off: what waits for slots or pages ends now."""
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(self._over())

    def end(self) -> None:
        """The session is over."""
        self.interrupted()
        self.imports.end()

    # -------------------------------------------------------------- transfers

    async def store(self, m: ImportedStore, request_id: int) -> ops.CommitReply:
        self._check()
        parts = self._parts(m.span)
        if len(m.pages) != len(parts):
            raise RequestError("RANGES", f"{len(m.pages)} lists of pages for {len(parts)} ranges", field="pages")
        used = []
        for i, (part, places) in enumerate(zip(parts, m.pages, strict=True)):
            used.append(self._checked(places, f"pages[{i}]"))
            if places.pool != part.pool or len(places) != part.count:
                raise RequestError(
                    "RANGES",
                    f"{len(places)} pages of pool {places.pool} for {part.count} of pool {part.pool}",
                    field=f"pages[{i}]",
                    remedy="name the pages of the span's ranges, in their order",
                )
        return await self._using(used, self._store(m, used, request_id))

    async def load(self, m: ImportedLoad) -> ImportedLoadReply:
        self._check()
        used = [self._checked(places, f"into[{i}]") for i, places in enumerate(m.into)]
        if len({places.pool for places in m.into}) != len(m.into):
            raise RequestError("RANGES", "a pool has two entries", field="into", remedy="name each pool once")
        return await self._using(used, self._load(m, used))

    async def _using(self, used: Sequence[Import], work: Coroutine[Any, Any, _T]) -> _T:
        """Run a transfer as a task of the engine's, which waits for it before the arenas go. The imports stay open."""
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.imports.hold(used)

        async def run() -> None:
            try:
                result = await work
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)
            finally:
                self.imports.let_go(used)

        self._session.engine.spawn(run())
        return await answer

    # -------------------------------------------------------------- storing

    async def _store(self, m: ImportedStore, used: Sequence[Import], request_id: int) -> ops.CommitReply:
        granted = await self._reserved(ops.Reserve(m.span, m.wait_ms), request_id)
        if granted.outcome is not ops.Outcome.ACCEPTED:
            return ops.CommitReply(granted.outcome, detail=granted.detail)
        session = self._session
        # In `cache` the pages go straight to where others read them, which saves the copy of publishing.
        placed = session.place_ahead(m.span, granted.slots)
        kept = False
        try:
            try:
                await self._read_in(m, used, granted.slots, placed)
            except BaseException as error:
                if self._active:
                    session.abort_refused(granted.slots)
                if isinstance(error, ImportProblem):
                    raise _told(error) from error
                raise
            finally:
                session.copy_ended()
            reply = await self._committed(ops.Commit(m.span, granted.slots), request_id, placed)
            kept = reply.outcome in _TAKEN
            return reply
        finally:
            if placed is not None and not kept:
                session.unplace(m.span, granted.slots, placed)

    async def _read_in(
        self, m: ImportedStore, used: Sequence[Import], slots: Sequence[ops.PoolSlots], placed: Sequence[ops.U32] | None
    ) -> None:
        session = self._session
        jobs: list[Pieces] = []
        pages = 0
        for i, (entry, places, memory) in enumerate(zip(slots, m.pages, used, strict=True)):
            wanted = np.flatnonzero(entry.slots != ops.NO_SLOT)
            pages += len(wanted)
            if placed is None:
                jobs += _jobs(places, wanted, memory, session.write_arena(entry.pool), entry.slots[wanted])
            else:
                jobs += _jobs(places, wanted, memory, session.read_arena(entry.pool), placed[i])
        await self._move(jobs, read_pieces, used[0], m.claim)
        session.engine.daemon_copies += pages

    async def _reserved(self, op: ops.Reserve, request_id: int) -> ops.ReserveReply:
        """Return write slots. Where there are some, the copy into them counts as begun."""
        future: asyncio.Future[ops.ReserveReply] = asyncio.get_running_loop().create_future()

        def answered(answer: ops.HotReply) -> None:
            assert isinstance(answer, ops.ReserveReply)
            if not future.done():
                if answer.outcome is ops.Outcome.ACCEPTED:
                    # Before anything else can happen: until the copy has ended the arenas stay, even if the session ends now.
                    self._session.copy_began()
                future.set_result(answer)

        return await self._awaited(future, lambda: self._session.submit(op, request_id, answered))

    async def _committed(self, op: ops.Commit, request_id: int, placed: Sequence[ops.U32] | None) -> ops.CommitReply:
        if not self._active:
            raise self._over()
        future: asyncio.Future[ops.CommitReply] = asyncio.get_running_loop().create_future()

        def answered(answer: ops.HotReply) -> None:
            assert isinstance(answer, ops.CommitReply)
            if answer.outcome not in _TAKEN:
                # The client does not know these slots, so it cannot give them back.
                self._session.abort_refused(op.slots)
            if not future.done():
                # Credits would be slots that nobody here can write.
                future.set_result(answer)

        return await self._awaited(future, lambda: self._session.commit_placed(op, request_id, answered, placed))

    # -------------------------------------------------------------- loading

    async def _load(self, m: ImportedLoad, used: Sequence[Import]) -> ImportedLoadReply:
        session = self._session
        groups: list[ops.LoadReady] = []
        future: asyncio.Future[ops.LoadReady] = asyncio.get_running_loop().create_future()

        def arrived(message: ops.LoadReady) -> None:
            groups.append(message)
            if message.last and not future.done():
                if message.outcome is ops.Outcome.READY:
                    session.copy_began()
                future.set_result(message)

        load_id = 0

        def begin() -> None:
            nonlocal load_id
            load_id = session.begin_own_load(m.load, arrived)

        try:
            end = await self._awaited(future, begin)
            if end.outcome is not ops.Outcome.READY:
                return ImportedLoadReply(end.outcome, detail=end.detail)
            try:
                return await self._write_out(m, used, load_id, end.prefix, groups)
            except ImportProblem as problem:
                raise _told(problem) from problem
            finally:
                session.copy_ended()
        finally:
            if load_id:
                session.end_own_load(load_id)

    async def _write_out(
        self, m: ImportedLoad, used: Sequence[Import], load_id: int, prefix: int, groups: Iterable[ops.LoadReady]
    ) -> ImportedLoadReply:
        session = self._session
        came = _extents(groups, prefix)
        jobs: list[Pieces] = []
        pages = 0
        for i, (places, memory) in enumerate(zip(m.into, used, strict=True)):
            if places.pool not in came:
                continue
            _, slots = came[places.pool]
            if len(places) < len(slots):
                raise RequestError(
                    "RANGES",
                    f"{len(slots)} pages of pool {places.pool} came for {len(places)} places",
                    field=f"into[{i}].offsets",
                    remedy="name a place for every page that the load brings",
                )
            pages += len(slots)
            jobs += _jobs(places, np.arange(len(slots)), memory, session.read_arena(places.pool), slots)
        if used:
            await self._move(jobs, write_pieces, used[0], m.claim)
        session.engine.daemon_copies += pages
        if not self._active or load_id not in session.core.loads:
            # The leases were given up while the pages were read: others may have come in their place.
            raise RequestError(
                "LOAD_RELEASED",
                "the leases of the load were released while its pages were written",
                code="FAILED_PRECONDITION",
                field="load",
                remedy="release only loads whose answers named slots",
            )
        ranges = tuple(ops.PoolRange(pool, first, len(slots)) for pool, (first, slots) in sorted(came.items()))
        return ImportedLoadReply(ops.Outcome.READY, prefix, ranges)

    # -------------------------------------------------------------- what both need

    @property
    def _active(self) -> bool:
        return self._session.core.state is SessionState.ACTIVE

    def _over(self) -> RequestError:
        return RequestError(
            "SESSION_OVER",
            f"session {self._session.session_id} is {self._session.core.state.value}",
            code="FAILED_PRECONDITION",
            remedy="open a new session",
        )

    def _check(self) -> None:
        if not self._active:
            raise self._over()
        path = self._session.grant.path
        if path is not PayloadPath.IMPORTED:
            raise RequestError(
                "IMPORTED_PATH",
                f"the payload path of this session is {path.value}",
                code="FAILED_PRECONDITION",
                field="paths",
                remedy="put imported first among the paths of the handshake, on the daemon's Unix socket",
            )

    def _parts(self, span: ops.Span) -> list[SpanPart]:
        keys = keys_of(span, self._session.max_span_keys)
        if not keys or not span.ranges:
            missing = "ranges" if keys else "keys"
            raise RequestError("RANGES", f"a store names no {missing}", field=f"span.{missing}")
        return parts_of(span, keys, self._session.pool_count)

    def _checked(self, places: Places, at: str) -> Import:
        """Return the memory that places lie in, having checked that all of them do. Raises `RequestError`."""
        session = self._session
        if places.pool >= session.pool_count:
            raise RequestError("RANGES", f"pool {places.pool}: the stack has {session.pool_count}", field=f"{at}.pool")
        want = session.page_bytes(places.pool)
        if places.page_bytes != want:
            raise RequestError(
                "PAGE_SIZE",
                f"the pieces of a page have {places.page_bytes} bytes together, a page of this pool has {want}",
                field=f"{at}.piece_bytes",
                remedy="name every piece of a page",
            )
        memory = self.imports.get(places.import_id, at)
        wrong = places.memfds[(places.memfds < 0) | (places.memfds >= len(memory.sizes))]
        if len(wrong):
            raise RequestError(
                "IMPORT_BOUNDS",
                f"memfd {int(wrong[0])}: the import has {len(memory.sizes)}",
                field=f"{at}.memfds",
                remedy="name memfds by their place in import_memory.bytes",
            )
        limits = np.array(memory.sizes, dtype=np.int64)[places.memfds] - places.sizes
        beyond = np.argwhere((places.offsets < 0) | (places.offsets > limits))
        if len(beyond):
            page, piece = (int(n) for n in beyond[0])
            raise RequestError(
                "IMPORT_BOUNDS",
                f"page {page}, piece {piece}: {int(places.sizes[piece])} bytes at offset {int(places.offsets[page, piece])} "
                f"of a memfd of {memory.sizes[int(places.memfds[piece])]} bytes",
                field=f"{at}.offsets",
                remedy="name pieces that lie within the memfd",
            )
        return memory

    async def _awaited(self, future: asyncio.Future[_T], begin: Callable[[], object]) -> _T:
        """Begin what will set the future, and wait for that, or for the session to be cut off."""
        self._waiting.add(future)
        try:
            begin()
            return await future
        finally:
            self._waiting.discard(future)

    async def _move(self, jobs: Sequence[Pieces], work: Callable[[Pieces], None], first: Import, claim: int) -> None:
        """Move pieces in worker threads; returns, or raises, once every one of them has ended.

        Raises `ImportProblem` where the client has withdrawn its claim: it waits no more, and may have put its memory to another use.
        """
        lock = first.files[0]
        if claim and not claims.take(lock, claim):
            raise ImportProblem(
                "IMPORT_WITHDRAWN",
                "the client gave up on this request",
                "claim",
                "wait longer, or ask for less at once",
            )
        try:
            loop = asyncio.get_running_loop()
            parts = [part for job in jobs for part in job.parts(_TASK_BYTES)]
            ended = await asyncio.gather(
                *(loop.run_in_executor(self._executor, work, part) for part in parts), return_exceptions=True
            )
        finally:
            if claim:
                claims.give_back(lock, claim)
        for result in ended:
            if isinstance(result, BaseException):
                raise result


def _jobs(places: Places, rows: I64, memory: Import, arena: PoolArena, slots: ops.U32) -> list[Pieces]:
    """Return the pieces of some rows of a table and of the slots that belong to them, one job a memfd."""
    if not len(rows):
        return []
    bases = arena.base + arena.offsets(slots)
    addresses = bases[:, None] + (np.cumsum(places.sizes) - places.sizes)
    offsets = places.offsets[rows]
    sizes = np.broadcast_to(places.sizes, offsets.shape)
    jobs = []
    for memfd in np.unique(places.memfds).tolist():
        mine = places.memfds == memfd
        jobs.append(
            Pieces(
                memory.files[memfd],
                memory.sizes[memfd],
                f"memfd {memfd} of import {memory.import_id}",
                offsets[:, mine].ravel(),
                addresses[:, mine].ravel(),
                sizes[:, mine].ravel(),
            )
        )
    return jobs


def _extents(groups: Iterable[ops.LoadReady], prefix: int) -> dict[int, tuple[int, ops.U32]]:
    """Return, for each pool, the place of its first page in the prefix and the slots of its pages in order."""
    found: dict[int, list[tuple[int, ops.U32]]] = {}
    for group in groups:
        for r, entry in zip(group.ranges, group.slots, strict=True):
            keep = min(len(entry.slots), prefix - r.first)
            if keep > 0:
                found.setdefault(r.pool, []).append((r.first, entry.slots[:keep]))
    out = {}
    for pool, parts in found.items():
        parts.sort(key=lambda part: part[0])
        out[pool] = (parts[0][0], np.concatenate([slots for _, slots in parts]))
    return out


def _told(problem: ImportProblem) -> RequestError:
    return RequestError(
        problem.reason, str(problem), code="FAILED_PRECONDITION", field=problem.field, remedy=problem.remedy
    )
