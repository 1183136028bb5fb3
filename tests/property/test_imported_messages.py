"""Operations on imported memory survive the way over the wire, and whatever comes off it is refused by name or makes sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoststage.v1 import fdsocket, imported, ops
from hoststage.v1 import hoststage_pb2 as pb

U32 = st.integers(0, (1 << 32) - 1)
SPANS = st.builds(
    lambda n, ranges: ops.Span(bytes(range(32)) * n, 32, tuple(ranges)),
    st.integers(0, 4),
    st.lists(st.builds(ops.PoolRange, U32, U32, U32), max_size=3),
)
CLAIMS = st.integers(0, imported.MAX_OFFSET)


@st.composite
def tables(draw):
    pieces, pages = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    column = st.lists(st.integers(0, 300), min_size=pieces, max_size=pieces)
    sizes = st.lists(st.integers(1, imported.MAX_PIECE_BYTES), min_size=pieces, max_size=pieces)
    row = st.lists(st.integers(0, imported.MAX_OFFSET), min_size=pieces, max_size=pieces)
    offsets = draw(st.lists(row, min_size=pages, max_size=pages))
    return imported.Places(
        draw(st.integers(0, (1 << 64) - 1)),
        draw(U32),
        np.array(draw(column), dtype=np.int64),
        np.array(draw(sizes), dtype=np.int64),
        np.array(offsets, dtype=np.int64).reshape(pages, pieces),
    )


def _same(a: imported.Places, b: imported.Places) -> bool:
    arrays = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("memfds", "sizes", "offsets"))
    return arrays and (a.import_id, a.pool) == (b.import_id, b.pool)


@given(SPANS, st.lists(tables(), max_size=3), U32, CLAIMS)
def test_a_store_and_its_message_are_the_same(span, pages, wait_ms, claim):
    sent = imported.ImportedStore(span, tuple(pages), wait_ms, claim)
    wire = imported.store_to_proto(sent).SerializeToString()
    got = imported.store_from_proto(pb.ImportedStore.FromString(wire))
    assert (got.span, got.wait_ms, got.claim) == (span, wait_ms, claim)
    assert all(map(_same, got.pages, sent.pages))
    assert len(got.pages) == len(pages)


@given(SPANS, st.lists(tables(), max_size=3), U32, CLAIMS, st.booleans())
def test_a_load_and_its_message_are_the_same(span, into, number, claim, shorter):
    sent = imported.ImportedLoad(ops.Load(span, number, number, number, shorter), tuple(into), claim)
    got = imported.load_from_proto(pb.ImportedLoad.FromString(imported.load_to_proto(sent).SerializeToString()))
    assert (got.load, got.claim) == (sent.load, claim)
    assert all(map(_same, got.into, sent.into))


@given(st.sampled_from(ops.Outcome), U32, st.lists(st.builds(ops.PoolRange, U32, U32, U32), max_size=3), st.text())
def test_the_end_of_a_load_and_its_message_are_the_same(outcome, prefix, ranges, detail):
    sent = imported.ImportedLoadReply(outcome, prefix, tuple(ranges), detail)
    wire = imported.load_reply_to_proto(sent).SerializeToString()
    assert imported.load_reply_from_proto(pb.ImportedLoadReply.FromString(wire)) == sent


NUMBERS = st.lists(st.integers(0, (1 << 64) - 1), max_size=8)


@settings(max_examples=300)
@given(NUMBERS, st.lists(U32, max_size=8), NUMBERS)
def test_any_places_are_sound_or_refused_by_name(offsets, memfds, piece_bytes):
    message = pb.ImportedPages(offsets=offsets, memfds=memfds, piece_bytes=piece_bytes)
    try:
        places = imported.places_from_proto(message, "pages[3]")
    except imported.PlacesError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.field.startswith("pages[3].")
        assert refused.remedy
        return
    assert places.offsets.shape == (len(offsets) // len(piece_bytes), len(places.sizes))
    assert places.page_bytes == sum(piece_bytes)
    assert (places.sizes > 0).all()
    assert (places.offsets >= 0).all()


def test_more_pieces_than_a_page_may_have_are_refused():
    many = imported.MAX_PIECES + 1
    message = pb.ImportedPages(memfds=[0] * many, piece_bytes=[1] * many)
    with pytest.raises(imported.PlacesError, match="at most"):
        imported.places_from_proto(message, "pages[0]")
    whole = pb.ImportedPages(memfds=[0], piece_bytes=[1], offsets=range(imported.MAX_PLACES // 2 + 1))
    assert len(imported.store_from_proto(pb.ImportedStore(pages=[whole])).pages) == 1
    with pytest.raises(imported.PlacesError, match="in one request"):
        imported.store_from_proto(pb.ImportedStore(pages=[whole, whole]))
    with pytest.raises(imported.PlacesError, match="claim"):
        imported.store_from_proto(pb.ImportedStore(claim=1 << 62))


@given(st.binary(max_size=200))
def test_a_refusal_with_a_status_is_told_from_one_in_words(status):
    reply = fdsocket.decode_reply(fdsocket.encode_status(status))
    assert (reply.status, bool(reply.refusal), reply.records) == (status, True, ())
    assert fdsocket.decode_reply(fdsocket.encode_refusal("no")).status == b""
