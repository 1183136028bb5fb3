"""Rich statuses become errors that say everything the daemon said."""

import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import code_pb2, error_details_pb2, status_pb2

from hoststage.client import (
    DaemonUnavailable,
    DeadlineExceeded,
    Mode,
    QuotaExceeded,
    Refused,
    RequestRejected,
    Severity,
)
from hoststage.client._status import error_of


def packed(message):
    out = Any()
    out.Pack(message)
    return out


def violation(kind, subject, text):
    return packed(
        error_details_pb2.PreconditionFailure(
            violations=[error_details_pb2.PreconditionFailure.Violation(type=kind, subject=subject, description=text)]
        )
    )


def remedy(rule, text):
    link = error_details_pb2.Help.Link(description=text, url=f"https://example.org/rules#{rule}")
    return packed(error_details_pb2.Help(links=[link]))


def test_a_refusal_lists_every_finding_with_its_own_remedy():
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="BUDGET: too much (and 1 more)")
    status.details.append(packed(error_details_pb2.ErrorInfo(reason="BUDGET")))
    status.details.append(violation("BUDGET/cache", "kv", "too much"))
    status.details.append(violation("WINDOW", "swa", "too small"))
    status.details.append(remedy("WINDOW", "raise host_slots"))
    error = error_of(status, handshake=True)
    assert isinstance(error, Refused)
    assert [(f.rule, f.mode, f.subject, f.remedy) for f in error.findings] == [
        ("BUDGET", Mode.CACHE, "kv", ""),
        ("WINDOW", None, "swa", "raise host_slots"),
    ]
    assert all(f.severity is Severity.REFUSED for f in error.findings)
    for words in ("too much", "too small", "Remedy: raise host_slots"):
        assert words in str(error)


def test_a_rejected_request_names_reason_field_and_remedy():
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="9 bytes")
    status.details.append(packed(error_details_pb2.ErrorInfo(reason="KEY_SIZE")))
    field = error_details_pb2.BadRequest.FieldViolation(field="span.keys", description="9 bytes")
    status.details.append(packed(error_details_pb2.BadRequest(field_violations=[field])))
    status.details.append(remedy("KEY_SIZE", "pass whole keys"))
    error = error_of(status)
    assert isinstance(error, RequestRejected)
    assert (error.reason, error.field, error.remedy) == ("KEY_SIZE", "span.keys", "pass whole keys")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.UNAVAILABLE, DaemonUnavailable),
        (code_pb2.DEADLINE_EXCEEDED, DeadlineExceeded),
        (code_pb2.RESOURCE_EXHAUSTED, QuotaExceeded),
        (code_pb2.UNAUTHENTICATED, RequestRejected),
        (code_pb2.INTERNAL, RequestRejected),
    ],
)
def test_codes_have_kinds_of_their_own(code, kind):
    assert type(error_of(status_pb2.Status(code=code, message="why"), handshake=True)) is kind
