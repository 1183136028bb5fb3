"""Filesystem sockets: made with the right permissions, never taken from a daemon that lives, removed at the end."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

MAX_PATH_BYTES = 107


class SocketError(Exception):
    """A socket cannot be made; the message names the path and the remedy."""


def claim(path: str) -> None:
    """Make room for a socket at `path`: its folder exists, no live daemon owns it, a stale one is gone. Raises `SocketError`."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketError(
            f"the socket path {path} has more than {MAX_PATH_BYTES} bytes; choose a shorter listen.socket"
        )
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SocketError(
            f"cannot make {file.parent}: {error.strerror}; set listen.socket to a writable place"
        ) from error
    if not file.exists() and not file.is_symlink():
        return
    if not file.is_socket():
        raise SocketError(f"{path} exists and is no socket; remove it or set listen.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise SocketError(f"cannot tell who owns {path}: {error.strerror}") from error
        else:
            raise SocketError(f"another daemon listens on {path}; stop it or set listen.socket")
    file.unlink(missing_ok=True)


def listen(path: str, mode: int, backlog: int = 128) -> socket.socket:
    """Return a listening stream socket at `path`. Raises `SocketError`."""
    claim(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Closed to others until the mode is set.
        before = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, mode)
        made.listen(backlog)
    except OSError as error:
        made.close()
        raise SocketError(
            f"cannot listen on {path}: {error.strerror}; check listen.socket and its permissions"
        ) from error
    return made


def remove(path: str) -> None:
    """Remove a socket file, if it is there."""
    Path(path).unlink(missing_ok=True)
