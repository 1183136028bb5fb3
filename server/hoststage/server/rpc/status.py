"""Failures as gRPC rich status: ErrorInfo with the rule as reason, PreconditionFailure a finding, Help with the remedies."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from hoststage.core.findings import Finding, RefusalKind, Severity, Verdict
from hoststage.server.contract import RequestError

DOMAIN = "hoststage.dev"
HELP_URL = "https://hoststage.dev/rules#"
DETAILS_KEY = "grpc-status-details-bin"
_MAX_DETAILS_BYTES = 6000
"""Trailers larger than 8 KiB are refused by many peers; Negotiate gives everything."""

_CODES = {
    RefusalKind.INVALID_ARGUMENT: code_pb2.INVALID_ARGUMENT,
    RefusalKind.FAILED_PRECONDITION: code_pb2.FAILED_PRECONDITION,
    RefusalKind.RESOURCE_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    RefusalKind.UNIMPLEMENTED: code_pb2.UNIMPLEMENTED,
}
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def of_verdict(verdict: Verdict, *, draining: bool = False) -> status_pb2.Status:
    """Return the status of a refusal; what does not fit into trailers is left out, the refusing findings last."""
    refused = [f for f in verdict.findings if f.severity is Severity.REFUSED and f.subject != "retraction"]
    refused = refused or [f for f in verdict.findings if f.severity is Severity.REFUSED]
    if not refused:
        return _unavailable(draining)
    first = refused[0]
    status = status_pb2.Status(code=_CODES[first.kind], message=_summary(refused))
    info = error_details_pb2.ErrorInfo(reason=first.rule, domain=DOMAIN)
    info.metadata.update({k: str(v) for k, v in first.values.items()})
    status.details.append(_packed(info))
    for finding in refused:
        _append(status, _violation(finding))
    for finding in refused:
        if finding.remedy:
            link = error_details_pb2.Help.Link(description=finding.remedy, url=HELP_URL + finding.rule)
            _append(status, error_details_pb2.Help(links=[link]))
    return status


def _unavailable(draining: bool) -> status_pb2.Status:
    """Nothing is wrong with the stack: it is the moment that is."""
    if draining:
        error = RequestError(
            "DRAINING",
            "the daemon is draining and takes no new sessions",
            code="UNAVAILABLE",
            remedy="connect again when it has been restarted",
        )
    else:
        error = RequestError(
            "BUDGET", "memory that was free a moment ago is taken", code="UNAVAILABLE", remedy="try again"
        )
    return of_request_error(error)


def _summary(refused: list[Finding]) -> str:
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return f"{refused[0].rule}: {refused[0].message}{more}"


def _violation(finding: Finding) -> error_details_pb2.PreconditionFailure:
    kind = finding.rule if finding.mode is None else f"{finding.rule}/{finding.mode.value}"
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=kind, subject=finding.subject, description=finding.message
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def _append(status: status_pb2.Status, detail: Message) -> None:
    packed = _packed(detail)
    if status.ByteSize() + packed.ByteSize() <= _MAX_DETAILS_BYTES:
        status.details.append(packed)


def of_request_error(error: RequestError) -> status_pb2.Status:
    """Return the status of a request that failed as a whole."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=str(error))
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.remedy:
        link = error_details_pb2.Help.Link(description=error.remedy, url=HELP_URL + error.reason)
        status.details.append(_packed(error_details_pb2.Help(links=[link])))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> NoReturn:
    """End a call with a rich status."""
    code = _GRPC_CODES[status.code]
    await context.abort(code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))
    raise cast("BaseException", AssertionError("abort returned"))
