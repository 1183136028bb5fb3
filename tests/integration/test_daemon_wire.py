"""The daemon's sockets: what each carries, and what it does about peers that lie, stall, vanish or shout."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from hoststage.shm import fdpass
from hoststage.v1 import admin_pb2, admin_pb2_grpc, fdsocket, lane, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc as pb_grpc
from hoststage.v1 import stack_pb2 as spb
from tests.integration import wire
from tests.integration.daemon import ROOT, Daemon, environment, eventually
from tests.integration.wire import PAGE, Lane, Wire, ask_fds, connect, hello, keys_of, map_arenas, span

NONE = np.zeros(0, dtype=np.uint32)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("daemon")).start()
    yield made
    assert made.stop() == 0


@pytest.fixture
def client(daemon):
    made = Wire(daemon.address).open()
    yield made
    made.close()


@pytest.fixture
def inline(daemon):
    made = Wire(daemon.address).open(hello(spb.PAYLOAD_PATH_INLINE))
    yield made
    made.close()


def attached(client):
    made = Lane(client.welcome.lane_socket)
    assert made.attach(client.welcome.session, client.welcome.lane_token) == ""
    return made


def sessions(daemon):
    return {s["session"]: s["state"] for s in daemon.status()["sessions"]}


def details(error, kind):
    """The details of one type in a rich status."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    out = []
    for detail in status_pb2.Status.FromString(raw).details:
        message = kind()
        if detail.Unpack(message):
            out.append(message)
    return out


def reason_of(answer):
    assert answer.WhichOneof("body") == "error", answer
    info = error_details_pb2.ErrorInfo()
    assert answer.error.status.details[0].Unpack(info)
    assert info.domain == "hoststage.dev"
    return info.reason


def serves_on(daemon):
    """A new session stores a page and finds it."""
    made = Wire(daemon.address).open(hello(spb.PAYLOAD_PATH_INLINE, model="serves-on"))
    try:
        keys = [os.urandom(16)]
        page = pb.InlinePage(range=0, page=0, data=b"x" * PAGE)
        made.send(pb.ClientMessage(request_id=2, inline_store=pb.InlineStore(span=span(keys), pages=[page], last=True)))
        assert made.pushed("stored").outcome == pb.OUTCOME_STORED
        assert list(made.ask(3, lookup=pb.Lookup(span=span(keys, ()))).lookup_reply.runs) == [1, 1]
    finally:
        made.close()
    return True


# ------------------------------------------------------------------ handshake


def test_a_refusal_is_a_rich_status_with_every_finding_and_its_remedy(daemon):
    bad = hello()
    bad.stack.pools[0].page_bytes = 0
    bad.stack.pools[0].page_tokens = 0
    refused = Wire(daemon.address)
    with pytest.raises(grpc.RpcError) as caught:
        refused.open(bad)
    refused.close()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    [info] = details(caught.value, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("POOL_GEOMETRY", "hoststage.dev")
    assert details(caught.value, error_details_pb2.PreconditionFailure)[0].violations[0].subject
    assert details(caught.value, error_details_pb2.Help)[0].links[0].description


def test_an_unknown_pool_kind_is_refused_by_name(daemon):
    newer = hello()
    newer.stack.pools[0].kind = 99
    refused = Wire(daemon.address)
    with pytest.raises(grpc.RpcError) as caught:
        refused.open(newer)
    refused.close()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "stack.pools[0].kind" in caught.value.details()


def test_the_first_message_must_be_hello(daemon):
    rude = Wire(daemon.address)
    rude.send(pb.ClientMessage(request_id=1, ping=pb.Ping()))
    with pytest.raises(grpc.RpcError) as caught:
        next(rude.call)
    rude.close()
    assert details(caught.value, error_details_pb2.ErrorInfo)[0].reason == "HELLO_EXPECTED"


def test_negotiate_gives_the_verdict_and_opens_nothing(daemon):
    before = sessions(daemon)
    with grpc.insecure_channel(daemon.address.replace("unix://", "unix:")) as channel:
        stub = pb_grpc.HostStageStub(channel)
        good = stub.Negotiate(pb.NegotiateRequest(hello=hello()), timeout=10)
        newer = hello()
        newer.protocol_min, newer.protocol_max = 7, 9
        none = stub.Negotiate(pb.NegotiateRequest(hello=newer), timeout=10)
    assert good.protocol == 1
    assert good.grant.mode == spb.MODE_BUFFER_ONLY
    assert none.protocol == 0
    assert not none.HasField("grant")
    assert none.findings
    assert sessions(daemon).keys() <= before.keys()


def test_a_token_is_demanded_where_one_is_set(tmp_path):
    guarded = Daemon(tmp_path, ["auth.token=sesame"]).start()
    try:
        for token in ("", "wrong"):
            refused = Wire(guarded.address)
            with pytest.raises(grpc.RpcError) as caught:
                refused.open(hello(token=token))
            refused.close()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        Wire(guarded.address).open(hello(token="sesame")).close()
        with grpc.insecure_channel(guarded.address.replace("unix://", "unix:")) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", "Bearer sesame"),)
            admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=10, metadata=metadata)
    finally:
        guarded.stop()


def test_users_that_are_not_allowed_map_nothing(tmp_path):
    guarded = Daemon(tmp_path, ["auth.allow_uids=12345"]).start()
    client = Wire(guarded.address).open()
    try:
        reply, fds = ask_fds(client.welcome.fd_socket, client.welcome.fd_token)
        assert "auth.allow_uids" in reply.refusal
        assert fds == []
        made = Lane(client.welcome.lane_socket)
        op, _, body = made.next()
        assert op == lane.Op.ATTACH
        assert b"auth.allow_uids" in body
        assert made.closed()
    finally:
        client.close()
        guarded.stop()


# ------------------------------------------------------------------ the stream


def test_unknown_and_malformed_requests_fail_alone(inline):
    assert reason_of(inline.ask(2)) == "UNKNOWN_OPERATION"
    assert reason_of(inline.ask(3, hello=hello())) == "SECOND_HELLO"
    assert reason_of(inline.ask(4, import_memory=pb.ImportMemory())) == "IMPORTED_PATH"
    assert reason_of(inline.ask(5, lookup=pb.Lookup(span=pb.Span(keys=b"abc", key_bytes=0)))) == "KEY_SIZE"
    assert reason_of(inline.ask(6, lookup=pb.Lookup(span=pb.Span(keys=b"abc", key_bytes=2)))) == "KEY_SIZE"
    everywhere = pb.Span(keys=b"k" * 16, key_bytes=16, ranges=[pb.PoolRange(pool=7, count=1)])
    assert reason_of(inline.ask(7, reserve=pb.Reserve(span=everywhere))) == "RANGES"
    assert reason_of(inline.ask(8, inline_load=pb.InlineLoad(load=pb.Load(span=everywhere, prefix=1)))) == "RANGES"
    assert reason_of(inline.ask(0, ping=pb.Ping())) == "REQUEST_ID"
    assert inline.ask(9, ping=pb.Ping(payload=b"hi")).pong.payload == b"hi"


def test_acknowledgements_that_nobody_asked_for_are_refused_and_counted_and_not_logged(daemon, client, inline):
    def logged():
        mine = (client.welcome.session, inline.welcome.session)
        return [e["event"] for e in daemon.events() if e.get("session") in mine]

    on_lane, before = attached(client), logged()
    for revocation in range(50):
        inline.send(pb.ClientMessage(revoke_ack=pb.RevokeAck(revocation=revocation)))
    refused = inline.answer(0)
    assert reason_of(refused) == "NOT_REVOKED"
    assert "revocation 0" in refused.error.status.message
    acknowledgement = pb.ClientMessage(revoke_ack=pb.RevokeAck(revocation=7))
    on_lane.raw(lane.frame(lane.Op.PROTOBUF, 0, acknowledgement.SerializeToString()))
    eventually(lambda: 'hoststage_request_errors_total{reason="NOT_REVOKED"} 51.0' in daemon.get("/metrics"))
    assert inline.ask(9, ping=pb.Ping(payload=b"hi")).pong.payload == b"hi"
    assert before == ["session.opened"] * 2
    assert logged() == before


def test_a_few_bytes_cannot_announce_pages_without_end(inline):
    many = pb.Span(keys=b"k" * 16, key_bytes=16, ranges=[pb.PoolRange(pool=0, count=0xFFFFFFFF)])
    assert reason_of(inline.ask(2, inline_store=pb.InlineStore(span=many))) == "RANGES"
    twice = pb.Span(keys=b"k" * 16, key_bytes=16, ranges=[pb.PoolRange(pool=0, count=1)] * 2)
    assert reason_of(inline.ask(3, inline_store=pb.InlineStore(span=twice))) == "RANGES"
    much = pb.Load(span=span(keys_of(4), ()), prefix=0xFFFFFFFF)
    assert reason_of(inline.ask(4, inline_load=pb.InlineLoad(load=much))) == "RANGES"


def listing(**body):
    """A message that lists more than one may."""
    return pb.ClientMessage(request_id=9, **body)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            listing(lookup=pb.Lookup(span=pb.Span(keys=b"k", key_bytes=1, ranges=[pb.PoolRange()] * 70_000))),
            "lookup.span.ranges",
        ),
        (
            listing(abort=pb.Abort(slots=[pb.PoolSlots(slots=[1] * 600_000, generations=[1] * 600_000)])),
            "abort.slots.generations",
        ),
        (listing(inline_store=pb.InlineStore(pages=[pb.InlinePage()] * 70_000)), "inline_store.pages"),
        (listing(touch=pb.Touch(slots=[pb.PoolSlots(slots=[1] * 140_000)])), "touch.slots"),
        (listing(release=pb.Release(load_ids=range(70_000))), "release"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.WhichOneof("body"),
)
def test_a_message_that_lists_without_end_is_refused_before_anybody_waits_for_it(inline, message, field):
    inline.send(message)
    refused = inline.answer(9).error.status
    info = error_details_pb2.ErrorInfo()
    assert refused.details[0].Unpack(info)
    assert info.reason == "TOO_MANY_ENTRIES"
    assert f"{field} brings the entries" in refused.message
    assert inline.ask(10, ping=pb.Ping(payload=b"x")).pong.payload == b"x"


@pytest.mark.parametrize("generations", [[], [1], [1, 2, 3]])
def test_slots_without_their_generations_are_refused_by_name(inline, generations):
    # One without a slot among them, and without.
    for i, slots in enumerate(([0, 1], [0, 0xFFFFFFFF])):
        entry = pb.PoolSlots(slots=slots, generations=generations)
        assert reason_of(inline.ask(20 + i, abort=pb.Abort(slots=[entry]))) == "RANGES"
        commit = pb.Commit(span=span(keys_of(2)), slots=[entry])
        assert reason_of(inline.ask(30 + i, commit=commit)) == "RANGES"


@pytest.mark.parametrize(
    "body",
    [{"lease_arena": pb.LeaseArena(name="n" * 513, bytes=1)}, {"import_memory": pb.ImportMemory(name="n" * 513)}],
)
def test_a_name_without_end_is_refused_before_it_stands_in_a_log(inline, body):
    assert reason_of(inline.ask(9, **body)) == "TEXT_TOO_LONG"


def test_a_store_of_which_a_part_lists_too_much_is_dropped_and_charged_no_more(inline):
    first = pb.InlineStore(span=span(keys_of(2)), pages=[pb.InlinePage(data=bytes(PAGE))])
    inline.send(pb.ClientMessage(request_id=9, inline_store=first))
    inline.send(listing(inline_store=pb.InlineStore(pages=[pb.InlinePage()] * 70_000)))
    assert inline.answer(9).error.status.message
    # The number is free again, and the whole store can be sent anew.
    whole = [pb.InlinePage(page=i, data=bytes(PAGE)) for i in range(2)]
    stored = inline.ask(9, inline_store=pb.InlineStore(span=span(keys_of(2)), pages=whole, last=True))
    assert stored.commit_reply.outcome == pb.OUTCOME_ACCEPTED, stored


@pytest.mark.parametrize("field", ["stack.modes", "stack.paths", "features"])
def test_a_hello_that_lists_without_end_is_refused(daemon, field):
    greeting = hello()
    entry = {"stack.modes": spb.ModeWish(mode=spb.MODE_CACHE), "stack.paths": spb.PAYLOAD_PATH_SHM, "features": "x"}
    holder = greeting if field == "features" else greeting.stack
    getattr(holder, field.rpartition(".")[2]).extend([entry[field]] * 300)
    address = daemon.address.replace("unix://", "unix:")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.HostStageStub(channel).Negotiate(pb.NegotiateRequest(hello=greeting), timeout=10)
    assert f"{field} has 30" in refused.value.details()


def test_inline_pages_come_back_as_they_went_though_sent_in_parts(inline):
    keys = keys_of(3, 77)
    pages = [os.urandom(PAGE) for _ in keys]
    first = pb.InlineStore(span=span(keys), pages=[pb.InlinePage(page=0, data=pages[0])])
    inline.send(pb.ClientMessage(request_id=2, inline_store=first))
    for offset in (0, 4096):
        part = pb.InlinePage(page=1, offset=offset, data=pages[1][offset : offset + 4096])
        inline.send(pb.ClientMessage(request_id=2, inline_store=pb.InlineStore(pages=[part])))
    last = pb.InlineStore(pages=[pb.InlinePage(page=2, data=pages[2])], last=True)
    assert inline.ask(2, inline_store=last).commit_reply.outcome == pb.OUTCOME_ACCEPTED
    assert inline.pushed("stored").outcome == pb.OUTCOME_STORED

    inline.send(pb.ClientMessage(request_id=3, inline_load=pb.InlineLoad(load=pb.Load(span=span(keys, ()), prefix=3))))
    got = {}
    while True:
        answer = inline.answer(3).inline_pages
        if answer.ranges:
            first_key = answer.ranges[0].first
        for page in answer.pages:
            got.setdefault(first_key + page.page, bytearray()).extend(page.data)
        if answer.last:
            break
    assert answer.outcome == pb.OUTCOME_READY
    assert [bytes(got[i]) for i in range(3)] == pages


@pytest.mark.parametrize("offset", [1, PAGE - 1, PAGE, 1 << 40])
def test_a_part_out_of_place_fails_its_store_alone(inline, offset):
    part = pb.InlinePage(page=0, offset=offset, data=b"xy")
    bad = pb.InlineStore(span=span(keys_of(1)), pages=[part], last=True)
    assert reason_of(inline.ask(2, inline_store=bad)) == "PAGE_SIZE"
    short = pb.InlineStore(span=span(keys_of(1)), pages=[pb.InlinePage(data=b"xy")], last=True)
    assert reason_of(inline.ask(3, inline_store=short)) == "PAGE_SIZE"
    assert inline.ask(4, ping=pb.Ping()).HasField("pong")


def test_what_was_asked_before_the_client_finished_sending_is_answered(daemon):
    brief = Wire(daemon.address).open(hello(spb.PAYLOAD_PATH_INLINE))
    for i in range(2, 30):
        brief.send(pb.ClientMessage(request_id=i, ping=pb.Ping(payload=bytes([i]))))
    brief.half_close()
    assert [m.request_id for m in brief.call] == list(range(2, 30))
    assert brief.call.code() is grpc.StatusCode.OK
    brief.channel.close()


def test_bytes_that_are_no_message_end_their_own_stream_alone(daemon):
    with grpc.insecure_channel(daemon.address.replace("unix://", "unix:")) as channel:
        call = channel.stream_stream("/hoststage.v1.HostStage/Session")(iter([b"\xff\xff\xff garbage"]), timeout=20)
        with pytest.raises(grpc.RpcError):
            next(call)
    assert serves_on(daemon)


def test_a_client_that_does_not_read_holds_up_nobody(daemon):
    deaf = Wire(daemon.address).open(hello(spb.PAYLOAD_PATH_INLINE))
    for i in range(2, 400):
        deaf.send(pb.ClientMessage(request_id=i, ping=pb.Ping(payload=b"x" * (1 << 20))))
    memory = eventually(lambda: resident(daemon))
    for _ in range(5):
        assert serves_on(daemon)
    assert resident(daemon) - memory < 400 << 20
    deaf.close()
    eventually(lambda: deaf.welcome.session not in sessions(daemon))


def resident(daemon):
    with open(f"/proc/{daemon.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


# ------------------------------------------------------------------ the fd socket


def test_a_token_works_once_and_yields_that_sessions_descriptors_alone(client, daemon):
    other = Wire(daemon.address).open(hello(model="other"))
    reply, fds = ask_fds(client.welcome.fd_socket, client.welcome.fd_token)
    mine = {a.arena_id for a in client.welcome.arenas}
    assert {r.arena_id for r in reply.records} == mine
    assert not mine & {a.arena_id for a in other.welcome.arenas}
    fdpass.close_all(fds)
    for token in (client.welcome.fd_token, client.welcome.lane_token, bytes(16), os.urandom(16)):
        refused, fds = ask_fds(client.welcome.fd_socket, token)
        assert refused.refusal
        assert fds == []
    other.close()


def test_clients_that_say_nothing_or_half_of_something_keep_nobody_waiting(client):
    path = client.welcome.fd_socket
    request = fdsocket.encode_request(fdsocket.Kind.ARENAS, client.welcome.fd_token, has_pidfd=False)
    with contextlib.ExitStack() as silent:
        for i in range(150):
            made = silent.enter_context(connect(path))
            made.sendall(b"\x18\0\0\0\0\0\0\0" + request[:1] if i % 2 else b"")
        started = time.monotonic()
        reply, fds = ask_fds(path, client.welcome.fd_token)
        assert time.monotonic() - started < 3
    assert not reply.refusal
    fdpass.close_all(fds)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\xff" * 8, b"\xff" * 4096, b"\x18\0\0\0\xff\xff\xff\xff" + b"HSFD" + b"\0" * 20, b"G" * 32],
    ids=["nothing", "one byte", "huge header", "long", "huge descriptor count", "no request"],
)
def test_garbage_on_the_fd_socket_costs_its_sender_alone(client, daemon, data):
    with connect(client.welcome.fd_socket) as made:
        made.sendall(data)
        made.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while made.recv(4096):
                pass
    assert not ask_fds(client.welcome.fd_socket, bytes(16))[1]
    assert serves_on(daemon)


def test_a_flood_of_descriptors_is_closed_again(client, daemon):
    def open_fds():
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    before = open_fds()
    spare = [os.dup(0) for _ in range(60)]
    for _ in range(20):
        with connect(client.welcome.fd_socket) as made:
            packet = fdsocket.encode_request(fdsocket.Kind.ARENAS, bytes(16), has_pidfd=True)
            fdpass.send_fds(made, packet, spare)
            with contextlib.suppress(OSError):
                fdpass.recv_fds(made, 4096, 0)
    fdpass.close_all(spare)
    eventually(lambda: open_fds() <= before + 5)


# ------------------------------------------------------------------ the lane


def test_pages_written_by_shared_memory_are_stored_and_loaded_by_the_lane(client):
    maps = map_arenas(client.welcome)
    made = attached(client)
    write = next(a for a in client.welcome.arenas if a.kind == spb.ARENA_KIND_WRITE)
    read = next(a for a in client.welcome.arenas if a.kind == spb.ARENA_KIND_READ)
    keys = keys_of(4, 5)
    whole = ops.Span(b"".join(keys), 16, (ops.PoolRange(0, 0, 4),))
    reserved = made.ask(ops.Reserve(whole), 2)
    assert reserved.outcome is ops.Outcome.ACCEPTED
    pages = [os.urandom(PAGE) for _ in keys]
    for slot, page in zip(reserved.slots[0].slots.tolist(), pages, strict=True):
        maps[write.arena_id][slot * write.stride : slot * write.stride + PAGE] = page
    assert made.ask(ops.Commit(whole, reserved.slots), 3).outcome is ops.Outcome.ACCEPTED
    op, request_id, body = made.next()
    assert (op, request_id) == (lane.Op.STORED, 0)
    assert lane.decode(op, body).outcome is ops.Outcome.STORED
    found = made.ask(ops.Lookup(ops.Span(whole.keys, 16), pin_ms=1000), 4)
    assert found.longest == 4
    loaded = made.ask(ops.Load(ops.Span(whole.keys, 16), 4, pin=found.pin), 5)
    while loaded.outcome is not ops.Outcome.READY:
        op, _, body = made.next()
        loaded = lane.decode(op, body)
    slots = loaded.slots[0].slots.tolist()
    assert [bytes(maps[read.arena_id][s * read.stride : s * read.stride + PAGE]) for s in slots] == pages
    made.raw(lane.encode(ops.Release((loaded.load_id,)), 0))
    body = pb.ClientMessage(request_id=9, goodbye=pb.Goodbye()).SerializeToString()
    made.raw(lane.frame(lane.Op.PROTOBUF, 9, body))
    assert wire.server_message(made.next()[2]).HasField("done")
    assert made.closed()


def test_protobuf_on_the_lane_answers_on_the_lane_and_the_stream_on_the_stream(client):
    made = attached(client)
    ping = pb.ClientMessage(request_id=7, ping=pb.Ping(payload=b"lane"))
    made.raw(lane.frame(lane.Op.PROTOBUF, 7, ping.SerializeToString()))
    assert wire.server_message(made.next()[2]).pong.payload == b"lane"
    assert client.ask(7, ping=pb.Ping(payload=b"stream")).pong.payload == b"stream"
    made.raw(lane.frame(lane.Op.PROTOBUF, 8, b"\xff\xff\xff"))
    op, request_id, body = made.next()
    assert (op, request_id, reason_of(wire.server_message(body))) == (lane.Op.PROTOBUF, 8, "MALFORMED")
    made.close()


def test_a_lane_needs_the_token_of_its_session(client, daemon):
    other = Wire(daemon.address).open(hello(model="other"))
    for session, token in [
        (client.welcome.session, other.welcome.lane_token),
        (client.welcome.session, client.welcome.fd_token),
        (client.welcome.session, bytes(16)),
        (2**64 - 1, client.welcome.lane_token),
    ]:
        made = Lane(client.welcome.lane_socket)
        assert made.attach(session, token)
        assert made.closed()
    other.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        lane.frame(lane.Op.LOOKUP, 1, b""),
        lane.HEADER.pack(0xFFFFFFFF, lane.Op.ATTACH, 0, 0, 1),
        lane.HEADER.pack(1 << 20, lane.Op.ATTACH, 0, 0, 1) + b"x" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["noise", "request before attach", "huge body", "long attach", "http"],
)
def test_an_unattached_lane_that_misbehaves_is_closed(client, daemon, data):
    made = Lane(client.welcome.lane_socket)
    with contextlib.suppress(OSError):
        made.raw(data)
    assert made.closed()
    assert serves_on(daemon)


@pytest.mark.parametrize(
    "data",
    [
        lane.frame(lane.Op.LOOKUP, 1, b"\x01"),
        lane.frame(lane.Op.LOOKUP_REPLY, 1, bytes(12)),
        lane.frame(200, 1, b"what"),
        lane.HEADER.pack(0xFFFFFFFF, lane.Op.LOOKUP, 0, 0, 1),
        lane.encode(ops.Lookup(ops.Span(b"k" * 16, 16)), 1)[:-1],
        lane.encode(ops.Lookup(ops.Span(b"k" * 16, 16, (ops.PoolRange(0, 0, 1),) * 1025)), 1),
        lane.encode(ops.Commit(ops.Span(b"k" * 16, 16), (ops.PoolSlots(0, NONE, NONE),) * 1025), 1),
        lane.encode(ops.Release(tuple(range(1, 65_538))), 1),
    ],
    ids=[
        "short body",
        "answer as request",
        "unknown operation",
        "huge body",
        "half a frame, then gone",
        "ranges without end",
        "lists of slots without end",
        "a release without end",
    ],
)
def test_a_malformed_frame_closes_the_lane_and_quarantines_its_session_alone(client, daemon, data):
    map_arenas(client.welcome)
    made = attached(client)
    made.raw(data)
    made.socket.shutdown(socket.SHUT_WR)
    assert made.closed()
    eventually(lambda: sessions(daemon)[client.welcome.session] == "quarantined")
    assert reason_of(client.ask(50, reserve=pb.Reserve(span=span(keys_of(1))))) == "SESSION_OVER"
    assert serves_on(daemon)


def test_too_many_silent_lanes_make_room_for_the_next(client):
    with contextlib.ExitStack() as silent:
        for _ in range(200):
            silent.enter_context(contextlib.closing(Lane(client.welcome.lane_socket)))
        attached(client).close()


# ------------------------------------------------------------------ death


CHILD = """
import os, sys, time
sys.path[:0] = {path!r}
from tests.integration.wire import *
client = Wire({address!r}).open(hello(model="mortal"))
maps = map_arenas(client.welcome)
made = Lane(client.welcome.lane_socket)
assert made.attach(client.welcome.session, client.welcome.lane_token) == ""
from hoststage.v1 import ops
span = ops.Span(b"".join(keys_of(8, 1)), 16, (ops.PoolRange(0, 0, 8),))
assert made.ask(ops.Reserve(span), 2).outcome is ops.Outcome.ACCEPTED
if {fork}:
    # Without gRPC's threads: the child only keeps the sockets and the mapping.
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())  # one write: two processes share the pipe
        time.sleep(60)
        os._exit(0)
os.write(1, b"%d\\n" % client.welcome.session)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child that lives on"])
def test_a_killed_clients_slots_are_free_within_a_second(daemon, fork):
    source = CHILD.format(path=[str(ROOT)], address=daemon.address, fork=fork)
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment())
    lines = [int(child.stdout.readline()) for _ in range(2 if fork else 1)]
    try:
        found = [s for s in daemon.status()["sessions"] if s["model"] == "mortal"]
        assert [s["state"] for s in found] == ["active"]
        session = found[0]["session"]
        held = [p["by_state"] for p in daemon.status()["pools"] if p["session"] == session]
        assert sum(p.get("reserved", 0) for p in held) == 8
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        eventually(lambda: session not in sessions(daemon), 1.0)
    finally:
        child.kill()
        if fork:
            for pid in set(lines) - {session}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_stream_that_breaks_leaves_the_session_to_its_lane(client, daemon):
    map_arenas(client.welcome)
    made = attached(client)
    client.call.cancel()
    client.channel.close()
    time.sleep(0.3)
    assert sessions(daemon)[client.welcome.session] == "active"
    assert made.ask(ops.Lookup(ops.Span(b"k" * 16, 16)), 2).runs == ()
    made.close()
    eventually(lambda: sessions(daemon)[client.welcome.session] == "quarantined")


def test_a_session_without_memory_ends_with_its_stream(inline, daemon):
    assert inline.welcome.session in sessions(daemon)
    inline.close()
    eventually(lambda: inline.welcome.session not in sessions(daemon))


def test_a_goodbye_counts_though_its_client_could_not_wait_for_the_daemon(client, daemon):
    map_arenas(client.welcome)
    made = attached(client)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for number, body in ((8, {"ping": pb.Ping()}), (9, {"goodbye": pb.Goodbye()})):
            message = pb.ClientMessage(request_id=number, **body)
            made.raw(lane.frame(lane.Op.PROTOBUF, number, message.SerializeToString()))
        made.close()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: client.welcome.session not in sessions(daemon))


def test_a_goodbye_ends_a_session(client, daemon):
    map_arenas(client.welcome)
    assert client.ask(2, goodbye=pb.Goodbye()).HasField("done")
    eventually(lambda: client.welcome.session not in sessions(daemon))


# ------------------------------------------------------------------ draining


def test_draining_is_told_everywhere_and_takes_no_new_sessions(tmp_path):
    made = Daemon(tmp_path).start()
    client = Wire(made.address).open(hello(spb.PAYLOAD_PATH_INLINE))
    try:
        with grpc.insecure_channel(made.address.replace("unix://", "unix:")) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            assert admin.Drain(admin_pb2.DrainRequest(), timeout=10).open_commits == 0
            assert client.pushed("draining").grace_ms == 0
            from grpc_health.v1 import health_pb2, health_pb2_grpc

            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="hoststage.v1.HostStage")
            serving = health_pb2.HealthCheckResponse.SERVING
            eventually(lambda: stub.Check(request, timeout=10).status != serving)
        assert made.status()["problems"] == ["the daemon is draining"]
        late = Wire(made.address)
        with pytest.raises(grpc.RpcError) as caught:
            late.open()
        late.close()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details(caught.value, error_details_pb2.ErrorInfo)[0].reason == "DRAINING"
        made.process.send_signal(signal.SIGTERM)
        assert client.pushed("draining").grace_ms == 30_000
        assert made.process.wait(10) == 0
    finally:
        client.close()
        made.kill()


def test_metrics_count_requests_by_road_and_errors_by_reason(client, daemon):
    made = attached(client)
    assert made.ask(ops.Lookup(ops.Span(b"k" * 16, 16)), 2).runs == ()
    client.ask(3, ping=pb.Ping())
    text = daemon.get("/metrics")
    assert 'hoststage_request_seconds_count{operation="lookup",road="lane"}' in text
    assert 'hoststage_request_seconds_bucket{le="+Inf",operation="ping",road="stream"}' in text
    assert 'hoststage_handshakes_total{result="granted"}' in text
    made.close()
