"""Workers and the daemon are killed and stopped at random; every loaded page is checked by its content, and nothing may leak.

`HOSTSTAGE_CHAOS_SECONDS` (150 by default) says for how long; `HOSTSTAGE_CHAOS_SEED` repeats a run's choices.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from tests.chaos.worker import LONGEST, POOLS, RUNS
from tests.integration.daemon import ROOT, Daemon, environment, eventually
from tests.life_support import check_loaded, keys_of, no_new_shared_files, sessions, shared_files, slots_in_use, stack

from hoststage.client import Mode, connect

SECONDS = float(os.environ.get("HOSTSTAGE_CHAOS_SECONDS", "150"))
WORKERS = 5
MODEL = "chaos"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 240)]


class Crew:
    """Workers that are replaced when they die. `counts` sums up what all of them reported."""

    def __init__(self, daemon, mode, folder, rng):
        self.daemon, self.mode, self.folder, self.rng = daemon, mode, folder, rng
        self.number = 0
        self.live = {}
        self.stopped = {}

    def hire(self):
        self.number += 1
        name = f"w{self.number}"
        env = environment()
        env["PYTHONPATH"] += os.pathsep + str(ROOT)
        command = [
            *(sys.executable, "-m", "tests.chaos.worker", self.daemon.address, MODEL, self.mode.value),
            *(name, str(self.rng.randrange(1 << 30)), str(self.folder / f"{name}.json")),
        ]
        self.live[name] = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)

    def signal(self, name, number):
        self.live[name].send_signal(number)

    def kill(self, name):
        self.signal(name, signal.SIGKILL)
        self.live.pop(name).wait(10)
        self.stopped.pop(name, None)

    def resume(self, everybody=False):
        for name, until in list(self.stopped.items()):
            if everybody or time.monotonic() > until:
                self.signal(name, signal.SIGCONT)
                del self.stopped[name]

    def check(self):
        """A worker ends only when it is told to."""
        for name, process in self.live.items():
            assert process.poll() is None, f"{name} ended by itself with {process.returncode}"

    def dismiss(self):
        self.resume(everybody=True)
        for name in self.live:
            self.signal(name, signal.SIGTERM)
        for process in self.live.values():
            # One that has only just been hired may not yet know what to do when told to stop.
            assert process.wait(60) in (0, -signal.SIGTERM)
        self.live.clear()

    def end(self):
        for process in self.live.values():
            process.kill()
            process.wait(10)

    def counts(self):
        total = Counter()
        for report in self.folder.glob("w*.json"):
            total.update(json.loads(report.read_text()))
        return total


def disturb(crew, daemon, rng, seconds, done):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.1, 0.7))
        crew.resume()
        crew.check()
        name = rng.choice(list(crew.live))
        match rng.choices(("kill", "stop", "daemon", "rest"), (6, 3, 1, 2))[0]:
            case "kill":
                crew.kill(name)
                crew.hire()
                done["workers killed"] += 1
            case "stop" if name not in crew.stopped:
                crew.signal(name, signal.SIGSTOP)
                crew.stopped[name] = time.monotonic() + rng.uniform(0.1, 2.0)
                done["workers stopped"] += 1
            case "daemon":
                daemon.kill()
                time.sleep(rng.uniform(0.0, 0.5))
                daemon.start()
                done["daemons killed"] += 1


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_no_wrong_byte_and_no_leaked_slot_whoever_dies(tmp_path, mode, capsys):
    seed = int(os.environ.get("HOSTSTAGE_CHAOS_SEED", time.time_ns() % (1 << 30)))
    rng = random.Random(seed)
    before = shared_files()
    # Few beliefs, so that keys are written over and over; a small store, so that pages are evicted.
    flags = ["staging.beliefs=64", "store.limit=16MiB", "store.min_free=0"]
    daemon = Daemon(tmp_path, flags=flags, budget="192MiB").start()
    crew = Crew(daemon, mode, tmp_path, rng)
    done = Counter()
    try:
        for _ in range(WORKERS):
            crew.hire()
        disturb(crew, daemon, rng, SECONDS / 2, done)
        crew.dismiss()
        eventually(lambda: not sessions(daemon), 20)
        eventually(lambda: not slots_in_use(daemon), 20)
        leaked = sum(slots_in_use(daemon).values())
        final = check_everything(daemon, mode)
        eventually(lambda: not sessions(daemon), 20)
        # Without sessions the budget is taken by the namespace and by idle arenas alone, which are given up on demand.
        assert_whole_budget_can_be_had(daemon)
        counts = crew.counts()
        summary = {
            "mode": mode.value,
            "seed": seed,
            "operations": counts["operations"],
            **done,
            "pages checked": counts["pages_checked"] + final,
            "misses": counts["misses"],
            "wrong bytes": counts["wrong_bytes"],
            "leaked slots": leaked,
            "typed errors": sum(n for name, n in counts.items() if name.startswith("error_")),
        }
        with capsys.disabled():
            print("\n  chaos: " + ", ".join(f"{name} {value}" for name, value in summary.items()))
            print("  " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        assert not [e for e in daemon.events() if e.get("event") == "staging.fault"]
        assert counts["wrong_bytes"] == 0
        assert leaked == 0
        assert counts["pages_checked"] > 100
        assert done["workers killed"]
    finally:
        crew.end()
        if daemon.process.poll() is None:
            status = daemon.stop()
    assert status == 0
    no_new_shared_files(before)


def check_everything(daemon, mode):
    """Load whatever is there of every run; return how many pages were checked."""
    n = 0
    with connect(daemon.address, stack=stack(MODEL, mode, pools=POOLS, slots=96), timeout=20) as session:
        for run in range(RUNS):
            keys = keys_of(LONGEST, f"chaos/{run}")
            match = session.lookup(keys)
            for prefix in {last for _, last in match.runs} | {first for first, _ in match.runs}:
                with session.load(keys, prefix) as loaded:
                    if loaded:
                        n += check_loaded(loaded, keys)
    return n


def assert_whole_budget_can_be_had(daemon):
    with connect(daemon.address, stack=stack("other", slots=64), timeout=20) as session:
        mine = session.grant.pool("kv")
        used = (mine.write_slots + mine.read_slots) * mine.stride
        arena = session.lease_arena("all of it", daemon.status()["budget_bytes"] - used - (4 << 20))
        session.return_arena(arena)
