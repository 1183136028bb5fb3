"""The synchronous face: what engines call from their own threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc

from hoststage.client import _holds, _imported, _load, _store, cuda
from hoststage.client._arenas import Arena
from hoststage.client._core import Core
from hoststage.client._holds import HoldBatch, RestoredHold
from hoststage.client._imported import Imported
from hoststage.client._load import LoadStream
from hoststage.client._loaded import Loaded, Match
from hoststage.client._options import Options, Previous
from hoststage.client._pages import Keys, Rows, pack_keys
from hoststage.client._status import error_of_call
from hoststage.client._store import WriteBatch
from hoststage.client._stream import open_channel
from hoststage.client._ticket import StoreTicket
from hoststage.client._wire import Message
from hoststage.client.errors import StackError
from hoststage.client.stack import StackSpec
from hoststage.client.verdict import Finding, Grant, Verdict, findings_from
from hoststage.shm.copy import MOST_THREADS
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc

_PROGRAM = "hoststage.client"
DEFAULT_ADDRESS = "unix:///run/hoststage/hoststage.sock"


def resolve_address(address: str | None) -> str:
    """Return the address to use: the one given, else `$HOSTSTAGE_ADDRESS`, else the default socket.

    A bare path is taken for a Unix socket. Raises `StackError` for what is neither a socket nor `host:port`.
    """
    chosen = address or os.environ.get("HOSTSTAGE_ADDRESS") or DEFAULT_ADDRESS
    if chosen.startswith("/"):
        return f"unix://{chosen}"
    if not chosen.startswith("unix:") and not chosen.rpartition(":")[2].isdigit():
        raise StackError("address", chosen, "pass unix:///path/to/socket or host:port")
    return chosen


def connect(
    address: str | None = None,
    *,
    stack: StackSpec,
    worker: str = "",
    client: str = "",
    token: str = "",
    timeout: float = 30.0,
    credits: int = 0,
    copy_threads: int = 1,
    register: str = "auto",
    on_push: Callable[[Message], None] | None = None,
) -> Session:
    """Open a session with the daemon.

    address: `unix:///path` or `host:port`; by default `$HOSTSTAGE_ADDRESS`, else the default socket. worker, client: names for operators. token:
    bearer token, where the daemon demands one; by default `$HOSTSTAGE_TOKEN`. timeout: seconds, of the handshake and of every call that names none. credits: write
    slots per pool to be granted ahead, which spares stores and `reserve` a request. copy_threads: threads that share a copy between the caller's memory and the arenas, 4 MiB or more each:
    faster where cores are idle, slower in a process whose other threads keep Python busy. register: "auto" registers the mapped memory with CUDA where torch
    is loaded and sees a device, "require" raises `RegistrationFailed` where it cannot, "never" leaves it. on_push: called with every message that the daemon
    pushes, in the thread that reads; it must not block.

    :raises Refused: with every finding, where the fences refuse the stack.
    :raises DaemonUnavailable: where no daemon answers.
    :raises DeadlineExceeded: where it does not in time.
    """
    if register not in ("auto", "never", "require"):
        raise StackError("register", register, 'pass "auto", "never" or "require"')
    if not 1 <= copy_threads <= MOST_THREADS:
        raise StackError("copy_threads", copy_threads, f"pass 1 to {MOST_THREADS}")
    if timeout <= 0:
        raise StackError("timeout", timeout, "pass seconds greater than 0")
    options = Options(
        resolve_address(address),
        stack,
        worker,
        client or _PROGRAM,
        token or os.environ.get("HOSTSTAGE_TOKEN", ""),
        timeout,
        max(0, credits),
        copy_threads,
        register,
    )
    return Session(Core(options, on_push))


def negotiate(address: str | None, stack: StackSpec, *, token: str = "", timeout: float = 30.0) -> Verdict:
    """Ask for the verdict on a stack without opening a session. A refusal is an answer, not an error.

    :raises DaemonUnavailable: where no daemon answers.
    :raises DeadlineExceeded: where it does not in time.
    """
    options = Options(
        resolve_address(address),
        stack,
        client=_PROGRAM,
        token=token or os.environ.get("HOSTSTAGE_TOKEN", ""),
        timeout=timeout,
    )
    with open_channel(options.address) as channel:
        stub = hoststage_pb2_grpc.HostStageStub(channel)
        try:
            reply = stub.Negotiate(pb.NegotiateRequest(hello=options.hello(Previous())), timeout=timeout)
        except grpc.RpcError as error:
            raise error_of_call(error, options.address) from error
    grant = Grant.from_proto(reply.grant) if reply.HasField("grant") else None
    return Verdict(grant, findings_from(reply.findings), reply.protocol)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that all arenas of the node may take, and those that one lease could have now."""

    budget_bytes: int
    free_bytes: int


class Session:
    """One session with the daemon, made by `connect`. Any number of threads may call at once.

    Every call has a deadline: `timeout` seconds, by default the session's. Where the connection is lost, calls that wait end at once with
    `SessionLost`, and calls that follow raise `DaemonUnavailable` until the daemon is back: the session then opens anew by itself. Views and tickets of
    before are void. A forked child cannot use it (`ForkedSession`).
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    # -------------------------------------------------------------- facts

    @property
    def session_id(self) -> int:
        """The daemon's number of this session; another one after a reconnection."""
        return int(self._core.link.welcome.session)

    @property
    def grant(self) -> Grant:
        """What was granted."""
        return self._core.link.grant

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the fences had to say of the accepted stack: adjustments and notices, and why an earlier mode was not granted."""
        return self._core.link.findings

    @property
    def stack(self) -> StackSpec:
        """The stack that was presented."""
        return self._core.options.stack

    @property
    def limits(self) -> pb.Limits:
        """What the session may do at once."""
        return self._core.link.welcome.limits

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory that is mapped now, with a report of how firmly the daemon holds it; empty over the inline path."""
        return tuple(arena for arena in self._core.link.arenas if arena.mapping.mapped)

    @property
    def registration(self) -> cuda.Registration:
        """What is registered with CUDA in this process, and why not more."""
        return self._core.link.registration or cuda.Registration(reason="not available: no memory is mapped")

    @property
    def board_pages(self) -> int:
        """Pages of every pool whose views can be leased at once without a request, where they are resident; 0: each load of views asks the daemon."""
        service = self._core.link.self_service
        return service.board_pages if service is not None else 0

    @property
    def retained_bytes(self) -> int:
        """Bytes of former arenas that views of this process still hold; the daemon counts them against its budget."""
        return self._core.retained_bytes

    @property
    def connected(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._core.link.lost is None

    @property
    def reconnects(self) -> int:
        """How often the session was opened anew."""
        return self._core.reconnects

    @property
    def draining(self) -> bool:
        """Whether the daemon has said that it takes no new work."""
        return self._core.draining

    def completions_fd(self) -> int:
        """Return an eventfd that becomes readable when something was pushed, or the connection was lost.

        It belongs to the session: read 8 bytes to clear it, do not close it. While nobody calls, pushes are noticed within about 20 ms.
        """
        return self._core.eventfd

    # -------------------------------------------------------------- writing

    def store(
        self,
        keys: Keys,
        pages: Mapping[str, Rows],
        *,
        first: Mapping[str, int] | None = None,
        parent: bytes = b"",
        timeout: float | None = None,
    ) -> StoreTicket:
        """Store the pages of a run of keys; return once they are handed over, before they are stored.

        keys: content-chained keys of one length, in order: a list, or one bytes object with keys of 32 bytes. pages: per pool, a list
        of buffers of one page each, or a C-contiguous array or tensor whose first axis is the page (numpy or torch, on the host or a
        device), `ScatteredPages` or `ImportedPages`. They belong to the last keys of the run, unless `first[pool]` gives the place of the first one. parent: key of the page
        before the run; the daemon then refuses a run whose parent it neither has nor is getting.

        A run larger than the write arena goes in several commits, each waiting for room; the ticket covers all of them. The caller's memory may be
        used again on return. What the daemon does not take (POOL_FULL, DRAINING, …) is the ticket's outcome, not an error.

        :raises StackError: for keys or pages out of form. :raises DeadlineExceeded: where an answer does not come in time.
        :raises SessionLost, DaemonUnavailable: where the daemon is away. :raises RequestRejected: what the daemon takes exception to.
        """
        how = _imported.store if _imported.given(pages) else _store.store
        return how(self._core, keys, pages, first, parent, self._core.deadline(timeout))

    def reserve(
        self,
        keys: Keys,
        counts: Mapping[str, int],
        *,
        first: Mapping[str, int] | None = None,
        parent: bytes = b"",
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> WriteBatch:
        """Reserve write slots to be written in place: `counts[pool]` pages, placed as in `store`. shm alone.

        Where enough slots were granted ahead (`connect(credits=n)`) nothing is asked; pages that are believed stored then have a slot like the others.
        wait: seconds that the request may queue for room. A batch without slots is falsy; its `outcome` says why.
        """
        deadline = self._core.deadline(timeout)
        return _store.reserve(self._core, keys, counts, first, parent, deadline, wait)

    # -------------------------------------------------------------- reading

    def lookup(self, keys: Keys, *, pin_seconds: float = 0.0, timeout: float | None = None) -> Match:
        """Ask which prefixes of the run can be restored. The keys start at the prefix's beginning.

        pin_seconds: keep what was answered from being evicted for so long, for the load that follows; pass the match as its `pin`.
        """
        return _load.lookup(self._core, keys, pin_seconds, self._core.deadline(timeout))

    def load(
        self,
        keys: Keys,
        prefix: int | None = None,
        *,
        pin: int | Match = 0,
        into: Mapping[str, Rows] | None = None,
        ranges: Mapping[str, tuple[int, int]] | None = None,
        accept_shorter: bool = False,
        timeout: float | None = None,
    ) -> Loaded:
        """Load the pages of the first `prefix` keys (all of them by default); a miss is falsy, not an error.

        into: per pool, memory to copy to, as in `store`; into `ImportedPages` the daemon writes itself, and where the call fails, what they have is
        undefined. Row `i` takes the page at `Loaded.first(pool) + i`. Without it the pages are read-only
        views of shared memory, to be released. ranges: per pool, `(first, count)` of the pages wanted, where not each pool's hit policy decides.
        accept_shorter: a shorter restorable prefix will do; `Loaded.prefix` says what came.

        :raises StackError: for keys or memory out of form. :raises DeadlineExceeded: where the pages do not come in time; nothing stays leased.
        :raises SessionLost, DaemonUnavailable: where the daemon is away. :raises QuotaExceeded, RequestRejected: what it takes exception to.
        """
        run = pack_keys(keys)
        if into is None:
            leased = _load.lease_views(self._core, run, prefix, pin, ranges)
            if leased is not None:
                return leased
        request = _load.load_request(self._core, run, prefix, pin, ranges, accept_shorter)
        deadline = self._core.deadline(timeout)
        if into and _imported.given(into):
            return _imported.load(self._core, request, into, deadline)
        return _load.load(self._core, request, into, deadline)

    def load_groups(
        self,
        keys: Keys,
        prefix: int | None = None,
        *,
        pin: int | Match = 0,
        ranges: Mapping[str, tuple[int, int]] | None = None,
        accept_shorter: bool = False,
        timeout: float | None = None,
    ) -> LoadStream:
        """Load like `load`, but hand pages over group by group as they arrive, in the order of the prefix. shm alone."""
        deadline = self._core.deadline(timeout)
        run = pack_keys(keys)
        leased = _load.lease_views(self._core, run, prefix, pin, ranges)
        if leased is not None:
            return LoadStream(leased, self._core.names, deadline)
        request = _load.load_request(self._core, run, prefix, pin, ranges, accept_shorter)
        link = self._core.ready(deadline)
        if not link.maps:
            raise StackError("path", link.grant.path.value, "groups come over shm alone; use load()")
        return LoadStream(_load.start_load(link, request, deadline), self._core.names, deadline)

    def release(self, loads: Iterable[Loaded]) -> None:
        """Give the leases of several loads up."""
        for loaded in loads:
            loaded.release()

    # -------------------------------------------------------------- holds

    def hold(
        self,
        owner_token: bytes,
        request: str,
        attempt: int,
        counts: Mapping[str, int],
        *,
        durable: bool = False,
        ttl_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> HoldBatch:
        """Ask for hold slots for a retracted request: `counts[pool]` pages. Write `views`, then `seal`.

        owner_token: a secret of 1 to 64 bytes; whoever knows it may restore. attempt: raised at each retraction, so that a new one never meets old pages.
        durable: kept in the store from its seal on, for `ttl_seconds` (0: as long as the daemon thinks right), whoever dies meanwhile; any session
        of the namespace may restore it. Otherwise the hold ends with this session. Every pool that the request lives in must be held.
        """
        name = _holds.hold_id(owner_token, request, attempt)
        return _holds.hold(self._core, name, counts, durable, ttl_seconds, self._core.deadline(timeout))

    def restore(self, owner_token: bytes, request: str, attempt: int, *, timeout: float | None = None) -> RestoredHold:
        """Find a sealed hold: one of this session, or a durable one; falsy where there is none. It stays until it is discarded."""
        name = _holds.hold_id(owner_token, request, attempt)
        return _holds.restore(self._core, name, self._core.deadline(timeout))

    def discard(self, owner_token: bytes, request: str, attempt: int, *, timeout: float | None = None) -> None:
        """Free a hold. Raises `RequestRejected` where there is none of that name."""
        message = pb.Discard(id=_holds.hold_id(owner_token, request, attempt))
        self._core.call(pb.ClientMessage(discard=message), pb.Done, self._core.deadline(timeout))

    # -------------------------------------------------------------- memory beyond the grant

    def import_memory(
        self,
        fds: int | Sequence[int],
        sizes: Sequence[int] | None = None,
        *,
        name: str = "",
        timeout: float | None = None,
    ) -> Imported:
        """Give the daemon memory of this process's own, whose pages it then reads and writes itself: see `ImportedPages`.

        fds: one or several memfds, or files of a tmpfs, open for reading and writing, with memory behind every page; they are duplicated. sizes: bytes of
        each, by default all. The session must have been granted the path `imported`. A reconnection imports it anew.

        A memfd that is made smaller later costs this session alone a `RequestRejected` (`IMPORT_TRUNCATED`), or a miss.

        :raises StackError: for another path. :raises RequestRejected: for a descriptor that the daemon does not take.
        """
        return _imported.import_memory(self._core, fds, sizes, name, self._core.deadline(timeout))

    def lease_arena(self, name: str, size: int, *, timeout: float | None = None) -> Arena:
        """Lease `size` bytes of contiguous memory whose slots the caller manages itself; `Arena.whole()` is the view of it.

        name: for operators. The lease ends with `return_arena`, or with this process. Where the connection is lost, views stay good and writable, and
        the daemon that comes next is told of them; `whole()` gives no new ones. `Arena.warm`: whether the memory was populated already. shm alone.

        :raises QuotaExceeded, RequestRejected: where the daemon's budget does not allow it.
        """
        deadline = self._core.deadline(timeout)
        link = self._core.ready(deadline)
        if link.lane is None:
            raise StackError("path", "inline", "arenas are leased over shm alone")
        message = pb.LeaseArena(name=name, bytes=size)
        request = pb.ClientMessage(lease_arena=message)
        reply = link.call(request, pb.LeaseArenaReply, deadline, orphan=link.return_orphan)
        return link.fetch_whole(reply, deadline)

    def budget(self, *, timeout: float | None = None) -> Budget:
        """Ask what could be leased now. Advisory: others may be faster."""
        reply = self._core.call(pb.ClientMessage(budget=pb.Budget()), pb.BudgetReply, self._core.deadline(timeout))
        return Budget(int(reply.budget_bytes), int(reply.free_bytes))

    def return_arena(self, arena: Arena, *, timeout: float | None = None) -> None:
        """Unmap a leased arena and give it back. Raises `StackError` while views of it live."""
        if not arena.mapping.unmap():
            raise StackError(
                "arena", arena.arena_id, "drop every view of the arena first; it goes back once they are gone"
            )
        arena.close_descriptors()
        link = self._core.link
        # After a reconnection the number may be another arena's.
        if link.arenas.whole.get(arena.arena_id) is arena:
            del link.arenas.whole[arena.arena_id]
            message = pb.ReturnArena(arena_id=arena.arena_id)
            link.call(pb.ClientMessage(return_arena=message), pb.Done, self._core.deadline(timeout))

    # -------------------------------------------------------------- life

    def ping(self, payload: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Send a payload round trip."""
        message = pb.ClientMessage(ping=pb.Ping(payload=payload))
        return bytes(self._core.call(message, pb.Pong, self._core.deadline(timeout)).payload)

    def close(self) -> None:
        """Unmap the daemon's memory, say goodbye, end. Views must not be used any more. Safe to repeat."""
        self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
