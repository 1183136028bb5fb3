"""All pools of a commit, or none: a daemon killed between any two writes of a commit, and two writers of one key."""

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from hoststage.client import HostStageError, Mode, connect
from tests.integration import daemon as daemons
from tests.integration.daemon import Daemon, eventually
from tests.life_support import check_loaded, keys_of, pages, slots_in_use, stack, writer_of

POOLS = ("kv", "indexer", "swa")
KEYS = 3
PAGES = 3 * KEYS
STEPS = 3 * PAGES
"""Before, in the middle of, and after each page's write."""


@dataclass
class CrashingDaemon(Daemon):
    """A daemon that kills itself at step `at` of what it writes once it is armed."""

    at: int = 0

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.integration.crash_daemon"]

    def environment(self) -> dict[str, str]:
        env = daemons.environment()
        env["PYTHONPATH"] += os.pathsep + str(daemons.ROOT)
        return env | {
            "CRASH_AT": str(self.at),
            "CRASH_ARM": str(self.folder / "armed"),
            "CRASH_LOG": str(self.folder / "steps"),
        }

    def arm(self) -> None:
        (self.folder / "armed").touch()

    def disarm(self) -> None:
        (self.folder / "armed").unlink()
        self.at = 0


def whole(keys, writer):
    return {pool: pages(pool, keys, writer) for pool in POOLS}


def steps_of(folder: Path) -> list[str]:
    return (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []


def found_writers(session, keys):
    """Load every prefix that is said to be there; return each key's writer, having checked that no two pools disagree."""
    names = {}
    longest = session.lookup(keys, timeout=10).longest
    if longest:
        with session.load(keys, longest, timeout=10) as loaded:
            assert loaded, "what a lookup finds after a start, a load gets"
            check_loaded(loaded, keys)
            for i, data in enumerate(loaded.pages("kv")):
                names[i] = writer_of(data, "kv", keys[i])
    return longest, names


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "over"), [(Mode.BUFFER_ONLY, "nothing"), (Mode.CACHE, "an older commit")])
def test_a_daemon_killed_between_any_two_writes_of_a_commit_leaves_all_of_a_key_or_none(tmp_path, mode, over):
    old, new = (writer_of(pages("kv", [b"k" * 32], w)[0], "kv", b"k" * 32) for w in ("old", "new"))
    # Every fifth step meets each kind of step and most pages; all of them take minutes.
    chosen = range(1, STEPS + 1, 1 if "HOSTSTAGE_CHAOS_SECONDS" in os.environ else 5)
    outcomes = set()
    made = CrashingDaemon(tmp_path, flags=["staging.beliefs=1"]).start()
    try:
        for at in chosen:
            made.stop()
            made.at = at
            made.start()
            keys = keys_of(KEYS, f"{mode.value}/{over}/{at}")
            spec = stack("crash", mode, pools=POOLS)
            with connect(made.address, stack=spec, timeout=10) as session:
                if over != "nothing":
                    # One belief a pool is kept: that of the keys in question must not be the one, lest they be skipped.
                    for run in (keys, keys_of(1, f"filler/{at}")):
                        assert session.store(run, whole(run, "old")).wait(20).ok
                made.arm()
                with pytest.raises(HostStageError):
                    ticket = session.store(keys, whole(keys, "new"), timeout=5)
                    assert not ticket.wait(5).ok
                    pytest.fail(f"the daemon did not die at step {at}: {steps_of(tmp_path)}")
                made.process.wait(10)
            made.disarm()
            made.start()
            with connect(made.address, stack=spec, timeout=10) as session:
                longest, names = found_writers(session, keys)
                outcomes.add(longest)
                assert set(names.values()) <= {old, new}
                # Of a key whose commit was under way the old pages, the new ones, or none: never some of each.
                assert over != "nothing" or set(names.values()) <= {new}
                # And the commit can be repeated.
                assert session.store(keys, whole(keys, "new")).wait(20).ok
                assert found_writers(session, keys)[0] == KEYS
            assert not slots_in_use(made)
    finally:
        if made.process.poll() is None:
            made.stop()
    print(f"\n  {mode.value} over {over}: prefixes found after the crashes: {sorted(outcomes)}")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), flags=["staging.beliefs=1"]).start()
    yield made
    made.stop()


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_two_writers_of_one_key_are_never_mixed(daemon, mode):
    """Writers whose bytes differ race for the same keys, readers load meanwhile: a sidecar is always of its source's writer."""
    keys = keys_of(6, f"race-{mode.value}")
    spec = stack(f"race-{mode.value}", mode, pools=("kv", "indexer"))
    stopping, errors, loads, seen = threading.Event(), [], [0], set()

    def run(work):
        try:
            with connect(daemon.address, stack=spec, timeout=20) as session:
                while not stopping.is_set():
                    work(session)
        except BaseException as error:
            errors.append(error)
            stopping.set()

    def write(name):
        def work(session):
            made = {"kv": pages("kv", keys, name), "indexer": pages("indexer", keys, name)}
            session.store(keys, made).wait(20)

        return work

    def read(session):
        with session.load(keys, accept_shorter=True) as loaded:
            if loaded:
                check_loaded(loaded, keys)
                loads[0] += 1
                seen.update(writer_of(data, "kv", keys[i]) for i, data in enumerate(loaded.pages("kv")))

    threads = [threading.Thread(target=run, args=(w,)) for w in (write("a"), write("b"), read, read)]
    for thread in threads:
        thread.start()
    stopping.wait(4)
    stopping.set()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert loads[0] > 20
    assert len(seen) == 2, "both writers' pages were seen, or the race did not take place"
    eventually(lambda: not slots_in_use(daemon))
