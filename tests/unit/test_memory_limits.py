"""The node's limits, read from a made-up /proc and /sys."""

import pytest

from hoststage.server.memory.arena import MemoryPolicy, numa_nodes
from hoststage.server.memory.limits import NodeLimits, default_budget, detect_limits, doubt_of_budget

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    def put(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\nSwapTotal: 0 kB\nHugePages_Free: 7\n")
    put("proc/self/cgroup", "")
    return type("Root", (), {"path": str(tmp_path), "put": staticmethod(put)})


def test_without_a_cgroup_limit_the_budget_follows_available_memory(root):
    limits = detect_limits(root.path)
    assert (limits.total_bytes, limits.available_bytes) == (64 * GIB, 32 * GIB)
    assert (limits.cgroup_limit_bytes, limits.huge_pages_free, limits.swap_bytes) == (-1, 7, 0)
    assert default_budget(limits).bytes == 28 * GIB


def test_the_tightest_limit_up_the_version_2_tree_binds(root):
    root.put("proc/self/cgroup", "0::/pod/container\n")
    root.put("sys/fs/cgroup/pod/memory.max", str(8 * GIB))
    root.put("sys/fs/cgroup/pod/memory.current", str(1 * GIB))
    root.put("sys/fs/cgroup/pod/container/memory.max", "max")
    limits = detect_limits(root.path)
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (8 * GIB, 1 * GIB)
    basis = default_budget(limits)
    assert basis.bytes == 7 * GIB - 7 * GIB // 8
    assert "pod/memory.max" in basis.why


def test_version_1_limits_bind_and_its_huge_number_means_none(root):
    root.put("proc/self/cgroup", "4:memory:/job\n2:cpu:/job\n")
    root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", str(9223372036854771712))
    root.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(4 * GIB))
    root.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "0")
    assert detect_limits(root.path).cgroup_limit_bytes == 4 * GIB


def test_inside_a_container_only_the_root_of_the_tree_may_exist(root):
    root.put("proc/self/cgroup", "0::/../../not/visible\n")
    root.put("sys/fs/cgroup/memory.max", str(2 * GIB))
    root.put("sys/fs/cgroup/memory.current", str(GIB))
    assert detect_limits(root.path).cgroup_limit_bytes == 2 * GIB


def test_what_cannot_be_read_counts_as_absent(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("nonsense")
    limits = detect_limits(str(tmp_path))
    assert (limits.total_bytes, limits.cgroup_limit_bytes) == (0, -1)
    assert default_budget(limits).bytes == 0


@pytest.mark.parametrize(("text", "nodes"), [("0", (0,)), ("0-1", (0, 1)), ("0,2-3", (0, 2, 3)), ("", (0,))])
def test_numa_nodes_are_read_as_the_kernel_writes_them(root, text, nodes):
    root.put("sys/devices/system/node/has_memory", text)
    assert numa_nodes(root.path) == nodes


def test_a_chunk_must_be_a_multiple_of_a_huge_page():
    with pytest.raises(ValueError, match="multiple"):
        MemoryPolicy(chunk_bytes=3 << 20 | 1)


@pytest.mark.parametrize(
    ("budget", "total", "cgroup", "bound"),
    [
        (9 << 30, 8 << 30, -1, 8 << 30),
        (5 << 30, 8 << 30, 4 << 30, 4 << 30),
        (8, 8 << 30, -1, 1 << 20),
        (8 << 30, 8 << 30, -1, 0),
        (4 << 30, 8 << 30, 4 << 30, 0),
        (1 << 20, 8 << 30, -1, 0),
        (8 << 30, 0, -1, 0),
    ],
)
def test_a_budget_beyond_the_node_or_its_cgroup_or_too_small_is_doubted(budget, total, cgroup, bound):
    doubt = doubt_of_budget(budget, NodeLimits(total, total, cgroup, 0, "memory.max", 0, -1, 0))
    assert (doubt.bound if doubt else 0) == bound
    assert doubt is None or doubt.bytes == budget
    assert doubt is None or ("memory.max" in doubt.why) == (bound == cgroup)
