"""Whether all processes of a node have room together, and the even share at which they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hoststage.cli.plan_report import ModePlan, Part, need, plan_mode
from hoststage.core.fences.context import at_least, in_words, listed
from hoststage.core.findings import Finding, NodeFacts, RefusalKind, Severity
from hoststage.core.sizing import Sizing, largest_step, size_pools
from hoststage.core.stack import Mode, Stack

BUDGET = "BUDGET"
"""Rule of these findings: the fence that a daemon's refusal would name."""

STEPS = 4096
"""Resolution of the even share between the least and what the daemon would choose."""

ROUNDS = 16
"""Attempts at a budget under which sizes can be left to the daemon: in `cache` they grow with it."""

Slots = Mapping[int, Mapping[str, int]]
"""Host slots to ask for: by pipeline rank, then by pool."""


def room_finding(stacks: Sequence[Stack], engines: int, facts: NodeFacts, mode: Mode) -> Finding | None:
    """Return what stands in the way of all processes of a node having `mode` together, or None.

    Refused: not even the least fits, or sizes that are asked for do not. Adjusted: it fits only where every process asks
    for its even share, since sizes left to the daemon are given first come, first served.
    """
    plan = plan_mode(stacks, engines, facts, mode)
    if plan.demanded.total > facts.free_bytes:
        return _refused(plan, len(stacks) * engines, facts, mode)
    if plan.chosen.total <= facts.free_bytes:
        return None
    slots = even_share(stacks, engines, facts, mode)
    return None if slots is None else _adjusted(stacks, engines, facts, plan, slots)


def even_share(stacks: Sequence[Stack], engines: int, facts: NodeFacts, mode: Mode) -> Slots | None:
    """Return the largest even share, in slots, of the sizes that are left to the daemon; None where no share fits."""
    distinct = {stack.parallel.pp_rank: stack for stack in reversed(stacks)}
    sizings = {rank: size_pools(stack, facts, mode) for rank, stack in distinct.items()}

    def fits(step: int) -> bool:
        parts = {
            rank: Part.chosen(size_pools(asking(stack, _share(sizings[rank], step)), facts, mode))
            for rank, stack in distinct.items()
        }
        return need(stacks, engines, parts, sizings).total <= facts.free_bytes

    step = largest_step(fits, STEPS)
    return None if step is None else {rank: _share(sizing, step) for rank, sizing in sizings.items()}


def asking(stack: Stack, slots: Mapping[str, int]) -> Stack:
    """Return `stack` with the host slots of these pools asked for."""
    return replace(stack, pools=tuple(replace(p, host_slots=slots.get(p.name, p.host_slots)) for p in stack.pools))


def _share(sizing: Sizing, step: int) -> dict[str, int]:
    """Return `step / STEPS` of what each pool has above its least, for the pools whose size is left to the daemon."""
    return {
        p.pool: p.least_slots + max(0, p.slots - p.least_slots) * step // STEPS
        for p in sizing.pools
        if p.pool == p.source and p.asked_slots <= 0 and not p.shared
    }


def _values(plan: ModePlan, processes: int, facts: NodeFacts) -> dict[str, int | str]:
    return {
        "processes": processes,
        "budget_bytes": facts.budget_bytes,
        "free_bytes": facts.free_bytes,
        "needed_bytes": plan.demanded.total,
        "least_bytes": plan.least.total,
    }


def _refused(plan: ModePlan, processes: int, facts: NodeFacts, mode: Mode) -> Finding:
    who = "The one process" if processes == 1 else f"The {processes} processes together"
    does = "needs" if processes == 1 else "need"
    needed, least = plan.demanded.total, plan.least.total
    room = f"the node's budget has {in_words(facts.free_bytes)} for it" + (
        "" if facts.free_bytes == facts.budget_bytes else f", of {in_words(facts.budget_bytes)}"
    )
    held = facts.committed_bytes
    if facts.holders:
        room += f", beside {listed(f'{h.name} ({in_words(h.bytes)})' for h in facts.holders)}"
    remedy = f"Raise the budget to {at_least(held + needed)} or more"
    if needed > least:
        what = f"{at_least(needed)} with the sizes asked for, {at_least(least)} at the least"
        remedy += ", or ask for smaller pools"
        remedy += "" if least <= facts.free_bytes else f" and raise it to {at_least(held + least)} or more"
    else:
        what = f"{at_least(least)} at the least"
    remedy += "." if processes == 1 else ", or run fewer processes on the node."
    message = f"Does not fit. {who} {does} {what}; {room}."
    kind = RefusalKind.RESOURCE_EXHAUSTED
    return Finding(
        BUDGET, Severity.REFUSED, "budget", message, remedy, mode, kind, values=_values(plan, processes, facts)
    )


def _adjusted(stacks: Sequence[Stack], engines: int, facts: NodeFacts, plan: ModePlan, slots: Slots) -> Finding:
    processes = len(stacks) * engines
    stages = len(slots) > 1
    sizes = listed(
        f"{f'stage {rank} ' if stages else ''}{pool} {count}"
        for rank, pools in sorted(slots.items())
        for pool, count in pools.items()
    )
    enough = _carefree(stacks, engines, facts, plan)
    raised = f", or raise the budget to {at_least(enough)} or more" if enough else ", or raise the budget"
    return Finding(
        BUDGET,
        Severity.ADJUSTED,
        "budget",
        f"Sizes left to the daemon come to {at_least(plan.chosen.total)} for {processes} processes, and "
        f"{in_words(facts.free_bytes)} are free: first come, first served, the last would get too little. "
        f"All of them fit with an even share each, in slots: {sizes}.",
        f'Have every process ask for that (SGLang: "slots" under "hoststage" in the backend\'s extra config){raised}.',
        plan.mode,
        values={**_values(plan, processes, facts), "share": sizes, "chosen_bytes": plan.chosen.total},
    )


def _carefree(stacks: Sequence[Stack], engines: int, facts: NodeFacts, plan: ModePlan) -> int:
    """Return a budget in which sizes that are left to the daemon fit for every process, 0 where none was found."""
    budget = facts.committed_bytes + plan.chosen.total
    for _ in range(ROUNDS):
        chosen = plan_mode(stacks, engines, replace(facts, budget_bytes=budget), plan.mode).chosen.total
        if facts.committed_bytes + chosen <= budget:
            return budget
        budget = facts.committed_bytes + chosen
    return 0
