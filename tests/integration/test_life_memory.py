"""The daemon's memory is flat, however much is asked of it."""

import os

import pytest

from hoststage.client import Mode, connect
from tests.integration.daemon import Daemon
from tests.life_support import keys_of, pages, stack

OPERATIONS = 1_000_000 if "HOSTSTAGE_CHAOS_SECONDS" in os.environ else 100_000
"""Pages that are looked up, loaded, stored, reserved or given back."""
BATCH = 32
MOST_GROWTH = 12 << 20
"""Bytes between a tenth of the way and its end: an object of 16 bytes that is left behind by each of 10^6 operations would be more."""


def private_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        fields = statm.read().split()
    # Without shared pages, which the arenas are.
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
def test_memory_is_flat_over_many_operations(tmp_path, mode, capsys):
    # Everything that is bounded is bounded tightly, so that it is full soon and what grows on is a leak.
    flags = ["staging.beliefs=512", "store.limit=16MiB", "store.min_free=0"]
    daemon = Daemon(tmp_path, flags=flags).start()
    spec = stack("flat", mode, pools=("kv", "indexer", "swa"), slots=128)
    done = rounds = 0
    marks = []
    try:
        with connect(daemon.address, stack=spec, timeout=20, credits=8) as session:
            made = {}
            while done < OPERATIONS:
                keys = keys_of(BATCH, f"run/{rounds % 64}" if rounds % 4 else f"new/{rounds}")
                if not made:
                    made = {p: pages(p, keys, "w") for p in ("kv", "indexer")} | {"swa": pages("swa", keys[-4:], "w")}
                if rounds % 4 == 0:
                    session.store(keys, made).wait(20)
                match = session.lookup(keys, pin_seconds=1 if rounds % 3 else 0)
                if match:
                    session.load(keys, match.longest, pin=match).release()
                for _ in range(4):
                    session.lookup(keys)
                with session.reserve(keys_of(BATCH // 4, f"aborted/{rounds}"), {"kv": BATCH // 4}):
                    pass
                if rounds % 50 == 0:
                    with connect(daemon.address, stack=spec, timeout=20) as other:
                        stream = other.load_groups(keys, accept_shorter=True)
                        stream.cancel()
                done += BATCH * 6 + BATCH // 2
                rounds += 1
                if done * 10 >= OPERATIONS * (len(marks) + 1):
                    marks.append(private_bytes(daemon.process.pid))
        with capsys.disabled():
            print(f"\n  {mode.value}: MiB at each tenth of {done} operations: {[m >> 20 for m in marks]}", end="")
        assert min(marks[-3:]) - marks[1] < MOST_GROWTH
    finally:
        assert daemon.stop() == 0
