"""Typed errors of the model descriptions: each names the field, what is wrong with it, and how to supply it."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or an engine setting that cannot be described. `field` names it, `remedy` says what to do."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


class MissingField(ModelError):
    """A field that the arithmetic needs is in neither the config nor the overrides."""

    def __init__(self, field: str, architecture: str) -> None:
        super().__init__(
            field,
            f"the config of {architecture} lacks it and nothing else tells its value",
            f"Give it with --set {field}=VALUE, or describe the pools in a stack file (--stack)",
        )


class BadField(ModelError):
    """A field is there, but its value cannot be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(
            field,
            f"is {value!r}, expected {expected}",
            f"Correct it in the config, or override it with --set {field}=VALUE",
        )


class UnknownArchitecture(ModelError):
    """No description is known for the architecture."""

    def __init__(self, architecture: str, known: tuple[str, ...]) -> None:
        super().__init__(
            "architectures",
            f"{architecture} is not one that hoststage can describe",
            "Describe its pools in a stack file (--stack), or, where its cache has the shape of a known one, name that "
            f"with --set 'architectures=[\"NAME\"]'; known: {', '.join(known)}",
        )


class UnknownPreset(ModelError):
    """No preset of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__("preset", f"there is none named {name!r}", f"Known presets: {', '.join(known)}")


class StackFileError(ModelError):
    """A stack file that cannot be read as a stack."""
