"""`hoststage doctor`: what this machine offers a daemon, and what to change."""

from __future__ import annotations

import json
import os
import platform
import socket as sockets
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console
from rich.table import Table

from hoststage.cli.remote import FAILED, settings_of
from hoststage.cli.status import human
from hoststage.server.config import Settings
from hoststage.server.memory.limits import default_budget, detect_limits, doubt_of_budget
from hoststage.shm.peer import peer_pidfd

HUGE_PAGE_BYTES = 2 << 20


class Health(Enum):
    OK = "ok"
    NOTE = "note"
    """The daemon works, but not as well as it could."""
    BAD = "bad"
    """The daemon cannot start, or not with these settings."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about one thing, and what to do about it."""

    name: str
    health: Health
    found: str
    remedy: str = ""


def doctor(
    config: Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")] = "",
    socket: Annotated[str, typer.Option(help="Path of the gRPC Unix socket (listen.socket).")] = "",
    store: Annotated[str, typer.Option(help="file:///path, memory: or none (store.url).")] = "",
    budget: Annotated[str, typer.Option(help='Pinned memory, e.g. 8GiB, or "auto" (memory.budget).')] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, as section.name=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine through the eyes of the daemon that `serve` with the same options starts; exit with 1 where it could not."""
    named = {"listen.socket": socket, "store.url": store, "memory.budget": budget}
    settings = settings_of(config, named, set_)
    checks = [check(settings) for check in CHECKS]
    if as_json:
        print(json.dumps({"checks": [{**asdict(c), "health": c.health.value} for c in checks]}))
    else:
        _show(checks)
    if any(c.health is Health.BAD for c in checks):
        raise typer.Exit(FAILED)


def _show(checks: list[Check]) -> None:
    table = Table()
    for name in ("what", "", "found", "remedy"):
        table.add_column(name, overflow="fold")
    style = {Health.OK: "green", Health.NOTE: "yellow", Health.BAD: "bold red"}
    for c in checks:
        table.add_row(c.name, f"[{style[c.health]}]{c.health.value}[/]", c.found, c.remedy)
    Console().print(table)


# ------------------------------------------------------------------ memory


def budget(settings: Settings) -> Check:
    """The budget against what is free."""
    limits = detect_limits()
    basis = default_budget(limits)
    wanted = settings.memory.budget
    if not wanted:
        health = Health.OK if basis.bytes >= 1 << 30 else Health.NOTE
        remedy = "" if health is Health.OK else "free memory, or give the container more"
        return Check("memory budget", health, f"auto: {human(basis.bytes)} ({basis.why})", remedy)
    doubt = doubt_of_budget(wanted, limits)
    if doubt is not None:
        health = Health.BAD if wanted > doubt.bound else Health.NOTE
        found = f"{human(wanted)} configured, against {human(doubt.bound)}: {doubt.why}"
        return Check("memory budget", health, found, "correct memory.budget, or leave it at auto")
    if wanted > limits.available_bytes:
        return Check(
            "memory budget",
            Health.BAD,
            f"{human(wanted)} configured, {human(limits.available_bytes)} available",
            "lower memory.budget, or free memory",
        )
    return Check("memory budget", Health.OK, f"{human(wanted)} configured, {human(limits.available_bytes)} available")


def cgroup(settings: Settings) -> Check:
    """The cgroup limit, which must hold the arenas: whoever touches a page first is charged for it."""
    limits = detect_limits()
    if limits.cgroup_limit_bytes < 0:
        return Check("cgroup memory limit", Health.OK, "none")
    room = limits.cgroup_limit_bytes - limits.cgroup_used_bytes
    found = f"{human(limits.cgroup_limit_bytes)}, {human(max(room, 0))} unused ({limits.cgroup_source})"
    if settings.memory.budget > room:
        return Check("cgroup memory limit", Health.BAD, found, "raise the container's limit or lower memory.budget")
    return Check("cgroup memory limit", Health.OK, found)


def memlock(settings: Settings) -> Check:
    """Whether arenas can be locked."""
    limits = detect_limits()
    if not settings.memory.lock:
        return Check("locked memory", Health.NOTE, "memory.lock is off", "set memory.lock = true")
    if limits.memlock_bytes < 0 or os.geteuid() == 0:
        return Check("locked memory", Health.OK, "unlimited" if limits.memlock_bytes < 0 else "unlimited for root")
    return Check(
        "locked memory",
        Health.NOTE,
        f"RLIMIT_MEMLOCK is {human(limits.memlock_bytes)}",
        "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers); without swap, resident memory does as well",
    )


def swap(_: Settings) -> Check:
    """Swap, which makes resident memory less than pinned."""
    size = detect_limits().swap_bytes
    if not size:
        return Check("swap", Health.OK, "none: populated memory stays")
    return Check("swap", Health.NOTE, human(size), "swapoff -a, or MemorySwapMax=0, unless arenas are locked")


def huge_pages(settings: Settings) -> Check:
    """Huge pages of the host."""
    free = detect_limits().huge_pages_free
    if free:
        return Check("huge pages", Health.OK, f"{free} free of 2 MiB: {human(free * HUGE_PAGE_BYTES)}")
    required = settings.memory.huge_pages == "required"
    want = settings.memory.budget or default_budget(detect_limits()).bytes
    return Check(
        "huge pages",
        Health.BAD if required else Health.NOTE,
        "none reserved" if required else "none reserved; the kernel makes them as far as it can",
        f"sysctl vm.nr_hugepages={-(-want // HUGE_PAGE_BYTES)} holds the whole budget",
    )


def cuda(_: Settings) -> Check:
    """CUDA, which only the workers need."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("CUDA", Health.OK, "no driver; the daemon needs none")
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return Check("CUDA", Health.NOTE, "a driver that does not start", "see nvidia-smi; the daemon needs none")
    return Check("CUDA", Health.OK, f"{count.value} devices")


# ------------------------------------------------------------------ sockets and store


def pidfd(_: Settings) -> Check:
    """Whether the kernel tells which process is at the other end of a socket."""
    with tempfile.TemporaryDirectory() as folder, sockets.socket(sockets.AF_UNIX) as server:
        path = os.path.join(folder, "s")
        server.bind(path)
        server.listen(1)
        with sockets.socket(sockets.AF_UNIX) as client:
            client.connect(path)
            peer, _address = server.accept()
            with peer:
                found = peer_pidfd(peer)
    if found is None:
        return Check(
            "SO_PEERPIDFD",
            Health.NOTE,
            f"not in kernel {platform.release()}; clients send their own pidfd",
            "Linux 6.5 or later",
        )
    os.close(found)
    return Check("SO_PEERPIDFD", Health.OK, f"kernel {platform.release()}")


def socket_folder(settings: Settings) -> Check:
    """The folder of the sockets."""
    from hoststage.server.rpc.sockets import MAX_PATH_BYTES

    name, path = "socket folder", settings.listen.socket
    longest = max(
        (path, settings.listen.fd_path, settings.listen.lane_path, settings.listen.data_path),
        key=lambda p: len(os.fsencode(p)),
    )
    if len(os.fsencode(longest)) > MAX_PATH_BYTES:
        return Check(name, Health.BAD, f"{longest} has more than {MAX_PATH_BYTES} bytes", "a shorter listen.socket")
    folder = Path(path).parent
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(
            name, Health.BAD, f"{there} is not writable", f"create {folder} for this user, or set listen.socket"
        )
    return Check(name, Health.OK, str(folder) if there == folder else f"{folder} (will be made)")


def store(settings: Settings) -> Check:
    """The store's directory: there, writable, direct I/O, room."""
    url, name = settings.store.url, "store"
    if not url.startswith("file:"):
        return Check(name, Health.NOTE, url or "none", "file:///path keeps pages over a restart")
    path = Path(unquote(urlsplit(url).path))
    if not path.is_dir():
        if settings.store.create_directory:
            return Check(name, Health.OK, f"{path} (will be made)")
        return Check(name, Health.BAD, f"{path} is no directory", f"mkdir {path}, or set store.create_directory = true")
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(name, Health.BAD, f"{path} is not writable", f"chown or chmod {path}")
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    if free <= settings.store.min_free:
        return Check(
            name,
            Health.BAD,
            f"{path}: {human(free)} free, store.min_free is {human(settings.store.min_free)}",
            "free room, or lower store.min_free",
        )
    return _direct_io(settings, path, free)


def _direct_io(settings: Settings, path: Path, free: int) -> Check:
    direct = True
    with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-") as probe:
        try:
            os.close(os.open(probe.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            direct = False
    found = f"{path}: {human(free)} free, {'' if direct else 'no '}direct I/O"
    if direct:
        return Check("store", Health.OK, found)
    required = settings.store.direct_io == "required"
    return Check(
        "store", Health.BAD if required else Health.NOTE, found, "a file system with O_DIRECT (ext4, xfs), not tmpfs"
    )


def descriptors(_: Settings) -> Check:
    """How many descriptors a process may hold."""
    import resource

    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The daemon raises its own soft limit as far as that.
    if hard >= 4096 or hard == resource.RLIM_INFINITY:
        return Check("open files", Health.OK, str(hard))
    return Check("open files", Health.NOTE, str(hard), "LimitNOFILE=65536: each session holds several descriptors")


CHECKS: tuple[Callable[[Settings], Check], ...] = (
    budget,
    cgroup,
    memlock,
    swap,
    huge_pages,
    cuda,
    pidfd,
    socket_folder,
    store,
    descriptors,
)
