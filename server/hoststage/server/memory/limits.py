"""What the node allows: physical memory, cgroup limits (v1 and v2), locked memory, huge pages, swap."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from hoststage.server.memory.arena import swap_bytes

_UNLIMITED = 1 << 60
_HEADROOM_FRACTION = 8


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


def default_budget(limits: NodeLimits) -> BudgetBasis:
    """Return what may be pinned when nobody says: what is free within the tightest limit, less an eighth for everything else."""
    free, basis = limits.available_bytes, "available memory"
    if limits.cgroup_limit_bytes >= 0:
        room = max(0, limits.cgroup_limit_bytes - limits.cgroup_used_bytes)
        if room < free:
            free, basis = room, f"the cgroup limit in {limits.cgroup_source}, less what is used"
    budget = free - free // _HEADROOM_FRACTION
    return BudgetBasis(budget, f"7/8 of {free} bytes: {basis}")


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
    """Return the tightest memory limit of this process's cgroups, what is used under it, and its file."""
    best = (-1, 0, "")
    for limit_file, used_file in _cgroup_files(base):
        limit, used = _number(limit_file), _number(used_file)
        if limit is None or limit >= _UNLIMITED:
            continue
        room = limit - (used or 0)
        if best[0] < 0 or room < best[0] - best[1]:
            best = (limit, used or 0, str(limit_file))
    return best


def _cgroup_files(base: Path) -> list[tuple[Path, Path]]:
    try:
        lines = (base / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = path.strip("/").split("/") if path.strip("/") else []
        if controllers == "":
            top, limit, used = base / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = base / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A limit anywhere up the tree binds; inside a container only the root of its own view may exist.
        for depth in range(len(names), -1, -1):
            folder = top.joinpath(*names[:depth])
            out.append((folder / limit, folder / used))
    return out


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None
