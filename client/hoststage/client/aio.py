"""The asyncio face, over the same core.

Calls run in a few threads of the session's own, as copies and waits would block the loop; completions are awaited without a thread each. The
connection is read by the housekeeper all the time here, so that what the daemon pushes is known at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from hoststage.client import session as sync
from hoststage.client._holds import HoldBatch, RestoredHold
from hoststage.client._imported import Imported
from hoststage.client._loaded import Loaded, LoadGroup, Match
from hoststage.client._pages import Keys, Rows
from hoststage.client._store import WriteBatch
from hoststage.client._ticket import StoreResult
from hoststage.client._ticket import StoreTicket as SyncTicket
from hoststage.client.errors import DeadlineExceeded
from hoststage.client.stack import StackSpec
from hoststage.client.verdict import Verdict
from hoststage.v1.ops import Outcome

_THREADS = 8
_T = TypeVar("_T")


async def connect(
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
) -> Session:
    """Open a session; the arguments and errors are those of `hoststage.client.connect`."""
    opened = await asyncio.to_thread(
        sync.connect,
        address,
        stack=stack,
        worker=worker,
        client=client,
        token=token,
        timeout=timeout,
        credits=credits,
        copy_threads=copy_threads,
        register=register,
    )
    return Session(opened)


async def negotiate(address: str | None, stack: StackSpec, *, token: str = "", timeout: float = 30.0) -> Verdict:
    """Ask for the verdict on a stack without opening a session."""
    return await asyncio.to_thread(sync.negotiate, address, stack, token=token, timeout=timeout)


class StoreTicket:
    """What became of a store; await it, or `wait` with a timeout."""

    def __init__(self, ticket: SyncTicket, timeout: float) -> None:
        self._ticket = ticket
        self._timeout = timeout

    @property
    def outcome(self) -> Outcome:
        """PENDING until everything is known."""
        return self._ticket.outcome

    async def wait(self, timeout: float | None = None) -> StoreResult:
        """Wait until every page is stored or dropped; errors as for the synchronous ticket."""
        loop = asyncio.get_running_loop()
        known = asyncio.Event()

        def wake(_: SyncTicket) -> None:
            # The loop may be closed by the time that the daemon answers.
            if not loop.is_closed():
                loop.call_soon_threadsafe(known.set)

        self._ticket.add_done_callback(wake)
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                await known.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the pages were not stored within {seconds:g} seconds") from None
        return self._ticket.wait(0)

    def __await__(self) -> Generator[Any, None, StoreResult]:
        return self.wait().__await__()


class Session:
    """One session with the daemon; see `hoststage.client.Session`, whose facts are at `session`."""

    def __init__(self, session: sync.Session) -> None:
        self.session = session
        self._threads = ThreadPoolExecutor(_THREADS, "hoststage-aio")
        session._core.eager = True

    async def _run(self, call: Callable[..., _T], *args: Any, **named: Any) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **named))

    async def store(
        self,
        keys: Keys,
        pages: Mapping[str, Rows],
        *,
        first: Mapping[str, int] | None = None,
        parent: bytes = b"",
        timeout: float | None = None,
    ) -> StoreTicket:
        """Hand the pages of a run over; the caller's memory may be used again on return. Await the ticket for what became of them."""
        ticket = await self._run(self.session.store, keys, pages, first=first, parent=parent, timeout=timeout)
        return StoreTicket(ticket, self.session._core.options.timeout)

    async def reserve(
        self,
        keys: Keys,
        counts: Mapping[str, int],
        *,
        first: Mapping[str, int] | None = None,
        parent: bytes = b"",
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> WriteBatch:
        """Reserve write slots to be written in place."""
        call = partial(self.session.reserve, first=first, parent=parent, wait=wait, timeout=timeout)
        return await self._run(call, keys, counts)

    async def commit(self, batch: WriteBatch, timeout: float | None = None) -> StoreTicket:
        """Commit a batch without blocking the loop."""
        return StoreTicket(await self._run(batch.commit, timeout), self.session._core.options.timeout)

    async def lookup(self, keys: Keys, *, pin_seconds: float = 0.0, timeout: float | None = None) -> Match:
        """Ask which prefixes of the run can be restored."""
        return await self._run(self.session.lookup, keys, pin_seconds=pin_seconds, timeout=timeout)

    async def load(
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
        """Load the pages of a prefix. A cancelled task lets go of what the load leases."""
        call = partial(
            self.session.load,
            keys,
            prefix,
            pin=pin,
            into=into,
            ranges=ranges,
            accept_shorter=accept_shorter,
            timeout=timeout,
        )
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release)
            raise

    async def load_groups(
        self,
        keys: Keys,
        prefix: int | None = None,
        *,
        pin: int | Match = 0,
        accept_shorter: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[LoadGroup]:
        """Yield groups of pages as they arrive. What was yielded is leased until the iteration ends, and released then."""
        call = partial(self.session.load_groups, keys, prefix, pin=pin, accept_shorter=accept_shorter, timeout=timeout)
        stream = await self._run(call)
        groups = stream.__iter__()
        try:
            while (group := await self._run(next, groups, None)) is not None:
                yield group
        finally:
            groups.close()
            stream.loaded.release()

    async def hold(
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
        """Ask for hold slots for a retracted request."""
        call = partial(self.session.hold, durable=durable, ttl_seconds=ttl_seconds, timeout=timeout)
        return await self._run(call, owner_token, request, attempt, counts)

    async def seal(self, hold: HoldBatch, note: bytes = b"", timeout: float | None = None) -> None:
        """Seal a hold without blocking the loop."""
        await self._run(hold.seal, note, timeout)

    async def restore(
        self, owner_token: bytes, request: str, attempt: int, *, timeout: float | None = None
    ) -> RestoredHold:
        """Find a sealed hold; falsy where there is none."""
        return await self._run(self.session.restore, owner_token, request, attempt, timeout=timeout)

    async def discard(self, owner_token: bytes, request: str, attempt: int, *, timeout: float | None = None) -> None:
        """Free a hold."""
        await self._run(self.session.discard, owner_token, request, attempt, timeout=timeout)

    async def import_memory(
        self,
        fds: int | Sequence[int],
        sizes: Sequence[int] | None = None,
        *,
        name: str = "",
        timeout: float | None = None,
    ) -> Imported:
        """Give the daemon memory of this process's own; its `ImportedPages` are stored and loaded like any others."""
        return await self._run(self.session.import_memory, fds, sizes, name=name, timeout=timeout)

    async def ping(self, payload: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Send a payload round trip."""
        return await self._run(self.session.ping, payload, timeout=timeout)

    async def close(self) -> None:
        """Unmap the daemon's memory, say goodbye, end."""
        await self._run(self.session.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _release(future: asyncio.Future[Loaded]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()
