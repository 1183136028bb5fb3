"""The linker's way with a CUDA device, with the device played: streams, events and the runtime's 2D copy are plain objects and plain copies.

What is shown is that every byte goes its way through rectangles, movers and events. The same on a device: `tests/gpu/test_sglang_linker.py`.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engines

pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache", exc_type=ImportError)
torch = pytest.importorskip("torch")

from hoststage.client.engines.sglang import devicecopy, linker, linkload  # noqa: E402
from hoststage.shm import cuda  # noqa: E402
from tests.engines import linker_support as ls  # noqa: E402
from tests.integration.daemon import Daemon  # noqa: E402


class Device:
    """What a device is asked to do, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.rows = 0
        self.calls = 0

    # The runtime's library.

    def cudaMemcpy2DAsync(
        self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int, kind: int, stream: int
    ) -> int:
        self.calls += 1
        self.rows += rows
        for row in range(rows):
            ctypes.memmove(to + row * to_step, source + row * source_step, width)
        return 0


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


class Stream:
    cuda_stream = 7

    def __init__(self, device: Device) -> None:
        self._device = device

    def wait_event(self, event: Event) -> None:
        self._device.done.append("wait")

    def synchronize(self) -> None:
        self._device.done.append("synchronize")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    played = Device()
    runtime = cuda.Runtime.__new__(cuda.Runtime)
    runtime._lib = runtime._enqueue = played  # type: ignore[assignment]
    monkeypatch.setattr(devicecopy, "Runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(played))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(played))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    module = SimpleNamespace(current_stream=lambda: Stream(played))
    monkeypatch.setattr(linkload, "get_device_module", lambda: module)
    monkeypatch.setattr(linker, "copies_for", devicecopy.CudaCopies)
    return played


@pytest.mark.parametrize("kind", ["mha", "mamba_swa", "dsv4_swa"])
def test_pages_of_a_device_go_out_and_come_back_as_rectangles(
    node: Daemon, group: Any, device: Device, kind: str
) -> None:
    engine = ls.LinkedEngine(node.address, kind, group, tenant=f"played-{kind}")
    tokens = ls.run_of(kind, 1000)
    wanted = engine.store(tokens, 1)
    assert device.rows > device.calls, "pages at even steps are one call"
    out = device.rows
    engine.evict()
    engine.fill(2)
    device.done.clear()
    req = engine.request(tokens)
    at = engine.admit(req)
    counter = engine.linker.layer_done_counter
    counter.set_consumer(engine.tree.ready_to_load_host_cache())
    for layer in range(ls.LAYERS):
        counter.wait_until(layer)
    # The load waits for the pages to be free, and the forward pass for each layer, on the device and not on the host.
    assert device.done.count("wait") == 1 + ls.LAYERS
    assert engine.tree.finish_external_linker_loads([req]) == []
    state = req.kv.mamba_pool_idx.unsqueeze(0) if "mamba" in kind else None
    assert ls.same(wanted, engine.rows(at, state))
    assert device.rows > out
    engine.close()
