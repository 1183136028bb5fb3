"""`hoststage health`: whether a daemon is ready, for container health checks and scripts."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Annotated

import typer

DEFAULT_HTTP = "127.0.0.1:9477"
NOT_READY = 1


def fetch(http: str, path: str, timeout: float) -> tuple[int, str]:
    """Return status and body of what the operators' port answers. Raises `OSError` where nothing does."""
    try:
        with urllib.request.urlopen(f"http://{http}{path}", timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def health(
    http: Annotated[
        str, typer.Option(help="host:port of the daemon's http.listen.", envvar="HOSTSTAGE_HTTP_LISTEN")
    ] = DEFAULT_HTTP,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 3.0,
) -> None:
    """Exit 0 where the daemon is ready, 1 where it is not, and say why."""
    where = http.replace("0.0.0.0", "127.0.0.1", 1)
    try:
        status, body = fetch(where, "/readyz", timeout)
        answer = json.loads(body)
    except (OSError, ValueError) as error:
        print(f"no daemon answers at http://{where}: {error}", file=sys.stderr)
        raise typer.Exit(NOT_READY) from None
    if status == 200 and answer.get("ready"):
        print("ready")
        return
    print("not ready: " + "; ".join(answer.get("problems", [])), file=sys.stderr)
    raise typer.Exit(NOT_READY)
