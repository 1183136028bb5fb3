"""The handshake end to end: what the fences refuse, adjust and grant, as a client and as any gRPC tool sees it."""

from __future__ import annotations

import base64
from dataclasses import replace

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hoststage.client import (
    Mode,
    ModeWish,
    Outcome,
    Placement,
    PoolSpec,
    Refused,
    Retraction,
    RetractionWish,
    Severity,
    StackSpec,
    WritePolicy,
    negotiate,
)
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc
from tests.integration.daemon import Daemon
from tests.integration.handshake_stacks import (
    KV,
    STATE,
    SWA,
    V4_POOLS,
    keys_of,
    nothing_held,
    opened,
    rows_of,
    sidecar,
    spec,
    unified,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), budget="64MiB").start()
    yield made
    assert made.stop() == 0


def hello_of(stack: StackSpec) -> pb.Hello:
    return pb.Hello(protocol_min=1, protocol_max=1, client="generic", stack=stack.to_proto())


def status_of(daemon: Daemon, hello: pb.Hello) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Shake hands as a generic client does, and return the code and the rich status of the refusal."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = hoststage_pb2_grpc.HostStageStub(channel)
        call = stub.Session(iter([pb.ClientMessage(request_id=1, hello=hello)]), timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        trailers = dict(caught.value.trailing_metadata())
    assert sum(len(base64.b64encode(v if isinstance(v, bytes) else v.encode())) for v in trailers.values()) < 8192
    return caught.value.code(), status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


def details_of(status: status_pb2.Status):
    """Return the ErrorInfo, the violations and the links of a rich status."""
    info, violations, links = error_details_pb2.ErrorInfo(), [], []
    for packed in status.details:
        failure, help_ = error_details_pb2.PreconditionFailure(), error_details_pb2.Help()
        packed.Unpack(info)
        if packed.Unpack(failure):
            violations += failure.violations
        if packed.Unpack(help_):
            links += help_.links
    return info, violations, links


def without_state(*pools: PoolSpec) -> tuple[PoolSpec, ...]:
    return tuple(p for p in pools if p.name != "deepseek_v4_state")


def changed(name: str, **changes) -> tuple[PoolSpec, ...]:
    return tuple(replace(p, **changes) if p.name == name else p for p in V4_POOLS)


HOLDS = RetractionWish(Retraction.HOST_POOL, required=True)
DEVICE = Placement.DEVICE_ONLY
CODE = grpc.StatusCode

REFUSED_CASES = {
    "unified_kv window pool": (unified("ring", Mode.BUFFER_ONLY), CODE.UNIMPLEMENTED, {"SWA_POOL_REQUIRED": ("swa",)}),
    "sidecar's source stays on the device": (
        spec("v4-no-source", *changed("kv", placement=DEVICE)),
        CODE.INVALID_ARGUMENT,
        {"SIDECAR_MAPPING_INCOMPLETE": ("deepseek_v4_c4", "deepseek_v4_c128", "indexer")},
    ),
    "sidecar smaller than its source": (
        spec("v4-smaller", *changed("indexer", host_slots=63)),
        CODE.INVALID_ARGUMENT,
        {"SIDECAR_SMALLER_THAN_SOURCE": ("indexer",)},
    ),
    "pure-SWA retraction": (
        spec("pure", SWA, retraction=HOLDS, largest_request_tokens=1000),
        CODE.FAILED_PRECONDITION,
        {"RETRACTION_PURE_SWA": ("retraction",)},
    ),
    "Mamba retraction": (
        spec("mamba", KV, STATE, retraction=HOLDS, largest_request_tokens=1000),
        CODE.UNIMPLEMENTED,
        {"RETRACTION_MAMBA": ("retraction",)},
    ),
    "more than the node has": (
        spec("large", replace(KV, host_slots=1 << 20)),
        CODE.RESOURCE_EXHAUSTED,
        {"BUDGET": ("budget",)},
    ),
    "several at once": (
        spec("several", *changed("indexer", host_slots=7)[:-1], replace(V4_POOLS[-1], placement=DEVICE)),
        CODE.INVALID_ARGUMENT,
        {"SIDECAR_SMALLER_THAN_SOURCE": ("indexer",), "MAMBA_STATE_UNSUPPORTED": ("deepseek_v4_state",)},
    ),
}


@pytest.mark.parametrize("name", REFUSED_CASES)
def test_a_refusal_tells_every_rule_and_remedy_three_ways(daemon, name):
    stack, code, rules = REFUSED_CASES[name]
    expected = [(rule, subject) for rule, subjects in rules.items() for subject in subjects]

    # As a rich status, to any client.
    got, status = status_of(daemon, hello_of(stack))
    info, violations, links = details_of(status)
    assert (got, status.code) == (code, code.value[0])
    assert (info.reason, info.domain) == (expected[0][0], "hoststage.dev")
    assert [(v.type.partition("/")[0], v.subject) for v in violations] == expected
    assert [link.url.rpartition("#")[2] for link in links] == [rule for rule, _ in expected]
    assert all(link.description for link in links)
    assert all(v.description for v in violations)

    # As an exception, printed.
    with pytest.raises(Refused) as caught:
        opened(daemon, stack)
    findings = [f for f in caught.value.findings if f.severity is Severity.REFUSED]
    assert [(f.rule, f.subject) for f in findings] == expected
    for finding, link in zip(findings, links, strict=True):
        assert finding.remedy == link.description
        assert finding.message in str(caught.value)
        assert finding.remedy in str(caught.value)

    # As a verdict, without a session.
    verdict = negotiate(daemon.address, stack)
    assert not verdict.accepted
    assert [f for f in verdict.findings if f.severity is Severity.REFUSED] == findings
    assert verdict.findings == caught.value.findings


def test_a_sidecar_whose_source_is_not_in_the_stack_is_refused_by_name(daemon):
    pools = tuple(p.to_proto() for p in V4_POOLS if p.name != "kv")
    hello = hello_of(spec("v4-sourceless", *V4_POOLS))
    del hello.stack.pools[:]
    hello.stack.pools.extend(pools)
    code, status = status_of(daemon, hello)
    _, violations, _ = details_of(status)
    assert code is CODE.INVALID_ARGUMENT
    named = [v for v in violations if v.type == "SIDECAR_MAPPING_INCOMPLETE"]
    assert [v.subject for v in named] == ["deepseek_v4_c4", "deepseek_v4_c128", "indexer"]
    assert all(f"'{v.subject}'" in v.description and "'kv'" in v.description for v in named)


def test_a_unified_layout_is_granted_cache_and_says_why_not_buffer_only(daemon):
    stack = unified("ring-then-cache", Mode.BUFFER_ONLY, Mode.CACHE)
    verdict = negotiate(daemon.address, stack)
    with opened(daemon, stack) as session:
        assert session.grant.mode is Mode.CACHE
        assert [p.pool for p in session.grant.pools] == ["kv"]
        [why] = session.findings
        assert (why.rule, why.severity, why.mode) == ("SWA_POOL_REQUIRED", Severity.REFUSED, Mode.BUFFER_ONLY)
        assert "unified_kv" in why.message
        assert verdict.findings == session.findings
        assert verdict.grant == session.grant
        # What the ring holds is the engine's to make anew: it keeps no prefix from being found.
        keys, kv = keys_of(6, "ring"), rows_of(6, KV.page_bytes, 1)
        assert session.store(keys, {"kv": kv}).wait(20).outcome is Outcome.STORED
        assert session.lookup(keys).runs == ((1, 6),)
        with session.load(keys, pin=session.lookup(keys, pin_seconds=5)) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
    nothing_held(daemon)


def test_a_required_mode_that_is_refused_ends_the_list(daemon):
    stack = replace(unified("required"), modes=(ModeWish(Mode.BUFFER_ONLY, True), ModeWish(Mode.CACHE)))
    with pytest.raises(Refused, match="SWA_POOL_REQUIRED"):
        opened(daemon, stack)


def test_a_stack_with_every_sidecar_is_granted_equal_slots(daemon):
    with opened(daemon, spec("v4", *V4_POOLS)) as session:
        slots = {p.pool: (p.write_slots, p.read_slots) for p in session.grant.pools}
        assert slots["kv"] == slots["deepseek_v4_c4"] == slots["deepseek_v4_c128"] == slots["indexer"] == (32, 32)
        assert session.grant.pool("swa").window_pages == 4
        assert session.grant.write_policy is WritePolicy.WRITE_THROUGH


def test_holds_that_are_refused_leave_the_session_unless_required(daemon):
    wish = RetractionWish(Retraction.HOST_POOL)
    with opened(daemon, spec("mamba-soft", KV, STATE, retraction=wish, largest_request_tokens=1000)) as session:
        assert session.grant.retraction is Retraction.NONE
        assert [f.rule for f in session.findings if f.severity is Severity.REFUSED] == ["RETRACTION_MAMBA"]
        assert all(p.hold_slots == 0 for p in session.grant.pools)


def test_a_refusal_of_required_holds_is_told_though_an_earlier_mode_failed_for_another_reason(daemon):
    stack = replace(unified("both", Mode.BUFFER_ONLY, Mode.CACHE), retraction=HOLDS, largest_request_tokens=1000)
    _, status = status_of(daemon, hello_of(stack))
    _, violations, _ = details_of(status)
    types = [v.type for v in violations]
    assert types[0] == "SWA_POOL_REQUIRED/buffer_only"
    assert "RETRACTION_STACK/cache" in types


def test_window_only_holds_are_granted_on_opt_in_and_hold_a_window(daemon):
    wish = RetractionWish(Retraction.HOST_POOL, window_only=True, required=True)
    with opened(daemon, spec("pure-opt-in", SWA, retraction=wish, largest_request_tokens=1000)) as session:
        assert session.grant.retraction is Retraction.HOST_POOL
        assert session.grant.window_only_holds
        # A request stops anywhere in a page: a window of 4 pages touches 5 of them.
        assert session.grant.pool("swa").hold_slots == 5
        rows = rows_of(5, SWA.page_bytes, 9)
        batch = session.hold(b"secret", "r1", 1, {"swa": 5})
        for view, row in zip(batch.views["swa"], rows, strict=True):
            view[: len(row)] = row.tobytes()
        batch.seal(b"pos=77")
        held = session.restore(b"secret", "r1", 1)
        assert held.note == b"pos=77"
        assert [bytes(p) for p in held.views["swa"]] == [bytes(r) for r in rows]
        held.views.clear()
        batch.views.clear()
        del view
        session.discard(b"secret", "r1", 1)


def test_write_back_is_resolved_and_the_grant_says_so(daemon):
    stack = spec("write-back", KV, write_policy=WritePolicy.WRITE_BACK, modes=(Mode.BUFFER_ONLY, Mode.CACHE))
    with opened(daemon, stack) as session:
        assert session.grant.mode is Mode.BUFFER_ONLY
        assert session.grant.write_policy is WritePolicy.WRITE_THROUGH
        [finding] = session.findings
        assert (finding.rule, finding.severity) == ("WRITE_BACK_RESOLVED", Severity.ADJUSTED)
    in_cache = negotiate(daemon.address, replace(stack, modes=(ModeWish(Mode.CACHE),)))
    assert in_cache.grant.write_policy is WritePolicy.WRITE_BACK


def test_a_small_window_pool_is_grown_within_the_budget(daemon):
    verdict = negotiate(daemon.address, spec("grown", KV, replace(SWA, host_slots=7)))
    assert verdict.accepted
    [finding] = verdict.findings
    assert (finding.rule, finding.severity, finding.subject) == ("SWA_POOL_TOO_SMALL", Severity.ADJUSTED, "swa")
    assert (finding.values["asked_slots"], finding.values["needed_slots"]) == ("7", "8")
    assert verdict.grant.pool("swa").write_slots + verdict.grant.pool("swa").read_slots == 8
    assert not negotiate(daemon.address, spec("exact", KV, replace(SWA, host_slots=8))).findings


def test_negotiate_takes_nothing(daemon):
    nothing_held(daemon)
    before = daemon.status()
    half = replace(KV, host_slots=5000)
    for _ in range(5):
        assert negotiate(daemon.address, spec("free", half)).accepted
    after = daemon.status()
    assert after["granted_bytes"] == before["granted_bytes"]
    assert after["sessions"] == []
    assert "free" not in {p["namespace"] for p in after["pools"]}


def test_many_findings_fit_a_trailer_and_the_exception_has_them_all(daemon):
    pools = [sidecar(f"side{i}_{'x' * 50}", host_slots=3) for i in range(31)]
    stack = spec("many", KV, *pools)
    _, status = status_of(daemon, hello_of(stack))
    info, violations, links = details_of(status)
    assert 5 < len(violations) < 31
    assert len(links) == len(violations)
    assert int(info.metadata["findings_left_out"]) == 31 - len(violations)
    with pytest.raises(Refused) as caught:
        opened(daemon, stack)
    assert [f.subject for f in caught.value.findings] == [p.name for p in pools]


def test_each_finding_of_one_rule_keeps_its_own_remedy(daemon):
    pools = [replace(p, host_slots=3) if p.indices_from_pool else p for p in V4_POOLS]
    code, status = status_of(daemon, hello_of(spec("remedies", *pools)))
    _, violations, links = details_of(status)
    assert code is CODE.INVALID_ARGUMENT
    for violation, link in zip(violations, links, strict=True):
        assert f"'{violation.subject}'" in link.description


def test_sessions_of_one_namespace_describe_the_same_pools(daemon):
    with opened(daemon, spec("shared", KV, SWA)):
        for pools in [(KV,), (SWA, KV), (KV, replace(SWA, trailing_pages=5)), (KV, replace(SWA, placement=DEVICE))]:
            with pytest.raises(Refused) as caught:
                opened(daemon, spec("shared", *pools, modes=(Mode.CACHE,)))
            [finding] = caught.value.findings
            assert (finding.rule, finding.subject) == ("POOL_GEOMETRY", "pools")
            assert "swa (trailing_pages, 4 trailing)" in finding.message
        with opened(daemon, spec("shared", KV, SWA)) as second:
            assert second.grant


def test_memory_that_an_idle_namespace_left_is_made_anew_where_it_does_not_fit(daemon):
    with opened(daemon, spec("relaunched", KV, SWA)) as session:
        namespace = session.grant.namespace
    nothing_held(daemon)
    assert namespace in {p["namespace"] for p in daemon.status()["pools"]}
    wider = (replace(KV, page_bytes=9000), replace(SWA, sliding_window=640, host_slots=100))
    assert negotiate(daemon.address, spec("relaunched", *wider)).accepted
    assert {p["slots"] for p in daemon.status()["pools"] if p["namespace"] == namespace} == {32, 16}
    with opened(daemon, spec("relaunched", *wider)) as session:
        assert session.grant.namespace == namespace
        assert session.grant.pool("swa").window_pages == 40
        keys, kv, swa = keys_of(3, "wide"), rows_of(3, 9000, 2), rows_of(3, SWA.page_bytes, 3)
        assert session.store(keys, {"kv": kv, "swa": swa}).wait(20).ok
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]


def test_a_generic_client_learns_all_by_reflection(daemon):
    """Nothing of hoststage is imported for this: the schema comes from the daemon, the answer is plain google.rpc."""
    pool = descriptor_pool.DescriptorPool()
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**request):
            [reply] = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
            return reply

        services = {s.name for s in ask(list_services="").list_services_response.service}
        assert "hoststage.v1.HostStage" in services
        files = ask(file_containing_symbol="hoststage.v1.HostStage").file_descriptor_response.file_descriptor_proto
        parsed = {f.name: f for f in map(descriptor_pb2.FileDescriptorProto.FromString, files)}

        def add(name: str) -> None:
            if name not in parsed:
                reply = ask(file_by_filename=name).file_descriptor_response.file_descriptor_proto
                parsed[name] = descriptor_pb2.FileDescriptorProto.FromString(reply[0])
            for needed in parsed[name].dependency:
                add(needed)
            pool.Add(parsed[name])

        add("hoststage/v1/hoststage.proto")
        classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hoststage.v1.{name}"))
            for name in ("NegotiateRequest", "NegotiateResponse", "ClientMessage", "ServerMessage")
        }
        negotiate_request = classes["NegotiateRequest"].FromString(
            pb.NegotiateRequest(hello=hello_of(unified("reflected", Mode.BUFFER_ONLY))).SerializeToString()
        )
        unary = channel.unary_unary(
            "/hoststage.v1.HostStage/Negotiate",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=classes["NegotiateResponse"].FromString,
        )
        answer = unary(negotiate_request, timeout=10)
        assert not answer.HasField("grant")
        assert [f.rule for f in answer.findings] == ["SWA_POOL_REQUIRED"]
        stream = channel.stream_stream(
            "/hoststage.v1.HostStage/Session",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=classes["ServerMessage"].FromString,
        )
        first = classes["ClientMessage"](request_id=1, hello=negotiate_request.hello)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter([first]), timeout=10))
    raw = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    info, violations, links = details_of(status_pb2.Status.FromString(raw))
    assert (info.reason, info.domain) == ("SWA_POOL_REQUIRED", "hoststage.dev")
    assert [v.subject for v in violations] == ["swa"]
    assert "paged" in links[0].description
