"""Model descriptions: from a Hugging Face `config.json` and an engine's flags to the stack that a rank presents.

`describe` does the whole of it; `load_preset` has configs of well-known models; `read_stack` reads a stack that a file
describes. Everything here is pure: standard library and `hoststage.core` only.
"""

from __future__ import annotations

from hoststage.core.sizing import Term
from hoststage.models.describe import ModelDescription, Shard, describe
from hoststage.models.errors import (
    BadField,
    MissingField,
    ModelError,
    StackFileError,
    UnknownArchitecture,
    UnknownPreset,
)
from hoststage.models.fields import Assumption
from hoststage.models.pools import PoolDescription
from hoststage.models.presets import Preset, load_preset, preset_names
from hoststage.models.settings import SGLANG_RELEASE, Engine, EngineSettings, Wishes
from hoststage.models.stackfile import read_stack, stack_from_mapping, stack_to_mapping

__all__ = [
    "SGLANG_RELEASE",
    "Assumption",
    "BadField",
    "Engine",
    "EngineSettings",
    "MissingField",
    "ModelDescription",
    "ModelError",
    "PoolDescription",
    "Preset",
    "Shard",
    "StackFileError",
    "Term",
    "UnknownArchitecture",
    "UnknownPreset",
    "Wishes",
    "describe",
    "load_preset",
    "preset_names",
    "read_stack",
    "stack_from_mapping",
    "stack_to_mapping",
]
