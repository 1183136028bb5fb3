"""The `hoststage` command: a table of subcommands, each imported only when it is called.

`hoststage --help` must answer at once and work in a container that has neither torch nor gRPC, so nothing
here imports a subcommand's module before that subcommand runs. A new subcommand is one row in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import typer
import typer.main
from typer.core import TyperGroup


class Entry(NamedTuple):
    """One subcommand: where its function (or `typer.Typer` group) lives, and its line on the help page."""

    module: str
    attr: str
    help: str


COMMANDS: dict[str, Entry] = {
    "serve": Entry("hoststage.cli.serve", "serve", "Run the daemon."),
    "bench": Entry(
        "hoststage.cli.bench.command", "bench", "Measure the daemon beside the machine's ceilings and other products."
    ),
    "demo": Entry("hoststage.cli.demo.command", "demo", "Move a real model's KV cache between two processes."),
    "health": Entry("hoststage.cli.health", "health", "Tell whether a daemon is ready."),
    "status": Entry("hoststage.cli.status", "status", "Show a daemon's sessions, pools and store."),
    "top": Entry("hoststage.cli.top", "top", "Watch them, with rates."),
    "doctor": Entry("hoststage.cli.doctor", "doctor", "Tell what this machine offers a daemon, and what to change."),
    "evict": Entry("hoststage.cli.admin", "evict", "Drop resident pages from host memory."),
    "clear": Entry("hoststage.cli.admin", "clear", "Remove a namespace from host memory and from the store."),
    "drain": Entry("hoststage.cli.admin", "drain", "Let a daemon finish what it accepted and take no new work."),
    "check": Entry("hoststage.cli.check", "check", "Judge a model and an engine's flags before anything is launched."),
    "plan": Entry(
        "hoststage.cli.plan", "plan", "Show what a model needs from a node's host memory, with the arithmetic."
    ),
    "version": Entry("hoststage.cli.version", "version", "Print the version and the Python that runs it."),
}
"""Subcommand name to its entry, in the order of the help page."""


def load(name: str) -> Any:
    """Import the subcommand `name` and return it as a click command.

    The entry's attribute is a plain function with typer-annotated parameters, or a `typer.Typer` for a group.
    """
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(entry.module), entry.attr)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(cast("Callable[..., Any]", target))
        target = single
    command = typer.main.get_command(target)
    command.name = name
    return command


class LazyGroup(TyperGroup):
    """A group that lists its commands from `COMMANDS` and imports one only when it is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder that knows the command's name and help line, enough for the help page."""
        if cmd_name not in COMMANDS:
            return None
        placeholder = typer.Typer(add_completion=False)
        placeholder.command(cmd_name, help=COMMANDS[cmd_name].help)(lambda: None)
        return typer.main.get_command(placeholder)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else command, rest


app = typer.Typer(
    name="hoststage",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The host-memory tier of an LLM serving node, as a service.",
)


@app.callback()
def _root() -> None:
    """The host-memory tier of an LLM serving node, as a service."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the process's own). Exits the process."""
    app(args=None if argv is None else list(argv), prog_name="hoststage")


if __name__ == "__main__":
    main()
