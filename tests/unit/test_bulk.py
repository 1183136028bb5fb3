"""Bulk over sockets: every byte in its place however the kernel cuts it up, and a peer that stalls or leaves is told apart."""

import math
import os
import socket
import threading

import pytest

from hoststage.shm import bulk
from hoststage.v1 import data, lane


def second():
    return 0.2


def ample():
    return 10.0


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        bulk.prepare(end)
    yield ends
    for end in ends:
        end.close()


def run(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("out", "into"),
    [
        ([9 << 20], [9 << 20]),
        ([1000] * 3000, [3_000_000]),
        ([2_500_000], [1000] * 2500),
        ([0, 5, 0, 7_000_003, 0], [3, 0, 7_000_005, 0]),
        ([], []),
    ],
)
def test_parts_of_any_size_and_number_arrive_in_order(pair, out, into):
    payload = os.urandom(sum(out))
    parts, at = [], 0
    for size in out:
        parts.append(memoryview(payload)[at : at + size])
        at += size
    got = [bytearray(size) for size in into]
    sending = run(bulk.send, pair[0], parts, ample)
    bulk.receive(pair[1], [memoryview(part) for part in got], ample)
    sending.join(10)
    assert b"".join(got) == payload


def test_who_sends_nothing_and_who_takes_nothing_is_given_up(pair):
    with pytest.raises(bulk.Stalled):
        bulk.receive(pair[0], [memoryview(bytearray(1))], second)
    with pytest.raises(bulk.Stalled):
        bulk.send(pair[0], [bytes(64 << 20)], second)
    with pytest.raises(bulk.Stalled):
        bulk.receive(pair[0], [memoryview(bytearray(1))], lambda: 0.0)


def test_a_peer_that_leaves_half_way_is_no_stall(pair):
    pair[0].sendall(b"half")
    pair[0].close()
    with pytest.raises(bulk.Ended):
        bulk.receive(pair[1], [memoryview(bytearray(8))], ample)
    with pytest.raises(OSError):
        bulk.send(pair[1], [b"x"], ample)


def test_waiting_without_end_is_ended_by_a_shutdown_from_another_thread(pair):
    threading.Timer(0.2, pair[1].shutdown, [socket.SHUT_RDWR]).start()
    with pytest.raises(bulk.Ended):
        bulk.receive(pair[1], [memoryview(bytearray(8))], lambda: math.inf)


def test_frames_come_one_by_one_and_no_larger_than_allowed(pair):
    pair[0].sendall(data.pages(7, 1 << 40) + data.sent(7, whole=True) + lane.frame(lane.Op.LOAD, 8, bytes(100)))
    op, request, body = data.receive_frame(pair[1], 64, ample, idle=ample)
    assert (op, request, data.pages_bytes(body)) == (data.Op.PAGES, 7, 1 << 40)
    op, request, body = data.receive_frame(pair[1], 64, ample)
    assert (op, request, data.is_whole(body)) == (data.Op.SENT, 7, True)
    with pytest.raises(lane.FrameError, match="exceeds"):
        data.receive_frame(pair[1], 64, ample)
    for broken in (data.pages_bytes, data.is_whole):
        with pytest.raises(lane.FrameError):
            broken(b"xyz")


def test_the_lane_has_none_of_these_operations():
    assert not {int(op) for op in data.Op} & {int(op) for op in lane.Op}
