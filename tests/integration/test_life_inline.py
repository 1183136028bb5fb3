"""Pages that come in messages: a session that ends while the daemon copies them, and commits that are refused after the copy."""

import asyncio
import os
import threading

from hoststage.core.sessions import SessionLimits
from hoststage.server.contract import SessionRequest
from hoststage.server.staging import session as staging_session
from hoststage.v1 import ops
from tests.integration.test_service import PAGE, Inbox, keys_of, service, span, stack

__all__ = ["service"]


async def test_memory_outlasts_a_copy_into_it_though_its_session_ends(service, monkeypatch):
    began, go_on, copy = threading.Event(), threading.Event(), staging_session._copy_in

    def slow_copy(todo):
        began.set()
        assert go_on.wait(10)
        copy(todo)

    monkeypatch.setattr(staging_session, "_copy_in", slow_copy)
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
