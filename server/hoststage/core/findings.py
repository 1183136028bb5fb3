"""Findings: what the fences answer, and the grant that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hoststage.core.stack import Mode, PayloadPath, Retraction, WritePolicy


class Severity(Enum):
    """`REFUSED` stands in the way of the mode it names, `ADJUSTED` says what was changed, `NOTICE` informs."""

    REFUSED = "refused"
    ADJUSTED = "adjusted"
    NOTICE = "notice"


class RefusalKind(Enum):
    """Why a refusal was made, in terms of a gRPC status code."""

    INVALID_ARGUMENT = "invalid_argument"
    FAILED_PRECONDITION = "failed_precondition"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNIMPLEMENTED = "unimplemented"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one fence.

    rule: the fence id. subject: the pool, mode or field that it is about. mode: the mode that it was evaluated for, None
    where it holds for any. values: the numbers behind the message, by name.
    """

    rule: str
    severity: Severity
    subject: str
    message: str
    remedy: str = ""
    mode: Mode | None = None
    kind: RefusalKind = RefusalKind.FAILED_PRECONDITION
    values: dict[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """Slots of one pool in a grant.

    write_slots: slots of the session's own write arena. read_slots: slots of the namespace's read arena. reserve_slots: of those, the
    ones that publishing may never take. hold_slots: further write-arena slots for retracted requests. stride: bytes from slot to slot.
    window_pages: pages of one window, 0 without one.
    """

    pool: str
    stride: int
    write_slots: int
    read_slots: int
    reserve_slots: int = 0
    hold_slots: int = 0
    window_pages: int = 0

    @property
    def session_bytes(self) -> int:
        """Bytes of the session's private write arena in this pool, holds included."""
        return (self.write_slots + self.hold_slots) * self.stride

    @property
    def namespace_bytes(self) -> int:
        """Bytes of the namespace's read arena in this pool."""
        return self.read_slots * self.stride


@dataclass(frozen=True, slots=True)
class Grant:
    """What the tier will do for a session. `write_policy` is the one in force, which a fence may have changed."""

    mode: Mode
    path: PayloadPath
    retraction: Retraction
    window_only_holds: bool
    pools: tuple[PoolGrant, ...]
    namespace: str
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH

    @property
    def session_bytes(self) -> int:
        return sum(p.session_bytes for p in self.pools)

    @property
    def namespace_bytes(self) -> int:
        return sum(p.namespace_bytes for p in self.pools)


@dataclass(frozen=True, slots=True)
class BudgetHolder:
    """One holder of pinned memory: a session's write arenas, a namespace's read arenas, or what old clients still map."""

    name: str
    bytes: int
    reclaimable: bool = False


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the fences need to know of the node. A live namespace's read arenas are shared, not charged again.

    live_read_slots: pool name to read slots already there for the stack's namespace. live_page_bytes: likewise page bytes.
    live_shapes: one `hoststage.core.spans.shape_of` a pool of the live namespace, in its order; empty where none is live.
    """

    budget_bytes: int
    holders: tuple[BudgetHolder, ...] = ()
    store_configured: bool = True
    pinned: str = "resident"
    pin_problem: str = ""
    memlock_bytes: int = 0
    cuda: bool = False
    paths: tuple[PayloadPath, ...] = (PayloadPath.SHM, PayloadPath.IMPORTED, PayloadPath.INLINE)
    live_read_slots: dict[str, int] = field(default_factory=dict)
    live_page_bytes: dict[str, int] = field(default_factory=dict)
    live_shapes: tuple[str, ...] = ()

    @property
    def committed_bytes(self) -> int:
        """Bytes that cannot be given to anyone else now."""
        return sum(h.bytes for h in self.holders if not h.reclaimable)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.committed_bytes)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings for all modes, and the grant of the first acceptable one (None: refused)."""

    grant: Grant | None
    findings: tuple[Finding, ...]

    @property
    def refused(self) -> bool:
        return self.grant is None
