"""What `plan` calls the least is what `check` grants, for every built-in model, in either mode, to all processes of a node."""

from __future__ import annotations

import pytest

from hoststage.cli.inputs import Request, Subject, parse_size, resolve
from hoststage.cli.judge import judge
from hoststage.cli.options import node_facts
from hoststage.cli.plan_report import plan_modes
from hoststage.core.fences.context import at_least
from hoststage.core.findings import Severity
from hoststage.core.stack import Mode
from hoststage.models import preset_names


def subject(preset: str, mode: Mode, *flags: str) -> Subject:
    return resolve(Request(preset=preset, modes=(mode.value,), engine_flags=("--page-size=128", *flags), ranks=6))


def granted(asked: Subject, budget: int) -> Mode | None:
    return judge(asked.stacks, node_facts(budget, store=True)).mode


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("preset", preset_names())
def test_the_least_is_granted_and_a_byte_less_is_not(preset: str, mode: Mode) -> None:
    asked = subject(preset, mode, "--tp-size=2")
    (plan,) = plan_modes(asked.stacks, 1, 1 << 40)
    least = plan.least.total
    assert granted(asked, least) is mode
    assert granted(asked, parse_size(at_least(least).replace(" bytes", ""))) is mode
    assert granted(asked, least - 1) is None
    (finding,) = judge(asked.stacks, node_facts(least - 1, store=True)).findings
    assert (finding.rule, finding.severity) == ("BUDGET", Severity.REFUSED)
    assert finding.values["needed_bytes"] == least


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("preset", ["gpt-oss-20b", "deepseek-v3", "deepseek-v4-flash", "qwen3-next-80b-a3b"])
def test_everything_between_the_least_and_what_is_chosen_is_granted_within_the_budget(preset: str, mode: Mode) -> None:
    asked = subject(preset, mode, "--tp-size=2")
    (plan,) = plan_modes(asked.stacks, 1, 1 << 33)
    for part in range(9):
        budget = plan.least.total + (plan.chosen.total - plan.least.total) * part // 8
        verdict = judge(asked.stacks, node_facts(budget, store=True))
        assert verdict.mode is mode
        reads = {grant.namespace: grant.namespace_bytes for grant in verdict.grants}
        assert sum(reads.values()) + sum(grant.session_bytes for grant in verdict.grants) <= budget


def test_holds_are_part_of_the_least() -> None:
    flags = ("--context-length=1024", "--disaggregation-decode-retraction-backup=host_pool")
    asked = subject("llama-3.1-8b", Mode.BUFFER_ONLY, *flags)
    (plan,) = plan_modes(asked.stacks, 1, 1 << 40)
    # 6 processes of one namespace, pages of 16 MiB: 6 × (2 + 8 held) written, 2 read.
    assert plan.least.total == (6 * 10 + 2) * (16 << 20)
    assert granted(asked, plan.least.total) is Mode.BUFFER_ONLY
