"""Memory of the daemon's for an engine's host pools: leases that end with the tensors in them.

The memory belongs to the node: the daemon's budget arbitrates it between all ranks and engines, it is populated already when an engine starts
again, and it stays good when the daemon goes away. Knows neither sglang nor torch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.client._arenas import Arena
from hoststage.client.engines.sglang.settings import SECTION, Settings
from hoststage.client.errors import HostStageError, StackError
from hoststage.client.session import Session, connect, resolve_address
from hoststage.client.stack import Identity, Mode, ModeWish, PayloadPath, PoolKind, PoolSpec, StackSpec

_log = logging.getLogger(__name__)

FIELD = f"{SECTION}.host_pools"
_PATIENCE = 10.0
_PAUSE = 0.02
_PAGE_BYTES = 4096
_POOL = "none"


class HostPoolsUnavailable(HostStageError, RuntimeError):
    """The daemon does not supply the memory of a host pool, and it was required to. `field`, `value` and `remedy` say what, and what would do."""

    def __init__(self, field_name: str, value: object, problem: str, remedy: str) -> None:
        self.field, self.value, self.remedy = field_name, value, remedy
        super().__init__(f"{field_name} is {value!r} and required, but {problem}; {remedy}")


@dataclass(slots=True, eq=False)
class Lease:
    """An arena that one tensor lives in. `unpin` undoes its registration with CUDA: before it is unmapped."""

    arena: Arena
    bytes: int
    unpin: Callable[[], None] | None = None

    @property
    def address(self) -> int:
        return self.arena.mapping.address

    @property
    def region(self) -> tuple[int, int, int] | None:
        """The memfd, the address at which it is mapped, and its bytes. None for a daemon that gives more than one."""
        fds, mapping = self.arena.fds, self.arena.mapping
        return (fds[0], mapping.address, mapping.size) if len(fds) == 1 else None


class Leases:
    """The leases of this process, over a session of their own that opens with the first. Thread-safe.

    Where there is no daemon, or it refuses the session, this is settled once for all pools: they are made at start, and half of a launch must not wait for what
    the other half went without.
    """

    def __init__(self, settings: Settings, worker: str = "") -> None:
        self.settings = settings
        self.address = resolve_address(settings.address)
        self._worker = worker or f"host pools pid {os.getpid()}"
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._absent: HostStageError | None = None
        self._leases: dict[int, Lease] = {}
        # Filled by finalizers, which may run anywhere and must not wait.
        self._over: SimpleQueue[Lease | None] = SimpleQueue()
        self._lost = False
        self._closed = False

    def free(self) -> int:
        """Return the bytes that one lease could have now. Raises `HostStageError`."""
        return self._open().budget(timeout=self.settings.connect_timeout).free_bytes

    def lease(self, size: int, name: str = "host pool") -> npt.NDArray[np.uint8]:
        """Lease `size` bytes and return them; the lease ends with the last view of the array. Raises `HostStageError`."""
        session = self._open()
        arena = session.lease_arena(name, size, timeout=self.settings.host_pool_timeout)
        array = np.frombuffer(arena.whole(), dtype=np.uint8, count=size)
        lease = Lease(arena, size)
        self._leases[lease.address] = lease
        # At exit the process's end says it all.
        weakref.finalize(array, self._ended, lease).atexit = False
        found = "populated already" if arena.warm else "newly populated"
        _log.info(
            "hoststage: %.3f GB for a host pool, %s, %s, in the memory of the daemon at %s",
            size / 1e9,
            found,
            arena.pin.level.value,
            self.address,
        )
        return array

    def find(self, address: int) -> Lease | None:
        """Return the lease whose memory starts at an address."""
        return self._leases.get(address)

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases that tensors still live in."""
        return tuple(self._leases.values())

    def close(self) -> None:
        """Leave the daemon; what tensors still use stays mapped, and the session lingers until they are gone."""
        with self._lock:
            self._closed = True
            session = self._session
        self._over.put(None)
        if session is not None:
            session.close()

    # -------------------------------------------------------------- the session

    def _open(self) -> Session:
        with self._lock:
            if self._absent is not None:
                raise self._absent
            if self._session is None:
                self._session = self._connect()
                threading.Thread(target=self._give_back, name="hoststage-host-pools", daemon=True).start()
            return self._session

    def _connect(self) -> Session:
        settings = self.settings
        try:
            return connect(
                settings.address,
                stack=memory_stack(settings.tenant),
                worker=self._worker,
                client="sglang host pools",
                token=settings.token,
                timeout=settings.connect_timeout,
                # SGLang registers its pools itself.
                register="never",
                on_push=self._pushed,
            )
        except HostStageError as error:
            self._absent = error
            raise

    def _pushed(self, message: Any) -> None:
        # Without a body: the connection is lost. One that never came about is told of by `connect`.
        lost = message.WhichOneof("body") is None and self._session is not None
        if lost and not self._lost and not self._closed:
            self._lost = True
            threading.Thread(target=self._tell, name="hoststage-host-pools-lost", daemon=True).start()

    def _tell(self) -> None:
        """Say once that the daemon is away, and once that it is back."""
        _log.warning(
            "hoststage: the daemon at %s is away; the host pools in its memory (%d bytes) stay as they are, and it is told of them when it is back",
            self.address,
            sum(lease.arena.mapping.size for lease in self.held),
        )
        session = self._session
        while not self._closed and session is not None and not session.connected:
            time.sleep(0.5)
        self._lost = False
        if not self._closed and session is not None:
            _log.warning(
                "hoststage: the daemon at %s is back, and counts %d bytes of host pools of before",
                self.address,
                session.retained_bytes,
            )

    # -------------------------------------------------------------- the end of a lease

    def _ended(self, lease: Lease) -> None:
        """The array is going: it is still mapped, and will not be for long."""
        self._leases.pop(lease.address, None)
        unpin, lease.unpin = lease.unpin, None
        if unpin is not None:
            unpin()
        self._over.put(lease)

    def _give_back(self) -> None:
        while (lease := self._over.get()) is not None:
            with suppress(HostStageError):
                # Where the daemon is away, unmapping is all: it counts what is mapped when it is back.
                self._return(lease.arena)

    def _return(self, arena: Arena) -> None:
        session = self._session
        assert session is not None
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                session.return_arena(arena)
            except StackError:
                # The array's own memory goes a moment after its finalizer has run.
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)
            else:
                return


def memory_stack(tenant: str) -> StackSpec:
    """Return the stack of a session that leases memory alone. It must have a pool, though nothing passes through this one: three pages."""
    pool = PoolSpec(_POOL, PoolKind.KV, _PAGE_BYTES, 1, host_slots=3)
    modes = (ModeWish(Mode.CACHE), ModeWish(Mode.BUFFER_ONLY))
    return StackSpec(Identity("host pools", tenant=tenant), (pool,), modes=modes, paths=(PayloadPath.SHM,))
