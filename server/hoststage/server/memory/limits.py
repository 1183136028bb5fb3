"""What the node allows: physical memory, cgroup limits (v1 and v2), locked memory, huge pages, swap."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
_HEADROOM_FRACTION = 8
_LEAST_BUDGET = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Bytes, -1 for "no limit". `cgroup_source`: the file that the cgroup limit was read from, or empty."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int
    cgroup_used_bytes: int
    cgroup_source: str
    huge_pages_free: int
    memlock_bytes: int
    swap_bytes: int


@dataclass(frozen=True, slots=True)
class BudgetBasis:
    """A default budget, and in words how it came about."""

    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class BudgetDoubt:
    """A budget in bytes, the bound in bytes that it crosses, and in words why that is doubtful."""

    bytes: int
    bound: int
    why: str


def detect_limits(root: str = "/") -> NodeLimits:
    """Read the node's limits. `root` stands for "/" in tests. What cannot be read counts as absent."""
    base = Path(root)
    info = _meminfo(base / "proc/meminfo")
    limit, used, source = _cgroup(base)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return NodeLimits(
        info.get("MemTotal", 0),
        info.get("MemAvailable", 0),
        limit,
        used,
        source,
        info.get("HugePages_Free", 0) // 1024,
        -1 if soft == resource.RLIM_INFINITY else soft,
        swap_bytes(root),
    )


def free_bytes(root: str = "/") -> int:
    """Return what can be taken now: available on the host, and within the tightest limit of this process's cgroups."""
    base = Path(root)
    # Where the kernel does not say, it is left to populating to find out.
    available = _meminfo(base / "proc/meminfo").get("MemAvailable", _UNLIMITED)
    limit, used, _ = _cgroup(base)
    return available if limit < 0 else max(0, min(available, limit - used))


def shared_bytes(root: str = "/") -> int:
    """Return the most that all shared memory on this host can come to now: in memory, in huge pages, and swapped out."""
    info = _meminfo(Path(root) / "proc/meminfo")
    if "Shmem" not in info:
        return _UNLIMITED
    huge = (info.get("HugePages_Total", 0) - info.get("HugePages_Free", 0)) // 1024 * info.get("Hugepagesize", 0)
    return info["Shmem"] + huge + info.get("SwapTotal", 0) - info.get("SwapFree", 0)


def swap_bytes(root: str = "/") -> int:
    """Return how much swap this host has."""
    return _meminfo(Path(root) / "proc/meminfo").get("SwapTotal", 0)


def default_budget(limits: NodeLimits) -> BudgetBasis:
    """Return what may be pinned when nobody says: what is free within the tightest limit, less an eighth for everything else."""
    free, basis = limits.available_bytes, "available memory"
    if limits.cgroup_limit_bytes >= 0:
        room = max(0, limits.cgroup_limit_bytes - limits.cgroup_used_bytes)
        if room < free:
            free, basis = room, f"the cgroup limit in {limits.cgroup_source}, less what is used"
    budget = free - free // _HEADROOM_FRACTION
    return BudgetBasis(budget, f"7/8 of {free} bytes: {basis}")


def doubt_of_budget(budget: int, limits: NodeLimits) -> BudgetDoubt | None:
    """Return why a budget that somebody set can hardly be meant: more than the node or its cgroup has, or too little for any arena."""
    bound, what = limits.total_bytes, "the node's memory"
    if 0 <= limits.cgroup_limit_bytes < bound:
        bound, what = limits.cgroup_limit_bytes, f"the cgroup limit in {limits.cgroup_source}"
    if bound and budget > bound:
        return BudgetDoubt(
            budget, bound, f"it is larger than {what}: arenas will fail to populate, or the daemon be killed"
        )
    if budget < _LEAST_BUDGET:
        return BudgetDoubt(budget, _LEAST_BUDGET, "it is smaller than 1 MiB and holds no arena; was a unit forgotten?")
    return None


def _meminfo(path: Path) -> dict[str, int]:
    """Values in bytes (counts of pages times 1024, as all lines are read alike)."""
    out = {}
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            out[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return out
    return out


def _cgroup(base: Path) -> tuple[int, int, str]:
    """Return the tightest memory limit of this process's cgroups, what is used under it, and its file.

    Cached file pages that the kernel would drop first do not count as used.
    """
    best = (-1, 0, "")
    for limit_file, used_file in _cgroup_files(base):
        limit, used = _number(limit_file), _number(used_file) or 0
        if limit is None or limit >= _UNLIMITED:
            continue
        used = max(0, used - _droppable(limit_file.parent / "memory.stat"))
        if best[0] < 0 or limit - used < best[0] - best[1]:
            best = (limit, used, str(limit_file))
    return best


def _droppable(stat: Path) -> int:
    """Return the bytes of inactive file pages of a cgroup and those below it."""
    try:
        lines = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


def _cgroup_files(base: Path) -> list[tuple[Path, Path]]:
    try:
        lines = (base / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[tuple[Path, Path]] = []
    limits: tuple[str, ...]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = path.strip("/").split("/") if path.strip("/") else []
        if controllers == "":
            # Above memory.high the kernel stalls whoever allocates, and memory that cannot be reclaimed stays above it.
            top, limits, used = base / "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            top = base / "sys/fs/cgroup/memory"
            limits, used = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        # A limit anywhere up the tree binds; inside a container only the root of its own view may exist.
        for depth in range(len(names), -1, -1):
            folder = top.joinpath(*names[:depth])
            out.extend((folder / limit, folder / used) for limit in limits)
    return out


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None
