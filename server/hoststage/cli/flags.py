"""Settings on the command line: named options, and `--set section.name=value` for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class FlagError(ValueError):
    """A `--set` that cannot be read; the message says what to write."""


def flags_of(named: Mapping[str, str], items: Sequence[str] | None) -> dict[str, str]:
    """Return settings by `section.name`; an empty option was not given. Raises `FlagError`."""
    flags = {key: value for key, value in named.items() if value}
    for item in items or ():
        key, sign, value = item.partition("=")
        if not sign:
            raise FlagError(f'--set {item}: there is no "=". Write section.name=value.')
        flags[key] = value
    return flags
