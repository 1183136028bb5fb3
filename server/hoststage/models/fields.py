"""Reading a model's `config.json`: every value that is taken is there, overridden, or listed as an assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hoststage.models.errors import BadField, MissingField

NESTED = ("text_config", "llm_config", "language_config")
"""Where multimodal configs keep the language model's own fields."""

MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that nobody gave. subject: the field. message: what was taken and why. remedy: how to give another."""

    subject: str
    message: str
    remedy: str = ""


class Fields:
    """A config with overrides. Nested language-model fields win over the outer ones of the same name.

    An override `a=b` replaces field `a`; reading a field that is null counts as absent, as in Hugging Face configs.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        overrides: Mapping[str, object] | None = None,
        architecture: str = "",
    ) -> None:
        nested: dict[str, object] = {}
        for name in NESTED:
            inner = config.get(name)
            if isinstance(inner, Mapping):
                nested.update({str(k): v for k, v in inner.items() if v is not None})
        self._values: dict[str, object] = {**config, **nested, **(overrides or {})}
        outer = (overrides or {}).get("architectures", config.get("architectures")) or nested.get("architectures")
        self.architecture = architecture or self._architecture(outer)
        self.assumptions: list[Assumption] = []

    @staticmethod
    def _architecture(value: object) -> str:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Sequence) and value and isinstance(value[0], str):
            return value[0]
        raise MissingField("architectures", "this model")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> object:
        """Return the value, or None where it is absent."""
        return self._values.get(name)

    def integer(self, name: str, *aliases: str, least: int = 1) -> int:
        """Return an integer of at least `least` under `name` or, where that is absent, under an alias."""
        for candidate in (name, *aliases):
            if self.has(candidate):
                return self._integer(candidate, least)
        raise MissingField(name, self.architecture)

    def integer_or(self, name: str, default: int, why: str, least: int = 0) -> int:
        """Return the integer under `name`; where it is absent take `default` and list that, with the reason."""
        if self.has(name):
            return self._integer(name, least)
        self.assume(name, f"{name} = {default}: {why}", f"--set {name}=VALUE")
        return default

    def supply(self, name: str, value: object) -> None:
        """Set a field that the config left out to a value that has been listed as an assumption."""
        self._values[name] = value

    def _integer(self, name: str, least: int) -> int:
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadField(name, value, f"an integer of at least {least}")
        return value

    def layer_count(self) -> int:
        """Return `num_hidden_layers`, which no real model has more than `MOST_LAYERS` of."""
        count = self.integer("num_hidden_layers")
        if count > MOST_LAYERS:
            raise BadField("num_hidden_layers", count, f"at most {MOST_LAYERS}")
        return count

    def flag(self, name: str) -> bool | None:
        """Return a boolean, or None where it is absent."""
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise BadField(name, value, "true or false")

    def text(self, name: str) -> str:
        """Return a string, or the empty string where it is absent."""
        value = self._values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise BadField(name, value, "a string")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of integers. Raises `MissingField` where it is absent."""
        value = self._values.get(name)
        if value is None:
            raise MissingField(name, self.architecture)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise BadField(name, value, "a list of integers")
        numbers: list[int] = []
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int):
                raise BadField(name, item, "only integers in the list")
            numbers.append(item)
        return numbers

    def strings(self, name: str) -> list[str]:
        """Return a list of strings. Raises `MissingField` where it is absent."""
        value = self._values.get(name)
        if value is None:
            raise MissingField(name, self.architecture)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise BadField(name, value, "a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise BadField(name, value, "only strings in the list")
        return [str(item) for item in value]

    def assume(self, subject: str, message: str, remedy: str = "") -> None:
        """List a value that was taken though nobody gave it. The same one twice is listed once."""
        assumption = Assumption(subject, message, remedy)
        if assumption not in self.assumptions:
            self.assumptions.append(assumption)
