"""Two client processes race for the last bytes of the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hoststage.client import Mode, Refused
from tests.integration.daemon import Daemon, environment
from tests.integration.handshake_stacks import KV, nothing_held, opened, spec

BUDGET = 64 << 20
SLOTS = 5000
RACER = Path(__file__).with_name("handshake_racer.py")


class Racer:
    def __init__(self, daemon: Daemon, name: str) -> None:
        command = [sys.executable, str(RACER), daemon.address, name, str(SLOTS)]
        pipe = subprocess.PIPE
        self.name = name
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment())
        assert self.answer_line() == "ready"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answer(self) -> dict:
        return json.loads(self.answer_line())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d"), budget="64MiB").start()
    yield made
    assert made.stop() == 0


@pytest.fixture
def racers(daemon):
    made = [Racer(daemon, "racer-a"), Racer(daemon, "racer-b")]
    yield made
    for racer in made:
        racer.stop()


def test_exactly_one_gets_the_last_bytes_and_the_other_learns_who_holds_them(daemon, racers):
    for _ in range(6):
        # From the second round on, the memory of the one before is idle and has to be reclaimed within the race.
        for racer in racers:
            racer.go()
        answers = [racer.answer() for racer in racers]
        winners = [r for r, a in zip(racers, answers, strict=True) if a["granted"]]
        assert len(winners) == 1, answers
        [(won, lost)] = [(answers[i], answers[1 - i]) for i in (0, 1) if answers[i]["granted"]]
        assert won["granted"] == SLOTS * 8192
        [finding] = lost["findings"]
        assert finding["rule"] == "BUDGET"
        assert f"({winners[0].name})" in finding["message"]
        assert "read arenas" in finding["values"]["holders"] or "namespace" in finding["values"]["holders"]
        assert "What would fit, in slots: kv " in finding["message"]
        fits = int(finding["values"]["fits"].removeprefix("kv "))
        assert 0 < fits * 8192 <= int(finding["values"]["free_bytes"])
        assert finding["message"] in lost["text"]
        assert daemon.status()["granted_bytes"] <= BUDGET
        # What is said to fit, fits, while the winner keeps what it has; one window's worth of slots more does not.
        with opened(daemon, spec("modest", replace(KV, host_slots=fits))) as session:
            assert session.grant.pool("kv").write_slots + session.grant.pool("kv").read_slots == fits
        with pytest.raises(Refused, match="BUDGET"):
            opened(daemon, spec("immodest", replace(KV, host_slots=fits + fits // 50 + 2)))
        for racer in racers:
            racer.go()
        nothing_held(daemon)


def test_a_budget_that_fits_to_the_byte_is_granted_and_one_slot_more_is_not(daemon):
    nothing_held(daemon)
    whole = BUDGET // 8192
    with opened(daemon, spec("whole", replace(KV, host_slots=whole))) as session:
        assert daemon.status()["granted_bytes"] == BUDGET
        assert session.grant.mode is Mode.BUFFER_ONLY
        with pytest.raises(Refused) as caught:
            opened(daemon, spec("nothing-left", replace(KV, host_slots=2)))
        [finding] = caught.value.findings
        assert finding.values["fits"] == "nothing"
        assert finding.values["free_bytes"] == "0"
    nothing_held(daemon)
    with pytest.raises(Refused, match="BUDGET"):
        opened(daemon, spec("one-more", replace(KV, host_slots=whole + 1)))
