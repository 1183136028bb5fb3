"""Sizing: how many slots a stack gets in each pool, and the arithmetic behind each number.

The unit of decision is a *family*: a pool with slots of its own together with the sidecars that reuse its slot ids; all
of them get the same number of slots. A family's slots are split into

- `write`: the session's private write arena, at least one span;
- `read`: the namespace's read arena, shared by all its sessions and charged once, at least one span in `buffer_only`
  and two in `cache` (one in reserve, one that publishing may take);
- `hold`: further slots of the write arena that park retracted requests.

A span is the smallest transfer that has to fit: one window in a window pool, the trailing pages (one state) in a
Mamba pool, the prefetch threshold or the largest window's tokens in a full-attention pool.

Everything here is integer arithmetic on what is given, so that every rank that presents the same stack to the same
node computes the same numbers. Nothing raises, whatever the stack says: judging it is the fences' part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from hoststage.core.findings import NodeFacts, PoolGrant
from hoststage.core.spans import (
    RESERVE_DIVISOR,
    arena_group,
    asked_slots,
    hold_formula,
    hold_slots,
    reserve_slots,
    source_of,
    span_formula,
    span_pages,
)
from hoststage.core.stack import SLOT_ALIGNMENT, Mode, Parallel, Pool, PoolKind, Retraction, Stack, ceil_div

STAGING_DEPTH_BYTES = 16 << 20
"""Bytes of one side of a pool that the daemon sizes itself: it keeps copies and store requests of a few MiB in flight."""

CACHE_BUDGET_DIVISOR = 2
"""In `cache`, a stack that asks for no size gets this part of the node's budget, divided evenly by its shards."""

CACHE_WRITE_DIVISOR = 8
"""In `cache`, the write side takes at most this part of what a client asks for; the rest keeps pages resident."""

PAGES_PER_STATE = 16
"""In `cache`, Mamba states that the daemon sizes itself: one for that many anchor pages."""

FIT_STEPS = 4096
"""Resolution with which sizes that the daemon chose are shrunk to the budget."""


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a pool's arithmetic: what is computed, how, and the result in `unit`."""

    name: str
    formula: str
    value: int
    unit: str = "slots"

    def __str__(self) -> str:
        return f"{self.name} = {self.formula} = {self.value} {self.unit}"


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """Slots of one pool and where they come from.

    asked_slots: what the client asked for, 0 where the daemon decides. needed_write, needed_read: the least that serves
    the mode. live_read_slots: read slots that the namespace already has; they are neither more nor fewer for this session.
    shared: the pool is one of several in one arena, so its own `asked_slots` bind only as a sum in bytes.
    """

    pool: str
    source: str
    stride: int
    span_pages: int
    window_pages: int
    asked_slots: int
    needed_write: int
    needed_read: int
    write_slots: int
    read_slots: int
    reserve_slots: int
    hold_slots: int
    live_read_slots: int
    read_is_live: bool
    shared: bool
    page_bytes: int
    page_tokens: int
    window_tokens: int
    span_formula: str
    hold_formula: str

    @property
    def slots(self) -> int:
        """All slots of the pool: write side, read side and holds."""
        return self.write_slots + self.read_slots + self.hold_slots

    @property
    def least_slots(self) -> int:
        """The least slots with which the pool serves its mode, holds included."""
        return self.needed_write + self.needed_read + self.hold_slots

    @property
    def charged_bytes(self) -> int:
        """Bytes that the grant adds to the node's budget: a live read arena is already there."""
        new_reads = max(0, self.read_slots - self.live_read_slots)
        return (self.write_slots + self.hold_slots + new_reads) * self.stride

    @property
    def grant(self) -> PoolGrant:
        return PoolGrant(
            pool=self.pool,
            stride=self.stride,
            write_slots=self.write_slots,
            read_slots=self.read_slots,
            reserve_slots=self.reserve_slots,
            hold_slots=self.hold_slots,
            window_pages=self.window_pages,
        )

    def terms(self) -> tuple[Term, ...]:
        """Return the arithmetic of the pool, in the order in which it is done."""
        blocks, asked = f"ceil({self.page_bytes} / {SLOT_ALIGNMENT})", self.asked_slots
        terms = [Term("stride", f"{blocks} × {SLOT_ALIGNMENT}", self.stride, "bytes")]
        if self.source != self.pool:
            terms.append(Term("slots", f"as many as its source {self.source}", self.slots))
        else:
            rest = f"asked {asked} − read − hold" if asked and not self.shared else "chosen by the daemon"
            side = f"live {self.live_read_slots}" if self.read_is_live else f"at least {self.needed_read}"
            least = f"{self.needed_write} + {self.needed_read} + {self.hold_slots}"
            tenth = f", read // {RESERVE_DIVISOR}" if self.window_pages else ""
            terms += [
                *self._window_terms(),
                Term("least", f"write + read + hold = {least}", self.least_slots),
                Term("write", f"{rest}, at least {self.needed_write}", self.write_slots),
                Term("read", f"{'its share of what is asked' if asked else 'chosen'}, {side}", self.read_slots),
                Term("reserve", f"min(read, max(span{tenth}))" if tenth else "min(read, span)", self.reserve_slots),
                Term("hold", f"pages of the largest request: {self.hold_formula or 'none'}", self.hold_slots),
                Term("slots", f"{self.write_slots} + {self.read_slots} + {self.hold_slots}", self.slots),
            ]
        new_reads = max(0, self.read_slots - self.live_read_slots)
        charged = f"({self.write_slots} + {self.hold_slots} + {new_reads} new read) × {self.stride}"
        return (*terms, Term("charged", charged, self.charged_bytes, "bytes"))

    def _window_terms(self) -> tuple[Term, ...]:
        if not self.window_pages:
            return (Term("span", self.span_formula, self.span_pages, "pages"),)
        window = Term("window", f"ceil({self.window_tokens} / {self.page_tokens})", self.window_pages, "pages")
        return (window, Term("span", self.span_formula, self.span_pages, "pages"))


@dataclass(frozen=True, slots=True)
class Sizing:
    """Sizes of a stack's host pools for one mode, in stack order. Pools without host pages have no entry."""

    mode: Mode
    pools: tuple[PoolSizing, ...]
    free_bytes: int
    holds: bool

    @property
    def charged_bytes(self) -> int:
        """Bytes that granting this would add to the node's budget."""
        return sum(p.charged_bytes for p in self.pools)

    @property
    def least_bytes(self) -> int:
        """Bytes that the least grant for this mode would add."""
        return sum(_shrunk(p, 0).charged_bytes for p in self.pools)

    @property
    def fits(self) -> bool:
        return self.charged_bytes <= self.free_bytes

    def pool(self, name: str) -> PoolSizing | None:
        """Return the sizing of the pool of that name, or None."""
        return next((p for p in self.pools if p.pool == name), None)

    def fitted(self) -> Sizing | None:
        """Return the largest evenly shrunk sizing that fits what is free, or None where not even the least does."""
        step = _largest_step(self.pools, self.free_bytes)
        return None if step is None else replace(self, pools=tuple(_shrunk(p, step) for p in self.pools))

    def explain(self) -> tuple[str, ...]:
        """Return the arithmetic, a line each, as an operator reads it."""
        lines = [f"{p.pool}: {term}" for p in self.pools for term in p.terms()]
        total = " + ".join(str(p.charged_bytes) for p in self.pools) or "0"
        lines.append(f"charged to the node = {total} = {self.charged_bytes} bytes of {self.free_bytes} free")
        return tuple(lines)


def size_pools(stack: Stack, facts: NodeFacts, mode: Mode, *, holds: bool | None = None) -> Sizing:
    """Return the sizes of all pools of `stack` for `mode` on a node with these `facts`.

    A size that the client asks for is kept, or raised to the least that serves the mode; it is never shrunk. Sizes that
    the daemon chooses are shrunk to what is free, down to the least. Whether the result fits is `Sizing.fits`.
    holds: whether slots for retracted requests are counted; None takes it from the stack's wish.
    """
    if holds is None:
        holds = stack.retraction.retraction is Retraction.HOST_POOL
    roots = [p for p in stack.pools if p.has_host_pool and not p.is_sidecar]
    families = {root.name: _Family.of(stack, facts, mode, root, holds) for root in roots}
    totals = _shared_totals(stack, families)
    for family in families.values():
        family.choose(mode, totals.get(family.root.name))
    if mode is Mode.CACHE:
        _share_budget(stack, facts, list(families.values()))
    sized = [_pool_sizing(stack, facts, families, pool) for pool in stack.pools if pool.has_host_pool]
    pools = tuple(p for p in sized if p is not None)
    sizing = Sizing(mode=mode, pools=pools, free_bytes=facts.free_bytes, holds=holds)
    return sizing if sizing.fits else _shrink_chosen(stack, sizing)


@dataclass(slots=True)
class _Family:
    """A pool with slots of its own while its sizes are being chosen. `stride` is the sum over its sidecars too."""

    root: Pool
    span: int
    asked: int
    hold: int
    least_read: int
    live: int
    stride: int
    write: int = 0
    read: int = 0
    shared: bool = False

    @classmethod
    def of(cls, stack: Stack, facts: NodeFacts, mode: Mode, root: Pool, holds: bool) -> _Family:
        span = span_pages(stack, root)
        sidecars = [p for p in stack.pools if p.is_sidecar and source_of(stack, p) is root]
        return cls(
            root=root,
            span=span,
            asked=asked_slots(stack, root),
            hold=hold_slots(stack, root) if holds else 0,
            least_read=span if mode is Mode.BUFFER_ONLY else 2 * span,
            live=max(0, facts.live_read_slots.get(root.name, 0)),
            stride=root.stride + sum(p.stride for p in sidecars),
        )

    @property
    def least(self) -> int:
        return self.span + self.least_read + self.hold

    @property
    def depth(self) -> int:
        """Slots of one side that the daemon chooses by itself."""
        return max(2 * self.span, ceil_div(STAGING_DEPTH_BYTES, self.stride))

    def choose(self, mode: Mode, total: int | None) -> None:
        """Set write and read slots from `total` slots (a share of a common arena), the ask, or the defaults."""
        self.shared = total is not None
        wanted = self.asked if total is None else total
        if wanted <= 0:
            self.write, self.read = self.depth, max(self.depth, self.least_read)
        else:
            staging = max(wanted, self.least) - self.hold
            if mode is Mode.BUFFER_ONLY:
                self.read = max(self.least_read, staging // 2)
            else:
                self.read = staging - max(self.span, min(staging // CACHE_WRITE_DIVISOR, self.depth))
            self.read = max(self.read, self.least_read)
            self.write = staging - self.read
        if self.live:
            self.read = self.live


def _shared_totals(stack: Stack, families: dict[str, _Family]) -> dict[str, int]:
    """Divide arenas that pools share: the least for each, the rest of the bytes in proportion to what each asked."""
    totals: dict[str, int] = {}
    for family in families.values():
        group = [families[p.name] for p in arena_group(stack, family.root) if p.name in families]
        asked = sum(f.asked * f.root.stride for f in group)
        if len(group) < 2 or asked <= 0:
            continue
        rest = max(0, asked - sum(f.least * f.root.stride for f in group))
        share = rest * family.asked * family.root.stride // asked
        totals[family.root.name] = family.least + share // family.root.stride
    return totals


def _share_budget(stack: Stack, facts: NodeFacts, families: list[_Family]) -> None:
    """In `cache`, give the read arenas that no client sized their default share of the budget."""
    open_ended = [f for f in families if f.asked <= 0 and not f.shared and not f.live]
    anchor = next((f.root for f in families if f.root is stack.anchor), None)
    if not open_ended or anchor is None:
        return
    share = min(facts.free_bytes, facts.budget_bytes // CACHE_BUDGET_DIVISOR // _shards(stack))
    taken = sum((f.write + f.hold) * f.stride for f in families)
    taken += sum(f.read * f.stride for f in families if f not in open_ended and not f.live)
    weights = [_weight(anchor, f.root) for f in open_ended]
    unit = sum((w * f.stride for w, f in zip(weights, open_ended, strict=True)), start=Fraction(0))
    anchor_pages = Fraction(max(0, share - taken)) / unit
    for weight, family in zip(weights, open_ended, strict=True):
        family.read = max(family.least_read, int(anchor_pages * weight))


def _shards(stack: Stack) -> int:
    """Shards of the model with pages of their own; replicated pools are stored once for all tensor-parallel ranks."""
    p: Parallel = stack.parallel
    replicated = bool(stack.pools) and all(pool.replicated for pool in stack.pools)
    return max(1, p.pp_size) * max(1, p.cp_size) * (1 if replicated else max(1, p.tp_size))


def _weight(anchor: Pool, pool: Pool) -> Fraction:
    """Pages of `pool` for each anchor page: as on the device where both are known, else as many tokens."""
    if pool.kind is PoolKind.MAMBA and anchor.kind is not PoolKind.MAMBA:
        return Fraction(1, PAGES_PER_STATE)
    if anchor.device_slots > 0 and pool.device_slots > 0:
        return Fraction(pool.device_slots, anchor.device_slots)
    return Fraction(max(1, anchor.page_tokens), max(1, pool.page_tokens))


def _pool_sizing(stack: Stack, facts: NodeFacts, families: dict[str, _Family], pool: Pool) -> PoolSizing | None:
    root = source_of(stack, pool)
    family = None if root is None else families.get(root.name)
    if root is None or family is None:
        return None
    return PoolSizing(
        pool=pool.name,
        source=root.name,
        stride=pool.stride,
        span_pages=family.span,
        window_pages=root.window_pages,
        asked_slots=family.asked,
        needed_write=family.span,
        needed_read=family.least_read,
        write_slots=family.write,
        read_slots=family.read,
        reserve_slots=reserve_slots(root, family.span, family.read),
        hold_slots=family.hold,
        live_read_slots=max(0, facts.live_read_slots.get(pool.name, 0)),
        read_is_live=family.live > 0,
        shared=family.shared,
        page_bytes=pool.page_bytes,
        page_tokens=pool.page_tokens,
        window_tokens=root.sliding_window,
        span_formula=span_formula(stack, root),
        hold_formula=hold_formula(stack, root) if family.hold else "",
    )


def _shrunk(pool: PoolSizing, step: int) -> PoolSizing:
    """Return `pool` with `step / FIT_STEPS` of what it has above the least."""
    write = pool.needed_write + max(0, pool.write_slots - pool.needed_write) * step // FIT_STEPS
    read = pool.needed_read + max(0, pool.read_slots - pool.needed_read) * step // FIT_STEPS
    if pool.read_is_live:
        read = pool.read_slots
    least = max(pool.span_pages, read // RESERVE_DIVISOR) if pool.window_pages else pool.span_pages
    return replace(pool, write_slots=write, read_slots=read, reserve_slots=min(read, least))


def largest_step(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the largest step from 0 to `most` that fits, None where not even 0 does. What fits at a step fits at every smaller one."""
    if not fits(0):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _largest_step(pools: tuple[PoolSizing, ...], free: int) -> int | None:
    """Return the largest step at which `pools` fit `free` bytes, None where not even the least fits."""

    def fits(step: int) -> bool:
        return sum(_shrunk(p, step).charged_bytes for p in pools) <= free

    return largest_step(fits, FIT_STEPS)


def _shrink_chosen(stack: Stack, sizing: Sizing) -> Sizing:
    """Shrink the sizes that the daemon chose to what is free; those that the client asked for stay."""
    chosen = tuple(p for p in sizing.pools if p.asked_slots <= 0 and not p.shared)
    fixed = sizing.charged_bytes - sum(p.charged_bytes for p in chosen)
    step = _largest_step(chosen, sizing.free_bytes - fixed) or 0
    shrunk = tuple(_shrunk(p, step) if p in chosen else p for p in sizing.pools)
    return replace(sizing, pools=shrunk)
