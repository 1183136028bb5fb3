"""What a client may raise. Every error says what was asked, what was found and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoststage.client.verdict import Finding


class HostStageError(Exception):
    """Base of every error of this library."""


class StackError(HostStageError, ValueError):
    """A description or an argument that no daemon would take. `field`, `value` and `remedy` say what, and what would do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field} is {value!r}: {remedy}")


class DaemonUnavailable(HostStageError, ConnectionError):
    """The daemon cannot be reached, or was lost and is not back yet. The session reconnects by itself."""


class SessionLost(DaemonUnavailable):
    """The connection broke while the call was waiting: whether it was carried out is not known.

    Leases, tickets and views of the lost session are void; the next call uses a new one."""


class DeadlineExceeded(HostStageError, TimeoutError):
    """The call's time was up before an answer came."""


class ForkedSession(HostStageError, RuntimeError):
    """The process was forked: a session belongs to the process that opened it. Open another one here."""

    def __init__(self) -> None:
        super().__init__("this session belongs to the process that opened it; call connect() in the forked one")


class SessionClosed(HostStageError, RuntimeError):
    """The session was closed by `close`."""

    def __init__(self) -> None:
        super().__init__("the session is closed; open another with connect()")


class Refused(HostStageError):
    """The handshake was refused. `findings` holds every answer of the fences; printing the error shows them all."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        self.message = message
        self.findings = tuple(findings)
        lines = [message or "the daemon refused the stack"]
        lines += [f"  {finding}" for finding in self.findings]
        super().__init__("\n".join(lines))


class RequestRejected(HostStageError):
    """A request failed as a whole and nothing of it was done.

    reason: upper-case words that a program may compare. field: what to correct. remedy: how.
    """

    def __init__(self, message: str, reason: str = "", field: str = "", remedy: str = "") -> None:
        self.reason, self.field, self.remedy = reason, field, remedy
        head = f"{reason}: {message}" if reason else message
        where = f" ({field})" if field else ""
        super().__init__(head + where + (f"; {remedy}" if remedy else ""))


class QuotaExceeded(RequestRejected):
    """The request exceeds what one session may hold or ask at once."""
