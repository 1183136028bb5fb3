"""`hoststage serve` that kills itself with SIGKILL at a given step of its writing to the disk.

Environment: `CRASH_AT`, the number of the step, counted from the moment `CRASH_ARM` names a file that exists. A step is just before, in the
middle of (half of the bytes), or just after a page's write; `CRASH_AT=0` never kills. Steps that were reached are written to `CRASH_LOG`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Sequence

from hoststage.cli.main import main

_at = int(os.environ["CRASH_AT"])
_arm = os.environ["CRASH_ARM"]
_log = os.open(os.environ["CRASH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_steps = itertools.count(1)
_lock = threading.Lock()
_pwritev = os.pwritev


def _step(name: str) -> bool:
    """Count a step; returns whether this is the one to die at."""
    if not os.path.exists(_arm):
        return False
    n = next(_steps)
    os.write(_log, f"{n} {name}\n".encode())
    return n == _at


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def pwritev(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
    """Write, and die on the way where it is time."""
    with _lock:  # one write at a time, so that steps have an order
        if _step("before"):
            _die()
        if _step("torn"):
            # The page is there, its trailer only by half.
            _pwritev(fd, list(buffers[:-1]), offset, *flags)
            _die()
        done = _pwritev(fd, buffers, offset, *flags)
        if _step("after"):
            _die()
        return done


if __name__ == "__main__":
    os.pwritev = pwritev  # type: ignore[assignment]
    sys.argv[0] = "hoststage"
    main()
