"""The arithmetic of a node: what a model's processes need from one host tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hoststage.core.findings import BudgetHolder, NodeFacts
from hoststage.core.sizing import PoolSizing, Sizing, Term, size_pools
from hoststage.core.stack import Mode, Stack, ceil_div, namespace_of

HUGE_PAGE = 2 << 20
"""Bytes of the huge pages that `vm.nr_hugepages` counts on x86-64 and on arm64 with 4 KiB pages."""

SLACK = 64 << 20
"""Bytes of locked memory beside the arenas: stacks, buffers and the interpreter of a daemon that locks all of itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one distinct stack: private to each process, and shared by all of its namespace."""

    session: int
    namespace: int

    @classmethod
    def least(cls, sizing: Sizing) -> Part:
        """The least with which the mode is served."""
        session = sum((p.needed_write + p.hold_slots) * p.stride for p in sizing.pools)
        return cls(session, sum(p.needed_read * p.stride for p in sizing.pools))

    @classmethod
    def demanded(cls, sizing: Sizing) -> Part:
        """The sizes that are asked for, which are never shrunk, and the least of those left to the daemon."""
        session = namespace = 0
        for p in sizing.pools:
            asked = p.asked_slots > 0 or p.shared
            session += ((p.write_slots if asked else p.needed_write) + p.hold_slots) * p.stride
            namespace += (p.read_slots if asked else p.needed_read) * p.stride
        return cls(session, namespace)

    @classmethod
    def chosen(cls, sizing: Sizing) -> Part:
        """What the flags ask for, or the daemon would choose."""
        session = sum((p.write_slots + p.hold_slots) * p.stride for p in sizing.pools)
        return cls(session, sum(p.read_slots * p.stride for p in sizing.pools))


@dataclass(frozen=True, slots=True)
class Need:
    """What all processes of a node need for one mode, with the sums that lead there."""

    terms: tuple[Term, ...]
    total: int
    arenas: int

    @property
    def huge_pages(self) -> int:
        """Huge pages for all arenas; each arena is rounded up to a whole one."""
        return ceil_div(self.total, HUGE_PAGE) + self.arenas

    @property
    def memlock_bytes(self) -> int:
        return self.huge_pages * HUGE_PAGE + SLACK

    def settings(self) -> tuple[Term, ...]:
        """Return the kernel settings and where they come from."""
        return (
            Term(
                "vm.nr_hugepages",
                f"ceil({self.total} / {HUGE_PAGE}) + {self.arenas} arenas rounded up",
                self.huge_pages,
                "pages",
            ),
            Term(
                "RLIMIT_MEMLOCK",
                f"{self.huge_pages} × {HUGE_PAGE} + {SLACK} beside the arenas",
                self.memlock_bytes,
                "bytes",
            ),
        )


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One mode: the sizes of each distinct stack (by pipeline rank), the least, and what the flags make of it.

    demanded: what must fit for the mode to be granted to all processes.
    """

    mode: Mode
    sizings: tuple[tuple[int, Sizing], ...]
    least: Need
    demanded: Need
    chosen: Need


def plan_modes(
    stacks: Sequence[Stack], engines: int, budget_bytes: int, holders: tuple[BudgetHolder, ...] = ()
) -> tuple[ModePlan, ...]:
    """Return the plan of each mode that the stacks ask for.

    stacks: those of one engine's processes on the node. engines: how many such engines share the node; they
    serve the same model, so their namespaces, and with them the read arenas, are the same. holders: what else is in the budget.
    """
    facts = NodeFacts(budget_bytes=budget_bytes, holders=holders)
    modes = tuple(dict.fromkeys(wish.mode for wish in stacks[0].modes))
    return tuple(plan_mode(stacks, engines, facts, mode) for mode in modes)


def plan_mode(stacks: Sequence[Stack], engines: int, facts: NodeFacts, mode: Mode) -> ModePlan:
    """Return the plan of one mode on a node with these facts."""
    sizings: dict[int, Sizing] = {}
    for stack in stacks:
        if stack.parallel.pp_rank not in sizings:
            sizings[stack.parallel.pp_rank] = size_pools(stack, facts, mode)
    return ModePlan(
        mode=mode,
        sizings=tuple(sizings.items()),
        least=need(stacks, engines, {r: Part.least(s) for r, s in sizings.items()}, sizings),
        demanded=need(stacks, engines, {r: Part.demanded(s) for r, s in sizings.items()}, sizings),
        chosen=need(stacks, engines, {r: Part.chosen(s) for r, s in sizings.items()}, sizings),
    )


def need(stacks: Sequence[Stack], engines: int, parts: Mapping[int, Part], sizings: Mapping[int, Sizing]) -> Need:
    """Return what all processes need where those of each pipeline rank have their part; read arenas count once."""
    terms: list[Term] = []
    total = arenas = 0
    for rank, part in parts.items():
        of_stage = [stack for stack in stacks if stack.parallel.pp_rank == rank]
        namespaces = len({namespace_of(stack) for stack in of_stage})
        processes = len(of_stage) * engines
        label = f"stage {rank}: " if len(parts) > 1 else ""
        write, read = processes * part.session, namespaces * part.namespace
        terms.append(
            Term(
                f"{label}write arenas",
                f"{len(of_stage)} processes × {engines} engines × {part.session}",
                write,
                "bytes",
            )
        )
        terms.append(Term(f"{label}read arenas", f"{namespaces} namespaces × {part.namespace}", read, "bytes"))
        total += write + read
        arenas += len(sizings[rank].pools) * (processes + namespaces)
    terms.append(Term("node", " + ".join(str(t.value) for t in terms), total, "bytes"))
    return Need(tuple(terms), total, arenas)


def least_terms(pool: PoolSizing) -> tuple[Term, ...]:
    """Return the arithmetic of the smallest pool that serves a mode; a sidecar has as many slots as its source."""
    if pool.source != pool.pool:
        size = pool.least_slots * pool.stride
        return (Term("least bytes", f"{pool.least_slots} slots as {pool.source} × {pool.stride}", size, "bytes"),)
    spans = pool.needed_read // pool.span_pages if pool.span_pages else 0
    return (
        Term("span", "one window, one state, or the prefetch threshold", pool.span_pages, "pages"),
        Term("least write", "one span", pool.needed_write, "slots"),
        Term("least read", f"{spans} × span", pool.needed_read, "slots"),
        Term("least", f"{pool.needed_write} + {pool.needed_read} + {pool.hold_slots} held", pool.least_slots, "slots"),
        Term("least bytes", f"{pool.least_slots} × {pool.stride}", pool.least_slots * pool.stride, "bytes"),
    )
