"""The errors of the store layer: for people at start, and for callers that misuse a store."""

from __future__ import annotations


class StoreError(Exception):
    """The base of all errors of the store layer."""


class StoreConfigError(StoreError):
    """A store could not be opened, and a person must put it right.

    ``field`` names the setting, ``value`` what it was, ``problem`` what is wrong with it in one sentence, and
    ``remedy`` what to do about it.
    """

    def __init__(self, field: str, value: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem} {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


class StoreClosedError(StoreError):
    """A store was called after ``close``."""
