"""Why nobody answers at an address, in words that say what to do."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

_PREFACES = ("failed to connect to all addresses", "errors resolving ")
_DENIED = os.strerror(errno.EACCES)


def unreachable(address: str, details: str) -> str:
    """Return the message for an address where nobody answers; `details`: gRPC's own words."""
    reason = cause_of(details)
    if address.startswith("unix:") and reason == _DENIED:
        return _denied(_path(address))
    return (
        f"no daemon answers at {address}: {reason or 'no reason given'}; "
        "is `hoststage serve` running, and is the address right?"
    )


def cause_of(details: str) -> str:
    """Return what the system said, where gRPC repeats the address and its own state around it; other words as they are."""
    if not details.startswith(_PREFACES):
        return details
    return details.rstrip("]").rpartition(": ")[2]


def _path(address: str) -> Path:
    rest = address.removeprefix("unix:")
    # unix:///path has an empty authority; unix:path may be relative.
    return Path(rest.removeprefix("//"))


def _denied(path: Path) -> str:
    user = f"user {_user(os.geteuid())}"
    try:
        found = path.stat()
    except OSError:
        # A folder above it is what keeps us out.
        return (
            f"the daemon's socket {path} may not be opened by {user}: a folder above it may not be entered; "
            "join the group of that folder, or have its mode changed"
        )
    group = _group(found.st_gid)
    mode = f"{stat.S_IMODE(found.st_mode):04o}, owner {_user(found.st_uid)}, group {group}"
    return (
        f"the daemon's socket {path} may not be opened by {user}: its mode is {mode}; "
        f"join the group {group}, or set listen.socket_mode at the daemon"
    )


def _user(uid: int) -> str:
    with suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    return str(uid)


def _group(gid: int) -> str:
    with suppress(KeyError):
        return f"{grp.getgrgid(gid).gr_name} ({gid})"
    return str(gid)
