"""Which prefixes of a run of keys can be restored, and which pages each of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hoststage.core.spans import source_of
from hoststage.core.stack import HitPolicy, PoolKind, Stack

Present: TypeAlias = Sequence[bytes | None]
"""Per key of a run: the commit id of the page there, or None where there is none."""


@dataclass(frozen=True, slots=True)
class PoolRule:
    """What the tier needs to know of a pool. `source`: place of the pool whose slot ids a sidecar reuses, -1 for none.

    `on_host`: whether it has host pages at all; a prefix needs nothing of a pool that stays on the device.
    """

    name: str
    policy: HitPolicy
    trailing: int
    group: int
    source: int
    page_bytes: int
    stride: int
    on_host: bool = True

    def needed(self, prefix: int) -> tuple[int, int]:
        """Return `(first, count)` of the pages that a prefix of that many pages needs."""
        if self.policy is HitPolicy.TRAILING_PAGES:
            first = max(0, prefix - self.trailing)
            return first, prefix - first
        return 0, prefix

    def needed_by(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return disjoint `(first, count)` of the pages that any prefix length of ascending inclusive `runs` needs."""
        out: list[tuple[int, int]] = []
        for low, high in runs:
            first = self.needed(low)[0]
            if out and first <= out[-1][0] + out[-1][1]:
                first = out[-1][0]
                out.pop()
            out.append((first, high - first))
        return out


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a stack's pools, in stack order; `anchor` is the place of the pool that makes a prefix visible."""

    pools: tuple[PoolRule, ...]
    anchor: int
    windowed: bool = field(init=False)
    """Whether some pool needs less than every page of a prefix, or only whole groups."""
    grouped: bool = field(init=False)
    """Whether some pool is a sidecar, so that pages of several pools are replaced and evicted together."""

    def __post_init__(self) -> None:
        every = all(rule.policy is HitPolicy.ALL_PAGES for rule in self.pools if rule.on_host)
        object.__setattr__(self, "windowed", not every)
        object.__setattr__(self, "grouped", any(rule.source >= 0 for rule in self.pools))

    def needs(self, prefix: int) -> list[tuple[int, int, int]]:
        """Return `(pool, first, count)` of the pages that a prefix of that many pages needs, in every pool with host pages."""
        return [(i, *rule.needed(prefix)) for i, rule in enumerate(self.pools) if rule.on_host]

    @property
    def self_service(self) -> bool:
        """Whether a page's presence alone decides what can be restored: no sidecars to agree with, no block groups."""
        return all(rule.source < 0 and rule.policy is not HitPolicy.BLOCK_GROUPS for rule in self.pools if rule.on_host)

    @property
    def store_order(self) -> list[int]:
        """Places in the order in which a commit is stored: sidecars first, the anchor last."""
        places = range(len(self.pools))
        return sorted(places, key=lambda i: (i == self.anchor, self.pools[i].source < 0))

    def group_of(self, place: int) -> list[int]:
        """Return the places whose pages are replaced and evicted together with those of `place`: a source and its sidecars."""
        source = self.pools[place].source if self.pools[place].source >= 0 else place
        return [i for i, p in enumerate(self.pools) if source in (i, p.source)]


def rules_of(stack: Stack) -> Rules:
    """Return the rules of a stack that the fences have accepted."""
    names = [p.name for p in stack.pools]
    roots = {p.name: source_of(stack, p) for p in stack.pools}
    on_host = [p for p in stack.pools if p.has_host_pool and not p.is_sidecar]
    anchor = next((p for p in on_host if p.kind is PoolKind.KV), next(iter(on_host), None))
    return Rules(
        tuple(
            PoolRule(
                p.name,
                p.hit_policy,
                p.needed_trailing_pages,
                max(1, p.group_pages),
                # A sidecar of a sidecar counts in the slots of the pool at the chain's end.
                -1 if (root := roots[p.name]) is None or root is p else names.index(root.name),
                p.page_bytes,
                p.stride,
                p.has_host_pool,
            )
            for p in stack.pools
        ),
        names.index(anchor.name) if anchor else 0,
    )


def agreed(rules: Rules, present: Sequence[Present]) -> list[NDArray[np.bool_]]:
    """Return, per pool, which pages count as there: a sidecar's page counts only if its commit id is its source's."""
    out = []
    for rule, pages in zip(rules.pools, present, strict=True):
        if not rule.on_host:
            flags = [True] * len(pages)
        elif rule.source >= 0:
            source = present[rule.source]
            flags = [page is not None and page == source[i] for i, page in enumerate(pages)]
        else:
            flags = [page is not None for page in pages]
        out.append(np.array(flags, dtype=np.bool_))
    return out


def _common_prefix(rules: Rules, present: Sequence[Present], n: int) -> int:
    """Return how many keys from the front every pool has, sidecars with their source's commit."""
    end = n
    for rule, pages in zip(rules.pools, present, strict=True):
        if not rule.on_host:
            continue
        if None in pages:
            end = min(end, list(pages).index(None))
        if rule.source >= 0:
            source = present[rule.source]
            end = next((i for i in range(end) if pages[i] != source[i]), end)
    return end


def restorable(rules: Rules, present: Sequence[Present]) -> list[tuple[int, int]]:
    """Return every restorable prefix length as inclusive runs `(first, last)`, ascending.

    `present` has one entry a pool, each with one entry a key. A length is restorable where every pool meets its hit
    policy there.
    """
    n = len(present[0]) if present else 0
    if n == 0:
        return []
    if not rules.windowed:
        end = _common_prefix(rules, present, n)
        return [(1, end)] if end else []
    at = np.arange(n)
    ok = np.ones(n, dtype=np.bool_)
    for rule, there in zip(rules.pools, agreed(rules, present), strict=True):
        missing = np.flatnonzero(~there)
        if rule.policy is HitPolicy.TRAILING_PAGES:
            last_missing = np.full(n, -1)
            last_missing[missing] = missing
            behind = at - np.maximum.accumulate(last_missing)
            ok &= behind >= np.minimum(rule.trailing, at + 1)
            continue
        if len(missing):
            ok[missing[0] :] = False
        if rule.policy is HitPolicy.BLOCK_GROUPS:
            ok &= (at + 1) % rule.group == 0
    edges = np.flatnonzero(np.diff(np.concatenate(([0], ok.view(np.int8), [0]))))
    return [(int(a) + 1, int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
