"""`hoststage evict`, `clear` and `drain`: what an operator does to a running daemon."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from hoststage.cli.remote import admin, fail, target_of
from hoststage.v1 import admin_pb2 as pb

Socket = Annotated[str, typer.Option(help="gRPC socket or host:port. \\[default: listen.socket]")]
Config = Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")]
Timeout = Annotated[float, typer.Option(help="Seconds.")]


def evict(
    namespace: Annotated[str, typer.Option(help="Namespace, or its first digits. Empty: all.")] = "",
    pool: Annotated[str, typer.Option(help="Name of the pool. Empty: all.")] = "",
    socket: Socket = "",
    config: Config = "",
    timeout: Timeout = 30.0,
) -> None:
    """Drop resident pages that nobody leases from host memory; the store keeps them."""
    target = target_of(socket, config, timeout)
    with admin(target) as stub:
        request = pb.EvictRequest(namespace=namespace, pool=pool)
        answer = stub.Evict(request, timeout=timeout, metadata=target.metadata)
    print(f"{answer.pages} pages evicted")


def clear(
    namespace: Annotated[str, typer.Argument(help="The namespace: 64 hex digits, as `hoststage status --json` shows.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    socket: Socket = "",
    config: Config = "",
    timeout: Timeout = 300.0,
) -> None:
    """Remove every page of a namespace, from host memory and from the store."""
    if not re.fullmatch("[0-9a-f]{64}", namespace):
        fail(
            f'"{namespace}" is no whole namespace, which has 64 hex digits: `hoststage status --json` has those with memory, '
            "and the folders under v1 in a file store are named by them"
        )
    if not yes and not typer.confirm(f"Remove all pages of namespace {namespace}?"):
        fail("nothing was removed")
    target = target_of(socket, config, timeout)
    with admin(target) as stub:
        request = pb.ClearNamespaceRequest(namespace=namespace)
        answer = stub.ClearNamespace(request, timeout=timeout, metadata=target.metadata)
    print(f"{answer.resident_pages} resident and {answer.stored_pages} stored pages removed")


def drain(
    wait: Annotated[bool, typer.Option("--wait", help="Return when everything that was accepted is stored.")] = False,
    socket: Socket = "",
    config: Config = "",
    timeout: Timeout = 60.0,
) -> None:
    """Let the daemon take no new work and finish what it accepted. It stays up until it is stopped."""
    target = target_of(socket, config, timeout)
    deadline = time.monotonic() + timeout
    with admin(target) as stub:
        answer = stub.Drain(pb.DrainRequest(), timeout=timeout, metadata=target.metadata)
        while wait and answer.open_commits:
            if time.monotonic() > deadline:
                fail(f"{answer.open_commits} commits are not stored after {timeout} s")
            time.sleep(0.2)
            answer = stub.Drain(pb.DrainRequest(), timeout=timeout, metadata=target.metadata)
    print(f"draining; {answer.open_commits} commits are not stored yet")
