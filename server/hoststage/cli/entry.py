"""The `hoststage` command's entry: says what to install where only the client is."""

from __future__ import annotations

import sys

UNUSABLE = 2


def main() -> None:
    """Run the command line. Exits the process."""
    try:
        from hoststage.cli.main import main as run
    except ModuleNotFoundError as error:
        print(
            f"the hoststage command needs the server extra ({error.name} is not installed): pip install 'hoststage[server]'",
            file=sys.stderr,
        )
        raise SystemExit(UNUSABLE) from None
    run()
