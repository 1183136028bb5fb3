"""The verdict for all processes of one node: what each is granted counts against the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hoststage.cli.inputs import ASSUMED
from hoststage.cli.room import BUDGET, asking, even_share, room_finding
from hoststage.core.fences import evaluate
from hoststage.core.findings import BudgetHolder, Finding, Grant, NodeFacts, Severity
from hoststage.core.sizing import size_pools
from hoststage.core.stack import Mode, ModeWish, Retraction, Stack, namespace_of

DEFAULT_BUDGET = 64 << 30


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """What a node would answer. grants: one for each process, in order; empty where the mode is refused.

    retraction: the holds that every process is granted.
    """

    mode: Mode | None
    retraction: Retraction
    grants: tuple[Grant, ...]
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Node:
    """A node that fills up. Read arenas belong to a namespace and are charged once.

    others: how many of the holders were there before. taken: bytes of all grants so far.
    """

    facts: NodeFacts
    others: int
    taken: int = 0
    live: dict[str, dict[str, int]] = field(default_factory=dict)

    def facts_for(self, namespace: str) -> NodeFacts:
        return replace(self.facts, live_read_slots=self.live.get(namespace, {}))

    def take(self, grant: Grant) -> None:
        self.taken += grant.session_bytes
        if grant.namespace not in self.live:
            self.taken += grant.namespace_bytes
            self.live[grant.namespace] = {p.pool: p.read_slots for p in grant.pools}
        holders = (*self.facts.holders[: self.others], BudgetHolder("the processes before", self.taken))
        self.facts = replace(self.facts, holders=holders)


def judge(stacks: Sequence[Stack], facts: NodeFacts) -> NodeVerdict:
    """Judge the processes of one node together: the first mode that all of them can have is granted.

    Processes take what the daemon would choose in turn; where that leaves too little for the last, all are judged again
    with an even share each, and a finding says so. Findings are those of each distinct stack for every mode; those about
    room speak of all processes together.
    """
    findings: list[Finding] = []
    for stack in _distinct(stacks):
        findings += [f for f in evaluate(stack, facts).findings if f not in findings]
    for wish in stacks[0].modes:
        grants, said = _judge_mode(stacks, facts, wish)
        if len(stacks) > 1:
            # A process alone tells too small a sum.
            findings = [f for f in findings if f.rule != BUDGET or f.mode is not wish.mode]
        seen = {_key(f) for f in findings}
        findings += [f for f in said if _key(f) not in seen]
        if grants is not None:
            retractions = {g.retraction for g in grants}
            retraction = retractions.pop() if len(retractions) == 1 else Retraction.NONE
            return NodeVerdict(wish.mode, retraction, tuple(grants), tuple(findings))
        if wish.required:
            break
    return NodeVerdict(None, Retraction.NONE, (), tuple(findings))


def _judge_mode(
    stacks: Sequence[Stack], facts: NodeFacts, wish: ModeWish
) -> tuple[list[Grant] | None, tuple[Finding, ...]]:
    """Return the grants of one mode for all processes, None where one is refused, and what is to be said of it."""
    grants, late = _grant_all(stacks, facts, wish)
    if late is None:
        return grants, ()
    if len(stacks) == 1 or not any(f.rule == BUDGET for f in late):
        return None, late
    said = room_finding(stacks, 1, facts, wish.mode)
    if said is None:
        return None, late
    others = tuple(f for f in late if f.rule != BUDGET)
    slots = even_share(stacks, 1, facts, wish.mode) if said.severity is Severity.ADJUSTED else None
    if slots is None:
        return None, (*others, said)
    shared = [asking(stack, slots[stack.parallel.pp_rank]) for stack in stacks]
    grants, late = _grant_all(shared, facts, wish)
    return (grants, (said,)) if late is None else (None, late)


def _grant_all(
    stacks: Sequence[Stack], facts: NodeFacts, wish: ModeWish
) -> tuple[list[Grant], tuple[Finding, ...] | None]:
    """Grant one mode to all processes in turn; return the refusals of the first that cannot have it."""
    node = _Node(facts, len(facts.holders))
    grants: list[Grant] = []
    for i, stack in enumerate(stacks):
        namespace_facts = node.facts_for(namespace_of(stack))
        verdict = evaluate(replace(stack, modes=(wish,)), namespace_facts)
        if verdict.grant is None:
            return grants, tuple(
                _of_process(f, i, len(stacks)) for f in verdict.findings if f.severity is Severity.REFUSED
            )
        grants.append(verdict.grant)
        node.take(verdict.grant)
    return grants, None


def _of_process(finding: Finding, index: int, count: int) -> Finding:
    if index == 0:
        return finding
    message = f"Process {index + 1} of {count} on this node: {finding.message}"
    return replace(finding, message=message, values={**finding.values, "process": index + 1, "processes": count})


def _key(f: Finding) -> tuple[str, Severity, str, Mode | None]:
    return f.rule, f.severity, f.subject, f.mode


def _distinct(stacks: Sequence[Stack]) -> list[Stack]:
    """Return one stack for each pipeline stage: other ranks differ in their number only."""
    by_stage: dict[int, Stack] = {}
    for stack in stacks:
        by_stage.setdefault(stack.parallel.pp_rank, stack)
    return list(by_stage.values())


def assumed_budget(stacks: Sequence[Stack]) -> int:
    """Return a budget that stands in nobody's way, for where none is given: 64 GiB, or all that is asked for if more."""
    facts = NodeFacts(budget_bytes=DEFAULT_BUDGET)
    needed = 0
    for mode in {wish.mode for wish in stacks[0].modes}:
        sizes = {stack.parallel.pp_rank: size_pools(stack, facts, mode) for stack in _distinct(stacks)}
        sessions = sum(
            (p.write_slots + p.hold_slots) * p.stride for stack in stacks for p in sizes[stack.parallel.pp_rank].pools
        )
        namespaces = {namespace_of(stack): stack.parallel.pp_rank for stack in stacks}
        reads = sum(p.read_slots * p.stride for stage in namespaces.values() for p in sizes[stage].pools)
        needed = max(needed, sessions + reads)
    return max(DEFAULT_BUDGET, needed)


def size_in_words(size: int) -> str:
    """Return whole GiB as such, anything else in bytes: the number must be one that --budget takes."""
    return f"{size >> 30} GiB" if size % (1 << 30) == 0 else f"{size} bytes"


def budget_note(size: int) -> Finding:
    """Return the notice that a budget was assumed."""
    return Finding(
        ASSUMED,
        Severity.NOTICE,
        "budget",
        f"no budget was given: judged as if the node had {size_in_words(size)} for it, so no finding is about room",
        "--budget SIZE",
        values={"budget_bytes": size},
    )
