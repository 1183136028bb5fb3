"""Rich statuses of the wire as errors of this library."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as PackedAny
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from hoststage.client._reach import unreachable
from hoststage.client.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    HostStageError,
    QuotaExceeded,
    Refused,
    RequestRejected,
)
from hoststage.client.stack import Mode
from hoststage.client.verdict import Finding, Severity, findings_from
from hoststage.v1 import stack_pb2

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_CANCELLED = grpc.StatusCode.CANCELLED.value[0]
_DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


class _Details:
    """The details of a status, those that we know by kind."""

    def __init__(self, packed: list[PackedAny]) -> None:
        self.info = error_details_pb2.ErrorInfo()
        self.precondition = error_details_pb2.PreconditionFailure()
        self.bad = error_details_pb2.BadRequest()
        self.help = error_details_pb2.Help()
        findings: list[stack_pb2.Finding] = []
        for part in packed:
            # A detail may come in several messages of its kind, each of them small enough for a trailer.
            for known in (self.info, self.precondition, self.bad, self.help):
                one = type(known)()
                if part.Unpack(one):
                    known.MergeFrom(one)
            finding = stack_pb2.Finding()
            if part.Unpack(finding):
                findings.append(finding)
        self.findings = findings_from(findings) or self._from_violations()

    def _from_violations(self) -> tuple[Finding, ...]:
        remedies: dict[str, list[str]] = {}
        for link in self.help.links:
            remedies.setdefault(link.url.rpartition("#")[2], []).append(link.description)
        out = []
        for violation in self.precondition.violations:
            rule, _, mode = violation.type.partition("/")
            known_mode = next((m for m in Mode if m.value == mode), None)
            # Links stand in the order of the violations, one each.
            own = remedies.get(rule, [])
            remedy = own.pop(0) if len(own) > 1 else next(iter(own), "")
            out.append(Finding(rule, Severity.REFUSED, violation.subject, violation.description, remedy, known_mode))
        return tuple(out)

    @property
    def field(self) -> str:
        if self.bad.field_violations:
            return str(self.bad.field_violations[0].field)
        return str(self.info.metadata.get("field", ""))

    @property
    def remedy(self) -> str:
        if self.help.links:
            return str(self.help.links[0].description)
        return str(self.info.metadata.get("remedy", ""))


def error_of(status: status_pb2.Status, *, handshake: bool = False) -> HostStageError:
    """Return the error that a rich status stands for. `handshake`: a failed precondition is then a refusal of the stack."""
    details = _Details(list(status.details))
    reason, message = details.info.reason, status.message
    if status.code in (_UNAVAILABLE, _CANCELLED) and not details.findings:
        said = message or "the daemon is not reachable"
        return DaemonUnavailable(said + (f"; {details.remedy}" if details.remedy else ""))
    if status.code == _DEADLINE:
        return DeadlineExceeded(message)
    if details.findings and handshake:
        return Refused(message, details.findings)
    kind = QuotaExceeded if status.code == _EXHAUSTED else RequestRejected
    return kind(message, reason, details.field, details.remedy)


def error_of_call(error: grpc.RpcError, address: str, *, handshake: bool = True) -> HostStageError:
    """Return the error that a failed call stands for; `address` is named where nobody answered."""
    code, text = error.code(), error.details() or ""
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        status = None
    if status is None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return DaemonUnavailable(unreachable(address, text))
    if status is None and code is grpc.StatusCode.UNIMPLEMENTED:
        return DaemonUnavailable(f"what answers at {address} is no hoststage daemon: {text}")
    if status is None:
        status = status_pb2.Status(code=code.value[0], message=text)
    return error_of(status, handshake=handshake)
