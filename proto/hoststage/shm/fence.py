"""Memory fences between processes, with what Python has.

`fence` keeps loads with loads, stores with stores, and loads before stores: x86-64 does so by itself. A store and a load after it may pass each other there too:
`full_fence` keeps them as well, which is what two sides need that each write something and then look whether the other has.
"""

from __future__ import annotations

import platform
from _thread import allocate_lock as _new_lock

from hoststage.shm import libc

_X86 = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Keep loads and stores before this before those after it, but for a store before a load, where the processor does not by itself."""
    if not _X86:
        # A release and an acquire after it, which no load or store passes.
        barrier = _new_lock()
        barrier.acquire()
        barrier.release()
        barrier.acquire()


def full_fence() -> None:
    """Make every store before this seen by all before any load after it.

    On x86-64 any locked instruction does, and taking a lock that is free is one; that of a lock which others share may fail without it. Elsewhere the
    kernel is asked: `membarrier` with the command for registered processes, of which there need be none (the command for a process's own
    threads returns without a barrier where there is only one thread).
    """
    if _X86:
        _new_lock().acquire()
    else:
        libc.membarrier_global_expedited()


def full_fence_known() -> bool:
    """Return whether `full_fence` can be relied on here. Without it nobody may use a board."""
    return _X86 or libc.has_membarrier_global_expedited()
