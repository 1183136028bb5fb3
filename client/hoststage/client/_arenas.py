"""The arenas of a session in this process: fetched over the fd socket, mapped, addressed slot by slot."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hoststage.client._wire import Deadline
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, SessionLost
from hoststage.client.stack import from_wire
from hoststage.shm import peer
from hoststage.shm.copy import Offsets
from hoststage.shm.fdpass import close_all, recv_fds, send_fds
from hoststage.shm.mapping import Chunk, Mapping, MappingError
from hoststage.v1 import fdsocket
from hoststage.v1 import stack_pb2 as pb
from hoststage.v1.ops import U32

_GIVEN_BACK = "the connection was lost, and its memory given back"


class ArenaKind(Enum):
    """Whose an arena is: the session's own to write, the namespace's to read, leased whole, the index of a read arena, or the session's lease board."""

    WRITE = "write"
    READ = "read"
    WHOLE = "whole"
    INDEX = "index"
    BOARD = "board"


class PinLevel(Enum):
    """How firmly memory is held. `RESIDENT`: populated, on a host without swap."""

    NONE = "none"
    RESIDENT = "resident"
    MLOCK = "mlock"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Pin:
    """What the daemon achieved for one arena, and why not more."""

    level: PinLevel
    reason: str
    huge_pages: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class Arena:
    """One mapped arena. `page_bytes`: bytes of a page within a slot of `stride` bytes (equal for WHOLE). `warm`: for WHOLE, whether it was
    populated before, with the bytes of an earlier lease of the tenant. `trailing_pages`: of an index, the pages at a prefix's end that its
    pool needs; 0: all. `fds`: for WHOLE, its memfds while it is leased, for a session that imports it."""

    arena_id: int
    kind: ArenaKind
    pool: int
    slots: int
    stride: int
    page_bytes: int
    pin: Pin
    mapping: Mapping
    warm: bool = False
    trailing_pages: int = 0
    fds: list[int] = field(default_factory=list)

    def keep_descriptors(self, fds: Sequence[int]) -> None:
        """Keep duplicates of descriptors until the arena is given back; not in a forked child."""
        _keepers.add(self)
        self.fds += [os.dup(fd) for fd in fds]

    def close_descriptors(self) -> None:
        """Close what is kept: memory that is open anywhere goes to nobody else. Safe to repeat."""
        fds, self.fds = self.fds, []
        close_all(fds)

    def __del__(self) -> None:
        self.close_descriptors()

    def view(self, slot: int) -> memoryview:
        """Return the page in a slot: writable in a write arena, else read-only."""
        return self.whole()[slot * self.stride : slot * self.stride + self.page_bytes]

    def guard(self) -> object:
        """Return what keeps the arena mapped while it is referred to. Raises `SessionLost` once it was given back."""
        try:
            return self.mapping.guard()
        except ValueError as error:
            raise SessionLost(_GIVEN_BACK) from error

    def whole(self) -> memoryview:
        """Return the whole arena, and with it a guard that keeps it mapped. Raises `SessionLost` once it was given back."""
        try:
            return self.mapping.view()
        except ValueError as error:
            raise SessionLost(_GIVEN_BACK) from error

    def views(self, slots: Sequence[int] | U32) -> list[memoryview]:
        """Return the pages in slots, one export for all of them."""
        whole, stride, size = self.whole(), self.stride, self.page_bytes
        return [whole[slot * stride : slot * stride + size] for slot in map(int, slots)]

    def addresses(self, slots: U32) -> Offsets:
        """Return the address of each slot. Valid while the caller keeps a view of the mapping."""
        return self.mapping.address + slots.astype(np.int64) * self.stride


@dataclass(slots=True)
class Arenas:
    """What a session has mapped: one write and one read arena a pool, in stack order, and what it leased whole.

    index: the page index of a pool's read arena, where the daemon gives one. board: where the session lists what it reads by the indexes. They
    hold no pages and are not among those iterated over.
    """

    write: dict[int, Arena] = field(default_factory=dict)
    read: dict[int, Arena] = field(default_factory=dict)
    whole: dict[int, Arena] = field(default_factory=dict)
    index: dict[int, Arena] = field(default_factory=dict)
    board: Arena | None = None

    def __iter__(self) -> Iterator[Arena]:
        return iter([*self.write.values(), *self.read.values(), *self.whole.values()])

    def add(self, arena: Arena) -> None:
        """Take an arena in."""
        if arena.kind is ArenaKind.WHOLE:
            self.whole[arena.arena_id] = arena
        elif arena.kind is ArenaKind.BOARD:
            self.board = arena
        else:
            by_pool = {ArenaKind.WRITE: self.write, ArenaKind.READ: self.read, ArenaKind.INDEX: self.index}
            by_pool[arena.kind][arena.pool] = arena

    def unmap(self) -> list[Mapping]:
        """Give all mappings back; returns those that views of the caller still hold."""
        # The tables stay: a thread that is about to copy finds a closed arena, and says that the session was lost.
        busy = []
        for arena in [*self, *self.index.values(), *([self.board] if self.board is not None else ())]:
            if arena.mapping.unmap():
                arena.close_descriptors()
            else:
                busy.append(arena.mapping)
        return busy


_keepers: weakref.WeakSet[Arena] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child does not map these, and must not keep them from whoever comes next."""
    for arena in list(_keepers):
        arena.close_descriptors()


os.register_at_fork(after_in_child=_in_child)


def fetch(
    fd_socket: str, token: bytes, grants: Sequence[pb.ArenaGrant], page_bytes: Sequence[int], deadline: Deadline
) -> Arenas:
    """Fetch the descriptors of the granted arenas and map them.

    page_bytes: bytes of a page, per pool in stack order.

    :raises DaemonUnavailable: where the fd socket cannot be reached or refuses the token, or an arena cannot be mapped.
    :raises DeadlineExceeded: where it does not answer in time.
    """
    chunks = _descriptors(fd_socket, token, deadline)
    arenas = Arenas()
    try:
        for grant in grants:
            if not grant.chunk_bytes:
                continue  # a pool that stays on the device has no slots here
            parts = chunks.get(grant.arena_id, {})
            arena = _mapped(grant, parts, page_bytes)
            arenas.add(arena)
            if arena.kind is ArenaKind.WHOLE:
                arena.keep_descriptors([parts[i][0] for i in sorted(parts)])
    except (MappingError, OSError) as error:
        arenas.unmap()
        raise DaemonUnavailable(f"the daemon's memory cannot be mapped: {error}") from error
    finally:
        # A mapping needs no descriptor, and one that stays open would keep the memory of a dead daemon.
        close_all([fd for parts in chunks.values() for fd, _ in parts.values()])
    return arenas


def _mapped(grant: pb.ArenaGrant, parts: dict[int, tuple[int, int]], page_bytes: Sequence[int]) -> Arena:
    sizes = list(grant.chunk_bytes)
    got = [parts[i][1] for i in sorted(parts)]
    if got != sizes or sorted(parts) != list(range(len(sizes))):
        raise MappingError(f"arena {grant.arena_id}: chunks of {sizes} bytes were granted, {got} arrived")
    kind = from_wire(ArenaKind, grant.kind)
    if kind is None:
        raise MappingError(f"arena {grant.arena_id}: its kind {grant.kind} is not known to this client")
    mapping = Mapping.map(
        [Chunk(parts[i][0], size) for i, size in enumerate(sizes)],
        kind in (ArenaKind.WRITE, ArenaKind.WHOLE, ArenaKind.BOARD),
        private_to_process=True,
        require_seals=True,
    )
    size = page_bytes[grant.pool] if kind in (ArenaKind.WRITE, ArenaKind.READ) else grant.stride
    holds_pages = kind not in (ArenaKind.INDEX, ArenaKind.BOARD)
    if holds_pages and (grant.slots * grant.stride > mapping.size or size > grant.stride):
        mapping.unmap()
        raise MappingError(
            f"arena {grant.arena_id}: {grant.slots} slots of {grant.stride} bytes (pages of {size}) do not fit {sum(sizes)}"
        )
    pin = Pin(from_wire(PinLevel, grant.pin.level) or PinLevel.NONE, grant.pin.reason, grant.pin.huge_pages)
    return Arena(
        grant.arena_id,
        kind,
        grant.pool,
        grant.slots,
        grant.stride,
        size,
        pin,
        mapping,
        trailing_pages=grant.trailing_pages,
    )


def _descriptors(path: str, token: bytes, deadline: Deadline) -> dict[int, dict[int, tuple[int, int]]]:
    """Return `{arena id: {chunk: (descriptor, bytes)}}`; the descriptors are the caller's."""
    chunks: dict[int, dict[int, tuple[int, int]]] = {}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(0.001, deadline.left))
            sock.connect(path)
            _ask(sock, token, fdsocket.Kind.ARENAS, ())
            last = False
            while not last:
                sock.settimeout(max(0.001, deadline.left))
                packet, fds = recv_fds(sock, fdsocket.MAX_PACKET_BYTES, fdsocket.MAX_DESCRIPTORS)
                last = _take(packet, fds, chunks, path)
    except BaseException as error:
        close_all([fd for parts in chunks.values() for fd, _ in parts.values()])
        if isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceeded):
            raise DeadlineExceeded(f"the fd socket at {path} did not answer in time") from error
        if isinstance(error, DaemonUnavailable) or not isinstance(error, OSError | fdsocket.PacketError):
            raise
        raise DaemonUnavailable(f"no descriptors from the fd socket at {path}: {error}") from error
    return chunks


def present(
    sock: socket.socket, token: bytes, deadline: Deadline, *, kind: fdsocket.Kind, fds: Sequence[int]
) -> fdsocket.Reply:
    """Hand descriptors over with a token and return the reply, which must come without any. Raises what the socket raises, and `PacketError`."""
    _ask(sock, token, kind, fds)
    sock.settimeout(max(0.001, deadline.left))
    packet, got = recv_fds(sock, fdsocket.MAX_PACKET_BYTES, fdsocket.MAX_DESCRIPTORS)
    close_all(got)
    return fdsocket.decode_reply(packet)


def _ask(sock: socket.socket, token: bytes, kind: fdsocket.Kind, fds: Sequence[int]) -> None:
    own: int | None = None
    with suppress(OSError):
        # For daemons on kernels that cannot tell them who connected.
        own = peer.pidfd_of_self()
    try:
        packet = fdsocket.encode_request(kind, token, has_pidfd=own is not None)
        send_fds(sock, packet, list(fds) if own is None else [own, *fds])
    finally:
        if own is not None:
            os.close(own)


def _take(packet: bytes, fds: list[int], chunks: dict[int, dict[int, tuple[int, int]]], path: str) -> bool:
    try:
        reply = fdsocket.decode_reply(packet)
        if reply.refusal:
            raise DaemonUnavailable(f"the fd socket at {path} refused: {reply.refusal}")
        if len(reply.records) != len(fds):
            raise fdsocket.PacketError(f"{len(reply.records)} records came with {len(fds)} descriptors")
    except BaseException:
        close_all(fds)
        raise
    for record, fd in zip(reply.records, fds, strict=True):
        chunks.setdefault(record.arena_id, {})[record.chunk] = (fd, record.size)
    return reply.last
