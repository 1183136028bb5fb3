"""Frames of the lane as version 1 puts them on the wire, and what a client makes of a daemon that says less or more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hoststage.client.stack import WritePolicy
from hoststage.client.verdict import Grant
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import lane, ops
from hoststage.v1 import stack_pb2 as spb

RECORDED = Path(__file__).parents[1] / "fixtures" / "wire"
REQUEST = 0x0102030405060708

SPAN = ops.Span(b"k" * 32 + b"l" * 32, 32, (ops.PoolRange(0, 0, 2), ops.PoolRange(1, 1, 1)), b"p" * 8)
SLOTS = (
    ops.PoolSlots(0, np.array([7, 0xFFFFFFFF], dtype=np.uint32), np.array([3, 0], dtype=np.uint32)),
    ops.PoolSlots(1, np.array([258], dtype=np.uint32), np.array([1], dtype=np.uint32)),
)
COMMIT_ID = bytes(range(16))

MESSAGES: dict[str, ops.HotMessage] = {
    "reserve": ops.Reserve(SPAN, 250),
    "reserve-reply": ops.ReserveReply(ops.Outcome.ACCEPTED, SLOTS, "é"),
    "commit": ops.Commit(SPAN, SLOTS),
    "commit-reply": ops.CommitReply(ops.Outcome.ACCEPTED, COMMIT_ID, SLOTS[1:], "ok"),
    "lookup": ops.Lookup(replace(SPAN, ranges=()), 1000),
    "lookup-reply": ops.LookupReply(((1, 4), (8, 8)), 77),
    "load": ops.Load(replace(SPAN, ranges=()), 2, 77, 5000, True),
    "load-reply": ops.LoadReply(ops.Outcome.READY, 9, 2, SPAN.ranges, SLOTS, "x"),
    "load-ready": ops.LoadReady(9, ops.Outcome.MISS, True, 1, SPAN.ranges, SLOTS, "gone"),
    "release": ops.Release((9, 10), (77,)),
    "stored": ops.Stored(COMMIT_ID, 21, ops.Outcome.STORED, 5, ""),
}


def recordings() -> dict[str, bytes]:
    lines = (RECORDED / "lane-v1.hex").read_text().splitlines()
    return {name: bytes.fromhex(raw) for name, raw in (line.split() for line in lines)}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_frame_of_version_1_means_what_it_meant_and_is_written_the_same(name):
    raw = recordings()[name]
    size, op, zero, _, request = lane.HEADER.unpack_from(raw)
    assert (size, zero, request) == (len(raw) - lane.HEADER.size, 0, REQUEST)
    assert lane.decode(op, raw[lane.HEADER.size :]) == MESSAGES[name]
    assert lane.encode(MESSAGES[name], REQUEST) == raw


def test_every_hot_operation_is_recorded():
    hot = {op for op in lane.Op if lane.is_hot(op)}
    assert {lane.HEADER.unpack_from(raw)[1] for raw in recordings().values()} == hot


def test_an_outcome_of_a_newer_daemon_reads_as_unspecified():
    raw = bytearray(recordings()["stored"])
    message = lane.decode(lane.Op.STORED, bytes(raw[lane.HEADER.size :]))
    assert isinstance(message, ops.Stored)
    at = raw.index(bytes([ops.Outcome.STORED]), lane.HEADER.size + 16 + 8)
    raw[at] = 99
    newer = lane.decode(lane.Op.STORED, bytes(raw[lane.HEADER.size :]))
    assert newer == replace(message, outcome=ops.Outcome.UNSPECIFIED)


def test_a_grant_of_an_older_daemon_has_no_write_policy_and_that_of_a_newer_one_may_be_unknown():
    recorded = pb.ServerMessage.FromString(bytes.fromhex((RECORDED / "welcome-v1.hex").read_text())).welcome.grant
    assert not recorded.HasField("write_policy")
    assert Grant.from_proto(recorded).write_policy is None
    said = spb.Grant(mode=spb.MODE_CACHE, write_policy=spb.WRITE_POLICY_WRITE_BACK)
    assert Grant.from_proto(said).write_policy is WritePolicy.WRITE_BACK
    unknown = spb.Grant.FromString(spb.Grant(mode=spb.MODE_CACHE).SerializeToString() + b"\x38\x63")
    assert Grant.from_proto(unknown).write_policy is None
