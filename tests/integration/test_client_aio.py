"""The asyncio face against a real daemon."""

import asyncio
import time

import pytest

from hoststage.client import DeadlineExceeded, Outcome, PayloadPath, aio
from tests.integration.daemon import Daemon
from tests.integration.test_client_session import keys_of, rows_of, stack


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d")).start()
    yield made
    made.stop()


@pytest.mark.parametrize("path", [PayloadPath.SHM, PayloadPath.INLINE])
async def test_many_tasks_store_and_load_at_once(daemon, path):
    async with await aio.connect(
        daemon.address, stack=stack(f"aio-{path.value}", path=path, slots=256), timeout=20
    ) as session:

        async def one(i):
            keys, kv = keys_of(4, f"aio-{i}"), rows_of(4)
            ticket = await session.store(keys, {"kv": kv})
            assert (await ticket).outcome is Outcome.STORED
            assert (await session.lookup(keys)).longest == 4
            with await session.load(keys) as loaded:
                assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]

        async with asyncio.timeout(60):
            await asyncio.gather(*(one(i) for i in range(24)))


async def test_groups_are_yielded_and_released(daemon):
    async with await aio.connect(daemon.address, stack=stack("aio-groups"), timeout=20) as session:
        keys, kv = keys_of(8, "aio-groups"), rows_of(8)
        assert (await (await session.store(keys, {"kv": kv}))).ok
        got = []
        async for group in session.load_groups(keys):
            got += [bytes(p) for p in group.pages["kv"]]
        assert got == [bytes(r) for r in kv]


async def test_the_loop_runs_on_while_calls_wait(daemon):
    async with await aio.connect(daemon.address, stack=stack("aio-loop"), timeout=20) as session:
        worst, done = 0.0, False

        async def watch():
            nonlocal worst
            while not done:
                before = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - before)

        watching = asyncio.create_task(watch())
        for i in range(20):
            await (await session.store(keys_of(8, f"loop-{i}"), {"kv": rows_of(8)}))
        done = True
        await watching
        assert worst < 1.0
        with pytest.raises(DeadlineExceeded):
            await session.ping(timeout=0)
