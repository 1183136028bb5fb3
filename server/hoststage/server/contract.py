"""The contract between the wire (`rpc`) and the tier (`staging`): who calls what, and when.

The life of a session. `rpc` turns a `Hello` into a `SessionRequest` and calls `TierService.open`, which judges the stack, takes the
budget, makes the arenas and returns a `LiveSession`, or raises `Refusal`. Requests of either lane are given to
`LiveSession.submit`, which answers through the callback: at once where nothing has to be waited for, later otherwise, and exactly once. What the daemon
has to say on its own goes to the session's `Port`. A session ends once: `end` (goodbye, or the kernel said
that the process is gone) frees what it held; `quarantine` (its connection broke, the process may live) keeps its slots out of use until `end`.

All of this runs on the event loop's thread. Nothing here blocks; what takes time is a coroutine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hoststage.core.findings import Grant, Verdict
from hoststage.core.stack import Stack
from hoststage.v1 import ops
from hoststage.v1.imported import ImportedLoad, ImportedLoadReply, ImportedStore

Reply: TypeAlias = Callable[[ops.HotReply], None]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a client presented, in our own terms. `previous_session`: what it replaces after a lost connection, 0 for none."""

    stack: Stack
    client: str = ""
    worker: str = ""
    pid: int = 0
    uid: int | None = None
    protocol: tuple[int, int] = (1, 1)
    features: tuple[str, ...] = ()
    credits: int = 0
    previous_session: int = 0
    previous_epoch: bytes = b""
    previous_token: bytes = b""
    retained_bytes: int = 0


class Refusal(Exception):
    """The handshake was refused; the verdict says why, with remedies."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__("; ".join(f.message for f in verdict.findings))


class RequestError(Exception):
    """A request failed as a whole and nothing of it was done.

    reason: UPPER_SNAKE, for ErrorInfo. code: the name of a gRPC status code. field and remedy: what to correct, and how.
    """

    def __init__(
        self, reason: str, message: str, *, code: str = "INVALID_ARGUMENT", field: str = "", remedy: str = ""
    ) -> None:
        self.reason, self.code, self.field, self.remedy = reason, code, field, remedy
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class PinFacts:
    """How firmly memory is held: `level` is "none", "resident", "mlock" or "cuda"."""

    level: str
    reason: str
    huge_pages: bool


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """One arena that a session may map. `kind` is "write", "read", "whole", "index" or "board".

    trailing_pages: of an index, the pages at the end of a prefix that its pool needs; 0: all of them.
    """

    arena_id: int
    kind: str
    pool: int
    slots: int
    stride: int
    chunk_bytes: tuple[int, ...]
    pin: PinFacts
    trailing_pages: int = 0


@dataclass(frozen=True, slots=True)
class ArenaDescriptor:
    """A duplicate made for one client; whoever receives it closes it."""

    arena_id: int
    chunk: int
    size: int
    fd: int


@dataclass(frozen=True, slots=True)
class WholeLease:
    """An arena leased whole. `warm`: it was populated before, and has the bytes of an earlier client of the tenant."""

    arena: ArenaFacts
    descriptors: list[ArenaDescriptor]
    warm: bool


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """Bytes of the node's budget, and those of them that a lease could have now."""

    budget_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class RevokedLeases:
    """Pushed: the tier wants leases back (see `LeaseRevoked` in the protocol)."""

    revocation: int
    load_ids: tuple[int, ...]
    write_slots: tuple[ops.PoolSlots, ...]
    reason: str


Push: TypeAlias = ops.Stored | ops.LoadReady | RevokedLeases


class Port(Protocol):
    """Where the tier sends what a session did not ask for. `push` never blocks and never raises; it is False once the peer is
    gone or too slow (its queue is full): the message is then lost, and the connection on its way to be closed."""

    def push(self, message: Push) -> bool: ...


@dataclass(frozen=True, slots=True)
class HoldKey:
    owner_token: bytes
    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RestoredHold:
    """`arena` is "write" (the session's own slots) or "read" (leased under `load_id`)."""

    outcome: ops.Outcome
    arena: str = "write"
    slots: tuple[ops.PoolSlots, ...] = ()
    note: bytes = b""
    load_id: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session, for operators. `state` is "active", "quarantined" or "ending"."""

    session: int
    client: str
    worker: str
    pid: int
    namespace: str
    model: str
    mode: str
    path: str
    state: str
    write_bytes: int
    open_commits: int
    read_leases: int
    connected_seconds: float


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Slots of one arena by state name, for operators and metrics. `session` is 0 for read arenas."""

    namespace: str
    pool: str
    kind: str
    session: int
    stride: int
    slots: int
    by_state: dict[str, int]
    reserve_slots: int
    pin: PinFacts


@dataclass(frozen=True, slots=True)
class HoldFacts:
    """Holds, for operators and metrics. `moving`: on their way between slots and store. `slots`: promised for holds at handshakes."""

    ordinary: int = 0
    durable: int = 0
    moving: int = 0
    durable_pages: int = 0
    slots_held: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """Memory of clients that the daemon reads and writes, for operators and metrics. `limit`: descriptors that it may keep for it."""

    descriptors: int = 0
    limit: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Counters and gauges of the tier, for the metrics. Counters only grow. Keys of `counters`: (name, label value)."""

    budget_bytes: int
    granted_bytes: int
    sessions: tuple[SessionFacts, ...]
    pools: tuple[PoolFacts, ...]
    counters: dict[tuple[str, str], int] = field(default_factory=dict)
    undrainable_commits: int = 0
    problems: tuple[str, ...] = ()
    holds: HoldFacts = HoldFacts()
    imports: ImportFacts = ImportFacts()


class ImportedMemory(Protocol):
    """Memory of the client's own, and pages between it and the tier. Every coroutine raises `RequestError`."""

    def announce(self, name: str, sizes: Sequence[int]) -> int:
        """Note memfds that are to come over the fd socket; return the number of the import. Raises `RequestError`."""
        ...

    def awaited(self, import_id: int) -> tuple[int, ...] | None:
        """Return the announced sizes of an import whose descriptors have not come, None for any other."""
        ...

    def attach(self, import_id: int, files: Sequence[int]) -> bool:
        """Take descriptors over that `memory.imports.open_memory` opened; False, and they stay the caller's, where nobody awaits them."""
        ...

    def forget(self, import_id: int) -> None:
        """The descriptors of an import did not come, or were refused."""
        ...

    async def drop(self, import_id: int) -> None:
        """Close an import once no transfer uses it."""
        ...

    async def store(self, m: ImportedStore, request_id: int) -> ops.CommitReply:
        """Store pages from imported memory. A `Stored` that names the request id follows where they were accepted."""
        ...

    async def load(self, m: ImportedLoad) -> ImportedLoadReply:
        """Load pages into imported memory; nothing stays leased."""


class PagesInPlace(Protocol):
    """Pages of one pool where they lie in the daemon's memory. Any thread may ask."""

    @property
    def nbytes(self) -> int: ...

    def views(self) -> list[memoryview]:
        """Return their bytes in order, pages that are adjacent in memory in one view."""
        ...


class PageMoves(Protocol):
    """Pages between a session's slots and a socket, moved by a thread of the wire. Called on the loop alone.

    The pages come with the replies. While a thread uses them the session's memory stays, though the session may end; so whoever was
    given pages calls `filled` or `not_filled`, or `sent`, once no thread uses them any more, whatever happened.
    """

    def reserve(
        self, op: ops.Reserve, request_id: int, reply: Callable[[ops.ReserveReply, list[PagesInPlace]], None]
    ) -> None:
        """Reserve slots that the wire fills; their pages come with an ACCEPTED, in the order of the ranges, those without a slot left out.

        Raises `RequestError` at once where it is malformed; else `reply` is called exactly once, now or later.
        """
        ...

    def filled(self, span: ops.Span, slots: tuple[ops.PoolSlots, ...], request_id: int, reply: Reply) -> None:
        """Commit what was reserved. Replies with a `CommitReply`; raises `RequestError` where the session is over."""
        ...

    def not_filled(self, slots: tuple[ops.PoolSlots, ...]) -> None:
        """Give what was reserved back."""
        ...

    def load(self, op: ops.Load, reply: Callable[[ops.LoadReply, list[PagesInPlace]], None]) -> int:
        """Load pages, and reply once when the load has ended; with READY come its pages, in the order of the reply's ranges, leased until `sent`.

        Returns the load's id, by which it may be cancelled. Raises `RequestError` at once where it is malformed; `reply` may be
        called before this returns, and never is where the session ends first.
        """
        ...

    def sent(self, load_id: int) -> bool:
        """Let the pages go; return whether they were leased until now, and so cannot have changed under way."""
        ...


class LiveSession(Protocol):
    """An open session, as `rpc` sees it."""

    @property
    def session_id(self) -> int: ...
    @property
    def resume_token(self) -> bytes: ...
    @property
    def grant(self) -> Grant: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def arenas(self) -> Sequence[ArenaFacts]: ...

    @property
    def imported(self) -> ImportedMemory: ...

    @property
    def pool_count(self) -> int: ...

    @property
    def moves(self) -> PageMoves: ...

    def page_bytes(self, pool: int) -> int:
        """Return the bytes of a page of the pool at that place of the stack."""
        ...

    def descriptors(self) -> list[ArenaDescriptor]:
        """Return fresh duplicates of the descriptors of all arenas, write arenas writable, read arenas read-only."""
        ...

    def submit(self, op: ops.HotRequest, request_id: int, reply: Reply) -> None:
        """Carry out one request. Raises `RequestError` at once where it is malformed; else `reply` is called exactly once,
        now or later (never for Release)."""
        ...

    def abort(self, slots: Sequence[ops.PoolSlots]) -> None:
        """Give reserved slots back unwritten. Raises `RequestError` for a stale generation."""
        ...

    def cancel_load(self, load_id: int) -> None: ...

    def revoke_ack(self, revocation: int) -> None:
        """Take back what the revocation asked for. Raises `RequestError` where nothing of that number was asked for."""
        ...

    def inline_store(
        self, span: ops.Span, pages: Sequence[Sequence[bytes | bytearray]], request_id: int, wait_ms: int, reply: Reply
    ) -> None:
        """Store pages given as bytes: one sequence a range, one whole page each. Replies with a `CommitReply`."""
        ...

    def inline_load(self, op: ops.Load, reply: Callable[[ops.LoadReady, list[list[memoryview]]], None]) -> None:
        """Load pages as bytes. `reply` is called one or more times with a group (ranges in the message, its pages one list a
        range); the views are valid until it returns. The last call has `last` set; nothing stays leased."""
        ...

    async def hold(
        self, key: HoldKey, ranges: Sequence[ops.PoolRange], durable: bool, ttl_ms: int
    ) -> ops.ReserveReply: ...
    async def seal_hold(self, key: HoldKey, note: bytes) -> None: ...
    async def restore(self, key: HoldKey) -> RestoredHold: ...
    async def discard(self, key: HoldKey) -> None: ...

    def touch(self, lookups: int, loads: int, used: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The client served itself by the page indexes: so many hits, and per pool the slots that it read."""
        ...

    async def lease_arena(self, name: str, size: int) -> WholeLease:
        """Lease memory that the client manages itself. Raises `RequestError` where the budget does not allow it."""
        ...

    async def budget(self) -> BudgetFacts:
        """Return what could be leased now."""
        ...

    async def return_arena(self, arena_id: int) -> None: ...


class TierService(Protocol):
    """The tier, as `rpc` and the operators' interfaces see it."""

    @property
    def boot_epoch(self) -> bytes: ...

    def negotiate(self, request: SessionRequest) -> Verdict: ...

    async def open(self, request: SessionRequest, port: Port) -> LiveSession:
        """Open a session. Raises `Refusal`."""
        ...

    def quarantine(self, session_id: int, reason: str) -> None:
        """Its connection broke without a goodbye; its process may still write its slots."""
        ...

    def end(self, session_id: int, reason: str) -> None:
        """It said goodbye and unmapped, or the kernel says that its process is gone."""
        ...

    def drain(self) -> int:
        """Take no new work; return the number of commits that are not yet stored."""
        ...

    async def drained(self) -> None:
        """Wait until every accepted commit is stored or dropped."""
        ...

    def evict(self, namespace: str, pool: str) -> int: ...
    async def clear(self, namespace: str) -> tuple[int, int]: ...
    def facts(self) -> TierFacts: ...
    async def close(self) -> None: ...
