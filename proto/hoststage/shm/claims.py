"""Claims: who may touch memory that two processes reach, settled by locks that the kernel gives back when their owner dies.

A claim is a byte of a file that nobody reads or writes, locked by whoever moves bytes in its name, or by whoever forbids it. They are
open-file-description locks: each end needs an open file of its own (a duplicate of a descriptor is the same one).
"""

from __future__ import annotations

import errno
import fcntl
import struct

_F_OFD_SETLK = 37
_F_OFD_SETLKW = 38
_FLOCK = struct.Struct("hhqqi4x")
_SEEK_SET = 0


def _lock(kind: int, claim: int) -> bytes:
    return _FLOCK.pack(kind, _SEEK_SET, claim, 1, 0)


def take(fd: int, claim: int) -> bool:
    """Takes a claim if nobody has it; returns whether it could be had. Never blocks."""
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _lock(fcntl.F_WRLCK, claim))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def wait_and_take(fd: int, claim: int) -> None:
    """Takes a claim, waiting for as long as another process has it; a dead process has none. The GIL is released meanwhile."""
    fcntl.fcntl(fd, _F_OFD_SETLKW, _lock(fcntl.F_WRLCK, claim))


def give_back(fd: int, claim: int) -> None:
    """Gives a claim back."""
    fcntl.fcntl(fd, _F_OFD_SETLK, _lock(fcntl.F_UNLCK, claim))
