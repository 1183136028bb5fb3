"""Asking a running daemon for its verdict, without a session."""

from __future__ import annotations

from hoststage.core.findings import Verdict
from hoststage.core.stack import Stack


class NegotiateError(RuntimeError):
    """The daemon could not be asked. `target` is its address, `remedy` says what to do."""

    def __init__(self, target: str, problem: str, remedy: str) -> None:
        super().__init__(f"{target}: {problem}. {remedy}")
        self.target = target
        self.problem = problem
        self.remedy = remedy


def negotiate(target: str, stack: Stack, timeout: float) -> Verdict:
    """Return the verdict of the daemon at `target` (`unix:///path` or `host:port`) on `stack`.

    timeout: seconds. Raises `NegotiateError` where there is no answer; a refusal is an answer.
    """
    raise NegotiateError(
        target,
        "this build cannot ask a daemon",
        "Judge without one: leave out --daemon, and give the daemon's budget by --budget",
    )
