"""Asking a running daemon for its verdict, without a session."""

from __future__ import annotations

import os

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
    import grpc

    from hoststage.server.rpc.convert_stack import stack_to_proto, verdict_from_proto
    from hoststage.v1 import hoststage_pb2 as pb
    from hoststage.v1 import hoststage_pb2_grpc
    from hoststage.v1.ops import PROTOCOL_MAX, PROTOCOL_MIN

    hello = pb.Hello(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        client="hoststage check",
        stack=stack_to_proto(stack),
        token=os.environ.get("HOSTSTAGE_TOKEN", ""),
    )
    with grpc.insecure_channel(target.replace("unix://", "unix:", 1)) as channel:
        try:
            answer = hoststage_pb2_grpc.HostStageStub(channel).Negotiate(
                pb.NegotiateRequest(hello=hello), timeout=timeout
            )
        except grpc.RpcError as error:
            problem = f"{error.code().name}: {error.details()}"
            raise NegotiateError(target, problem, "Check the address and that the daemon runs") from error
    return verdict_from_proto(answer)
