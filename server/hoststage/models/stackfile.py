"""A stack written down in TOML or JSON: for engines and models that no description covers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from hoststage.core.stack import (
    HitPolicy,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Parallel,
    PayloadPath,
    Placement,
    Pool,
    PoolKind,
    Retraction,
    RetractionWish,
    Role,
    Stack,
    WritePolicy,
)
from hoststage.models.errors import StackFileError

T = TypeVar("T")

ENUMS: dict[str, type[Enum]] = {
    "kind": PoolKind,
    "hit_policy": HitPolicy,
    "layout": KvLayout,
    "placement": Placement,
    "role": Role,
    "write_policy": WritePolicy,
    "retraction": Retraction,
    "mode": Mode,
}

REMEDY = "See the reference of stack files, or `hoststage plan --stack-out` for one to start from"


def read_stack(path: Path) -> Stack:
    """Read a stack file; the suffix `.toml` or `.json` tells the format. Raises `StackFileError`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StackFileError(str(path), f"cannot be read: {error.strerror}", "Give a readable file") from error
    try:
        if path.suffix == ".toml":
            data: object = tomllib.loads(raw.decode())
        elif path.suffix == ".json":
            data = json.loads(raw)
        else:
            raise StackFileError(str(path), "has neither the suffix .toml nor .json", "Rename it to what it is")
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise StackFileError(str(path), f"cannot be parsed: {error}", "Correct the file") from error
    if not isinstance(data, Mapping):
        raise StackFileError(str(path), "is not a table", REMEDY)
    return stack_from_mapping(data)


def stack_from_mapping(data: Mapping[str, object]) -> Stack:
    """Build a stack from plain data, keys as the fields of `hoststage.core.stack`.

    `modes` may list names, a trailing `!` marking a required one; `model` at the top stands for `identity.model`.
    Raises `StackFileError` that names the first wrong field.
    """
    rest = dict(data)
    identity = dict(_mapping(rest.pop("identity", {}), "identity"))
    if "model" in rest:
        identity.setdefault("model", rest.pop("model"))
    pools = rest.pop("pools", None)
    if not isinstance(pools, list) or not pools:
        raise StackFileError("pools", "there is none", "Describe each pool in a [[pools]] table")
    built: dict[str, Any] = {
        "identity": _build(Identity, identity, "identity"),
        "pools": tuple(_build(Pool, _mapping(p, f"pools[{i}]"), f"pools[{i}]") for i, p in enumerate(pools)),
        "parallel": _build(Parallel, _mapping(rest.pop("parallel", {}), "parallel"), "parallel"),
    }
    wish = rest.pop("retraction", {})
    wish = {"retraction": wish} if isinstance(wish, str) else wish
    built["retraction"] = _build(RetractionWish, _mapping(wish, "retraction"), "retraction")
    if "modes" in rest:
        built["modes"] = tuple(_mode(m, i) for i, m in enumerate(_list(rest.pop("modes"), "modes")))
    if "paths" in rest:
        paths = _list(rest.pop("paths"), "paths")
        built["paths"] = tuple(_enum(PayloadPath, p, f"paths[{i}]") for i, p in enumerate(paths))
    return _build(Stack, rest, "", built)


def stack_to_mapping(stack: Stack) -> dict[str, object]:
    """Return a stack as plain data that `stack_from_mapping` reads back; fields at their defaults are left out."""
    out = cast("dict[str, object]", _plain(stack))
    out["modes"] = [f"{wish.mode.value}{'!' if wish.required else ''}" for wish in stack.modes]
    return out


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        items = {f.name: (f, getattr(value, f.name)) for f in fields(cast("Any", value))}
        return {name: _plain(item) for name, (f, item) in items.items() if item != _default(f) and item is not None}
    return value


def _default(f: Field[Any]) -> object:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise StackFileError(where, f"is {value!r}, expected a table", REMEDY)
    return {str(k): v for k, v in value.items()}


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise StackFileError(where, f"is {value!r}, expected a list", REMEDY)
    return value


def _mode(value: object, index: int) -> ModeWish:
    if not isinstance(value, str):
        raise StackFileError(
            f"modes[{index}]", f"is {value!r}, expected a name", "Name a mode, such as buffer_only or cache!"
        )
    return ModeWish(_enum(Mode, value.removesuffix("!"), f"modes[{index}]"), required=value.endswith("!"))


E = TypeVar("E", bound=Enum)


def _enum(kind: type[E], value: object, where: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(str(member.value) for member in kind)
        raise StackFileError(where, f"is {value!r}", f"Give one of {names}") from error


def _build(kind: type[T], data: Mapping[str, object], where: str, built: Mapping[str, Any] | None = None) -> T:
    """Build a dataclass, each value checked against the type of its field's default or its annotation."""
    known = {f.name: f for f in fields(cast("Any", kind))}
    prefix = f"{where}." if where else ""
    values: dict[str, Any] = dict(built or {})
    for name, value in data.items():
        if name not in known or name in values:
            raise StackFileError(f"{prefix}{name}", "is no field here", f"Fields: {', '.join(known)}")
        values[name] = _value(known[name], value, f"{prefix}{name}")
    for name, f in known.items():
        if name not in values and _default(f) is MISSING:
            raise StackFileError(f"{prefix}{name}", "is missing", "Add it to the file")
    return kind(**values)


def _value(f: Field[Any], value: object, where: str) -> object:
    if f.name in ENUMS and f.type not in ("str",):
        return _enum(ENUMS[f.name], value, where)
    expected = str(f.type)
    if expected.startswith("tuple[int"):
        items = _list(value, where)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            raise StackFileError(where, f"is {value!r}", "Give a list of integers")
        return tuple(cast("list[int]", items))
    wanted: dict[str, type] = {"int": int, "str": str, "bool": bool, "int | None": int}
    kind = wanted.get(expected)
    right = kind is not None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right:
        raise StackFileError(where, f"is {value!r}", f"Give a value of type {expected}")
    return value
