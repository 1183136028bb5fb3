"""Memory of the caller's own that the daemon reads and writes itself, by descriptor: no copy is made in this process."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.rpc import status_pb2

from hoststage.client._arenas import present
from hoststage.client._core import Core
from hoststage.client._link import Link
from hoststage.client._load import LoadRequest
from hoststage.client._loaded import Loaded
from hoststage.client._pages import Keys, Part, Piece, pack_keys, split
from hoststage.client._status import error_of
from hoststage.client._store import ranges_of, room_of
from hoststage.client._ticket import StoreTicket
from hoststage.client._wire import SHARE_OF_DEADLINE, Deadline, Waiter
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, HostStageError, RequestRejected, StackError
from hoststage.client.stack import PayloadPath
from hoststage.shm import claims
from hoststage.shm.copy import Offsets
from hoststage.v1 import fdsocket, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import imported as wire

_T = TypeVar("_T")

_BYTES_PER_PIECE_ON_WIRE = 10
_claim_numbers = itertools.count(secrets.randbits(60))
"""Claims of all sessions of this process; where they start keeps those of two processes that share memory apart."""


class Imported:
    """Memory that the daemon reads and writes itself. Made by `Session.import_memory`; it is imported anew after a reconnection.

    sizes: bytes of each memfd. The memory must stay as large as it is until `close`.
    """

    def __init__(self, core: Core, fds: Sequence[int], sizes: Sequence[int], name: str) -> None:
        self._fds: list[int] = []
        self._claims_fd = -1
        self.name = name
        self.sizes = tuple(sizes)
        self._core = core
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._import_id = 0
        self._withdrawn = False
        try:
            for fd in fds:
                self._fds.append(os.dup(fd))
            # Locks are of an open file: a duplicate would share it with the caller, and a child with us.
            self._claims_fd = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._close_own()
            raise StackError(
                "fds", list(fds), f"pass descriptors that are open for reading and writing: {error}"
            ) from error

    def id_on(self, link: Link, deadline: Deadline) -> int:
        """Return the number that a connection's daemon knows the memory by, having imported it there where that was not done."""
        if not self._lock.acquire(timeout=deadline.left):
            raise DeadlineExceeded("the memory is being imported anew; that took longer than this call may")
        try:
            if not self._fds:
                raise StackError("imported", self.name, "this memory was closed; import it again")
            if self._link is not link:
                self._import_id = _import(link, self.name, self._fds, self.sizes, deadline)
                self._link = link
            return self._import_id
        finally:
            self._lock.release()

    def withdraw(self, claim: int) -> None:
        """Make sure that the daemon does not touch the memory for that claim any more, waiting for a move that is under way."""
        self._withdrawn = True
        try:
            claims.wait_and_take(self._claims_fd, claim)
        except OSError as error:
            # Closed meanwhile by another thread, which has seen to it that the daemon is done with the memory.
            if error.errno != errno.EBADF:
                raise

    def close(self, timeout: float | None = None) -> None:
        """Let the daemon close its descriptors. Pages that it took are stored all the same. Safe to repeat."""
        with self._lock:
            link, self._link = self._link, None
            if not self._fds:
                return
            gone = link is None or self._drop(link, self._core.deadline(timeout))
            if self._withdrawn and not gone:
                # The daemon may still have what we gave up on before it: what forbids it must outlive us.
                self._claims_fd = -1
            self._close_own()
        self._core.imports.discard(self)

    def _drop(self, link: Link, deadline: Deadline) -> bool:
        if link.lost is not None:
            return False
        try:
            link.call(pb.ClientMessage(drop_import=pb.DropImport(import_id=self._import_id)), pb.Done, deadline)
        except HostStageError:
            return False
        return True

    def disown(self) -> None:
        """In a forked child: drop the inherited descriptors."""
        self._close_own()

    def __del__(self) -> None:
        self._close_own()

    def _close_own(self) -> None:
        fds, self._fds = self._fds, []
        if self._claims_fd >= 0:
            fds = [*fds, self._claims_fd]
            self._claims_fd = -1
        for fd in fds:
            with suppress(OSError):
                os.close(fd)


@dataclass(frozen=True, slots=True, eq=False)
class ImportedPages:
    """Pages of one pool in imported memory: to be stored from there, or loaded to there.

    offsets: `int64[pages, pieces]`, where each piece of each page begins in its memfd. sizes: `int64[pieces]`, bytes of each piece, the same for every
    page; a page is its pieces one after the other. memfds: `int64[pieces]`, which memfd of the import each piece lies in; by default the first.

    :raises StackError: where these do not fit each other.
    """

    imported: Imported
    offsets: Offsets
    sizes: Offsets
    memfds: Offsets | None = None

    def __post_init__(self) -> None:
        fits = self.offsets.ndim == 2 and self.sizes.shape == self.offsets.shape[1:] and bool((self.sizes > 0).all())
        fits = fits and (self.memfds is None or self.memfds.shape == self.sizes.shape)
        if not fits or any(t.dtype != np.int64 for t in (self.offsets, self.sizes)):
            found = f"{self.offsets.dtype}{self.offsets.shape} with sizes {self.sizes.dtype}{self.sizes.shape}"
            raise StackError("pages", found, "pass int64[pages, pieces], and positive sizes and memfds int64[pieces]")
        if bool((self.offsets < 0).any()):
            raise StackError("pages", int(self.offsets.min()), "pass offsets from 0 on")

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.sizes.sum())

    def cut(self, start: int, end: int) -> ImportedPages:
        """Return the pages `[start, end)`."""
        return ImportedPages(self.imported, self.offsets[start:end], self.sizes, self.memfds)

    def places(self, pool: int, import_id: int, start: int, end: int) -> wire.Places:
        """Return rows `[start, end)` as the wire names them."""
        memfds = np.zeros(len(self.sizes), dtype=np.int64) if self.memfds is None else self.memfds.astype(np.int64)
        return wire.Places(import_id, pool, memfds, self.sizes, self.offsets[start:end])


# ------------------------------------------------------------------ importing


def import_memory(
    core: Core, fds: int | Sequence[int], sizes: Sequence[int] | None, name: str, deadline: Deadline
) -> Imported:
    """Import memory; see `Session.import_memory`."""
    given = [fds] if isinstance(fds, int) else list(fds)
    if not given:
        raise StackError("fds", given, "pass at least one descriptor")
    try:
        found = [os.fstat(fd).st_size for fd in given] if sizes is None else list(sizes)
    except OSError as error:
        raise StackError("fds", given, f"pass open descriptors: {error.strerror}") from error
    if len(found) != len(given) or min(found) < 1:
        raise StackError("sizes", found, f"pass a size of at least 1 byte for each of {len(given)} descriptors")
    link = core.ready(deadline)
    if link.grant.path is not PayloadPath.IMPORTED:
        raise StackError(
            "path",
            link.grant.path.value,
            "put PayloadPath.IMPORTED first among the stack's paths, and connect over the daemon's Unix socket",
        )
    imported = Imported(core, given, found, name)
    try:
        imported.id_on(link, deadline)
    except BaseException:
        imported.close()
        raise
    core.imports.add(imported)
    return imported


def _import(link: Link, name: str, fds: Sequence[int], sizes: Sequence[int], deadline: Deadline) -> int:
    message = pb.ClientMessage(import_memory=pb.ImportMemory(name=name, bytes=sizes))
    announced = link.call(message, pb.ImportMemoryReply, deadline)

    def hand_over(sock: socket.socket) -> None:
        reply = present(sock, announced.fd_token, deadline, kind=fdsocket.Kind.IMPORT, fds=fds)
        if reply.status:
            raise error_of(status_pb2.Status.FromString(reply.status))
        if reply.refusal:
            raise DaemonUnavailable(f"the fd socket at {link.welcome.fd_socket} refused: {reply.refusal}")

    on_socket(link.welcome.fd_socket, deadline, hand_over)
    return int(announced.import_id)


def on_socket(path: str, deadline: Deadline, use: Callable[[socket.socket], _T]) -> _T:
    """Connect to the fd socket and use it. Raises `DaemonUnavailable`, `DeadlineExceeded`, and what `use` raises of ours."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(0.001, deadline.left))
            sock.connect(path)
            return use(sock)
    except HostStageError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"the fd socket at {path} did not answer in time") from error
    except (OSError, fdsocket.PacketError) as error:
        raise DaemonUnavailable(f"the fd socket at {path} did not take the memory: {error}") from error


def given(pages: Mapping[str, Any] | None) -> bool:
    """Return whether pages lie in imported memory. Raises `StackError` where some do and others do not."""
    if not pages:
        return False
    kinds = {name: isinstance(rows, ImportedPages) for name, rows in pages.items()}
    if len(kinds) > 1 and len(set(kinds.values())) > 1:
        other = next(name for name, is_imported in kinds.items() if not is_imported)
        raise StackError(
            f"pages[{other!r}]", "no ImportedPages", "pages of one call lie in imported memory, or none does"
        )
    return any(kinds.values())


def _checked(core: Core, pages: Mapping[str, ImportedPages], what: str) -> dict[int, ImportedPages]:
    stack = core.options.stack
    out = {}
    for name, rows in pages.items():
        pool = stack.index_of(name)
        want = stack.pools[pool].page_bytes
        if rows.page_bytes != want:
            raise StackError(f"{what}[{name!r}]", f"{rows.page_bytes} bytes", f"pages of this pool have {want} bytes")
        if rows.imported._core is not core:
            raise StackError(f"{what}[{name!r}]", rows.imported.name, "this memory was imported by another session")
        out[pool] = rows
    return out


# ------------------------------------------------------------------ moving


def _ask(
    link: Link,
    message: pb.ClientMessage,
    waiter: Waiter,
    first: Imported,
    claim: int,
    deadline: Deadline,
    then: Callable[[int], None] | None = None,
) -> object:
    """Send a request that lets the daemon touch memory and return its answer. Whatever ends the wait, it touches nothing later."""
    try:
        link.start(message, waiter, deadline, then)
        return link.finish(waiter, deadline, "a move of imported pages")
    except RequestRejected:
        raise  # that is its answer
    except BaseException:
        first.withdraw(claim)
        raise


def store(
    core: Core,
    keys: Keys,
    pages: Mapping[str, ImportedPages],
    first: Mapping[str, int] | None,
    parent: bytes,
    deadline: Deadline,
) -> StoreTicket:
    """Store a run from imported memory; see `Session.store`."""
    run = pack_keys(keys)
    rows = _checked(core, pages, "pages")
    ranges = ranges_of(core, len(run), {name: len(table) for name, table in pages.items()}, first)
    link = core.ready(deadline)
    ids = {pool: table.imported.id_on(link, deadline) for pool, table in rows.items()}
    ticket = StoreTicket(link)
    try:
        pieces = sum(len(rows[r.pool].sizes) for r in ranges)
        fit = min(link.message_room // (run.key_bytes + _BYTES_PER_PIECE_ON_WIRE * pieces), wire.MAX_PLACES // pieces)
        most = max(1, min(link.welcome.limits.max_span_keys or len(run), fit))
        for piece in split(len(run), ranges, room_of(link, ranges, by_message=False), most):
            before = run.cut(piece.start - 1, piece.start) if piece.start and parent else parent
            span = ops.Span(run.cut(piece.start, piece.end), run.key_bytes, tuple(p.range for p in piece.parts), before)
            if not _store_piece(link, ticket, span, piece, rows, ids, deadline):
                break
    finally:
        ticket._seal()
    return ticket


def _store_piece(
    link: Link,
    ticket: StoreTicket,
    span: ops.Span,
    piece: Piece,
    rows: Mapping[int, ImportedPages],
    ids: Mapping[int, int],
    deadline: Deadline,
) -> bool:
    """Store one commit; returns whether the next one may follow."""

    def places(p: Part) -> wire.Places:
        return rows[p.pool].places(p.pool, ids[p.pool], p.row, p.row + p.count)

    part, claim = ticket._begin(), next(_claim_numbers)
    wait_ms = max(1, int(deadline.left_ms * SHARE_OF_DEADLINE))
    ask = wire.ImportedStore(span, tuple(places(p) for p in piece.parts), wait_ms, claim)
    waiter = Waiter()
    try:
        message = pb.ClientMessage(imported_store=wire.store_to_proto(ask))
        imported = rows[piece.parts[0].pool].imported
        answer = _ask(
            link, message, waiter, imported, claim, deadline, lambda request: link.commits.__setitem__(request, part)
        )
        reply = link.expect(answer, ops.CommitReply)
    except HostStageError as error:
        link.commits.pop(waiter.request_id, None)
        part.lose(error)
        raise
    if reply.outcome is ops.Outcome.ACCEPTED:
        part.accept()
        return True
    link.commits.pop(waiter.request_id, None)
    part.refuse(reply.outcome, reply.detail)
    return reply.outcome is ops.Outcome.BELIEVED_STORED


def load(core: Core, request: LoadRequest, into: Mapping[str, ImportedPages], deadline: Deadline) -> Loaded:
    """Load a prefix into imported memory; see `Session.load`."""
    rows = _checked(core, into, "into")
    if (pieces := sum(table.offsets.size for table in rows.values())) > wire.MAX_PLACES:
        raise StackError("into", f"{pieces} pieces", f"load at most {wire.MAX_PLACES} pieces in one call")
    link = core.ready(deadline)
    names = core.names
    tables = tuple(t.places(pool, t.imported.id_on(link, deadline), 0, len(t)) for pool, t in rows.items())
    claim = next(_claim_numbers)
    message = wire.load_to_proto(wire.ImportedLoad(request.message(link, deadline), tables, claim))
    first = next(iter(rows.values())).imported
    answer = _ask(link, pb.ClientMessage(imported_load=message), Waiter(), first, claim, deadline)
    reply = wire.load_reply_from_proto(link.expect(answer, pb.ImportedLoadReply))
    return Loaded.of_places(names, reply)
