"""`hoststage health`: for container health checks and scripts."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer

from hoststage.cli.remote import fail, get, http_base, target_of, words


def health(
    http: Annotated[str, typer.Option(help="host:port of the operators' port. \\[default: http.listen]")] = "",
    socket: Annotated[
        str,
        typer.Option(
            help="gRPC socket or host:port; the daemon there is asked first. \\[default: listen.socket, where there is no operators' port]"
        ),
    ] = "",
    config: Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 3.0,
) -> None:
    """Exit with 0 if the daemon is ready, with 1 and the reasons if it is not."""
    # Who names a socket means the daemon behind it: another one may have the default operators' port.
    base = "" if socket and not http else http_base(http, config)
    if socket or not base:
        _ask_grpc(socket, config, timeout)
    if base:
        _ask_http(base, timeout)
    print("ready")


def _ask_http(base: str, timeout: float) -> None:
    try:
        status, body = get(f"{base}/readyz", timeout)
    except (OSError, ValueError) as error:
        fail(f"{base}: no answer: {getattr(error, 'reason', error)}; is `hoststage serve` running?")
    if status != 200:
        problems = body.get("problems", []) if isinstance(body, dict) else []
        fail("not ready: " + ("; ".join(problems) or f"HTTP status {status}"))


def _ask_grpc(socket: str, config: str, timeout: float) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    target = target_of(socket, config, timeout)
    with grpc.insecure_channel(target.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            fail(words(error, target.address))
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        fail("not ready: the daemon is draining")
