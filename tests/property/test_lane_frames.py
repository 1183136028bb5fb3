"""The fixed frames of the lane and their protobuf twins say the same."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoststage.v1 import convert, hoststage_pb2, lane, ops

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ranges = st.lists(st.builds(ops.PoolRange, u32, u32, u32), max_size=4).map(tuple)
commit_ids = st.binary(min_size=16, max_size=16).filter(any)


@st.composite
def spans(draw):
    key_bytes = draw(st.integers(1, 64))
    n = draw(st.integers(0, 5))
    keys = draw(st.binary(min_size=n * key_bytes, max_size=n * key_bytes))
    return ops.Span(keys, key_bytes, draw(ranges), draw(st.binary(max_size=64)))


@st.composite
def pool_slots(draw):
    n = draw(st.integers(0, 6))
    values = st.lists(u32, min_size=n, max_size=n).map(lambda v: np.array(v, dtype=np.uint32))
    return ops.PoolSlots(draw(u32), draw(values), draw(values))


slots = st.lists(pool_slots(), max_size=3).map(tuple)
outcomes = st.sampled_from(ops.Outcome)
runs = st.lists(st.tuples(u32, u32), max_size=4).map(tuple)
ids = st.lists(u64, max_size=5).map(tuple)

messages = st.one_of(
    st.builds(ops.Reserve, spans(), u32),
    st.builds(ops.ReserveReply, outcomes, slots, text),
    st.builds(ops.Commit, spans(), slots),
    st.builds(ops.CommitReply, outcomes, commit_ids | st.just(b""), slots, text),
    st.builds(ops.Lookup, spans(), u32),
    st.builds(ops.LookupReply, runs, u64),
    st.builds(ops.Load, spans(), u32, u64, u32, st.booleans()),
    st.builds(ops.LoadReply, outcomes, u64, u32, ranges, slots, text),
    st.builds(ops.LoadReady, u64, outcomes, st.booleans(), u32, ranges, slots, text),
    st.builds(ops.Release, ids, ids),
    st.builds(ops.Stored, commit_ids, u64, outcomes, u32, text),
)


@given(messages, u64)
def test_a_frame_decodes_to_what_was_encoded(message, request_id):
    [(op, got_id, body)] = lane.FrameReader(1 << 20).feed(lane.encode(message, request_id))
    assert (got_id, lane.decode(op, body)) == (request_id, message)


@given(messages, u64)
def test_the_protobuf_twin_says_the_same_as_the_frame(message, request_id):
    envelope = convert.to_proto(message, request_id)
    again = type(envelope).FromString(envelope.SerializeToString())
    assert again.request_id == request_id
    assert convert.from_proto(again) == message


@given(st.lists(st.tuples(messages, u64), min_size=1, max_size=4), st.integers(1, 50))
def test_frames_survive_any_cutting_of_the_stream(batch, step):
    stream = b"".join(lane.encode(m, i) for m, i in batch)
    reader = lane.FrameReader(1 << 20)
    got = []
    for at in range(0, len(stream), step):
        got += [(lane.decode(op, body), i) for op, i, body in reader.feed(stream[at : at + step])]
    assert got == batch


@given(st.integers(0, 40), st.binary(max_size=200))
def test_garbage_is_a_frame_error_and_nothing_else(op, body):
    with contextlib.suppress(lane.FrameError):
        lane.decode(op, body)


def test_a_body_over_the_limit_is_refused_before_it_is_buffered():
    reader = lane.FrameReader(100)
    with pytest.raises(lane.FrameError, match="exceeds the limit of 100"):
        list(reader.feed(lane.HEADER.pack(101, lane.Op.LOOKUP, 0, 0, 1)))


def test_outcomes_are_those_of_the_protobuf_enum_and_unknown_ones_are_survivable():
    assert {f"OUTCOME_{o.name}": o.value for o in ops.Outcome} == dict(hoststage_pb2.Outcome.items())
    assert ops.Outcome(200) is ops.Outcome.UNSPECIFIED


def test_other_operations_have_no_fixed_twin():
    assert convert.from_proto(hoststage_pb2.ClientMessage(request_id=1, ping={})) is None
