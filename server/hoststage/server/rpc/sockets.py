"""Filesystem sockets: made with the right permissions, never taken from a daemon that lives, removed at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path

MAX_PATH_BYTES = 107
BACKLOG = 1024


class SocketError(Exception):
    """A socket cannot be made; the message names the path and the remedy."""


@dataclass(frozen=True, slots=True)
class Owned:
    """The right to a socket path, held for a daemon's life by a lock beside it: of two daemons started at once, one gets it."""

    path: str
    lock_fd: int

    @classmethod
    def take(cls, path: str) -> Owned:
        """Own `path` and make room there. Raises `SocketError`."""
        check_length(path)
        _make_folder(path)
        lock = _lock_path(path)
        while True:
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SocketError(
                    f"cannot open {lock}: {error.strerror}; set listen.socket to a writable place"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                raise SocketError(f"another daemon listens on {path}; stop it or set listen.socket") from error
            if _same_file(fd, lock):
                break
            # The former owner removed the file between our opening and our locking it.
            os.close(fd)
        try:
            claim(path)
        except SocketError:
            os.close(fd)
            raise
        return cls(path, fd)

    def release(self) -> None:
        """Give the path up."""
        Path(_lock_path(self.path)).unlink(missing_ok=True)
        os.close(self.lock_fd)


def _lock_path(path: str) -> str:
    return path + ".lock"


def _same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def check_length(path: str) -> None:
    """Refuse a path that no socket can have. Raises `SocketError`."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SocketError(
            f"the socket path {path} has more than {MAX_PATH_BYTES} bytes; choose a shorter listen.socket"
        )


def _make_folder(path: str) -> None:
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SocketError(f"cannot make {folder}: {error.strerror}; set listen.socket to a writable place") from error


def claim(path: str) -> None:
    """Make room for a socket at `path`: its folder exists, no live daemon owns it, a stale one is gone. Raises `SocketError`."""
    check_length(path)
    _make_folder(path)
    file = Path(path)
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


def listen(path: str, mode: int, backlog: int = BACKLOG) -> socket.socket:
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
