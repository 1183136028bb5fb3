"""The stack: what a client presents at the handshake.

A stack is the set of pools of one model shard with sizes, windows and layout, together with what its client wants of
the host tier. Everything here is plain data: the fences (`hoststage.core.fences`) judge it, the sizing
(`hoststage.core.sizing`) turns it into a grant, the rpc layer builds it from the wire.

Units: sizes in bytes, lengths in tokens or in pages as the field's name says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

SLOT_ALIGNMENT = 4096
"""Slots are cut at a multiple of this, so that direct I/O works on every page."""

MAX_KEY_BYTES = 64


class PoolKind(Enum):
    """What the pages of a pool are."""

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    SIDECAR = "sidecar"


class HitPolicy(Enum):
    """Which pages of a pool a prefix of `n` pages needs.

    `ALL_PAGES`: pages `[0, n)`. `TRAILING_PAGES`: the last `trailing_pages` of `[0, n)`. `BLOCK_GROUPS`: pages come in
    groups of `group_pages`; a prefix needs every whole group inside it and ends at a group's edge.
    """

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class KvLayout(Enum):
    """How the engine lays a pool out on the device. In `UNIFIED_KV` the SWA part is a device-only ring."""

    PAGED = "paged"
    UNIFIED_KV = "unified_kv"


class Placement(Enum):
    """Whether a pool has host pages at all."""

    HOST_POOL = "host_pool"
    DEVICE_ONLY = "device_only"


class Mode(Enum):
    """What host memory is for: `BUFFER_ONLY` only stages, `CACHE` keeps pages resident."""

    BUFFER_ONLY = "buffer_only"
    CACHE = "cache"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class WritePolicy(Enum):
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class Retraction(Enum):
    """How a decode worker parks a retracted request."""

    NONE = "none"
    CPU_TENSOR = "cpu_tensor"
    HOST_POOL = "host_pool"


class PayloadPath(Enum):
    SHM = "shm"
    IMPORTED = "imported"
    INLINE = "inline"


def ceil_div(a: int, b: int) -> int:
    """Return the quotient of two positive integers, rounded up."""
    return -(-a // b)


def align_up(n: int, alignment: int) -> int:
    """Return `n` rounded up to a multiple of `alignment`."""
    return ceil_div(n, alignment) * alignment


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of a stack.

    name: `[a-z0-9_]{1,64}`, unique in the stack. page_bytes: bytes of one page (all layers of the shard).
    page_tokens: tokens of one page. sliding_window: tokens, 0 where there is no window (a chunked-attention pool gives
    its chunk). pieces: sizes in bytes of the parts that one page is scattered over in the engine's layout, in order; empty means
    one piece. host_slots: host pages that the client asks for, write side, read side and holds together; 0 leaves it
    to the daemon. device_slots: pages that the device pool holds, 0 unknown. indices_from_pool: for a sidecar, the pool
    whose slot ids it reuses. shares_arena_with: the pool whose host arena this one is packed into, or "".
    replicated: every tensor-parallel rank holds the same bytes (MLA).
    """

    name: str
    kind: PoolKind
    page_bytes: int
    page_tokens: int
    layers: int = 1
    sliding_window: int = 0
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing_pages: int = 0
    group_pages: int = 0
    layout: KvLayout = KvLayout.PAGED
    placement: Placement = Placement.HOST_POOL
    indices_from_pool: str = ""
    shares_arena_with: str = ""
    replicated: bool = False
    pieces: tuple[int, ...] = ()
    host_slots: int = 0
    device_slots: int = 0

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next in an arena of this pool."""
        return align_up(max(self.page_bytes, 1), SLOT_ALIGNMENT)

    @property
    def is_sidecar(self) -> bool:
        """Whether the pool counts in another pool's slots rather than in slots of its own."""
        return self.kind is PoolKind.SIDECAR or bool(self.indices_from_pool)

    @property
    def has_host_pool(self) -> bool:
        """Whether pages of the pool are ever offloaded. The SWA part of a `unified_kv` layout is a device-only ring."""
        ring = self.kind is PoolKind.SWA and self.layout is KvLayout.UNIFIED_KV
        return self.placement is Placement.HOST_POOL and not ring

    @property
    def window_pages(self) -> int:
        """Pages that hold one full window: `ceil(sliding_window / page_tokens)`; 0 without a window."""
        if self.sliding_window <= 0 or self.page_tokens <= 0:
            return 0
        return ceil_div(self.sliding_window, self.page_tokens)

    @property
    def needed_trailing_pages(self) -> int:
        """Pages that a prefix needs at its end under `TRAILING_PAGES` (the window, or one state page)."""
        return self.trailing_pages or self.window_pages or 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two stacks' pages interchangeable, apart from the shard. See `namespace_of`."""

    model: str
    tenant: str = "default"
    weights_revision: str = ""
    quantization: str = ""
    kv_scales: str = ""
    dtype: str = ""
    layout: str = ""
    key_hash: str = ""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Position of this shard. Sizes are at least 1, ranks in `[0, size)`. `dcp_rank` is None where the client cannot tell."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    dcp_rank: int | None = 0
    dcp_size: int = 1


@dataclass(frozen=True, slots=True)
class ModeWish:
    """One entry of the client's ordered list of modes. A required mode that is refused ends the negotiation there."""

    mode: Mode
    required: bool = False


@dataclass(frozen=True, slots=True)
class RetractionWish:
    """How the client wants to park retracted decode requests.

    window_only: the client accepts holds of the trailing window alone (a pure-SWA model needs no more to resume).
    concurrent_receive: a request may be received while another is retracted, so two largest requests must fit.
    required: a refusal refuses the session, not only the holds.
    """

    retraction: Retraction = Retraction.NONE
    window_only: bool = False
    concurrent_receive: bool = False
    required: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """The whole of what a client presents, in the client's own terms."""

    identity: Identity
    pools: tuple[Pool, ...]
    parallel: Parallel = field(default_factory=Parallel)
    role: Role = Role.MIXED
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    modes: tuple[ModeWish, ...] = (ModeWish(Mode.BUFFER_ONLY), ModeWish(Mode.CACHE))
    retraction: RetractionWish = field(default_factory=RetractionWish)
    paths: tuple[PayloadPath, ...] = (PayloadPath.SHM, PayloadPath.INLINE)
    largest_request_tokens: int = 0
    prefetch_threshold_tokens: int = 0
    maps_sidecars: bool = True
    hands_over_state: bool = True
    requires_pinned: bool = False

    def pool(self, name: str) -> Pool | None:
        """Return the pool of that name, or None."""
        return next((p for p in self.pools if p.name == name), None)

    @property
    def anchor(self) -> Pool | None:
        """The pool whose pages make a prefix visible: the first `kv` pool, else the first pool that is no sidecar."""
        return next(
            (p for p in self.pools if p.kind is PoolKind.KV),
            next((p for p in self.pools if p.kind is not PoolKind.SIDECAR), None),
        )

    def of_kind(self, kind: PoolKind) -> tuple[Pool, ...]:
        """Return the pools of one kind, in stack order."""
        return tuple(p for p in self.pools if p.kind is kind)

    def sidecars_of(self, name: str) -> tuple[Pool, ...]:
        """Return the sidecars that reuse the slot ids of pool `name`."""
        return tuple(p for p in self.pools if p.indices_from_pool == name)


def hashed(parts: Iterable[tuple[str, object]]) -> str:
    """Return the hex SHA-256 of named parts, in a canonical form that no value can forge across fields."""
    text = json.dumps(sorted(parts), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def namespace_of(stack: Stack) -> str:
    """Return the namespace of a stack: 64 hex digits.

    It fingerprints tenant, model, weights revision, quantization and KV scales, dtype, layout, tokens per page, the key-hash scheme and the
    logical shard. Where every pool is replicated (MLA), the logical shard has no tensor-parallel rank, so
    that ranks share pages; a stack that mixes replicated and sharded pools keeps its rank, since a commit spans them.
    The data-parallel rank never counts: replicas of one shard hold the same pages.
    """
    i, p = stack.identity, stack.parallel
    replicated = bool(stack.pools) and all(pool.replicated for pool in stack.pools)
    anchor = stack.anchor
    return hashed(
        [
            ("format", 1),
            ("tenant", i.tenant),
            ("model", i.model),
            ("weights_revision", i.weights_revision),
            ("quantization", i.quantization),
            ("kv_scales", i.kv_scales),
            ("dtype", i.dtype),
            ("layout", i.layout),
            ("key_hash", i.key_hash),
            ("page_tokens", anchor.page_tokens if anchor else 0),
            ("tp", [0, 1] if replicated else [p.tp_rank, p.tp_size]),
            ("pp", [p.pp_rank, p.pp_size]),
            ("cp", [p.cp_rank, p.cp_size]),
            ("dcp", [p.dcp_rank, p.dcp_size]),
        ]
    )
