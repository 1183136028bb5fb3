"""What `check` and `plan` are about: a model or a stack, the engine's flags, and the node."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hoststage.cli.launch_settings import (
    asked_modes,
    asked_slots,
    check_slots,
    host_pools,
    launch_settings,
    memory_note,
    memory_stack,
    slots_note,
)
from hoststage.cli.sglang_args import CommandLineError, SglangFlags, json_object, read_command
from hoststage.cli.sglang_rules import engine_findings, settled_rules
from hoststage.cli.sglang_settings import engine_settings, inferred_retraction, wishes
from hoststage.core.findings import BudgetHolder, Finding, Severity
from hoststage.core.stack import KvLayout, Mode, ModeWish, Stack
from hoststage.models import (
    Assumption,
    Engine,
    ModelDescription,
    PoolDescription,
    describe,
    load_preset,
    preset_names,
    read_stack,
)

if TYPE_CHECKING:
    from hoststage.client.engines.sglang.settings import Settings as LaunchSettings

ASSUMED = "ASSUMED"
"""Rule of the notices that list a value which nobody gave."""


class InputError(ValueError):
    """Input that cannot be used. `subject` names what, `remedy` says what to do."""

    def __init__(self, subject: str, problem: str, remedy: str) -> None:
        super().__init__(f"{subject}: {problem}. {remedy}")
        self.subject = subject
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one call, as given.

    engine_flags: options of our own that are spelled as SGLang's. command: what stands after `--`.
    ranks: processes with pools of their own on one node, 0 to derive it.
    """

    config: Path | None = None
    preset: str = ""
    stack: Path | None = None
    overrides: tuple[str, ...] = ()
    kv_layout: KvLayout | None = None
    modes: tuple[str, ...] = ()
    window_only: bool = False
    requires_pinned: bool = False
    swa_pool: bool | None = None
    engine_flags: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be judged.

    stacks: one for each process on one node. shards: the distinct stacks, one for each pipeline stage, with their
    arithmetic where the model was described. engine: what SGLang's own rules say. notes: assumptions.
    settled: fences whose advice the launch follows already. holders: what the processes of one engine take of the daemon's budget beside its arenas.
    """

    title: str
    stacks: tuple[Stack, ...]
    shards: tuple[tuple[Stack, tuple[PoolDescription, ...]], ...]
    engine: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    settled: frozenset[str] = frozenset()
    holders: tuple[BudgetHolder, ...] = ()

    @property
    def held_bytes(self) -> int:
        return sum(holder.bytes for holder in self.holders)

    @property
    def engine_refuses(self) -> bool:
        return any(f.severity is Severity.REFUSED for f in self.engine)


def parse_size(text: str) -> int:
    """Return bytes of a size such as `64GiB`, `512MiB`, `80GB` or `1073741824`. Raises `InputError`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]i?B?|B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError("budget", f"is {text!r}", "Give a size such as 64GiB, 512MiB or 80GB")
    unit = (match[2] or "b").lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match[1]) * base ** ("bkmgt".index(unit[0])))


def assumed(assumption: Assumption) -> Finding:
    """Return an assumption as a notice."""
    return Finding(ASSUMED, Severity.NOTICE, assumption.subject, assumption.message, assumption.remedy)


def resolve(request: Request) -> Subject:
    """Turn the options into stacks. Raises `InputError`, `CommandLineError` or a `ModelError`."""
    launch = read_command(request.command) if request.command else None
    flags = _merged(request, launch)
    sources = [s for s in (request.config, request.preset, request.stack) if s]
    if len(sources) > 1:
        raise InputError("input", "more than one of --config, --preset and --stack is given", "Give exactly one")
    asks = launch_settings(flags) if launch is not None else None
    if asks is None or asks.moves_pages:
        return _of_pages(request, flags, launch, asks.settings if asks is not None else None)
    return _of_memory(request, flags, _of_pages(request, flags, launch, None), asks.settings)


def _of_memory(request: Request, flags: SglangFlags, engine: Subject, settings: LaunchSettings) -> Subject:
    """Return what a launch opens whose pages do not come to hoststage: a session for memory in each process. engine: of its own pools."""
    stack = memory_stack(settings)
    stack = replace(stack, modes=_modes(request.modes) or stack.modes)
    holders = host_pools(engine.stacks, settings)
    notes = (note for note in engine.notes if note.subject != "host_slots")
    return replace(
        engine,
        stacks=(stack,) * len(engine.stacks),
        shards=((stack, ()),),
        notes=(*notes, assumed(memory_note(flags, sized=bool(holders)))),
        holders=holders,
    )


def _of_pages(
    request: Request, flags: SglangFlags, launch: SglangFlags | None, asked: LaunchSettings | None
) -> Subject:
    """Return the stacks whose pages are to be kept: of the model or the stack file."""
    if request.stack is not None:
        return _from_stack(request, flags, launch, asked)
    notes: list[Assumption] = []
    config, model = _model(request, flags, notes)
    engine = Engine.SGLANG if launch is not None else Engine.NEUTRAL
    settings = engine_settings(flags, engine=engine, kv_layout=request.kv_layout)
    if request.swa_pool is not None:
        settings = replace(settings, window_pool=request.swa_pool)
    wish = wishes(flags, modes=_wished(request, asked), window_only=request.window_only)
    wish = replace(wish, requires_pinned=request.requires_pinned)
    description = describe(config, settings, wish, model=model, overrides=_overrides(request, flags))
    notes += description.assumptions
    return _subject(request, flags, description, launch, asked, notes)


def _merged(request: Request, launch: SglangFlags | None) -> SglangFlags:
    """Return the flags of the command over those given as options of our own."""
    own = read_command(request.engine_flags)
    if launch is None:
        return own
    values = {name: getattr(own, name) for name in own.given - launch.given}
    return replace(launch, **values, given=launch.given | own.given)


def _subject(
    request: Request,
    flags: SglangFlags,
    description: ModelDescription,
    launch: SglangFlags | None,
    asked: LaunchSettings | None,
    notes: list[Assumption],
) -> Subject:
    def finished(stack: Stack) -> Stack:
        if launch is None:
            return stack
        inferred, note = inferred_retraction(flags, stack)
        if note is not None and note not in notes:
            notes.append(note)
        return inferred

    shards = tuple((finished(shard.stack), shard.pools) for shard in description.shards)
    stacks = tuple(finished(stack) for stack in description.stacks())
    stacks = _on_one_node(stacks, request, flags, notes)
    engine: list[Finding] = []
    for stack, _ in shards if launch is not None else ():
        engine += [f for f in engine_findings(flags, stack) if f not in engine]
    holders: tuple[BudgetHolder, ...] = ()
    if asked is not None:
        check_slots((stack for stack, _ in shards), asked, flags)
        holders = host_pools(stacks, asked)
        notes[:] = [note for note in notes if note.subject != "host_slots"]
        notes += [note for note in {slots_note(stack, asked) for stack, _ in shards} if note is not None]
        shards = tuple((asked_slots(stack, asked), pools) for stack, pools in shards)
        stacks = tuple(asked_slots(stack, asked) for stack in stacks)
    s = description.settings
    sizes = ", ".join(
        f"{name} {size}" for name, size in (("tp", s.tp_size), ("pp", s.pp_size), ("dp", s.dp_size)) if size > 1
    )
    title = f"{description.shards[0].stack.identity.model} ({description.architecture})"
    return Subject(
        title=f"{title}, {sizes}" if sizes else title,
        stacks=stacks,
        shards=shards,
        engine=tuple(engine),
        notes=tuple(assumed(note) for note in notes),
        settled=settled_rules(flags),
        holders=holders,
    )


def _on_one_node(
    stacks: tuple[Stack, ...], request: Request, flags: SglangFlags, notes: list[Assumption]
) -> tuple[Stack, ...]:
    """Return the stacks of the processes that share one node: all replicas' ranks, divided over the nodes."""
    every = stacks * flags.dp_size if not flags.enable_dp_attention else stacks
    if request.ranks:
        return tuple(every[i % len(every)] for i in range(request.ranks))
    if len(every) % flags.nnodes:
        raise CommandLineError("--nnodes", f"{flags.nnodes} nodes do not divide {len(every)} ranks", "Give --ranks")
    count = len(every) // flags.nnodes
    if count > 1:
        notes.append(Assumption("ranks", f"{count} processes share the node, from the parallel sizes", "--ranks"))
    return every[:count]


def _from_stack(
    request: Request, flags: SglangFlags, launch: SglangFlags | None, asked: LaunchSettings | None
) -> Subject:
    if request.overrides:
        raise InputError("--set", "has no meaning with a stack file", "Change the file")
    assert request.stack is not None
    stack = read_stack(request.stack)
    if asked is not None:
        check_slots((stack,), asked, flags)
    modes = _wished(request, asked)
    wish = wishes(flags, modes=modes, window_only=request.window_only or stack.retraction.window_only)
    if modes or (launch is not None and launch.given):
        stack = replace(stack, modes=wish.modes)
    if launch is not None:
        stack = replace(stack, role=wish.role, write_policy=wish.write_policy)
    if flags.disaggregation_decode_retraction_backup is not None:
        stack = replace(stack, retraction=wish.retraction)
    elif request.window_only:
        stack = replace(stack, retraction=replace(stack.retraction, window_only=True))
    if request.requires_pinned:
        stack = replace(stack, requires_pinned=True)
    engine = engine_findings(flags, stack) if launch is not None else ()
    return Subject(
        title=f"{stack.identity.model} (stack file {request.stack.name})",
        stacks=(stack,) * max(1, request.ranks),
        shards=((stack, ()),),
        engine=engine,
        notes=(),
        settled=settled_rules(flags),
    )


def _model(request: Request, flags: SglangFlags, notes: list[Assumption]) -> tuple[Mapping[str, object], str]:
    """Return the config and the model's name."""
    if request.preset:
        preset = load_preset(request.preset)
        return preset.config, flags.model_path or preset.model
    if request.config is not None:
        path = request.config / "config.json" if request.config.is_dir() else request.config
        return _read_config(path), flags.model_path or str(path.parent)
    if not flags.model_path:
        raise InputError("input", "no model is given", "Give --config, --preset, --stack, or --model-path after `--`")
    path = Path(flags.model_path) / "config.json"
    if path.is_file():
        return _read_config(path), flags.model_path
    for name in preset_names():
        preset = load_preset(name)
        if preset.model == flags.model_path:
            notes.append(Assumption("config", f"that of the built-in preset {name}", "--config PATH"))
            return preset.config, preset.model
    raise InputError(
        "--model-path",
        f"{flags.model_path} is no directory with a config.json here, and no preset has that name",
        "Give its config with --config PATH, or a like model with --preset NAME",
    )


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}", "Give a readable config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"is no JSON: {error}", "Give a model's config.json") from error
    if not isinstance(data, dict):
        raise InputError(str(path), "is no JSON object", "Give a model's config.json")
    return data


def _overrides(request: Request, flags: SglangFlags) -> dict[str, object]:
    """Return the fields that replace the config's: the engine's overrides, then `--set`."""
    values = dict(json_object("--json-model-override-args", flags.json_model_override_args) or {})
    if flags.mamba_ssm_dtype is not None:
        values["mamba_ssm_dtype"] = flags.mamba_ssm_dtype
    for text in request.overrides:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError("--set", f"is {text!r}", "Give FIELD=VALUE, the value as JSON or as plain text")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def _wished(request: Request, asked: LaunchSettings | None) -> tuple[ModeWish, ...]:
    """Return the modes that the operator names, else those that hoststage's parts of the launch ask for, else none."""
    return _modes(request.modes) or (asked_modes(asked) if asked is not None else ())


def _modes(names: Sequence[str]) -> tuple[ModeWish, ...]:
    """Return the modes in order; a trailing `!` marks a required one. Commas separate as repetition does."""
    wished = []
    for name in (part.strip() for text in names for part in text.split(",")):
        try:
            wished.append(ModeWish(Mode(name.removesuffix("!")), required=name.endswith("!")))
        except ValueError as error:
            known = ", ".join(mode.value for mode in Mode)
            raise InputError("--mode", f"is {name!r}", f"Give one of {known}; a trailing ! requires it") from error
    return tuple(wished)
