"""What the daemon answers to a stack: findings, and where it accepts one, a grant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from hoststage.client.stack import Mode, PayloadPath, Retraction, WritePolicy, from_wire
from hoststage.v1 import stack_pb2 as pb


class Severity(Enum):
    """Whether a finding refuses, tells of a change, or only tells."""

    REFUSED = "refused"
    ADJUSTED = "adjusted"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one fence. `mode` is None where it holds for any mode; `values` are the numbers behind the message."""

    rule: str
    severity: Severity
    subject: str
    message: str
    remedy: str = ""
    mode: Mode | None = None
    values: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f" [{self.mode.value}]" if self.mode else ""
        about = f" {self.subject}:" if self.subject else ""
        remedy = f" Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.severity.value} {self.rule}{where}{about} {self.message}{remedy}"

    @classmethod
    def from_proto(cls, m: pb.Finding) -> Finding:
        """Return a finding from its message. A severity unknown here reads as a notice."""
        severity = from_wire(Severity, m.severity) or Severity.NOTICE
        return cls(m.rule, severity, m.subject, m.message, m.remedy, from_wire(Mode, m.mode), dict(m.values))


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """Slots of one pool: `write_slots` and `hold_slots` in the session's write arena, `read_slots` in the namespace's read arena,
    of which publishing never takes `reserve_slots`. `stride`: bytes from one slot to the next."""

    pool: str
    stride: int
    write_slots: int
    read_slots: int
    reserve_slots: int
    hold_slots: int
    window_pages: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What the client may do. `namespace`: 64 hex digits; keys never meet across it.

    write_policy: the one in force, which a fence may have changed; None where the daemon is older and does not say.
    """

    mode: Mode
    path: PayloadPath
    retraction: Retraction
    window_only_holds: bool
    pools: tuple[PoolGrant, ...]
    namespace: str
    write_policy: WritePolicy | None = None

    @classmethod
    def from_proto(cls, m: pb.Grant) -> Grant:
        """Return a grant from its message."""
        pools = tuple(
            PoolGrant(p.pool, p.stride, p.write_slots, p.read_slots, p.reserve_slots, p.hold_slots, p.window_pages)
            for p in m.pools
        )
        return cls(
            from_wire(Mode, m.mode) or Mode.BUFFER_ONLY,
            from_wire(PayloadPath, m.path) or PayloadPath.INLINE,
            from_wire(Retraction, m.retraction) or Retraction.NONE,
            m.window_only_holds,
            pools,
            m.namespace,
            from_wire(WritePolicy, m.write_policy),
        )

    def pool(self, name: str) -> PoolGrant | None:
        """Return the grant of one pool, or None."""
        return next((p for p in self.pools if p.pool == name), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a stack without a session. `grant` is None where it is refused; `protocol` is 0 where no version is shared."""

    grant: Grant | None
    findings: tuple[Finding, ...]
    protocol: int

    @property
    def accepted(self) -> bool:
        """Whether a session would be opened."""
        return self.grant is not None

    def __str__(self) -> str:
        head = f"accepted: {self.grant.mode.value} over {self.grant.path.value}" if self.grant else "refused"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def findings_from(messages: Iterable[pb.Finding]) -> tuple[Finding, ...]:
    """Return findings from their messages."""
    return tuple(Finding.from_proto(m) for m in messages)
