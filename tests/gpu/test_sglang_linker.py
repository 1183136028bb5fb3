"""The linker over device pools on a CUDA device: SGLang's real tree, copies on side streams, offloads gated on the forward stream.

Needs SGLang's environment and a device: `python -m pytest -m "gpu and engines" tests/gpu/test_sglang_linker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache", exc_type=ImportError)
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engines,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

from tests.engines import linker_support as ls  # noqa: E402
from tests.integration.daemon import Daemon  # noqa: E402

_LONG = 200_000_000
"""Cycles of a kernel that only waits: about a tenth of a second."""


@pytest.fixture
def engines(node: Daemon, group: Any) -> Iterator[Callable[..., ls.LinkedEngine]]:
    opened: list[ls.LinkedEngine] = []

    def start(kind: str, **given: Any) -> ls.LinkedEngine:
        opened.append(ls.LinkedEngine(node.address, kind, group, device="cuda", **given))
        return opened[-1]

    yield start
    for engine in reversed(opened):
        engine.close()


@pytest.mark.parametrize("kind", [kind for kind in ls.KINDS if kind != "dsv4_swa"])
def test_what_was_evicted_from_the_device_comes_back_byte_for_byte(
    engines: Callable[..., ls.LinkedEngine], kind: str
) -> None:
    engine = engines(kind, tenant=f"gpu-{kind}")
    assert engine.linker.channel.session.registration.arenas
    tokens = ls.run_of(kind, 1000)
    wanted = engine.store(tokens, 1)
    engine.evict()
    engine.fill(2)
    assert ls.same(wanted, engine.load(tokens)[0])


def test_an_offload_reads_pages_only_after_the_forward_stream_has_written_them(
    engines: Callable[..., ls.LinkedEngine],
) -> None:
    engine = engines("mha", tenant="gpu-gated")
    tokens = ls.run_of("mha", 5000)
    engine.fill(3)
    with torch.cuda.stream(engine.linker.forward_stream):
        torch.cuda._sleep(_LONG)
        for buffer in engine.kv.k_buffer:
            buffer.fill_(7)
    engine.insert_written(tokens)
    engine.settle()
    engine.evict()
    engine.fill(4)
    rows, _ = engine.load(tokens)
    assert all((row == 7).all() for row in rows[: ls.LAYERS])


def test_a_layer_that_was_waited_for_is_there_for_what_the_stream_does_next(
    engines: Callable[..., ls.LinkedEngine],
) -> None:
    engine = engines("mha", tenant="gpu-layers")
    tokens = ls.run_of("mha", 6000)
    wanted = engine.store(tokens, 5)
    engine.evict()
    engine.fill(6)
    req = engine.request(tokens)
    at = engine.admit(req)
    counter = engine.linker.layer_done_counter
    # The stream that loads waits for the scheduler's, which is busy: no layer is there yet when it is asked for.
    torch.cuda._sleep(_LONG)
    counter.set_consumer(engine.tree.ready_to_load_host_cache())
    seen = []
    forward = engine.linker.forward_stream
    with torch.cuda.stream(forward):
        for layer in range(ls.LAYERS):
            seen.append(engine.kv.get_key_buffer(layer)[at].clone())
    assert engine.tree.finish_external_linker_loads([req]) == []
    forward.synchronize()
    assert ls.same(wanted[: ls.LAYERS], [row.cpu() for row in seen])
