"""Data connections, spoken by hand: what they carry, and what the daemon does about peers that lie, stall or vanish on them."""

import contextlib
import os
import socket
import time

import pytest

from hoststage.shm import bulk
from hoststage.v1 import data, lane, ops
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import stack_pb2 as spb
from tests.integration.daemon import Daemon, eventually
from tests.integration.test_daemon_wire import reason_of, sessions
from tests.integration.wire import PAGE, Wire, hello, keys_of

INLINE = spb.PAYLOAD_PATH_INLINE


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    flags = ["listen.tcp=127.0.0.1:0", "listen.data_tcp=127.0.0.1:0"]
    made = Daemon(tmp_path_factory.mktemp("daemon"), flags=flags).start()
    yield made
    assert made.stop() == 0


@pytest.fixture
def client(daemon):
    made = Wire(daemon.address).open(hello(INLINE, mode=spb.MODE_CACHE, slots=128))
    yield made
    made.close()


def patient():
    return 10.0


class Raw:
    """A data connection, by hand."""

    def __init__(self, client, token=None, session=None, place=None):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(15)
        self.sock.connect(place or client.welcome.data_socket)
        bulk.prepare(self.sock)
        if token is None:
            token = client.ask(900, open_data=pb.OpenData()).open_data_reply.token
        body = lane.ATTACH_BODY.pack(session or client.welcome.session, token)
        self.sock.sendall(lane.frame(lane.Op.ATTACH, 1, body))
        op, _, self.attach = self.frame()
        assert op == lane.Op.ATTACH

    def frame(self):
        return data.receive_frame(self.sock, 1 << 20, patient)

    def ask(self, message, request_id):
        self.sock.sendall(lane.encode(message, request_id))
        return self.answer(request_id)

    def answer(self, request_id):
        op, its_id, body = self.frame()
        assert its_id == request_id
        return pb.ServerMessage.FromString(body) if op == lane.Op.PROTOBUF else lane.decode(op, body)

    def at_its_end(self):
        return at_its_end(self.sock)


def at_its_end(sock):
    """Read until the peer has closed; raise where it does not."""
    sock.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


def span(keys, count=None):
    return ops.Span(b"".join(keys), 16, (ops.PoolRange(0, 0, len(keys) if count is None else count),))


def store(raw, keys, pages, request_id=5):
    granted = raw.ask(ops.Reserve(span(keys), 1000), request_id)
    assert granted.outcome is ops.Outcome.ACCEPTED
    wanted = [p for p, slot in zip(pages, granted.slots[0].slots.tolist(), strict=True) if slot != ops.NO_SLOT]
    raw.sock.sendall(data.pages(request_id, PAGE * len(wanted)) + b"".join(wanted))
    return raw.answer(request_id), len(wanted)


def load(raw, keys, request_id=6):
    reply = raw.ask(ops.Load(span(keys), len(keys)), request_id)
    if reply.outcome is not ops.Outcome.READY:
        return reply, None
    op, _, body = raw.frame()
    assert op == data.Op.PAGES
    got = bytearray(data.pages_bytes(body))
    bulk.receive(raw.sock, [memoryview(got)], patient)
    op, _, body = raw.frame()
    assert op == data.Op.SENT
    assert data.is_whole(body)
    return reply, bytes(got)


def slots(daemon, client):
    return next(p["by_state"] for p in daemon.status()["pools"] if p["session"] == client.welcome.session)


def all_free(daemon, client):
    return lambda: set(slots(daemon, client)) == {"free"}


def test_pages_come_back_as_they_went_and_known_ones_are_not_sent(client):
    keys, pages = keys_of(5, 1), [os.urandom(PAGE) for _ in range(5)]
    raw = Raw(client)
    reply, sent = store(raw, keys[:3], pages[:3])
    assert (reply.outcome, sent) == (ops.Outcome.ACCEPTED, 3)
    stored = client.pushed("stored")
    assert (stored.outcome, stored.commit_request, stored.pages) == (pb.OUTCOME_STORED, 5, 3)
    reply, sent = store(raw, keys, pages, 7)
    assert (reply.outcome, sent) == (ops.Outcome.ACCEPTED, 2)
    assert raw.ask(ops.Reserve(span(keys[:3]), 1000), 8).outcome is ops.Outcome.BELIEVED_STORED
    client.pushed("stored")
    reply, got = load(raw, keys)
    assert (reply.prefix, reply.ranges) == (5, (ops.PoolRange(0, 0, 5),))
    assert got == b"".join(pages)
    assert load(raw, keys_of(2, 99))[0].outcome is ops.Outcome.MISS


def test_a_token_works_once_and_for_its_own_session(client, daemon):
    token = client.ask(2, open_data=pb.OpenData()).open_data_reply.token
    other = Wire(daemon.address).open(hello(INLINE))
    assert Raw(client, token, session=other.welcome.session).attach[:1] == b"\x01"
    other.close()
    token = client.ask(3, open_data=pb.OpenData()).open_data_reply.token
    assert Raw(client, token).attach == b"\x00"
    refused = Raw(client, token)
    assert b"unknown, used or expired" in refused.attach
    assert refused.at_its_end()
    assert Raw(client, os.urandom(16)).attach[:1] == b"\x01"


def test_sessions_that_share_memory_have_no_use_for_it(daemon):
    shm = Wire(daemon.address).open()
    assert (shm.welcome.data_socket, shm.welcome.data_port) == ("", 0)
    assert reason_of(shm.ask(2, open_data=pb.OpenData())) == "DATA_PATH"
    shm.close()


def test_a_session_has_a_few_connections_at_most(client):
    most = client.welcome.limits.max_data_connections
    held = [Raw(client) for _ in range(most)]
    assert b"at most" in Raw(client).attach
    held.pop().sock.close()
    eventually(lambda: Raw(client).attach == b"\x00")


def test_what_fails_as_a_whole_leaves_the_connection_usable(client):
    raw = Raw(client)
    assert reason_of(raw.ask(ops.Reserve(span(keys_of(1), 9)), 2)) == "RANGES"
    assert reason_of(raw.ask(ops.Reserve(ops.Span(b"", 16, (ops.PoolRange(0, 0, 1),))), 3)) == "RANGES"
    assert reason_of(raw.ask(ops.Load(span(keys_of(1)), 2), 4)) == "RANGES"
    keys = keys_of(2, 4)
    assert store(raw, keys, [bytes(PAGE)] * 2)[0].outcome is ops.Outcome.ACCEPTED


@pytest.mark.parametrize(
    "sent",
    [
        data.pages(5, 2 * PAGE - 1),
        data.pages(6, 2 * PAGE),
        lane.encode(ops.Load(span(keys_of(1)), 1), 5),
        lane.frame(data.Op.PAGES, 5, b"xy"),
        data.pages(5, 2 * PAGE) + b"half of it",
        b"",
    ],
)
def test_a_store_that_breaks_off_gives_its_slots_back_and_hurts_nothing_else(client, daemon, sent):
    raw = Raw(client)
    assert raw.ask(ops.Reserve(span(keys_of(2, os.getpid()))), 5).outcome is ops.Outcome.ACCEPTED
    assert slots(daemon, client)["reserved"] == 2
    raw.sock.sendall(sent)
    raw.sock.shutdown(socket.SHUT_WR)
    assert raw.at_its_end()
    eventually(all_free(daemon, client))
    assert client.ask(9, ping=pb.Ping(payload=b"hi")).pong.payload == b"hi"


@pytest.mark.parametrize(
    "sent", [lane.encode(ops.Lookup(ops.Span(b"k" * 16, 16)), 2), b"\xff" * 16, lane.frame(22, 2, b"x")]
)
def test_a_malformed_frame_closes_its_connection_alone(client, sent):
    raw = Raw(client)
    raw.sock.sendall(sent)
    assert raw.at_its_end()
    assert client.ask(9, ping=pb.Ping(payload=b"hi")).pong.payload == b"hi"


def test_a_session_that_ends_takes_its_connections_along(client, daemon):
    keys = keys_of(3, 31)
    idle, storing = Raw(client), Raw(client)
    assert storing.ask(ops.Reserve(span(keys)), 5).outcome is ops.Outcome.ACCEPTED
    storing.sock.sendall(data.pages(5, 3 * PAGE) + bytes(PAGE))
    client.close()
    eventually(lambda: client.welcome.session not in sessions(daemon), 1.0)
    assert idle.at_its_end()
    assert storing.at_its_end()


def test_who_does_not_read_its_load_holds_up_nobody_else(daemon):
    page = 1 << 20
    big = hello(INLINE, mode=spb.MODE_CACHE, model="big", slots=64)
    big.stack.pools[0].page_bytes = page
    slow = Wire(daemon.address).open(big)
    raw, keys = Raw(slow), keys_of(16, 3)
    granted = raw.ask(ops.Reserve(span(keys[:8]), 1000), 5)
    assert granted.outcome is ops.Outcome.ACCEPTED
    raw.sock.sendall(data.pages(5, 8 * page) + bytes(8 * page))
    assert raw.answer(5).outcome is ops.Outcome.ACCEPTED
    slow.pushed("stored")
    raw.sock.sendall(lane.encode(ops.Load(span(keys[:8]), 8), 6))
    leases = lambda: [s["read_leases"] for s in daemon.status()["sessions"] if s["session"] == slow.welcome.session]  # noqa: E731
    eventually(lambda: leases() == [8])
    quick = Wire(daemon.address).open(hello(INLINE))
    for i in range(20):
        mine = Raw(quick)
        assert store(mine, keys_of(2, 1000 + i), [os.urandom(PAGE)] * 2)[0].outcome is ops.Outcome.ACCEPTED
        mine.sock.close()
        eventually(lambda: Raw(quick).sock.close() is None)
    assert leases() == [8]
    raw.sock.close()
    eventually(lambda: leases() == [0])
    for wire in (slow, quick):
        wire.close()


def test_who_connects_and_says_nothing_or_nonsense_is_let_go(client):
    silent = [socket.socket(socket.AF_UNIX) for _ in range(140)]
    for sock in silent:
        sock.connect(client.welcome.data_socket)
    babbling = socket.socket(socket.AF_UNIX)
    babbling.connect(client.welcome.data_socket)
    babbling.sendall(bytes(100))
    assert at_its_end(babbling)
    # More than may wait: the first went when the last came, and who has a token comes through.
    assert at_its_end(silent[0])
    assert Raw(client).attach == b"\x00"
    for sock in silent:
        sock.close()


def test_the_operators_see_the_road(client, daemon):
    raw = Raw(client)
    store(raw, keys_of(1, 77), [bytes(PAGE)])
    load(raw, keys_of(1, 77))
    for operation in ("store", "load"):
        series = f'hoststage_request_seconds_count{{operation="{operation}",road="data"}}'
        eventually(lambda s=series: s in daemon.get("/metrics"))
    eventually(lambda: 'hoststage_connections{road="data"} 1.0' in daemon.get("/metrics"))


def test_a_daemon_that_stops_waits_for_nobody_in_the_middle_of_his_pages(tmp_path):
    daemon = Daemon(tmp_path).start()
    client = Wire(daemon.address).open(hello(INLINE))
    raw = Raw(client)
    assert raw.ask(ops.Reserve(span(keys_of(2))), 5).outcome is ops.Outcome.ACCEPTED
    raw.sock.sendall(data.pages(5, 2 * PAGE) + b"some")
    started = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started < 8
    assert raw.at_its_end()
    client.close()
