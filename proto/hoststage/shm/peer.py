"""Who is at the other end of a Unix socket, and a handle to its life."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""Linux 6.5 and later; Python does not name it."""

OVERFLOW_UID = 65534
_UCRED = struct.Struct("3i")
_UNSUPPORTED = {errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODATA, errno.ESRCH, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What ``SO_PEERCRED`` says of the process that connected.

    ``pid`` is 0 when that process is not visible in this PID namespace; ``uid`` and ``gid`` are 65534 when it belongs to
    another user namespace, so that they then identify nobody.
    """

    pid: int
    uid: int
    gid: int

    @property
    def pid_visible(self) -> bool:
        """Whether the process has an id in this PID namespace."""
        return self.pid > 0

    @property
    def identifies_user(self) -> bool:
        """Whether uid and gid are mapped in this user namespace, so that they may be trusted."""
        return OVERFLOW_UID not in (self.uid, self.gid)


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Reads the credentials of the peer of a connected Unix socket.

    :raises OSError: when ``sock`` is not a connected Unix socket.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    # The kernel stores ids as unsigned; an unmapped one reads as -1 on some kernels.
    return PeerCredentials(max(pid, 0), uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)


def peer_pidfd(sock: socket.socket) -> int | None:
    """A close-on-exec pidfd of the process that connected, or ``None`` where the kernel cannot give one.

    ``None`` means an old kernel, or a peer that was already reaped; the client may then send a pidfd of its own.
    """
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    os.set_inheritable(fd, False)
    return fd


def pidfd_of_self() -> int:
    """A close-on-exec pidfd of this process, to be sent to the daemon.

    :raises OSError: ``ENOSYS`` on kernels before 5.3.
    """
    return os.pidfd_open(os.getpid())


def is_pidfd(fd: int) -> bool:
    """Whether a descriptor that a client sent is a pidfd at all."""
    return _pid_line(fd) is not None


def pid_of_pidfd(fd: int) -> int | None:
    """The pid behind a pidfd in this PID namespace; ``None`` when it is dead, not visible here, or no pidfd."""
    pid = _pid_line(fd)
    return pid if pid is not None and pid > 0 else None


def pidfd_has_exited(fd: int, timeout: float = 0.0) -> bool:
    """Whether the process behind a pidfd has exited, waiting at most ``timeout`` seconds for it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def _pid_line(fd: int) -> int | None:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("Pid:"):
                    return int(line.split()[1])
    except FileNotFoundError:
        return None
    return None
