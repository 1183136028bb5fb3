"""Filling this process's page tables for its arenas ahead of the first copies.

The daemon has populated the memory, but each process faults its own mapping in: 256 faults for the first write of a page of 1 MiB, which
cost more than the copy. A thread does it in the background, in C, without holding the GIL.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from hoststage.client._arenas import Arena
from hoststage.client.errors import SessionLost
from hoststage.shm import libc

_log = logging.getLogger(__name__)
_PIECE = 16 << 20
MOST_BYTES = 16 << 30
"""Beyond this the rest is left to first use: page tables take memory of their own, 2 MiB for each GiB."""


class Populating:
    """The thread that populates; `stop` ends it and returns once it touches nothing any more."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hoststage-populate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        left = MOST_BYTES
        for arena in self._arenas:
            advice = libc.Advice.POPULATE_WRITE if arena.mapping.writable else libc.Advice.POPULATE_READ
            for at in range(0, arena.mapping.size, _PIECE):
                size = min(_PIECE, arena.mapping.size - at)
                left -= size
                if left < 0 or self._stop.is_set():
                    return
                try:
                    guard = arena.guard()
                    libc.madvise(arena.mapping.address + at, size, advice)
                    del guard
                except SessionLost:
                    return
                except OSError as error:
                    # Kernels before 5.14: pages are faulted in as they are used.
                    _log.debug("arenas are not populated ahead: %s", error)
                    return

    def stop(self) -> None:
        """End the thread; safe to repeat."""
        self._stop.set()
        self._thread.join()
