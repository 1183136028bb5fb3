"""Background tasks: none dies unseen."""

import asyncio

from hoststage.server import supervisor
from hoststage.server.supervisor import Supervisor


async def test_a_task_that_dies_is_started_anew():
    runs = []

    async def work():
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("once more")
        await asyncio.Event().wait()

    watched = Supervisor(lambda reason: None)
    watched.run("work", work)
    async with asyncio.timeout(20):
        while len(runs) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert watched.restarts == 2
    await watched.stop()


async def test_a_task_that_keeps_dying_takes_the_daemon_down_and_says_why(monkeypatch):
    monkeypatch.setattr(supervisor, "_MOST_RESTARTS", 1)
    fatal = asyncio.get_running_loop().create_future()

    async def work():
        raise ValueError("always")

    watched = Supervisor(fatal.set_result)
    watched.run("work", work)
    reason = await asyncio.wait_for(fatal, 20)
    assert "work" in reason
    assert "always" in reason
    await watched.stop()
