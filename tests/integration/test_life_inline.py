"""Inline pages: a session that ends while the daemon copies, receives or sends them, and commits that are refused after the copy."""

import asyncio
import os
import threading

import pytest

from hoststage.core.sessions import SessionLimits
from hoststage.server.contract import RequestError, RevokedLeases, SessionRequest
from hoststage.server.staging import messages as staging_messages
from hoststage.v1 import ops
from tests.integration.test_service import PAGE, Inbox, keys_of, service, span, stack

__all__ = ["service"]


async def test_memory_outlasts_a_copy_into_it_though_its_session_ends(service, monkeypatch):
    began, go_on, copy = threading.Event(), threading.Event(), staging_messages._copy_in

    def slow_copy(todo):
        began.set()
        assert go_on.wait(10)
        copy(todo)

    monkeypatch.setattr(staging_messages, "_copy_in", slow_copy)
    session = await service.open(SessionRequest(stack()), Inbox())
    arena = session._write[0].arena
    session.inline_store(span(keys_of(3), (0, 0, 3)), [[os.urandom(PAGE)] * 3], 1, 0, lambda _: None)
    assert await asyncio.to_thread(began.wait, 10)
    service.end(session.session_id, "its stream ended")
    await asyncio.sleep(0.05)
    # A thread is about to write there: were the memory unmapped, or another's by now, the daemon would die, or worse.
    assert [s.state for s in service.facts().sessions] == ["ending"]
    assert arena.view(0, 8) is not None
    go_on.set()
    await service.engine.idle()
    assert service.facts().sessions == ()


async def test_an_inline_store_that_is_refused_after_its_copy_leaves_no_slot_taken(service, monkeypatch):
    service.tier.limits = SessionLimits(max_open_commits=0)
    session = await service.open(SessionRequest(stack()), Inbox())
    for i in range(20):
        answer = asyncio.get_running_loop().create_future()
        session.inline_store(span(keys_of(5, bytes([i])), (0, 0, 5)), [[os.urandom(PAGE)] * 5], i, 0, answer.set_result)
        async with asyncio.timeout(10):
            assert (await answer).outcome is ops.Outcome.BACKLOG_FULL
    [facts] = [p for p in service.facts().pools if p.session]
    assert facts.by_state == {"free": facts.slots}


async def moved(begin):
    """Begin a move and return what it replies: the answer and the views."""
    answer = asyncio.get_running_loop().create_future()
    begin(lambda reply, pages: answer.set_result((reply, [view for part in pages for view in part.views()])))
    async with asyncio.timeout(10):
        return await answer


async def filled(session, keys, pages, request_id=1):
    """Store pages as a data connection does."""
    wanted = span(keys, (0, 0, len(pages)))
    granted, views = await moved(lambda reply: session.moves.reserve(ops.Reserve(wanted), request_id, reply))
    for view, page in zip(views, pages, strict=True):
        view[:] = page
    answer = asyncio.get_running_loop().create_future()
    session.moves.filled(wanted, granted.slots, request_id, answer.set_result)
    assert (await answer).outcome is ops.Outcome.ACCEPTED


async def test_slots_that_a_socket_fills_outlast_their_session_and_are_free_after_it(service):
    session = await service.open(SessionRequest(stack()), Inbox())
    wanted = span(keys_of(3), (0, 0, 3))
    granted, views = await moved(lambda reply: session.moves.reserve(ops.Reserve(wanted), 1, reply))
    service.end(session.session_id, "its stream ended")
    await asyncio.sleep(0.05)
    assert [s.state for s in service.facts().sessions] == ["ending"]
    views[2][:] = bytes(PAGE)
    with pytest.raises(RequestError) as caught:
        session.moves.filled(wanted, granted.slots, 1, pytest.fail)
    assert caught.value.reason == "SESSION_OVER"
    await service.engine.idle()
    assert service.facts().sessions == ()


async def test_pages_that_a_socket_sends_are_leased_until_they_are_out(service):
    inbox = Inbox()
    session = await service.open(SessionRequest(stack()), inbox)
    keys, pages = keys_of(3), [os.urandom(PAGE) for _ in range(3)]
    await filled(session, keys, pages)
    await inbox.wait_for(ops.Stored)
    reply, views = await moved(lambda done: session.moves.load(ops.Load(span(keys), 3), done))
    assert (reply.outcome, reply.prefix, reply.ranges) == (ops.Outcome.READY, 3, (ops.PoolRange(0, 0, 3),))
    assert [bytes(view) for view in views] == pages
    assert service.facts().sessions[0].read_leases == 3
    assert session.moves.sent(reply.load_id)
    assert service.facts().sessions[0].read_leases == 0
    # Its result was the reply; a push would speak of a load that the client does not know.
    assert not [m for m in inbox.messages if isinstance(m, ops.LoadReady)]


async def test_pages_of_a_session_that_ends_while_they_are_sent_are_void(service):
    inbox = Inbox()
    session = await service.open(SessionRequest(stack()), inbox)
    keys = keys_of(3)
    await filled(session, keys, [os.urandom(PAGE)] * 3)
    await inbox.wait_for(ops.Stored)
    reply, views = await moved(lambda done: session.moves.load(ops.Load(span(keys), 3), done))
    service.end(session.session_id, "its stream ended")
    assert [s.state for s in service.facts().sessions] == ["ending"]
    assert all(bytes(view) is not None for view in views)
    assert not session.moves.sent(reply.load_id)
    await service.engine.idle()
    assert service.facts().sessions == ()


async def test_leases_under_way_are_not_asked_back_from_a_client_that_does_not_know_them(service):
    service.tier.limits = SessionLimits(revoke_after=0.0)
    inbox, other_inbox = Inbox(), Inbox()
    session = await service.open(SessionRequest(stack(slots=16)), inbox)
    other = await service.open(SessionRequest(stack(slots=16)), other_inbox)
    room = next(p.slots for p in service.facts().pools if not p.session)
    runs = [keys_of(4, bytes([i])) for i in range(2 * room // 4)]
    for i, keys in enumerate(runs):
        await filled(session, keys, [os.urandom(PAGE)] * 4, i + 1)
        await inbox.wait_for(ops.Stored, lambda m, i=i: m.commit_request == i + 1)
    sending = []
    for keys in runs[: room // 4]:
        reply, _ = await moved(lambda done, keys=keys: session.moves.load(ops.Load(span(keys), 4), done))
        sending.append(reply)
    waiting = asyncio.get_running_loop().create_future()
    other.moves.load(ops.Load(span(runs[-1]), 4), lambda reply, pages: waiting.set_result((reply, pages)))
    async with asyncio.timeout(10):
        while not service.tier.counters["revocations", ""]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not waiting.done()
    assert not [m for m in inbox.messages if isinstance(m, RevokedLeases)]
    assert all(session.moves.sent(reply.load_id) for reply in sending)
    async with asyncio.timeout(10):
        reply, pages = await waiting
    assert (reply.outcome, sum(p.nbytes for p in pages)) == (ops.Outcome.READY, 4 * PAGE)
    assert other.moves.sent(reply.load_id)
    assert not session.core.revocations
