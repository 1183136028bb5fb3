"""Configs of well-known models, so that `check` and `plan` work without a download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from hoststage.models.errors import UnknownPreset


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's name, the repository it is published in, and the fields of its config that matter here."""

    name: str
    model: str
    config: dict[str, object]


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def load_preset(name: str) -> Preset:
    """Return a preset. Raises `UnknownPreset`."""
    if name not in preset_names():
        raise UnknownPreset(name, preset_names())
    data = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return Preset(name=name, model=str(data["model"]), config=dict(data["config"]))
