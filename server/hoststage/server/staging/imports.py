"""Imported memory of one session: announced on its connection, attached over the fd socket, closed when nothing uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hoststage.server.contract import RequestError

MOST_MEMFDS = 250
"""Descriptors of one import: as many as cross the fd socket at once."""
MOST_WAITING = 8
"""Imports of one session that were announced and whose descriptors have not come."""


@dataclass(slots=True)
class DescriptorBudget:
    """Descriptors that imports of all sessions may keep open."""

    limit: int
    taken: int = 0


@dataclass(slots=True, eq=False)
class Import:
    """Memory of a client. `files`: our descriptors, none before they came. `uses`: transfers under way; it is closed after the last one."""

    import_id: int
    name: str
    sizes: tuple[int, ...]
    files: tuple[int, ...] = ()
    uses: int = 0
    dropped: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Imports:
    """The imports of one session."""

    def __init__(self, budget: DescriptorBudget) -> None:
        self._budget = budget
        self._imports: dict[int, Import] = {}
        self._last = 0
        self._over = False

    @property
    def bytes(self) -> int:
        """Bytes of memory whose descriptors are here."""
        return sum(sum(each.sizes) for each in self._imports.values() if each.files)

    def announce(self, name: str, sizes: Sequence[int]) -> int:
        """Note memory that is to come, and return its number. Raises `RequestError`."""
        if not 1 <= len(sizes) <= MOST_MEMFDS:
            raise RequestError(
                "IMPORT_DESCRIPTORS",
                f"{len(sizes)} memfds are announced",
                field="import_memory.bytes",
                remedy=f"announce 1 to {MOST_MEMFDS}; import the rest by itself",
            )
        small = next((i for i, size in enumerate(sizes) if size < 1), None)
        if small is not None:
            raise RequestError("IMPORT_SIZE", "a memfd has at least 1 byte", field=f"import_memory.bytes[{small}]")
        waiting = sum(not i.files for i in self._imports.values())
        if waiting >= MOST_WAITING:
            raise RequestError(
                "IMPORT_DESCRIPTORS",
                f"{waiting} imports were announced whose descriptors have not come",
                code="RESOURCE_EXHAUSTED",
                remedy="pass the descriptors of one before the next is announced",
            )
        self._take_budget(len(sizes))
        self._last += 1
        self._imports[self._last] = Import(self._last, name, tuple(sizes))
        return self._last

    def _take_budget(self, count: int) -> None:
        mine, share = sum(len(i.sizes) for i in self._imports.values()), self._budget.limit // 2
        if mine + count > share:
            raise RequestError(
                "IMPORT_DESCRIPTORS",
                f"{count} descriptors wanted, {mine} are this session's, which may have {share}",
                code="RESOURCE_EXHAUSTED",
                field="import_memory.bytes",
                remedy="import fewer and larger memfds, or raise RLIMIT_NOFILE of the daemon: an eighth of it is for one session",
            )
        if self._budget.taken + count > self._budget.limit:
            raise RequestError(
                "IMPORT_DESCRIPTORS",
                f"{count} descriptors wanted, {self._budget.taken} of {self._budget.limit} are taken by all sessions",
                code="RESOURCE_EXHAUSTED",
                field="import_memory.bytes",
                remedy="raise RLIMIT_NOFILE of the daemon: a quarter of it is for imports; or use the path shm",
            )
        self._budget.taken += count

    def awaited(self, import_id: int) -> tuple[int, ...] | None:
        """Return the sizes of an import whose descriptors have not come, None for any other."""
        found = self._imports.get(import_id)
        return found.sizes if found is not None and not found.files and not found.dropped else None

    def attach(self, import_id: int, files: Sequence[int]) -> bool:
        """Take the descriptors of an import over; False, and they stay the caller's, where it is awaited no more."""
        if self.awaited(import_id) is None:
            return False
        self._imports[import_id].files = tuple(files)
        return True

    def forget(self, import_id: int) -> None:
        """Its descriptors never came, or were refused."""
        if self.awaited(import_id) is not None:
            self._close(self._imports[import_id])

    def get(self, import_id: int, at: str) -> Import:
        """Return an import that can be used; `at` names the place that asks for it. Raises `RequestError`."""
        found = self._imports.get(import_id)
        if found is None or not found.files or found.dropped:
            known = sorted(i for i, each in self._imports.items() if each.files and not each.dropped)
            raise RequestError(
                "IMPORT_UNKNOWN",
                f"{at}.import_id is {import_id}, which is no memory of this session",
                code="FAILED_PRECONDITION",
                field=f"{at}.import_id",
                remedy=f"import it first; the session has {known or 'none'}",
            )
        return found

    @staticmethod
    def hold(imports: Iterable[Import]) -> None:
        """A transfer begins to use these."""
        for each in imports:
            each.uses += 1

    def let_go(self, imports: Iterable[Import]) -> None:
        """A transfer uses these no more."""
        for each in imports:
            each.uses -= 1
            if each.dropped and not each.uses:
                self._close(each)

    async def drop(self, import_id: int) -> None:
        """Close an import once nothing uses it. Raises `RequestError`."""
        found = self.get(import_id, "drop_import")
        self._drop(found)
        await found.closed.wait()

    def end(self) -> None:
        """The session is over: everything is closed, what is in use after its last use."""
        for each in list(self._imports.values()):
            self._drop(each)

    def _drop(self, each: Import) -> None:
        each.dropped = True
        if not each.uses:
            self._close(each)

    def _close(self, each: Import) -> None:
        if self._imports.pop(each.import_id, None) is None:
            return
        self._budget.taken -= len(each.sizes)
        for fd in each.files:
            os.close(fd)
        each.files = ()
        each.closed.set()
