"""What a session leaves behind in its process: nothing that only the garbage collector would find, no promise that nobody keeps."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from hoststage.client._core import Core
from hoststage.client._credits import slots_of
from hoststage.client._link import Alarm
from hoststage.client._store import post_commit
from hoststage.client._ticket import StoreTicket
from hoststage.client._wire import Deadline
from hoststage.client.errors import SessionLost
from hoststage.v1 import ops
from hoststage.v1.ops import Outcome


class Daemon:
    """A link whose requests are kept, and answered by the test."""

    def __init__(self) -> None:
        self.commits: dict[int, object] = {}
        self.waiters: list[object] = []
        self.aborted: list[object] = []

    def start(self, message, waiter, deadline, then):
        waiter.request_id = len(self.waiters) + 1
        self.waiters.append(waiter)
        then(waiter.request_id)

    def written(self, slots):
        pass

    def abort(self, slots):
        self.aborted.append(slots)


def committed(link):
    ticket = StoreTicket(link)
    slots = (slots_of(0, [(1, 1), (2, 1)]),)
    span = ops.Span(bytes(64), 32, (ops.PoolRange(0, 0, 2),))
    post_commit(link, ticket._begin(), span, slots, Deadline(5))
    ticket._seal()
    return ticket, slots


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ending", ["stored", "refused", "lost"])
def test_a_commit_is_gone_when_it_has_ended_though_nobody_collects_garbage(without_collector, ending):
    link = Daemon()
    ticket, slots = committed(link)
    waiter, part = link.waiters.pop(), link.commits[1]
    if ending == "lost":
        waiter.fail(SessionLost("over"))
        assert link.aborted == [slots]
        assert ticket.outcome is Outcome.CANCELLED
    else:
        outcome = Outcome.ACCEPTED if ending == "stored" else Outcome.PARENT_UNCOVERED
        waiter.finish(ops.CommitReply(outcome))
        if ending == "stored":
            link.commits.pop(1).take(ops.Stored(b"", 1, Outcome.STORED, 2))
        assert ticket.outcome is (Outcome.STORED if ending == "stored" else Outcome.PARENT_UNCOVERED)
    assert not link.commits
    gone = weakref.ref(ticket), weakref.ref(slots[0].slots)
    link.aborted.clear()
    del ticket, slots, waiter, part
    assert [ref() for ref in gone] == [None, None]


def test_what_begins_while_the_housekeeper_decides_to_sleep_long_wakes_it():
    alarm = Alarm()

    class Link:
        lane = None

        @property
        def open_work(self):
            # It begins right after the look.
            alarm.ring()
            return False

    core = SimpleNamespace(_pause=1.0, alarm=alarm)
    Core._pace(core, Link())
    assert alarm._event.is_set()
