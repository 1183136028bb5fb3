"""The small parts of the wire: outbox, tokens, inline payload, peers, sockets."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from hoststage.server.contract import ArenaFacts, PinFacts, RequestError
from hoststage.server.rpc import inline, sockets
from hoststage.server.rpc.connections import Connection, Connections, InlineLimits
from hoststage.server.rpc.dataserver import DataServer
from hoststage.server.rpc.outbox import Outbox
from hoststage.server.rpc.peers import PeerPolicy
from hoststage.server.rpc.tickets import LIFE_SECONDS, MOST_OF_SESSION, Tickets
from hoststage.server.telemetry.wire import WireMetrics
from hoststage.shm.peer import PeerCredentials
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import ops

# ------------------------------------------------------------------ outbox


def pong(size):
    return pb.ServerMessage(request_id=1, pong=pb.Pong(payload=bytes(size)))


async def test_messages_come_out_in_order_and_end_after_what_was_queued():
    box = Outbox(1000)
    for size in (1, 2, 3):
        assert box.put(pong(size))
    box.end()
    assert not box.put(pong(4))
    assert [len((await box.get()).pong.payload) for _ in range(3)] == [1, 2, 3]
    assert await box.get() is None


async def test_a_queue_that_nobody_drains_overflows_and_takes_no_more():
    box = Outbox(1000)
    assert box.put(pong(5000))
    assert not box.put(pong(1))
    assert box.overflowed.is_set()
    assert not box.put(pong(1))


async def test_there_is_room_again_when_most_was_read():
    box = Outbox(1000)
    await asyncio.wait_for(box.room(), 1)
    box.put(pong(300))
    waiting = asyncio.create_task(box.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await box.get()
    await asyncio.wait_for(waiting, 1)


async def test_what_is_bounded_elsewhere_does_not_count_and_is_reported_when_sent():
    box, sent = Outbox(100), []
    for _ in range(10):
        assert box.put(pong(1000), counted=False)
    box.when_sent(lambda: sent.append(True))
    box.end()
    for _ in range(10):
        assert await box.get() is not None
    assert sent == []
    assert await box.get() is None
    assert sent == [True]


# ------------------------------------------------------------------ tokens


def test_a_token_works_once_for_its_purpose_and_for_ten_seconds():
    tickets, expired = Tickets(), []
    one = tickets.issue("fd", 1, 0.0)
    assert tickets.redeem("lane", one, 1.0) is None
    assert tickets.redeem("fd", one, 1.0) == (1, None)
    assert tickets.redeem("fd", one, 1.0) is None
    late = tickets.issue("fd", 1, 0.0, on_expiry=lambda: expired.append("late"))
    assert tickets.redeem("fd", late, LIFE_SECONDS) is None
    assert expired == ["late"]


def test_a_session_has_so_many_tokens_and_its_oldest_expires_for_a_further_one():
    tickets, expired = Tickets(), []
    other = tickets.issue("fd", 2, 0.0)
    mine = [tickets.issue("fd", 1, 0.0, i, lambda i=i: expired.append(i)) for i in range(MOST_OF_SESSION + 2)]
    assert expired == [0, 1]
    assert tickets.redeem("fd", mine[1], 1.0) is None
    assert tickets.redeem("fd", mine[2], 1.0) == (1, 2)
    assert tickets.redeem("fd", other, 1.0) == (2, None)
    tickets.issue("fd", 1, LIFE_SECONDS)
    assert expired == [0, 1, *range(3, len(mine))], "all others expired in time"
    tickets.revoke(1)
    tickets.revoke(1)


def test_the_tokens_of_a_session_that_is_over_are_void():
    tickets, expired = Tickets(), []
    mine = tickets.issue("fd", 1, 0.0, on_expiry=lambda: expired.append(1))
    other = tickets.issue("fd", 2, 0.0)
    tickets.revoke(1)
    assert expired == [1]
    assert tickets.redeem("fd", mine, 0.0) is None
    assert tickets.redeem("fd", other, 0.0) == (2, None)


# ------------------------------------------------------------------ inline payload

PAGES = (8, 4)


class Live:
    """As much of a session as inline payload needs: two pools of tiny pages."""

    session_id = 1
    pool_count = len(PAGES)
    arenas = tuple(ArenaFacts(i, "write", i, 9, 4096, (4096,), PinFacts("none", "", False)) for i in range(2))

    def __init__(self):
        self.stored, self.loads = [], []

    def page_bytes(self, pool):
        return PAGES[pool]

    def inline_store(self, span, pages, request_id, wait_ms, reply):
        self.stored.append((span, pages, reply))

    def inline_load(self, op, reply):
        self.loads.append(reply)


@pytest.fixture
def wired():
    connections = Connections(None, inline_limits=InlineLimits(100, 150))
    return connections, Connection(Outbox(1000), Live())


def part(*pages, span=None, last=False):
    made = [pb.InlinePage(range=r, page=p, offset=o, data=d) for r, p, o, d in pages]
    return pb.InlineStore(span=span, pages=made, last=last)


def span_of(n, *ranges):
    return pb.Span(
        keys=bytes(range(n)), key_bytes=1, ranges=[pb.PoolRange(pool=p, first=f, count=c) for p, f, c in ranges]
    )


def test_sessions_are_bounded_and_one_that_is_replaced_does_not_count(wired):
    connections, connection = wired
    connections.max_sessions = 2
    connections.add(connection)
    with connections.opening(0):
        with pytest.raises(RequestError, match="2 sessions are open, at most 2") as refused, connections.opening(0):
            raise AssertionError
        assert refused.value.reason == "SESSIONS"
        with connections.opening(connection.session):
            pass
    with connections.opening(0):
        pass


def test_parts_make_a_whole_and_are_held_until_the_answer(wired):
    connections, connection = wired
    answers = []
    whole = span_of(2, (0, 0, 2), (1, 1, 1))
    inline.store(connections, connection, 5, part((0, 0, 0, b"abcd"), (1, 0, 0, b"wxyz"), span=whole), answers.append)
    inline.store(
        connections, connection, 5, part((0, 1, 0, b"12345678"), (0, 0, 4, b"efgh"), last=True), answers.append
    )
    [(_, pages, reply)] = connection.live.stored
    assert pages == [[b"abcdefgh", b"12345678"], [b"wxyz"]]
    assert connections.inline_bytes == connection.inline_bytes == 20
    reply(ops.CommitReply(ops.Outcome.ACCEPTED))
    assert len(answers) == 1
    assert connections.inline_bytes == connection.inline_bytes == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (part(span=span_of(2, (7, 0, 1))), "RANGES"),
        (part(span=span_of(2, (0, 0, 1), (0, 1, 1))), "RANGES"),
        (part(span=span_of(2, (0, 1, 2))), "RANGES"),
        (part(span=span_of(2, (0, 0xFFFFFFFF, 0xFFFFFFFF))), "RANGES"),
        (part(span=span_of(100, (0, 0, 100))), "INLINE_TOO_LARGE"),
        (part((0, 0, 4, b"efgh"), span=span_of(1, (0, 0, 1))), "PAGE_SIZE"),
        (part((0, 0, 0, b"123456789"), span=span_of(1, (0, 0, 1))), "PAGE_SIZE"),
        (part((0, 0, 0, b"abcd"), (0, 0, 0, b"abcd"), span=span_of(1, (0, 0, 1))), "PAGE_SIZE"),
        (part((1, 0, 0, b"x"), span=span_of(1, (0, 0, 1))), "RANGES"),
        (part((0, 1, 0, b"x"), span=span_of(1, (0, 0, 1))), "RANGES"),
        (part((0, 0, 0, b"abcd"), span=span_of(1, (0, 0, 1)), last=True), "PAGE_SIZE"),
    ],
)
def test_a_part_that_is_wrong_fails_its_store_and_leaves_nothing_behind(wired, message, reason):
    connections, connection = wired
    with pytest.raises(RequestError) as caught:
        inline.store(connections, connection, 5, message, pytest.fail)
    assert caught.value.reason == reason
    assert caught.value.field
    assert (connection.inline_bytes, connections.inline_bytes, connection.inline_parts) == (0, 0, {})


def test_one_session_cannot_take_all_and_all_together_no_more_than_the_daemon_holds(wired):
    connections, first = wired
    second = Connection(Outbox(1000), Live())
    op = ops.Load(ops.Span(bytes(range(11)), 1, (ops.PoolRange(0, 0, 11),)), 11)
    inline.load(connections, first, 1, op, pytest.fail)
    for connection in (first, second):
        with pytest.raises(RequestError) as caught:
            inline.load(connections, connection, 2, op, pytest.fail)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
    inline.drop(first)
    assert connections.inline_bytes == 0
    inline.load(connections, second, 2, op, pytest.fail)


async def test_a_load_is_charged_until_its_pages_have_gone_out(wired):
    connections, connection = wired
    op = ops.Load(ops.Span(bytes(range(2)), 1), 2)
    inline.load(connections, connection, 1, op, connection.outbox.put)
    assert connection.inline_bytes == 2 * sum(PAGES)
    [reply] = connection.live.loads
    ranges = (ops.PoolRange(0, 0, 2),)
    reply(ops.LoadReady(1, ops.Outcome.READY, True, 2, ranges), [[memoryview(b"12345678"), memoryview(b"abcdefgh")]])
    assert connection.inline_bytes == 2 * sum(PAGES)
    pages, end = await connection.outbox.get(), await connection.outbox.get()
    assert [p.data for p in pages.inline_pages.pages] == [b"12345678", b"abcdefgh"]
    assert end.inline_pages.last
    connection.outbox.end()
    assert await connection.outbox.get() is None
    assert connection.inline_bytes == connections.inline_bytes == 0


# ------------------------------------------------------------------ peers and sockets


@pytest.mark.parametrize(
    ("policy", "peer", "allowed"),
    [
        (PeerPolicy(), PeerCredentials(1, 5, 5), True),
        (PeerPolicy(frozenset({5})), PeerCredentials(1, 5, 9), True),
        (PeerPolicy(frozenset(), frozenset({9})), PeerCredentials(1, 5, 9), True),
        (PeerPolicy(frozenset({5})), PeerCredentials(1, 6, 9), False),
        (PeerPolicy(frozenset({5})), PeerCredentials(1, 65534, 65534), False),
        (PeerPolicy(frozenset({65534})), PeerCredentials(1, 65534, 65534), False),
        (PeerPolicy(frozenset({5}), token_demanded=True), PeerCredentials(1, 65534, 65534), True),
    ],
)
def test_the_kernels_word_counts_only_where_it_names_somebody(policy, peer, allowed):
    assert (policy.refusal(peer) == "") is allowed


def test_a_path_that_no_socket_can_have_is_refused_with_the_setting_to_change(tmp_path):
    with pytest.raises(sockets.SocketError, match=r"listen\.socket"):
        sockets.Owned.take(str(tmp_path / ("x" * 120)))


def test_a_stale_socket_is_replaced_a_file_that_is_none_is_not(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    owned = sockets.Owned.take(str(path))
    assert not path.exists()
    owned.release()
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    with pytest.raises(sockets.SocketError, match="no socket"):
        sockets.Owned.take(str(path))
    assert path.read_text() == "mine"


def test_of_two_owners_one_is_refused_also_before_anybody_listens(tmp_path):
    path = str(tmp_path / "s")
    owned = sockets.Owned.take(path)
    code = f"from hoststage.server.rpc import sockets; sockets.Owned.take({path!r})"
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "another daemon listens" in second.stderr
    owned.release()
    assert subprocess.run(command, env=env, timeout=60, check=False).returncode == 0


def test_a_listening_socket_has_its_mode_from_the_start(tmp_path):
    path = tmp_path / "s"
    with sockets.listen(str(path), 0o600):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(sockets.SocketError, match="another daemon listens"):
            sockets.listen(str(path), 0o600)


# ------------------------------------------------------------------ metrics


def test_latencies_are_cumulative_and_in_seconds():
    metrics = WireMetrics()
    for seconds in (20e-6, 0.3, 100.0):
        metrics.latency("lane", "lookup").observe(seconds)
    family = next(m for m in metrics.collect() if m.name == "hoststage_request_seconds")
    counts = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (counts["5e-05"], counts["0.25"], counts["0.5"], counts["+Inf"]) == (1, 1, 2, 3)
    assert next(s.value for s in family.samples if s.name.endswith("_sum")) == pytest.approx(100.30002)


async def test_a_data_connection_for_which_there_is_no_thread_is_closed_and_takes_no_place(wired, monkeypatch):
    connections, connection = wired
    server = DataServer(connections, 1 << 20)
    ours, theirs = socket.socketpair()

    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fail)
    with theirs, pytest.raises(RuntimeError, match="new thread"):
        server._start(connection, ours, 1)
    assert (ours.fileno(), connection.data, connections.metrics.data) == (-1, set(), 0)
    async with asyncio.timeout(2):
        await server.stop()
