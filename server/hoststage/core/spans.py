"""Spans: how a stack's pools hang together, and the smallest numbers of slots that they need.

Shared by the fences and the sizing. Nothing raises, whatever the stack says.
"""

from __future__ import annotations

from hoststage.core.stack import HitPolicy, Pool, PoolKind, Stack, align_up, ceil_div

RESERVE_DIVISOR = 10
"""A window pool reserves at least this part of its read slots."""


def source_of(stack: Stack, pool: Pool) -> Pool | None:
    """Return the pool with slots of its own in whose slots `pool` counts, itself where it is no sidecar.

    None where the chain of sources leaves the stack, reaches a pool without host pages, or runs in a circle.
    """
    seen: set[str] = set()
    current: Pool | None = pool
    while current is not None and current.is_sidecar:
        if current.name in seen or not current.has_host_pool:
            return None
        seen.add(current.name)
        current = stack.pool(current.indices_from_pool)
    return current if current is not None and current.has_host_pool else None


def shape_of(stack: Stack, pool: Pool) -> str:
    """Return in words what all sessions of a namespace must agree on about a pool, but for its page bytes."""
    words = [pool.hit_policy.value]
    if pool.hit_policy is HitPolicy.TRAILING_PAGES:
        words.append(f"{pool.needed_trailing_pages} trailing")
    if pool.hit_policy is HitPolicy.BLOCK_GROUPS:
        words.append(f"groups of {pool.group_pages}")
    if not pool.has_host_pool:
        words.append("device only")
    elif (root := source_of(stack, pool)) is not None and root is not pool:
        words.append(f"as {root.name}")
    return f"{pool.name} ({', '.join(words)})"


def asked_slots(stack: Stack, root: Pool) -> int:
    """Return the slots that the client asks for in the family of `root`: its own, else the most of its sidecars'."""
    if root.host_slots > 0:
        return root.host_slots
    sidecars = (p.host_slots for p in stack.pools if p.is_sidecar and source_of(stack, p) is root)
    return max(0, *sidecars, 0)


def arena_group(stack: Stack, pool: Pool) -> tuple[Pool, ...]:
    """Return the pools packed into one host arena with `pool`, itself alone where it shares none."""

    def home(p: Pool) -> str:
        return p.shares_arena_with or p.name

    members = tuple(p for p in stack.pools if p.has_host_pool and not p.is_sidecar and home(p) == home(pool))
    return members if len(members) > 1 else (pool,)


def span_pages(stack: Stack, pool: Pool) -> int:
    """Return the pages of the smallest transfer of `pool` that has to fit, at least 1.

    A window pool: one window. A pool that needs only trailing pages: those. Any other: as many tokens as the prefetch
    threshold or the largest window, since a load of a window is a load of its full pages too; in whole block groups
    where the pool has them.
    """
    if _trails(pool):
        return max(1, pool.window_pages, pool.trailing_pages)
    pages = max(1, ceil_div(_span_tokens(stack), max(1, pool.page_tokens)))
    grouped = pool.hit_policy is HitPolicy.BLOCK_GROUPS and pool.group_pages > 0
    return align_up(pages, pool.group_pages) if grouped else pages


def span_formula(stack: Stack, pool: Pool) -> str:
    """Return how `span_pages` comes about, with its numbers."""
    if _trails(pool):
        return f"max(1, window {pool.window_pages}, trailing pages {pool.trailing_pages})"
    formula = f"max(1, ceil(max(prefetch threshold, windows) {_span_tokens(stack)} / {max(1, pool.page_tokens)}))"
    grouped = pool.hit_policy is HitPolicy.BLOCK_GROUPS and pool.group_pages > 0
    return f"{formula} in groups of {pool.group_pages}" if grouped else formula


def _trails(pool: Pool) -> bool:
    """Whether a prefix needs only the pool's pages at its end."""
    return bool(pool.window_pages) or pool.kind is PoolKind.MAMBA or pool.hit_policy is HitPolicy.TRAILING_PAGES


def _span_tokens(stack: Stack) -> int:
    """Tokens of the smallest load of full-attention pages: the prefetch threshold, or the largest window that is staged."""
    staged = (p for p in stack.pools if p.has_host_pool and not p.is_sidecar)
    windows = (p.window_pages * max(1, p.page_tokens) for p in staged)
    return max(0, stack.prefetch_threshold_tokens, *windows)


def hold_slots(stack: Stack, pool: Pool) -> int:
    """Return the slots that park one largest request in `pool`, two where one may be received meanwhile.

    No request is larger than the device pool, where that is known. A request stops anywhere in a page, so that its
    trailing window may touch one page more than the window has.
    """
    pages = ceil_div(max(stack.largest_request_tokens, 0), max(1, pool.page_tokens))
    limits = [limit for limit in _hold_limits(pool).values() if limit > 0]
    return min([pages, *limits]) * held_requests(stack)


def hold_formula(stack: Stack, pool: Pool) -> str:
    """Return how `hold_slots` comes about, with its numbers."""
    pages = f"ceil({max(stack.largest_request_tokens, 0)} / {max(1, pool.page_tokens)})"
    limits = [f"{name} {limit}" for name, limit in _hold_limits(pool).items() if limit > 0]
    return f"{held_requests(stack)} × min({', '.join([pages, *limits])})"


def held_requests(stack: Stack) -> int:
    """Return the largest requests that holds make room for: two where one may be received while another is retracted."""
    return 2 if stack.retraction.concurrent_receive else 1


def _hold_limits(pool: Pool) -> dict[str, int]:
    """What bounds the pages that one request has in `pool`, by name; 0 where it does not."""
    state = pool.kind is PoolKind.MAMBA and not pool.window_pages
    return {
        "device pool": max(0, pool.device_slots),
        "window + 1": pool.window_pages + 1 if pool.window_pages else 0,
        "state": pool.needed_trailing_pages if state else 0,
    }


def reserve_slots(pool: Pool, span: int, read: int) -> int:
    """Return the slots of a read arena of `read` slots that publishing may never take."""
    least = max(span, read // RESERVE_DIVISOR) if pool.window_pages else span
    return min(read, least)
