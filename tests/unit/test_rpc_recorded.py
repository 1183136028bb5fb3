"""Older and newer peers, as recorded bytes: what they say is understood, or survived."""

from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from hoststage.core import stack as core
from hoststage.core.fences import ProtocolRanges, evaluate
from hoststage.core.findings import NodeFacts
from hoststage.server.contract import RequestError
from hoststage.server.rpc.convert_stack import request_from_proto
from hoststage.v1 import convert, ops
from hoststage.v1 import hoststage_pb2 as pb

RECORDED = Path(__file__).parents[1] / "fixtures" / "wire"


def raw(name):
    return bytes.fromhex((RECORDED / f"{name}.hex").read_text())


def hello(name):
    return request_from_proto(pb.ClientMessage.FromString(raw(name)).hello)


def verdict(request):
    node = NodeFacts(budget_bytes=1 << 30, holders=(), store_configured=True, pinned="resident")
    low, high = request.protocol
    return evaluate(request.stack, node, ProtocolRanges(low, high, ops.PROTOCOL_MIN, ops.PROTOCOL_MAX))


def test_this_versions_hello_still_means_what_it_meant():
    request = hello("hello-v1")
    assert (request.client, request.worker, request.pid, request.credits) == ("sglang 0.5.23", "decode-0/tp1", 4242, 8)
    stack = request.stack
    assert stack.identity == core.Identity("org/model", "t", "r1", "fp8", "s", "bf16", "page_first", "sha256")
    assert (stack.parallel.tp_rank, stack.parallel.tp_size, stack.parallel.dcp_rank) == (1, 2, 0)
    kv, swa = stack.pools
    assert (kv.kind, kv.page_bytes, kv.page_tokens, kv.pieces) == (core.PoolKind.KV, 8192, 16, (4096, 4096))
    assert (kv.host_slots, kv.device_slots) == (64, 128)
    assert (swa.kind, swa.sliding_window, swa.trailing_pages) == (core.PoolKind.SWA, 128, 8)
    assert [w.mode for w in stack.modes] == [core.Mode.BUFFER_ONLY, core.Mode.CACHE]
    assert stack.paths == (core.PayloadPath.SHM, core.PayloadPath.INLINE)
    assert (stack.role, stack.largest_request_tokens, stack.prefetch_threshold_tokens) == (core.Role.DECODE, 1024, 64)
    assert verdict(request).grant is not None


def test_the_oldest_hello_gets_the_documented_defaults():
    request = hello("hello-oldest")
    stack = request.stack
    assert request.protocol == (1, 1)
    assert stack.identity.tenant == "default"
    assert stack.pools[0].hit_policy is core.HitPolicy.ALL_PAGES
    assert stack.pools[0].placement is core.Placement.HOST_POOL
    assert [w.mode for w in stack.modes] == [core.Mode.BUFFER_ONLY, core.Mode.CACHE]
    assert stack.paths == (core.PayloadPath.SHM, core.PayloadPath.INLINE)
    assert (stack.role, stack.retraction.retraction) == (core.Role.MIXED, core.Retraction.NONE)
    assert stack.parallel == core.Parallel()
    assert verdict(request).grant is not None


def test_a_newer_hello_is_granted_what_both_know():
    newer, ours = hello("hello-newer"), hello("hello-v1")
    assert newer.protocol == (1, 9)
    assert newer.features == ("lane", "telepathy")
    assert newer.stack == ours.stack
    found = verdict(newer)
    assert found.grant is not None
    assert found.grant.path is core.PayloadPath.SHM


def test_a_newer_welcome_and_a_newer_outcome_are_survivable():
    welcome = pb.ServerMessage.FromString(raw("welcome-newer")).welcome
    ours = pb.ServerMessage.FromString(raw("welcome-v1")).welcome
    assert (welcome.session, welcome.grant, welcome.limits) == (ours.session, ours.grant, ours.limits)
    assert welcome.findings[0].severity == 9
    stored = convert.from_proto(pb.ServerMessage.FromString(raw("stored-newer")))
    assert stored == ops.Stored(b"c" * 16, 3, ops.Outcome.UNSPECIFIED, 4)


def test_an_operation_of_the_future_reads_as_none():
    message = pb.ClientMessage.FromString(raw("request-newer"))
    assert message.request_id == 5
    assert message.WhichOneof("body") is None


@pytest.mark.parametrize("name", ["hello-v1", "hello-oldest", "hello-newer"])
def test_a_hello_that_is_cut_short_anywhere_is_an_error_of_a_known_type_or_a_shorter_hello(name):
    whole = raw(name)
    known = 0
    for end in range(len(whole)):
        try:
            verdict(request_from_proto(pb.ClientMessage.FromString(whole[:end]).hello))
        except (DecodeError, RequestError):
            known += 1
    # Most cuts fall inside the one big field.
    assert known > len(whole) // 2
