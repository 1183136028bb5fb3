"""SGLang's host pools in the daemon's memory on a device: pinned, copied by SGLang's own kernels, unpinned at their end; skipped where there is none.

Run it in SGLang's environment (with `sgl_kernel`): `"$(tools/engine_env.sh sglang)" -m pytest -m gpu tests/gpu/test_sglang_allocator.py`.
"""

import gc

import pytest

from tests.integration.daemon import Daemon, eventually

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.pool_host.common", exc_type=ImportError)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE, PAGES, LAYERS = 16, 64, 4


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path, budget="512MiB").start()
    yield made
    made.stop()


@pytest.fixture
def configured(daemon):
    from tests.engines import sglang_support as sg

    unhook = sg.hook_host_pools()
    with sg.engine({"hoststage": {"address": daemon.address, "host_pools": "daemon", "required": True}}):
        yield sg
    unhook()


def leased(daemon):
    return sum(p["slots"] * p["stride"] for p in daemon.status()["pools"] if p["kind"] == "whole")


def test_a_pinned_tensor_in_the_daemons_memory_takes_and_gives_device_bytes(daemon, configured):
    from sglang.srt.mem_cache.pool_host import common

    chosen = common.get_allocator_from_storage("default")
    host = common.alloc_with_host_register((PAGES, 1 << 16), torch.uint8, "cpu", True, chosen, 1 << 16)
    assert configured.mapping_at(host.data_ptr())[0] == "/memfd:hoststage-whole"
    assert host.is_pinned()
    device = torch.randint(0, 255, host.shape, dtype=torch.uint8, device="cuda")
    host.copy_(device, non_blocking=True)
    back = torch.zeros_like(device)
    back.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, device)
    del host
    gc.collect()
    eventually(lambda: leased(daemon) == 0)
    # Nothing stays pinned, and no error waits for the next launch.
    assert int(torch.ones(4, device="cuda").sum()) == 4
    again = common.alloc_with_host_register((PAGES, 1 << 16), torch.uint8, "cpu", True, chosen, 1 << 16)
    assert again.is_pinned()
    common._cuda_host_unregister(again)
    assert not again.is_pinned()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_sglangs_own_transfers_move_pages_between_the_device_and_the_daemons_memory(daemon, configured, layout):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    device = MHATokenToKVPool(
        PAGES * PAGE, PAGE, torch.bfloat16, 2, 128, LAYERS, "cuda", enable_memory_saver=False, enable_alt_stream=False
    )
    info = device.get_device_pool_infos()[0].buffer_info
    host = get_mha_host_pool_cls(info)(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        device_capacity_tokens=PAGES * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=2 * PAGES * PAGE,
    )
    assert {configured.mapping_at(t.data_ptr())[0] for t in configured.tensors_of(host)} == {"/memfd:hoststage-whole"}
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.normal_()
    rows = torch.arange(PAGE, 9 * PAGE, device="cuda")
    wanted = [buffer[rows].clone() for buffer in (*device.k_buffer, *device.v_buffer)]
    at = host.alloc(len(rows)).cuda()
    host.backup_from_device_all_layer(device, at, rows, "kernel")
    torch.cuda.synchronize()
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.zero_()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, at, rows, layer, "kernel")
    torch.cuda.synchronize()
    found = [buffer[rows] for buffer in (*device.k_buffer, *device.v_buffer)]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    host.destroy()
    del host
    gc.collect()
    eventually(lambda: leased(daemon) == 0)
