"""Which page lies where, and what goes first. No I/O, no clock; used on the event loop alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from hoststage.server.store.file.segment import Segment


@dataclass(slots=True, eq=False)
class Entry:
    """One stored page. ``readers`` pin its slot; a doomed entry has left the index and waits for them."""

    segment: Segment
    slot: int
    page_bytes: int
    sequence: int
    commit_id: bytes
    checksum: int
    readers: int = 0
    doomed: bool = False


class Group:
    """The pages of all pools under one key of one namespace; they are evicted together, and never while
    busy."""

    __slots__ = ("busy", "key", "namespace", "pages")

    def __init__(self, namespace: str, key: bytes) -> None:
        self.namespace = namespace
        self.key = key
        self.busy = 0
        self.pages: dict[str, Entry] = {}


@dataclass(frozen=True, slots=True)
class Evicted:
    """What one step of eviction took out of the index."""

    entries: list[Entry]
    bytes: int


class Index:
    """All groups, by namespace and key, and in the order of their last use."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[bytes, Group]] = {}
        self._order: OrderedDict[Group, None] = OrderedDict()
        self.pages = 0

    def group(self, namespace: str, key: bytes) -> Group | None:
        """Return the group of a key, if it has one."""
        return self._groups.get(namespace, {}).get(key)

    def find(self, namespace: str, pool: str, key: bytes) -> Entry | None:
        """Return a page's entry, and count that as a use of its group."""
        group = self.group(namespace, key)
        entry = group.pages.get(pool) if group is not None else None
        if group is not None and entry is not None:
            self._order.move_to_end(group)
        return entry

    def hold(self, namespace: str, key: bytes) -> Group:
        """Keep a key's group, new or old, from eviction until ``release``."""
        group = self.group(namespace, key)
        if group is None:
            group = Group(namespace, key)
            self._groups.setdefault(namespace, {})[key] = group
            self._order[group] = None
        group.busy += 1
        return group

    def release(self, group: Group) -> None:
        """End one ``hold``."""
        group.busy -= 1
        self._forget_if_empty(group)

    def put(self, group: Group, pool: str, entry: Entry) -> Entry | None:
        """Switch a held group's page to ``entry``, and return the entry whose slot is no longer needed, if
        any.

        A page with a higher sequence number stays: then ``entry`` itself is returned.
        """
        old = group.pages.get(pool)
        if old is not None and old.sequence > entry.sequence:
            return entry
        group.pages[pool] = entry
        self._order.move_to_end(group)
        if old is None:
            self.pages += 1
        return old

    def drop(self, namespace: str, pool: str, key: bytes, entry: Entry | None = None) -> Entry | None:
        """Take a page out (only if it is still ``entry``, when given), and return its entry."""
        group = self.group(namespace, key)
        found = group.pages.get(pool) if group is not None else None
        if group is None or found is None or (entry is not None and found is not entry):
            return None
        del group.pages[pool]
        self.pages -= 1
        self._forget_if_empty(group)
        return found

    def evict(self, bytes_wanted: int, most_groups: int) -> Evicted:
        """Take out groups that are not busy, least recently used first, for at least ``bytes_wanted``."""
        victims: list[Group] = []
        size = 0
        for group in self._order:
            if size >= bytes_wanted or len(victims) >= most_groups:
                break
            if group.busy:
                continue
            victims.append(group)
            size += sum(entry.segment.header.slot_bytes for entry in group.pages.values())
        entries = [entry for group in victims for entry in group.pages.values()]
        for group in victims:
            self.pages -= len(group.pages)
            group.pages.clear()
            self._forget_if_empty(group)
        return Evicted(entries, size)

    def __contains__(self, namespace: str) -> bool:
        """Whether a namespace has any page, or will have one that is being written."""
        return namespace in self._groups

    def keys(self, namespace: str) -> list[bytes]:
        """Return the keys of a namespace."""
        return list(self._groups.get(namespace, {}))

    def oldest_first(self) -> Iterator[tuple[Group, str, Entry]]:
        """Yield all pages in the order of their groups' last use."""
        for group in self._order:
            for pool, entry in group.pages.items():
                yield group, pool, entry

    def _forget_if_empty(self, group: Group) -> None:
        if group.busy or group.pages or group not in self._order:
            return
        del self._order[group]
        groups = self._groups[group.namespace]
        del groups[group.key]
        if not groups:
            del self._groups[group.namespace]
