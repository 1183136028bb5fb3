"""The directory of a file store: whether it can be used, who holds it, and what kind of I/O it allows."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import Final

from hoststage.server.store.errors import StoreConfigError
from hoststage.server.store.file.layout import BLOCK, FORMAT_VERSION
from hoststage.server.store.file.syscalls import AlignedBuffer
from hoststage.server.store.options import DirectIo

FIELD: Final = "store.url"
_FORMAT_FILE: Final = "FORMAT"
_FORMAT_LINE: Final = re.compile(r"hoststage-file-store (\d+)\n?")

_PROBLEMS: Final = {
    errno.ENOENT: (
        "The directory does not exist.",
        "Create it, set store.create_directory=true, or mount the disk that holds it.",
    ),
    errno.ENOTDIR: ("It is not a directory.", "Name a directory that the store may have for itself."),
    errno.EACCES: (
        "The daemon's user may not use it.",
        "Give that user read, write and search permission on it (in Kubernetes: fsGroup).",
    ),
    errno.EPERM: ("The system forbids the daemon's user to use it.", "Give that user permission on it."),
    errno.EROFS: ("The file system is mounted read-only.", "Mount it read-write, or name another directory."),
    errno.ENOSPC: ("The disk is full.", "Make room on it, or name a directory on another disk."),
    errno.EDQUOT: ("The disk quota is used up.", "Raise the quota, or name a directory on another disk."),
    errno.ENAMETOOLONG: ("The path is too long.", "Name a directory with a shorter path."),
    errno.ELOOP: ("The path has a loop of symbolic links.", "Name the directory itself."),
    errno.EIO: ("The disk answers with I/O errors.", "Check the disk and the kernel's log."),
}


def config_error(path: Path, error: OSError) -> StoreConfigError:
    """Return the error that tells a person what an ``OSError`` at start means."""
    default = (f"{error.strerror or error}.", "Check the path and its file system.")
    problem, remedy = _PROBLEMS.get(error.errno or 0, default)
    return StoreConfigError(FIELD, str(path), problem, remedy)


class StoreDirectory:
    """An exclusively held store directory. Blocking; created and closed off the event loop."""

    def __init__(self, root: Path, direct_io: DirectIo) -> None:
        """Check and lock ``root``. Raises ``StoreConfigError``, and then holds nothing."""
        self.root = root
        self.base = root / f"v{FORMAT_VERSION}"
        self.notices: list[str] = []
        self._lock_fd = -1
        try:
            self._enter()
            self.direct_io = self._choose_direct_io(direct_io)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise config_error(root, error) from error
            raise

    @property
    def open_flags(self) -> int:
        """The flags beyond reading and writing with which segments are opened."""
        return os.O_DIRECT if self.direct_io else 0

    def close(self) -> None:
        """Let another daemon have the directory."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _enter(self) -> None:
        os.listdir(self.root)  # unreadable, missing or no directory: the errno says which
        if not os.access(self.root, os.W_OK | os.X_OK, effective_ids=True):
            read_only = os.statvfs(self.root).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            raise OSError(code, os.strerror(code))
        self._check_format()
        self._lock()
        self._write_format()
        self.base.mkdir(mode=0o700, exist_ok=True)

    def _lock(self) -> None:
        self._lock_fd = os.open(self.root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 512, 0).decode(errors="replace").strip() or "another process"
            raise StoreConfigError(
                FIELD,
                str(self.root),
                f"The directory is in use by {holder}.",
                "Stop that daemon, or give each daemon a directory of its own.",
            ) from error
        # Always of one length, so that on a full disk it replaces the last one in place.
        claim = f"pid {os.getpid()} on host {socket.gethostname()[:64]}".ljust(127).encode() + b"\n"
        if os.pwrite(self._lock_fd, claim, 0) != len(claim):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _check_format(self) -> None:
        try:
            text = (self.root / _FORMAT_FILE).read_text(errors="replace")
        except FileNotFoundError:
            return
        match = _FORMAT_LINE.fullmatch(text)
        if match and int(match[1]) <= FORMAT_VERSION:
            return
        if match:
            problem = f"It was written in format {match[1]}, and this version knows up to {FORMAT_VERSION}."
            remedy = "Run the version that wrote it, or name an empty directory."
        else:
            problem = f"Its file {_FORMAT_FILE} is not that of a hoststage store."
            remedy = "Name an empty directory, or one that hoststage wrote."
        raise StoreConfigError(FIELD, str(self.root), problem, remedy)

    def _write_format(self) -> None:
        path = self.root / _FORMAT_FILE
        if path.exists():
            return
        temporary = path.with_suffix(".new")
        temporary.write_text(f"hoststage-file-store {FORMAT_VERSION}\n")
        temporary.rename(path)

    def _choose_direct_io(self, wanted: DirectIo) -> bool:
        if wanted is DirectIo.OFF:
            return False
        reason = self._try_direct_io()
        if not reason:
            return True
        if wanted is DirectIo.REQUIRED:
            raise StoreConfigError(
                "store.direct_io",
                wanted.value,
                f"The file system under {self.root} does not allow direct I/O ({reason}).",
                "Set it to auto, or use a directory on ext4 or XFS.",
            )
        self.notices.append(f"The file system does not allow direct I/O ({reason}): the page cache is used.")
        return False

    def _try_direct_io(self) -> str:
        """Return why direct I/O of one block fails here; nothing if it works."""
        path = self.base / ".probe"
        buffer = AlignedBuffer(BLOCK)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, buffer.view, 0)
                os.preadv(fd, [buffer.view], 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return error.strerror or "refused"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk may still be read from
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return ""
