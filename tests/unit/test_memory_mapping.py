"""A mapping shows chunks side by side, lets nobody touch what is gone, and refuses what it cannot show safely."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hoststage.shm.mapping import HUGE_PAGE_BYTES, Chunk, Mapping, MappingError

PAGE = 4096


@pytest.fixture
def chunks():
    made = []
    for size in (3 * PAGE, PAGE, 2 * PAGE):
        fd = os.memfd_create("test")
        os.ftruncate(fd, size)
        made.append(Chunk(fd, size))
    yield made
    for chunk in made:
        os.close(chunk.fd)


@pytest.fixture
def mapping(chunks):
    made = Mapping.map(chunks, writable=True)
    yield made
    made.unmap()


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_chunks_lie_side_by_side_in_order(chunks, mapping):
    for number, chunk in enumerate(chunks):
        os.pwrite(chunk.fd, bytes([number + 1]) * chunk.size, 0)
    assert bytes(mapping.view()) == b"\1" * 3 * PAGE + b"\2" * PAGE + b"\3" * 2 * PAGE
    assert mapping.address % HUGE_PAGE_BYTES == 0


def test_the_descriptors_may_be_closed(chunks):
    dup = [Chunk(os.dup(c.fd), c.size) for c in chunks]
    mapping = Mapping.map(dup, writable=True)
    for chunk in dup:
        os.close(chunk.fd)
    mapping.view(3 * PAGE, 2)[:] = b"ok"
    assert os.pread(chunks[1].fd, 2, 0) == b"ok"
    mapping.unmap()


def test_a_read_only_mapping_gives_read_only_views_and_arrays(chunks):
    mapping = Mapping.map(chunks, writable=False)
    view, array = mapping.view(0, 8), mapping.array(0, 2, np.float32)
    assert view.readonly
    assert not array.flags.writeable
    with pytest.raises(TypeError):
        view[0] = 1
    del view, array
    assert mapping.unmap()


def test_a_view_across_the_end_or_before_the_start_is_refused(mapping):
    assert mapping.view(mapping.size, 0).nbytes == 0
    for offset, length in ((mapping.size - 1, 2), (-1, 1), (0, -1), (mapping.size + 1, 0)):
        with pytest.raises(ValueError, match="outside a mapping"):
            mapping.view(offset, length)
    with pytest.raises(ValueError, match="outside"):
        mapping.array(mapping.size - 4, 2, np.float32)


def test_a_view_keeps_the_range_until_it_dies(chunks):
    mapping = Mapping.map(chunks, writable=True)
    array = mapping.array(0, 4)[1:3]
    assert mapping.has_views
    assert not mapping.unmap()
    assert mapping.resident
    assert not mapping.mapped
    array[:] = 7  # would crash, were the range gone
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 1)
    del array
    assert not mapping.resident
    assert not is_mapped(mapping.address)
    assert mapping.unmap()


def test_unmapping_twice_takes_nobody_elses_range(chunks):
    first = Mapping.map(chunks, writable=True)
    assert first.unmap()
    second = Mapping.map(chunks, writable=True)  # the kernel tends to give the same address again
    assert first.unmap()
    assert is_mapped(second.address)
    second.unmap()


@pytest.mark.parametrize("size", [0, -PAGE, PAGE + 1])
def test_a_chunk_size_that_cannot_be_mapped_is_named(chunks, size):
    with pytest.raises(MappingError, match=f"size {size} is not a positive multiple"):
        Mapping.map([Chunk(chunks[0].fd, size)], writable=False)


def test_a_descriptor_that_is_too_small_or_none_is_refused_before_mapping(chunks):
    with pytest.raises(MappingError, match=f"has {PAGE} bytes, {2 * PAGE} expected"):
        Mapping.map([chunks[0], Chunk(chunks[1].fd, 2 * PAGE)], writable=False)
    with pytest.raises(MappingError, match="not a usable memfd"):
        Mapping.map([Chunk(10_000, PAGE)], writable=False)
    with pytest.raises(MappingError, match="at least one chunk"):
        Mapping.map([], writable=False)


def test_a_plain_file_does_not_pass_where_seals_are_demanded(tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(MappingError, match="not a usable memfd"):
        Mapping.map([Chunk(fd, PAGE)], writable=False, require_seals=True)
    os.close(fd)


def test_a_refused_mapping_leaves_no_reservation_behind(chunks, tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with pytest.raises(MappingError, match="refuses a writable mapping"):
            Mapping.map([chunks[0], Chunk(fd, PAGE)], writable=True)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 3
    os.close(fd)


FORK = """
import os, signal, sys
from hoststage.shm.mapping import Chunk, Mapping
fd = os.memfd_create("x")
os.ftruncate(fd, 4096)
mapping = Mapping.map([Chunk(fd, 4096)], writable=True, private_to_process=True)
pid = os.fork()
if pid == 0:
    mapping.view(0, 1)[0] = 1
    os._exit(0)
_, status = os.waitpid(pid, 0)
print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, mapping.view(0, 1)[0])
"""


def test_a_forked_child_cannot_touch_a_private_mapping():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env=os.environ | {"PYTHONPATH": str(root / "proto")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["True", "0"], done.stderr
