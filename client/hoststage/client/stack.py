"""The stack that a client presents: its pools, sizes, windows and wishes.

The names and fields mirror the daemon's own, so that one description serves a launch script, a worker and the daemon's
log. Errors that need no daemon to see (a name out of form, a size out of range) are raised here, as `StackError`, when
the description is made; what needs judgement is left to the daemon's fences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from hoststage.client.errors import StackError
from hoststage.v1 import stack_pb2 as pb

MAX_POOLS = 32
MAX_PAGE_BYTES = 1 << 40
MAX_PAGE_TOKENS = 1 << 20

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


class PoolKind(Enum):
    """What the pages of a pool are."""

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    SIDECAR = "sidecar"


class HitPolicy(Enum):
    """Which pages of a pool a prefix needs: all of them, the last `trailing_pages`, or whole groups of `group_pages`."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class KvLayout(Enum):
    """How the engine lays the pool out on the device."""

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
    """What the worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class WritePolicy(Enum):
    """When the engine writes pages out."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class Retraction(Enum):
    """How a decode worker parks a retracted request."""

    NONE = "none"
    CPU_TENSOR = "cpu_tensor"
    HOST_POOL = "host_pool"


class PayloadPath(Enum):
    """How page bytes travel: in shared memory of the daemon, in memory of the client, or in messages."""

    SHM = "shm"
    IMPORTED = "imported"
    INLINE = "inline"


_E = TypeVar("_E", bound=Enum)


def wire(value: Enum) -> Any:
    """Return the number of the protobuf enum value of the same name."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(value).__name__).upper()
    return getattr(pb, f"{prefix}_{value.name}")


def from_wire(kind: type[_E], number: int) -> _E | None:
    """Return the value that a protobuf number stands for, or None where it is unspecified or unknown here."""
    return next((value for value in kind if wire(value) == number), None)


def _need(ok: bool, field_name: str, value: object, remedy: str) -> None:
    if not ok:
        raise StackError(field_name, value, remedy)


def _enum(value: object, kind: type[Enum], field_name: str) -> None:
    names = ", ".join(f"{kind.__name__}.{v.name}" for v in kind)
    _need(isinstance(value, kind), field_name, value, f"pass one of {names}")


def _whole(value: object, field_name: str, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _need(ok, field_name, value, f"pass an integer from {low} to {high}")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool of a stack.

    name: `[a-z0-9_]{1,64}`, unique in the stack. page_bytes: bytes of one page, all layers of the shard together. page_tokens: tokens
    of one page. sliding_window: tokens of the window, 0 where there is none. hit_policy: None takes the default of the kind (trailing
    pages for `swa` and `mamba`, else all pages). pieces: bytes of the parts that one page is scattered over in the engine's layout.
    host_slots: host pages asked for, 0 leaves it to the daemon. device_slots: pages of the device pool, 0 unknown.

    :raises StackError: for a value that no daemon would take; it names the field, the value and the remedy.
    """

    name: str
    kind: PoolKind
    page_bytes: int
    page_tokens: int
    layers: int = 1
    sliding_window: int = 0
    hit_policy: HitPolicy | None = None
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

    def __post_init__(self) -> None:
        at = f"pools[{self.name!r}]"
        ok = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        _need(ok, "pools.name", self.name, "use 1 to 64 of a-z, 0-9 and _")
        for value, kind, name in (
            (self.kind, PoolKind, "kind"),
            (self.layout, KvLayout, "layout"),
            (self.placement, Placement, "placement"),
        ):
            _enum(value, kind, f"{at}.{name}")
        if self.hit_policy is not None:
            _enum(self.hit_policy, HitPolicy, f"{at}.hit_policy")
        _whole(self.page_bytes, f"{at}.page_bytes", 1, MAX_PAGE_BYTES)
        _whole(self.page_tokens, f"{at}.page_tokens", 1, MAX_PAGE_TOKENS)
        for name in ("layers", "sliding_window", "trailing_pages", "group_pages"):
            _whole(getattr(self, name), f"{at}.{name}", 0, _U32)
        for name in ("host_slots", "device_slots"):
            _whole(getattr(self, name), f"{at}.{name}", 0, _U64)
        if self.pieces:
            fits = all(p > 0 for p in self.pieces) and sum(self.pieces) == self.page_bytes
            _need(fits, f"{at}.pieces", self.pieces, f"give positive sizes that add up to page_bytes {self.page_bytes}")

    def to_proto(self) -> pb.Pool:
        """Return the message of the wire."""
        return pb.Pool(
            name=self.name,
            kind=wire(self.kind),
            page_bytes=self.page_bytes,
            page_tokens=self.page_tokens,
            layers=self.layers,
            sliding_window=self.sliding_window,
            hit_policy=wire(self.hit_policy) if self.hit_policy is not None else pb.HIT_POLICY_UNSPECIFIED,
            trailing_pages=self.trailing_pages,
            group_pages=self.group_pages,
            layout=wire(self.layout),
            placement=wire(self.placement),
            indices_from_pool=self.indices_from_pool,
            shares_arena_with=self.shares_arena_with,
            replicated=self.replicated,
            pieces=self.pieces,
            host_slots=self.host_slots,
            device_slots=self.device_slots,
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes the pages of two stacks interchangeable, apart from the shard. Equal text is what counts."""

    model: str
    tenant: str = "default"
    weights_revision: str = ""
    quantization: str = ""
    kv_scales: str = ""
    dtype: str = ""
    layout: str = ""
    key_hash: str = ""

    def __post_init__(self) -> None:
        _need(bool(self.model), "identity.model", self.model, "name the model whose pages these are")

    def to_proto(self) -> pb.Identity:
        """Return the message of the wire."""
        return pb.Identity(
            tenant=self.tenant,
            model=self.model,
            weights_revision=self.weights_revision,
            quantization=self.quantization,
            kv_scales=self.kv_scales,
            dtype=self.dtype,
            layout=self.layout,
            key_hash=self.key_hash,
        )


@dataclass(frozen=True, slots=True)
class Parallel:
    """Position of the shard: sizes of at least 1, ranks in `[0, size)`. `dcp_rank` is None where it cannot be told."""

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

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dp", "dcp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            _whole(size, f"parallel.{axis}_size", 1, _U32)
            if rank is not None:
                _whole(rank, f"parallel.{axis}_rank", 0, size - 1)

    def to_proto(self) -> pb.Parallel:
        """Return the message of the wire."""
        return pb.Parallel(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            dcp_rank=self.dcp_rank,
            dcp_size=self.dcp_size,
        )


@dataclass(frozen=True, slots=True)
class ModeWish:
    """One entry of the ordered list of modes. A required mode that is refused ends the negotiation there."""

    mode: Mode
    required: bool = False

    def __post_init__(self) -> None:
        _enum(self.mode, Mode, "modes.mode")


@dataclass(frozen=True, slots=True)
class RetractionWish:
    """How retracted decode requests are to be parked; see the protocol's `RetractionWish`."""

    retraction: Retraction = Retraction.NONE
    window_only: bool = False
    concurrent_receive: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        _enum(self.retraction, Retraction, "retraction.retraction")


@dataclass(frozen=True, slots=True)
class StackSpec:
    """The whole of what a client presents at the handshake.

    modes and paths are in order of preference. largest_request_tokens: tokens of the largest request, sizes holds, 0 unknown.

    :raises StackError: for a value that no daemon would take.
    """

    identity: Identity
    pools: tuple[PoolSpec, ...]
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(self.pools))
        object.__setattr__(self, "modes", tuple(self.modes))
        object.__setattr__(self, "paths", tuple(self.paths))
        names = [pool.name for pool in self.pools]
        _need(1 <= len(names) <= MAX_POOLS, "pools", len(names), f"give 1 to {MAX_POOLS} pools")
        twice = sorted({name for name in names if names.count(name) > 1})
        _need(not twice, "pools.name", twice, "give each pool a name of its own")
        for pool in self.pools:
            for name in ("indices_from_pool", "shares_arena_with"):
                other = getattr(pool, name)
                _need(not other or other in names, f"pools[{pool.name!r}].{name}", other, f"name one of {names}")
        _enum(self.role, Role, "role")
        _enum(self.write_policy, WritePolicy, "write_policy")
        for path in self.paths:
            _enum(path, PayloadPath, "paths")
        _whole(self.largest_request_tokens, "largest_request_tokens", 0, _U64)
        _whole(self.prefetch_threshold_tokens, "prefetch_threshold_tokens", 0, _U64)

    def index_of(self, pool: str) -> int:
        """Return the place of a pool in the list. Raises `StackError` where there is none of that name."""
        for place, spec in enumerate(self.pools):
            if spec.name == pool:
                return place
        raise StackError("pool", pool, f"name one of {[spec.name for spec in self.pools]}")

    def to_proto(self) -> pb.Stack:
        """Return the message of the wire."""
        return pb.Stack(
            identity=self.identity.to_proto(),
            parallel=self.parallel.to_proto(),
            pools=[pool.to_proto() for pool in self.pools],
            role=wire(self.role),
            write_policy=wire(self.write_policy),
            modes=[pb.ModeWish(mode=wire(wish.mode), required=wish.required) for wish in self.modes],
            retraction=pb.RetractionWish(
                retraction=wire(self.retraction.retraction),
                window_only=self.retraction.window_only,
                concurrent_receive=self.retraction.concurrent_receive,
                required=self.retraction.required,
            ),
            paths=[wire(path) for path in self.paths],
            largest_request_tokens=self.largest_request_tokens,
            prefetch_threshold_tokens=self.prefetch_threshold_tokens,
            cannot_map_sidecars=not self.maps_sidecars,
            cannot_hand_over_state=not self.hands_over_state,
            requires_pinned=self.requires_pinned,
        )
