"""What the node allows is read from /proc and the cgroups, version 1 and 2, as a container sees them."""

from pathlib import Path

import pytest

from hoststage.server.memory.arena import numa_nodes
from hoststage.server.memory.limits import default_budget, detect_limits, free_bytes, shared_bytes, swap_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", _meminfo(total=64, available=48))
    return tmp_path


def _meminfo(total: int, available: int, swap: int = 0, huge: int = 0) -> str:
    return (
        f"MemTotal: {total << 20} kB\nMemAvailable: {available << 20} kB\nSwapTotal: {swap << 20} kB\n"
        f"HugePages_Free: {huge}\nHugepagesize: 2048 kB\n"
    )


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_without_cgroups_the_host_is_the_limit(root):
    limits = detect_limits(str(root))
    assert (limits.total_bytes, limits.available_bytes) == (64 * GIB, 48 * GIB)
    assert limits.cgroup_limit_bytes == -1
    assert free_bytes(str(root)) == 48 * GIB


def test_the_tightest_limit_up_a_v2_tree_binds(root):
    write(root, "proc/self/cgroup", "0::/kubepods/pod1/ctr\n")
    write(root, "sys/fs/cgroup/kubepods/pod1/ctr/memory.max", "max\n")
    write(root, "sys/fs/cgroup/kubepods/pod1/ctr/memory.current", f"{1 * GIB}\n")
    write(root, "sys/fs/cgroup/kubepods/pod1/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/kubepods/pod1/memory.current", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/kubepods/memory.max", f"{40 * GIB}\n")
    write(root, "sys/fs/cgroup/kubepods/memory.current", f"{10 * GIB}\n")
    limits = detect_limits(str(root))
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (8 * GIB, 3 * GIB)
    assert limits.cgroup_source.endswith("pod1/memory.max")
    assert free_bytes(str(root)) == 5 * GIB


def test_the_throttling_limit_binds_as_the_hard_one_does(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.high", f"{6 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", "0\n")
    assert detect_limits(str(root)).cgroup_limit_bytes == 6 * GIB


def test_droppable_cache_does_not_count_as_used(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{7 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {5 * GIB}\n")
    assert detect_limits(str(root)).cgroup_used_bytes == 2 * GIB


def test_a_v1_container_that_sees_only_its_own_root_still_has_its_limit(root):
    # The path is the host's, the mount shows the container's own group at its top.
    write(root, "proc/self/cgroup", "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {1 * GIB}\n")
    limits = detect_limits(str(root))
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (4 * GIB, 2 * GIB)


def test_the_v1_word_for_unlimited_is_no_limit(root):
    write(root, "proc/self/cgroup", "4:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert detect_limits(str(root)).cgroup_limit_bytes == -1


def test_a_group_already_over_its_limit_leaves_nothing(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
    assert free_bytes(str(root)) == 0
    assert default_budget(detect_limits(str(root))).bytes == 0


def test_the_default_budget_names_the_file_that_binds_it(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{16 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", "0\n")
    basis = default_budget(detect_limits(str(root)))
    assert basis.bytes == 14 * GIB
    assert "memory.max" in basis.why


def test_the_default_budget_of_a_host_is_under_what_is_available(root):
    basis = default_budget(detect_limits(str(root)))
    assert 0 < basis.bytes < 48 * GIB
    assert "available" in basis.why


def test_swap_and_huge_pages_are_read(root):
    write(root, "proc/meminfo", _meminfo(total=64, available=48, swap=2, huge=17))
    assert swap_bytes(str(root)) == 2 * GIB
    assert detect_limits(str(root)).huge_pages_free == 17


def test_unreadable_files_count_as_absent(tmp_path):
    limits = detect_limits(str(tmp_path))
    assert (limits.total_bytes, limits.cgroup_limit_bytes, limits.swap_bytes) == (0, -1, 0)


def test_the_real_node_is_plausible():
    limits = detect_limits()
    assert 0 < limits.available_bytes <= limits.total_bytes
    assert 0 < free_bytes() <= limits.total_bytes


def test_only_nodes_with_memory_that_this_process_may_use_are_chosen(root):
    write(root, "sys/devices/system/node/has_memory", "0-1,3\n")
    write(root, "proc/self/status", "Name:\tx\nMems_allowed_list:\t1-3\n")
    assert numa_nodes(str(root)) == (1, 3)


def test_shared_memory_is_what_lies_in_memory_in_huge_pages_and_in_swap(tmp_path):
    lines = (
        "Shmem: 1000 kB",
        "SwapTotal: 50 kB",
        "SwapFree: 20 kB",
        "HugePages_Total: 4",
        "HugePages_Free: 1",
        "Hugepagesize: 2048 kB",
    )
    write(tmp_path, "proc/meminfo", "\n".join(lines))
    assert shared_bytes(str(tmp_path)) == (1000 + 30 + 3 * 2048) * 1024
    assert shared_bytes(str(tmp_path / "nothing")) > 1 << 50
