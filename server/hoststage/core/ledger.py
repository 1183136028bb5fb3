"""The ledger: who holds what of the node's budget for pinned memory. Nothing is granted twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hoststage.core.findings import BudgetHolder


class OverBudget(Exception):
    """A holder asked for more than is left; nothing was taken."""

    def __init__(self, name: str, wanted: int, free: int, budget: int) -> None:
        self.name, self.wanted, self.free, self.budget = name, wanted, free, budget
        super().__init__(f"{name} wants {wanted} bytes; {free} of {budget} are free")


@dataclass(slots=True)
class Ledger:
    """Bytes by holder. A reclaimable holder can be made to give everything back before a grant."""

    budget: int
    _bytes: dict[str, int] = field(default_factory=dict)
    _reclaimable: set[str] = field(default_factory=set)

    @property
    def taken(self) -> int:
        """Bytes held by anyone, reclaimable ones included."""
        return sum(self._bytes.values())

    @property
    def free(self) -> int:
        """Bytes that nobody holds."""
        return self.budget - self.taken

    def take(self, name: str, amount: int) -> None:
        """Give `amount` bytes more to a holder. Raises `OverBudget`."""
        if amount > self.free:
            raise OverBudget(name, amount, self.free, self.budget)
        if amount:
            self._bytes[name] = self._bytes.get(name, 0) + amount

    def force(self, name: str, amount: int) -> None:
        """Note what a holder has in any case, even beyond the budget (memory that old clients still map)."""
        if amount:
            self._bytes[name] = self._bytes.get(name, 0) + amount

    def give(self, name: str, amount: int | None = None) -> None:
        """Take bytes back from a holder, all of them by default."""
        left = 0 if amount is None else self._bytes.get(name, 0) - amount
        if left > 0:
            self._bytes[name] = left
        else:
            self._bytes.pop(name, None)
            self._reclaimable.discard(name)

    def move(self, name: str, to: str) -> int:
        """Let another holder have all that one has; return how much that is."""
        amount = self._bytes.get(name, 0)
        self.give(name)
        self.force(to, amount)
        return amount

    def mark(self, name: str, *, reclaimable: bool) -> None:
        """Say whether a holder would give everything back on demand."""
        if reclaimable:
            self._reclaimable.add(name)
        else:
            self._reclaimable.discard(name)

    def holders(self) -> tuple[BudgetHolder, ...]:
        """Return all holders, the largest first."""
        return tuple(
            BudgetHolder(name, n, name in self._reclaimable)
            for name, n in sorted(self._bytes.items(), key=lambda item: -item[1])
        )
