"""Peers of other versions, and peers that send nonsense, against a daemon that is running."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings

from hoststage.client import PayloadPath
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc
from hoststage.v1.ops import PROTOCOL_MAX
from tests.integration.daemon import Daemon
from tests.integration.handshake_stacks import KV, SWA, keys_of, nothing_held, opened, rows_of, spec
from tests.property.test_hello_any import hellos

RECORDED = Path(__file__).parents[1] / "fixtures" / "wire"
DEADLINE = 20.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), budget="32MiB").start()
    yield made
    assert made.stop() == 0


def recorded(name: str) -> bytes:
    return bytes.fromhex((RECORDED / f"{name}.hex").read_text())


def inline_hello(low: int = 1, high: int = 1) -> pb.Hello:
    stack = spec("peer", KV, SWA, paths=(PayloadPath.INLINE,)).to_proto()
    return pb.Hello(protocol_min=low, protocol_max=high, stack=stack)


class RawSession:
    """A `Session` call that sends and returns bytes as they are."""

    def __init__(self, daemon: Daemon) -> None:
        self.channel = grpc.insecure_channel(f"unix:{daemon.socket}")
        self.call = self.channel.stream_stream("/hoststage.v1.HostStage/Session")

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def first_answer(self, *messages: bytes) -> pb.ServerMessage:
        """Send messages and say that no more come; return the first answer."""
        return pb.ServerMessage.FromString(next(iter(self.call(iter(messages), timeout=DEADLINE))))

    def all_answers(self, *messages: bytes) -> list[pb.ServerMessage]:
        return [pb.ServerMessage.FromString(m) for m in self.call(iter(messages), timeout=DEADLINE)]


def reason_of(error: grpc.RpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return info.reason


@pytest.mark.parametrize(("low", "high", "older"), [(7, 9, "daemon"), (2, 2, "daemon")])
def test_a_client_of_foreign_versions_learns_both_ranges(daemon, low, high, older):
    hello = inline_hello(low, high)
    with RawSession(daemon) as raw, pytest.raises(grpc.RpcError) as caught:
        raw.first_answer(pb.ClientMessage(request_id=1, hello=hello).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "PROTOCOL"
    assert f"versions {low} to {high}, the daemon 1 to {PROTOCOL_MAX}" in caught.value.details()
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        answer = hoststage_pb2_grpc.HostStageStub(channel).Negotiate(pb.NegotiateRequest(hello=hello), timeout=DEADLINE)
    assert (answer.protocol, answer.HasField("grant")) == (0, False)
    [finding] = answer.findings
    assert {k: finding.values[k] for k in ("client_min", "client_max", "server_min", "server_max")} == {
        "client_min": str(low),
        "client_max": str(high),
        "server_min": "1",
        "server_max": str(PROTOCOL_MAX),
    }
    assert finding.remedy == f"Upgrade the {older}."


def test_foreign_versions_are_told_before_the_values_that_they_brought(daemon):
    hello = inline_hello(5, 6)
    hello.stack.pools[0].kind = 77
    with RawSession(daemon) as raw, pytest.raises(grpc.RpcError) as caught:
        raw.first_answer(pb.ClientMessage(request_id=1, hello=hello).SerializeToString())
    assert reason_of(caught.value) == "PROTOCOL"
    hello.protocol_min = 1
    with RawSession(daemon) as raw, pytest.raises(grpc.RpcError) as caught:
        raw.first_answer(pb.ClientMessage(request_id=1, hello=hello).SerializeToString())
    assert reason_of(caught.value) == "UNKNOWN_VALUE"
    assert "stack.pools[0].kind" in caught.value.details()


@pytest.mark.parametrize("name", ["hello-v1", "hello-oldest", "hello-newer"])
def test_recorded_hellos_of_all_versions_open_a_session(daemon, name):
    nothing_held(daemon)
    with RawSession(daemon) as raw:
        welcome = raw.first_answer(recorded(name)).welcome
        assert welcome.session
        assert welcome.protocol == 1
        assert "lane" in welcome.features
        assert welcome.grant.pools


def test_a_session_goes_on_after_an_operation_of_the_future(daemon):
    nothing_held(daemon)
    hello = pb.ClientMessage(request_id=1, hello=inline_hello(1, 9)).SerializeToString()
    ping = pb.ClientMessage(request_id=6, ping=pb.Ping(payload=b"still here")).SerializeToString()
    unknown_field = b"\xa2\x06\x03abc"  # field 100, three bytes
    with RawSession(daemon) as raw:
        answers = raw.all_answers(hello + unknown_field, recorded("request-newer"), ping + unknown_field)
    assert answers[0].welcome.protocol == 1
    by_id = {a.request_id: a for a in answers[1:]}
    assert by_id[5].error.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert by_id[6].pong.payload == b"still here"


def typed_answer(daemon: Daemon, message: bytes) -> str:
    """Shake hands with these bytes, leave again, and return how it ended: "granted" or the reason of a rich status."""
    goodbye = pb.ClientMessage(request_id=2, goodbye=pb.Goodbye()).SerializeToString()
    failed: grpc.RpcError | None = None
    with RawSession(daemon) as raw:
        try:
            answers = raw.all_answers(message, goodbye)
        except grpc.RpcError as error:
            failed = error
    if failed is not None:
        assert failed.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), failed.details()
        return reason_of(failed)
    assert answers[0].WhichOneof("body") == "welcome"
    return "granted"


def baseline(daemon: Daemon) -> None:
    """No session is left, and all memory that is still held is a namespace's or kept warm: the whole budget can be granted."""
    nothing_held(daemon)
    assert _whole_budget(daemon)


def _whole_budget(daemon: Daemon) -> bool:
    with opened(daemon, spec(f"whole-{time.monotonic_ns()}", replace(KV, host_slots=(32 << 20) // 8192))) as session:
        return bool(session.grant)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(hello=hellos)
def test_any_hello_over_the_wire_gets_a_typed_answer(daemon, hello):
    hello.retained_bytes = 0
    assert typed_answer(daemon, pb.ClientMessage(request_id=1, hello=hello).SerializeToString())


def test_bent_bytes_get_a_typed_answer_and_nothing_is_left(daemon):
    dice = random.Random(3)
    seen = set()
    whole = [recorded(n) for n in ("hello-v1", "hello-oldest", "hello-newer")]
    for _ in range(150):
        message = bytearray(dice.choice(whole))
        for _ in range(dice.randint(1, 6)):
            message[dice.randrange(len(message))] = dice.randrange(256)
        if dice.random() < 0.2:
            del message[dice.randrange(len(message)) :]
        seen.add(typed_answer(daemon, bytes(message)))
    assert "granted" in seen
    assert len(seen) > 3, seen
    baseline(daemon)
    errors = [e for e in daemon.events() if e.get("level") in ("error", "critical")]
    assert not errors, errors[:3]


def test_the_daemon_still_serves_after_all_that(daemon):
    keys, kv, swa = keys_of(6, "after"), rows_of(6, KV.page_bytes, 1), rows_of(4, SWA.page_bytes, 2)
    with opened(daemon, spec("after", KV, SWA)) as session:
        assert session.store(keys, {"kv": kv, "swa": swa}).wait(20).ok
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
