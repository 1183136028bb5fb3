"""Memory of the client's own that is registered with CUDA: the daemon writes it by descriptor, the device reads it; skipped where there is no device."""

import mmap
import os

import numpy as np
import pytest

from hoststage.client import Identity, ImportedPages, PayloadPath, PoolKind, PoolSpec, StackSpec, connect
from tests.integration.daemon import Daemon

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE, PAGES = 64 << 10, 32


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.stop()


@pytest.fixture
def pinned():
    """A memfd of two batches of pages, mapped and registered as SGLang does with its host pools."""
    size = 2 * PAGES * PAGE
    fd = os.memfd_create("gpu")
    os.posix_fallocate(fd, 0, size)
    host = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(host.data_ptr(), size, 0)) == 0
    yield fd, host
    torch.cuda.synchronize()
    runtime.cudaHostUnregister(host.data_ptr())
    os.close(fd)


def test_device_pages_go_through_pinned_memory_that_the_daemon_reads_and_writes(daemon, pinned):
    fd, host = pinned
    assert host.is_pinned()
    rows = host.view(2, PAGES, PAGE)
    pages = torch.randint(0, 255, (PAGES, PAGE), dtype=torch.uint8, device="cuda")
    rows[0].copy_(pages, non_blocking=True)
    torch.cuda.synchronize()
    stack = StackSpec(Identity("gpu"), (PoolSpec("kv", PoolKind.KV, PAGE, 16),), paths=(PayloadPath.IMPORTED,))
    keys = [bytes([i]) * 32 for i in range(PAGES)]
    sizes = np.array([PAGE], dtype=np.int64)
    with connect(daemon.address, stack=stack) as session:
        imported = session.import_memory(fd)
        offsets = np.arange(2 * PAGES, dtype=np.int64)[:, None] * PAGE
        assert session.store(keys, {"kv": ImportedPages(imported, offsets[:PAGES], sizes)}).wait(20).ok
        assert session.load(keys, into={"kv": ImportedPages(imported, offsets[PAGES:], sizes)})
    back = torch.zeros_like(pages)
    back.copy_(rows[1], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, pages)
