"""Failures as gRPC rich status: ErrorInfo with the rule as reason, PreconditionFailure a finding, Help with the remedies."""

from __future__ import annotations

from typing import Any, NoReturn, cast
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from hoststage.core.fences import RETRACTION_SUBJECT
from hoststage.core.findings import Finding, RefusalKind, Severity, Verdict
from hoststage.server.contract import RequestError

DOMAIN = "hoststage.dev"
HELP_URL = "https://hoststage.dev/rules#"
DETAILS_KEY = "grpc-status-details-bin"
_MAX_DETAILS_BYTES = 5600
"""Trailers larger than 8 KiB are refused by many peers, and base64 makes four bytes of three; Negotiate gives everything."""
_MAX_MESSAGE_BYTES = 600
_MAX_VALUE_BYTES = 200

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
    """Return the status of a refusal: every refusing finding with its remedy, those about holds last.

    What does not fit into trailers is left out and counted in the ErrorInfo (`findings_left_out`).
    """
    refused = [f for f in verdict.findings if f.severity is Severity.REFUSED]
    refused.sort(key=lambda f: f.subject == RETRACTION_SUBJECT)
    if not refused:
        return _unavailable(draining)
    first = refused[0]
    status = status_pb2.Status(code=_CODES[first.kind], message=_summary(refused))
    info = error_details_pb2.ErrorInfo(reason=first.rule, domain=DOMAIN)
    info.metadata.update({k: _cut(str(v), _MAX_VALUE_BYTES) for k, v in first.values.items()})
    pairs = [_pair(finding) for finding in refused]
    # The message travels twice: in the status, and percent-encoded in a trailer of its own.
    room = _MAX_DETAILS_BYTES - 2 * len(quote(status.message)) - info.ByteSize()
    fitting = 0
    while fitting < len(pairs) and room >= sum(d.ByteSize() for d in pairs[fitting]):
        room -= sum(d.ByteSize() for d in pairs[fitting])
        fitting += 1
    if fitting < len(pairs):
        info.metadata["findings_left_out"] = str(len(pairs) - fitting)
    status.details.append(_packed(info))
    # Violations first, then the links, one each in the same order.
    status.details.extend(pair[0] for pair in pairs[:fitting])
    status.details.extend(pair[1] for pair in pairs[:fitting])
    return status


def _pair(finding: Finding) -> tuple[any_pb2.Any, any_pb2.Any]:
    link = error_details_pb2.Help.Link(description=finding.remedy or "See the rule.", url=HELP_URL + finding.rule)
    return _packed(_violation(finding)), _packed(error_details_pb2.Help(links=[link]))


def _cut(text: str, most: int) -> str:
    """Return `text`, or its beginning where it has more than `most` bytes."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= most else raw[: most - 3].decode(errors="ignore") + "…"


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
    return f"{refused[0].rule}: {_cut(refused[0].message, _MAX_MESSAGE_BYTES)}{more}"


def _violation(finding: Finding) -> error_details_pb2.PreconditionFailure:
    kind = finding.rule if finding.mode is None else f"{finding.rule}/{finding.mode.value}"
    violation = error_details_pb2.PreconditionFailure.Violation(
        type=kind, subject=finding.subject, description=finding.message
    )
    return error_details_pb2.PreconditionFailure(violations=[violation])


def of_request_error(error: RequestError) -> status_pb2.Status:
    """Return the status of a request that failed as a whole."""
    text = _cut(str(error), _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=text)
    status.details.append(_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
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
