"""How the operators' commands find a daemon and talk to it."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import typer

from hoststage.cli.flags import FlagError, flags_of
from hoststage.server.config import ConfigError, Settings, load_settings
from hoststage.v1 import admin_pb2_grpc

FAILED, UNUSABLE = 1, 2

_ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}


def fail(text: str, status: int = FAILED) -> NoReturn:
    """Say why the command cannot go on, and end it."""
    print(text, file=sys.stderr)
    raise typer.Exit(status)


def settings_of(config: str, named: Mapping[str, str] | None = None, items: Sequence[str] | None = None) -> Settings:
    """Return the settings that a daemon started here with these options would have. Ends the command where they are unusable."""
    try:
        return load_settings(config or None, flags_of(named or {}, items))
    except (ConfigError, FlagError) as error:
        fail(str(error), UNUSABLE)


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon: `address` for gRPC, the bearer token where one is known."""

    address: str
    token: str
    timeout: float

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def target_of(socket: str, config: str, timeout: float) -> Target:
    """Return the daemon that `socket` (a path, `unix:…` or `host:port`) or the settings name."""
    settings = settings_of(config)
    where = socket or settings.listen.socket
    address = f"unix:{where}" if where.startswith(("/", ".")) else where
    token = os.environ.get("HOSTSTAGE_TOKEN", "") or settings.auth.token
    if not token and settings.auth.token_file:
        try:
            token = Path(settings.auth.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            fail(f"auth.token_file {settings.auth.token_file}: {error.strerror}; set HOSTSTAGE_TOKEN instead", UNUSABLE)
    return Target(address, token, timeout)


@contextmanager
def admin(target: Target) -> Iterator[Any]:
    """Give a stub of `Admin`; what goes wrong with a call ends the command with one line."""
    with grpc.insecure_channel(target.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            yield admin_pb2_grpc.AdminStub(channel)
        except grpc.RpcError as error:
            fail(words(error, target.address))


def words(error: grpc.RpcError, address: str) -> str:
    """Say what a failed call to that address means, and what to do."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        from hoststage.client._reach import unreachable

        return unreachable(address, error.details() or "") + " (--socket names another one)"
    return f"{address}: {_words(error)}"


def _words(error: grpc.RpcError) -> str:
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.UNAUTHENTICATED:
            return f"{details}; set HOSTSTAGE_TOKEN to the daemon's token"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time; the daemon hangs or the machine is overloaded (--timeout waits longer)"
        case _:
            return f"{details} ({code.name})"


def http_base(address: str, config: str) -> str:
    """Return the base URL of the operators' port, "" where the settings say that there is none."""
    where = address or settings_of(config).http.listen
    if not where:
        return ""
    host, _, port = where.removeprefix("http://").rstrip("/").rpartition(":")
    host = host.strip("[]")
    return f"http://{_ANY_HOST.get(host, f'[{host}]' if ':' in host else host)}:{port}"


def get(url: str, timeout: float) -> tuple[int, Any]:
    """Return status and JSON body of a GET, an error's included. Raises `OSError` where nobody answers."""
    # The operators' port is on this machine: a proxy of the environment has no part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


def look(base: str) -> dict[str, Any]:
    """Return `/status.json` of a daemon; ends the command where there is none."""
    if not base:
        fail("http.listen is empty: the daemon has no operators' port; name one by --http")
    try:
        status, data = get(f"{base}/status.json", 5.0)
    except (OSError, ValueError) as error:
        fail(f"{base}: no answer: {getattr(error, 'reason', error)}; is `hoststage serve` running?")
    if status != 200 or not isinstance(data, dict):
        fail(f"{base}/status.json: HTTP status {status}; is this a hoststage daemon?")
    return data
