"""A slot that the daemon wants back is acknowledged only when nobody here writes it any more."""

import threading

import numpy as np
import pytest

from hoststage.client._credits import Credits, slots_of
from hoststage.client._link import Link
from hoststage.client._wire import Router
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1.convert import slots_to_proto


@pytest.fixture
def link():
    """A link whose messages are kept instead of sent."""
    made = Link.__new__(Link)
    made.router = Router(lambda message: None)
    made.credits = Credits([4])
    made.leased = set()
    made._revocations = {}
    made._revocation_lock = threading.Lock()
    made.sent = []
    made.post = made.sent.append
    return made


def revoked(pairs, loads=()):
    return pb.LeaseRevoked(revocation=7, load_ids=loads, write_slots=slots_to_proto([slots_of(0, pairs)]))


def acknowledged(link):
    return [m.revoke_ack.revocation for m in link.sent if m.WhichOneof("body") == "revoke_ack"]


def test_unused_slots_are_given_up_at_once(link):
    link.credits.add([slots_of(0, [(1, 1), (2, 1)])])
    link._revoked(revoked([(1, 1)]))
    assert acknowledged(link) == [7]
    assert link.credits.held(0) == 1


def test_slots_being_written_are_given_up_by_their_abort(link):
    link._revoked(revoked([(3, 5)]))
    assert acknowledged(link) == []
    link.abort([slots_of(0, [(3, 5)])])
    assert acknowledged(link) == [7]


def test_slots_being_written_are_given_up_by_their_commit(link):
    link._revoked(revoked([(3, 5), (4, 5)]))
    link.written([slots_of(0, [(3, 5)])])
    assert acknowledged(link) == []
    link.written([slots_of(0, [(4, 5)])])
    assert acknowledged(link) == [7]


def test_loads_are_given_up_by_their_release(link):
    link.leased.add(9)
    link._revoked(revoked([], loads=[9]))
    assert acknowledged(link) == []
    link.leased.discard(9)
    link.settle_revocations()
    assert acknowledged(link) == [7]


def test_slots_beyond_what_is_wanted_are_handed_back():
    credits = Credits([3, 0])
    beyond = credits.add([slots_of(0, [(i, 1) for i in range(5)]), slots_of(1, [(8, 1)])])
    assert [(e.pool, len(e.slots)) for e in beyond] == [(0, 2), (1, 1)]
    assert credits.held(0) == 3
    assert credits.take([(0, 4)]) is None
    taken = credits.take([(0, 2)])
    assert taken is not None
    assert np.array_equal(taken[0].slots, [1, 2])


def test_nothing_is_kept_ahead_while_a_reservation_waits_for_it():
    credits = Credits([4])
    credits.add([slots_of(0, [(1, 1)])])
    assert [e.slots.tolist() for e in credits.drain([0])] == [[1]]
    # Asked for before, and granted now: the reservation would wait for it.
    assert [e.slots.tolist() for e in credits.add([slots_of(0, [(2, 1)])])] == [[2]]
    assert credits.lacking() == []
    credits.drained([0])
    assert credits.lacking() == [(0, 4)]
    assert credits.add([slots_of(0, [(3, 1)])]) == []
