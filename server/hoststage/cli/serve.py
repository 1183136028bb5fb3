"""`hoststage serve`: the daemon."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from hoststage.cli.flags import FlagError, flags_of

STOPPED, UNUSABLE = 0, 2


def serve(
    config: Annotated[str, typer.Option(help="TOML or YAML file. \\[env: HOSTSTAGE_CONFIG]")] = "",
    socket: Annotated[str, typer.Option(help="Path of the gRPC Unix socket (listen.socket).")] = "",
    http: Annotated[str, typer.Option(help="host:port for operators (http.listen).")] = "",
    store: Annotated[str, typer.Option(help="file:///path, memory: or none (store.url).")] = "",
    store_limit: Annotated[str, typer.Option(help="Room of the store, e.g. 100GiB (store.limit).")] = "",
    budget: Annotated[str, typer.Option(help='Pinned memory, e.g. 8GiB, or "auto" (memory.budget).')] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error (log.level).")] = "",
    log_format: Annotated[str, typer.Option(help="auto, console or json (log.format).")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, as section.name=value.")] = None,
    print_config: Annotated[bool, typer.Option(help="Print the effective settings and exit.")] = False,
) -> None:
    """Run the daemon until SIGTERM: it drains, then stops; a second signal stops it at once."""
    from hoststage.server.config import ConfigError, as_toml, load_settings

    named = {
        "listen.socket": socket,
        "http.listen": http,
        "store.url": store,
        "store.limit": store_limit,
        "memory.budget": budget,
        "log.level": log_level,
        "log.format": log_format,
    }
    try:
        settings = load_settings(config or None, flags_of(named, set_))
    except (ConfigError, FlagError) as error:
        _fail(str(error))
    if print_config:
        print(as_toml(settings))
        raise typer.Exit(STOPPED)

    from hoststage.server.app import StartError
    from hoststage.server.app import serve as run
    from hoststage.server.rpc.sockets import SocketError
    from hoststage.server.store.errors import StoreConfigError
    from hoststage.server.telemetry.logs import setup_logs

    setup_logs(settings.log.level, settings.log.format)
    try:
        status = run(settings)
    except (StartError, SocketError, StoreConfigError) as error:
        _fail(str(error))
    raise typer.Exit(status)


def _fail(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    raise typer.Exit(UNUSABLE)
