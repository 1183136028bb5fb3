"""`hoststage version`."""

from __future__ import annotations

import platform
from importlib import metadata

import typer


def version() -> None:
    """Print the version of hoststage and of the Python that runs it."""
    try:
        own = metadata.version("hoststage")
    except metadata.PackageNotFoundError:
        own = "unknown (run from a source tree that is not installed)"
    typer.echo(f"hoststage {own}, Python {platform.python_version()}")
