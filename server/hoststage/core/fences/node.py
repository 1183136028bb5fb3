"""Fences about the node: its budget and its pinning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hoststage.core.fences.context import Context, Report, at_least, in_words, listed
from hoststage.core.findings import BudgetHolder, Finding, NodeFacts, RefusalKind

PINNED = ("cuda", "mlock")
"""Achievements that count as pinned. `resident` does not: no swap keeps the pages, but nothing locks them."""


def budget(ctx: Context) -> Iterator[Finding]:
    """A grant must fit what is left of the node's pinned budget."""
    sizing, facts = ctx.staging, ctx.facts
    if sizing.fits:
        return
    fitted = sizing.fitted()
    end = ", or end a holder" if facts.committed_bytes else ""
    values: dict[str, int | str] = {
        "budget_bytes": facts.budget_bytes,
        "committed_bytes": facts.committed_bytes,
        "free_bytes": facts.free_bytes,
        "needed_bytes": sizing.charged_bytes,
        "least_bytes": sizing.least_bytes,
        "holders": _named(facts.holders) or "nobody",
    }
    if fitted is None:
        fit = f"Not even the least for this mode ({in_words(sizing.least_bytes)}) would fit."
        remedy = f"Raise the budget to {at_least(facts.committed_bytes + sizing.least_bytes)} or more{end}."
        values["fits"] = "nothing"
    else:
        sizes = ", ".join(f"{p.pool} {p.slots}" for p in fitted.pools if p.pool == p.source)
        fit = f"What would fit, in slots: {sizes}."
        enough = at_least(facts.committed_bytes + sizing.charged_bytes)
        remedy = f"Ask for that, raise the budget to {enough} or more{end}."
        values["fits"] = sizes
        values["fits_bytes"] = fitted.charged_bytes
    yield Report("BUDGET", ctx.mode).refused(
        "budget",
        f"The grant needs {in_words(sizing.charged_bytes)}; of the node's budget of {in_words(facts.budget_bytes)}, "
        f"{_room(facts)}. {fit}",
        remedy,
        RefusalKind.RESOURCE_EXHAUSTED,
        **values,
    )


def _room(facts: NodeFacts) -> str:
    """Return in words what of the budget is held and by whom, what is free, and what of that is only lent."""
    firm = tuple(h for h in facts.holders if not h.reclaimable)
    warm = tuple(h for h in facts.holders if h.reclaimable)
    held = f"{in_words(facts.committed_bytes)} are held ({_named(firm)})" if _named(firm) else "nothing is held"
    free = f"{in_words(facts.free_bytes)} are free" if facts.free_bytes else "nothing is free"
    lent = sum(h.bytes for h in warm)
    # Memory that old clients still map counts even beyond the budget; then what is lent is not all free.
    if not 0 < lent <= facts.free_bytes:
        return f"{held} and {free}"
    return f"{held} and {free}, {in_words(lent)} of them by giving up what nobody uses now ({_named(warm)})"


def _named(holders: Iterable[BudgetHolder]) -> str:
    """Return the holders with what each has, the largest first; "" where nobody has anything."""
    held = sorted((h for h in holders if h.bytes > 0), key=lambda h: (-h.bytes, h.name))
    return listed(f"{h.name}: {in_words(h.bytes)}" for h in held)


def pin_required(ctx: Context) -> Iterator[Finding]:
    """A client that requires pinned memory must get it."""
    facts = ctx.facts
    if not ctx.stack.requires_pinned or facts.pinned in PINNED:
        return
    limit = "unlimited" if facts.memlock_bytes < 0 else in_words(facts.memlock_bytes)
    problem = f" ({facts.pin_problem})" if facts.pin_problem else ""
    yield Report("PIN_REQUIRED", ctx.mode).refused(
        "requires_pinned",
        f"The client requires pinned memory, and the daemon's is {facts.pinned!r}{problem}: RLIMIT_MEMLOCK is "
        f"{limit}, CUDA is "
        f"{'present' if facts.cuda else 'absent'}.",
        "Raise the limit (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; Kubernetes sets none: add the "
        "capability IPC_LOCK, or raise the container runtime's limit), or let the workers register the mapping by CUDA and do "
        "not require pinning.",
        RefusalKind.FAILED_PRECONDITION,
        pinned=facts.pinned,
        memlock_bytes=facts.memlock_bytes,
        cuda="yes" if facts.cuda else "no",
    )
