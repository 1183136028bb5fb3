"""The lane's waiting threads: one reads for all, and hands the reading on."""

import socket
import threading
import time

import pytest

from hoststage.client._lane import Lane
from hoststage.client._wire import Deadline, Router, Waiter
from hoststage.client.errors import DeadlineExceeded, RequestRejected, SessionLost
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane, ops

LIMIT = 1 << 20


class Peer:
    """The other end: answers pings when told to."""

    def __init__(self, sock):
        self.sock = sock
        self.reader = lane.FrameReader(LIMIT)
        self.requests = []

    def read(self, n):
        """Read until `n` requests are here."""
        self.sock.settimeout(10)
        while len(self.requests) < n:
            for op, request_id, body in self.reader.feed(self.sock.recv(65536)):
                self.requests.append((op, request_id, body))
        return self.requests

    def pong(self, request_id, payload=b""):
        body = pb.ServerMessage(request_id=request_id, pong=pb.Pong(payload=payload)).SerializeToString()
        self.sock.sendall(lane.frame(lane.Op.PROTOBUF, request_id, body))


@pytest.fixture
def ends():
    mine, theirs = socket.socketpair()
    pushes = []
    router = Router(pushes.append)
    made = Lane(mine, router, LIMIT)
    yield made, Peer(theirs), pushes
    made.close("over")
    made.dispose()
    theirs.close()


def ping(made, results, timeout=10.0):
    waiter, deadline = Waiter(), Deadline(timeout)
    made.send(pb.ClientMessage(ping=pb.Ping()), made.router.register(waiter), deadline)
    ended = made.wait(waiter, deadline)
    results.append((waiter.request_id, ended, waiter.error, waiter.result))


def start(n, made, results):
    threads = [threading.Thread(target=ping, args=(made, results)) for _ in range(n)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("order", [lambda ids: ids, lambda ids: ids[::-1]])
def test_every_thread_gets_its_own_answer_whoever_reads_it(ends, order):
    made, peer, _ = ends
    results = []
    threads = start(6, made, results)
    ids = [request_id for _, request_id, _ in peer.read(6)]
    for request_id in order(ids):
        peer.pong(request_id, str(request_id).encode())
        time.sleep(0.002)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(r[0] for r in results) == sorted(ids)
    assert all(result.pong.payload == str(request_id).encode() for request_id, _, _, result in results)
    assert made.router.waiting == 0


def test_end_of_file_ends_all_waits_at_once(ends):
    made, peer, _ = ends
    results = []
    threads = start(4, made, results)
    peer.read(4)
    peer.sock.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [type(error) for _, _, error, _ in results] == [SessionLost] * 4
    with pytest.raises(SessionLost):
        made.router.register(Waiter())


def test_the_leader_that_gives_up_hands_the_reading_on(ends):
    made, peer, _ = ends
    short, long = [], []
    leader = threading.Thread(target=ping, args=(made, short, 0.2))
    leader.start()
    peer.read(1)
    follower = threading.Thread(target=ping, args=(made, long, 10.0))
    follower.start()
    peer.read(2)
    leader.join(10)
    assert short[0][1] is False
    peer.pong(peer.requests[1][1])
    follower.join(10)
    assert long[0][1] is True


def test_an_answer_that_comes_too_late_goes_to_the_orphanage(ends):
    made, peer, _ = ends
    orphans = []
    waiter = Waiter(orphan=orphans.append)
    made.send(ops.Reserve(ops.Span(b"", 1)), made.router.register(waiter), Deadline(1))
    assert not made.wait(waiter, Deadline(0.05))
    assert waiter.abandon()
    late = ops.ReserveReply(ops.Outcome.ACCEPTED)
    peer.sock.sendall(lane.encode(late, waiter.request_id))
    made.drain(5)
    assert orphans == [late]
    assert not waiter.done


def test_pushes_and_errors_reach_whom_they_concern(ends):
    made, peer, pushes = ends
    stored = ops.Stored(b"c" * 16, 7, ops.Outcome.STORED, 3)
    peer.sock.sendall(lane.encode(stored, 0))
    peer.sock.sendall(lane.frame(200, 0, b"from a newer daemon"))
    made.drain(5)
    made.drain(0)
    assert pushes == [stored]
    waiter = Waiter()
    request_id = made.router.register(waiter)
    error = pb.ServerMessage(request_id=request_id)
    error.error.status.message = "no"
    peer.sock.sendall(lane.frame(lane.Op.PROTOBUF, request_id, error.SerializeToString()))
    assert made.wait(waiter, Deadline(5))
    assert isinstance(waiter.error, RequestRejected)


def test_a_daemon_that_does_not_read_costs_the_deadline_and_half_a_frame_the_lane(ends):
    made, _, _ = ends
    big = pb.ClientMessage(ping=pb.Ping(payload=bytes(8 << 20)))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        made.send(big, made.router.register(Waiter()), Deadline(0.2))
    assert time.monotonic() - started < 5
    assert made.router.lost is not None


def test_a_malformed_frame_ends_the_lane(ends):
    made, peer, _ = ends
    peer.sock.sendall(lane.HEADER.pack(LIMIT + 1, lane.Op.PROTOBUF, 0, 0, 1))
    made.drain(5)
    assert isinstance(made.router.lost, SessionLost)


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interruption_right_after_the_senders_lock_was_taken_wedges_nobody(ends):
    made, _, _ = ends
    lock = made._send_lock

    class Interrupted:
        def acquire(self, timeout):
            lock.acquire(timeout=timeout)
            raise Interrupt

    made._send_lock = Interrupted()
    with pytest.raises(Interrupt):
        made.send(pb.ClientMessage(ping=pb.Ping()), 2, Deadline(5))
    # The lock is lost, and with it the lane: openly, so that another one is opened.
    assert "interrupted" in str(made.router.lost)
    with pytest.raises(SessionLost):
        made.router.register(Waiter())


@pytest.mark.parametrize("how", ["wait", "drain"])
def test_an_interruption_while_the_reading_is_handed_on_leaves_it_free(ends, monkeypatch, how):
    made, peer, _ = ends

    def interrupted():
        raise Interrupt

    monkeypatch.setattr(made, "_nudge_one", interrupted)
    with pytest.raises(Interrupt):
        made.wait(Waiter(), Deadline(0.01)) if how == "wait" else made.drain()
    monkeypatch.undo()
    assert not made.led
    results = []
    threads = start(1, made, results)
    peer.pong(peer.read(1)[0][1])
    for thread in threads:
        thread.join(10)
    assert results[0][1:3] == (True, None)
