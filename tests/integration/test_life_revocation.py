"""A load that waits for room for long makes the daemon ask for leases back; they are the holder's until it gives them up."""

import threading
import time

import pytest

from hoststage.client import Outcome, connect
from tests.integration.daemon import Daemon, eventually
from tests.life_support import check_loaded, counter, keys_of, pages, slots_in_use, stack


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.stop()


def test_a_holder_is_asked_and_the_load_that_waited_comes_once_it_lets_go(daemon):
    spec = stack("revoked", slots=64)
    asked, pushed = threading.Event(), []

    def on_push(message):
        if getattr(message, "WhichOneof", lambda _: "")("body") == "lease_revoked":
            pushed.append(message.lease_revoked)
            asked.set()

    with connect(daemon.address, stack=spec, timeout=30, on_push=on_push) as holder:
        room = holder.grant.pool("kv").read_slots
        mine, theirs = keys_of(room, "mine"), keys_of(room, "theirs")
        for keys in (mine, theirs):
            assert holder.store(keys, {"kv": pages("kv", keys, "w")}).wait(20).ok
        halves = [holder.load(mine[: room // 2]), holder.load(mine[room // 2 :])]
        assert all(halves)
        with connect(daemon.address, stack=spec, timeout=30) as other:
            got = []

            def wait():
                with other.load(theirs) as loaded:
                    got.append((loaded.outcome, check_loaded(loaded, theirs)))

            waiting = threading.Thread(target=wait)
            waiting.start()
            assert asked.wait(10)
            eventually(lambda: counter(daemon, "revocations") == 2)
            # Asked is not taken: the views are as they were, for as long as the holder likes.
            time.sleep(0.3)
            assert not got
            assert check_loaded(halves[0], mine) == room // 2
            for loaded in halves:
                loaded.release()
            waiting.join(20)
            assert got == [(Outcome.READY, room)]
        assert "waited" in pushed[0].reason
        eventually(lambda: not holder._core.link._revocations)
        eventually(lambda: not slots_in_use(daemon))
        assert "NOT_REVOKED" not in daemon.get("/metrics")


def test_no_more_is_asked_back_than_is_needed(daemon):
    spec = stack("few", slots=64)
    with (
        connect(daemon.address, stack=spec, timeout=30) as holder,
        connect(daemon.address, stack=spec, timeout=30) as other,
    ):
        room = holder.grant.pool("kv").read_slots
        keys = keys_of(room + 2, "few")
        assert holder.store(keys, {"kv": pages("kv", keys, "w")}).wait(20).ok
        held = [holder.load(keys[i : i + 2]) for i in range(0, room - room % 2, 2)]
        assert all(held)
        # Nobody lets go: the load ends at its deadline, with a word of why.
        assert other.load(keys[room:], timeout=4).outcome is Outcome.CANCELLED
        assert counter(daemon, "revocations") == 1
        for loaded in held:
            loaded.release()
