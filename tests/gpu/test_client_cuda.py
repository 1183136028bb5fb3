"""Registration with CUDA and copies between device tensors and shared memory; skipped where there is no device."""

import pytest

from hoststage.client import Mode, cuda
from tests.integration.daemon import Daemon
from tests.integration.test_client_session import PAGE, keys_of, open_session, stack

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.stop()


@pytest.mark.parametrize("register", ["auto", "never"])
@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_device_pages_go_out_and_come_back(daemon, register, mode):
    keys = keys_of(32, "gpu")
    pages = torch.randint(0, 255, (32, PAGE), dtype=torch.uint8, device="cuda")
    with open_session(daemon, stack("gpu", mode), register=register) as session:
        assert session.store(keys, {"kv": pages}).wait(20).ok
        target = torch.zeros_like(pages)
        assert session.load(keys, into={"kv": target})
        assert torch.equal(target, pages)
        rows = [torch.zeros(PAGE, dtype=torch.uint8, device="cuda") for _ in range(32)]
        assert session.load(keys, into={"kv": rows})
        assert torch.equal(torch.stack(rows), pages)


def test_write_arenas_are_pinned_and_read_arenas_pinned_or_said_not_to_be(daemon):
    with open_session(daemon, stack("gpu-pin"), register="auto") as session:
        for report in session.registration.arenas:
            if report.kind.value == "write":
                assert report.pinned, report.reason
            else:
                assert report.pinned or report.reason
        for arena in session.arenas:
            if arena.kind.value == "write":
                whole = arena.whole()
                host = torch.frombuffer(whole, dtype=torch.uint8)
                assert host.is_pinned()
                del host, whole


def test_nothing_stays_registered_and_no_error_pends_after_close(daemon):
    for _ in range(3):
        with open_session(daemon, stack("gpu-again"), register="auto"):
            pass
    assert int(torch.ones(4, device="cuda").sum()) == 4
    assert cuda.availability() == ""
