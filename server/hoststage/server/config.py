"""Configuration of the daemon: flags over `HOSTSTAGE_*` environment over a TOML or YAML file over defaults.

A key `section.name` is `[section] name` in the file, `HOSTSTAGE_SECTION_NAME` in the environment and `--set section.name=…` on the command
line. Whatever is wrong is said at once: the key, the value, where it came from, and what to do.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from hoststage.server.units import UNITS, check_address, parse_budget, parse_chunk, parse_ids, parse_size, parse_span

ENV_PREFIX = "HOSTSTAGE_"
NOT_SETTINGS = frozenset(
    {"HOSTSTAGE_CONFIG", "HOSTSTAGE_ADDRESS", "HOSTSTAGE_TOKEN", "HOSTSTAGE_ENGINE_CACHE", "HOSTSTAGE_ENGINES_DIR"}
)
"""Variables with our prefix that other programs of ours read."""

Ids = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(parse_ids)]
Address = Annotated[str, AfterValidator(check_address)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Span = Annotated[float, BeforeValidator(parse_span), Field(ge=0)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(Section):
    """Where clients connect."""

    socket: str = Field("/run/hoststage/hoststage.sock", description="gRPC, a filesystem Unix socket")
    fd_socket: str = Field("", description="where descriptors cross; empty: beside `socket`, ending in -fd.sock")
    lane_socket: str = Field("", description="the local lane; empty: beside `socket`, ending in -lane.sock")
    tcp: Address = Field("", description="host:port for clients on other hosts (pages travel inline); empty: none")
    data_socket: str = Field(
        "", description="pages of inline sessions as raw bytes; empty: beside `socket`, ending in -data.sock"
    )
    data_tcp: Address = Field(
        "", description="the same as host:port for clients of `tcp` (port 0: any free one); empty: they use the stream"
    )
    socket_mode: str = Field("0660", description="permissions of the sockets, octal", pattern=r"^0?[0-7]{3}$")

    @property
    def fd_path(self) -> str:
        return self.fd_socket or self._beside("fd")

    @property
    def lane_path(self) -> str:
        return self.lane_socket or self._beside("lane")

    @property
    def data_path(self) -> str:
        return self.data_socket or self._beside("data")

    def _beside(self, what: str) -> str:
        path = Path(self.socket)
        return str(path.with_name(f"{path.stem}-{what}.sock"))


class Http(Section):
    """The operators' port."""

    listen: Address = Field(
        "127.0.0.1:9477", description="host:port of /metrics, /healthz, /readyz and the status page; empty: none"
    )


class Memory(Section):
    """Pinned memory."""

    budget: Annotated[int, BeforeValidator(parse_budget), Field(ge=0)] = Field(
        0, description='most that all arenas may take; "auto": 7/8 of what the node or its cgroup has free'
    )
    chunk: Annotated[int, BeforeValidator(parse_chunk)] = Field(
        1 << 30, description="size of one memfd; a multiple of 2 MiB"
    )
    huge_pages: Literal["auto", "off", "required"] = Field(
        "auto", description='2 MiB pages: "auto": from vm.nr_hugepages, else those that the kernel can make now'
    )
    lock: bool = Field(True, description="mlock where RLIMIT_MEMLOCK allows")
    prefault_threads: int = Field(0, ge=0, description="threads that populate memory; 0: one a core")
    numa: Literal["interleave", "off"] = Field(
        "interleave", description="spread pages over the NUMA nodes, where there are several"
    )
    register_cuda: Literal["never", "auto"] = Field(
        "never", description="register the daemon's own mapping with CUDA; workers register theirs in any case"
    )
    keep_idle: Size = Field(1 << 30, description="arenas kept warm for restarting workers")
    keep_pools: bool = Field(True, description="keep engines' host pools, leased whole, warm for their restart")


class StoreSection(Section):
    """Where pages live when they are not in host memory."""

    url: str = Field("file:///var/lib/hoststage", description="file:///path, memory: (lost at the end) or none")
    limit: Size = Field(64 << 30, description="room that pages may take")
    high_watermark: float = Field(0.95, gt=0, le=1, description="fraction of the limit at which eviction begins")
    low_watermark: float = Field(0.90, gt=0, le=1, description="fraction at which it ends")
    min_free: Size = Field(1 << 30, description="room left to others on the file system")
    io_threads: int = Field(8, ge=1, le=256, description="threads for reads, and as many for writes")
    direct_io: Literal["auto", "required", "off"] = Field("auto", description="bypass the kernel's page cache")
    sync: Literal["none", "data"] = Field("none", description='"data": fdatasync before a page counts as stored')
    create_directory: bool = Field(False, description="make the directory where it is missing")

    @model_validator(mode="after")
    def _watermarks(self) -> StoreSection:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is not below high_watermark {self.high_watermark}; lower it"
            )
        return self


class Staging(Section):
    """What sessions may hold, and how long things may take."""

    copy_threads: int = Field(2, ge=1, le=64, description="threads that publish pages and copy inline payload")
    drain_pages: int = Field(256, ge=1, description="pages under store writes at once")
    store_deadline: Span = Field(30.0, description="a commit that cannot be stored for this long is dropped")
    load_deadline: Span = Field(30.0, description="of a load that names none")
    max_pin: Span = Field(30.0, description="longest life of a pin")
    beliefs: int = Field(1_000_000, ge=1, description="keys remembered as stored, for each pool of a namespace")
    max_open_commits: int = Field(1024, ge=1, description="accepted and not yet stored, for each session")
    max_read_leases: int = Field(1 << 20, ge=1, description="pages leased, for each session")
    max_span_keys: int = Field(65536, ge=1, description="keys of one span")
    max_credits: int = Field(256, ge=0, description="write slots granted ahead, for each pool of a session")
    max_message: Size = Field(64 << 20, ge=1 << 16, description="bytes of one message")
    max_inline: Size = Field(
        2 << 30, ge=1 << 20, description="payload in messages held for a session; twice that for all"
    )
    max_open_requests: int = Field(4096, ge=1, description="requests without an answer, for each session")
    hold_ttl: Span = Field(600.0, description="life of a durable hold that names none")
    max_hold_ttl: Span = Field(86400.0, description="longest life of a durable hold")
    max_durable_holds: int = Field(4096, ge=1, description="durable holds of this daemon at once")


class Auth(Section):
    """Who may connect. Without a token, the sockets' permissions decide."""

    token: str = Field("", description="bearer token that clients must present; better: token_file")
    token_file: str = Field("", description="file that holds the token")
    allow_uids: Ids = Field(
        default_factory=list, description="users (by the kernel's word) that may map memory; none and no groups: any"
    )
    allow_gids: Ids = Field(default_factory=list, description="groups that may, as primary group of the process")

    @model_validator(mode="after")
    def _one_token(self) -> Auth:
        if self.token and self.token_file:
            raise ValueError("token and token_file are both set; keep token_file")
        return self


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    format: Literal["auto", "console", "json"] = Field("auto", description='"auto": console on a terminal, else JSON')


class Shutdown(Section):
    grace: Span = Field(30.0, description="time to store what was accepted, after SIGTERM")


class Settings(BaseSettings):
    """The whole configuration. Made by `load_settings`."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # type: ignore[assignment]

    listen: Listen = Field(default_factory=Listen)
    http: Http = Field(default_factory=Http)
    memory: Memory = Field(default_factory=Memory)
    store: StoreSection = Field(default_factory=StoreSection)
    staging: Staging = Field(default_factory=Staging)
    auth: Auth = Field(default_factory=Auth)
    log: Log = Field(default_factory=Log)
    shutdown: Shutdown = Field(default_factory=Shutdown)

    @model_validator(mode="after")
    def _tcp_needs_token(self) -> Settings:
        host = self.listen.tcp.rpartition(":")[0].strip("[]")
        if host not in ("", "localhost", "127.0.0.1", "::1") and not (self.auth.token or self.auth.token_file):
            raise ValueError("listen.tcp: lets other hosts in without a token; set auth.token_file")
        if self.listen.data_tcp and not self.listen.tcp:
            raise ValueError("listen.data_tcp: serves clients of listen.tcp, which is empty; set that as well")
        return self

    layers: ClassVar[tuple[dict[str, Any], ...]] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then the file."""
        return tuple(InitSettingsSource(settings_cls, init_kwargs=layer) for layer in cls.layers)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong: the key, its value, where it came from, what is wrong and what to do."""

    key: str
    value: str
    source: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        return f"{self.key}{value} (from {self.source}): {self.problem}. {self.remedy}"


class ConfigError(Exception):
    """The configuration cannot be used; all problems at once."""

    def __init__(self, problems: list[ConfigProblem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))


def known_keys() -> dict[str, set[str]]:
    """Return the names of each section's keys."""
    out = {}
    for name, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        out[name] = set(kind.model_fields)
    return out


def load_settings(
    config: str | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings. `flags`: by `section.name`. Raises `ConfigError`."""
    env = os.environ if environ is None else environ
    path = config or env.get("HOSTSTAGE_CONFIG") or None
    problems: list[ConfigProblem] = []
    layers = {
        "a flag": _nested(flags or {}, "a flag", problems),
        "the environment": _from_env(env, problems),
        f"file {path}": _from_file(path, problems) if path else {},
    }
    bound = type("BoundSettings", (Settings,), {"layers": tuple(layers.values())})
    try:
        settings = bound()
    except ValidationError as error:
        problems += [_problem(e, layers) for e in error.errors(include_url=False)]
        raise ConfigError(problems) from error
    if problems:
        raise ConfigError(problems)
    return settings  # type: ignore[no-any-return]


def _nested(flat: Mapping[str, Any], source: str, problems: list[ConfigProblem]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    known = known_keys()
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if name in known.get(section, ()):
            out.setdefault(section, {})[name] = value
        else:
            problems.append(_unknown(key, str(value), source, known))
    return out


def _from_env(env: Mapping[str, str], problems: list[ConfigProblem]) -> dict[str, Any]:
    flat = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        section, _, name = variable.removeprefix(ENV_PREFIX).lower().replace("__", "_").partition("_")
        flat[f"{section}.{name}"] = value
    return _nested(flat, "the environment", problems)


def _from_file(path: str, problems: list[ConfigProblem]) -> dict[str, Any]:
    source = f"file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.safe_load(text) if path.endswith((".yaml", ".yml")) else tomllib.loads(text)
    except OSError as error:
        problems.append(
            ConfigProblem("config", "", source, f"cannot be read: {error.strerror}", "Name a readable file.")
        )
        return {}
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        problems.append(ConfigProblem("config", "", source, f"does not parse: {said}", "Correct the file."))
        return {}
    if not isinstance(data, dict | None):
        remedy = "Write sections with settings in them, see docs/configuration.md."
        problems.append(ConfigProblem("config", "", source, "holds no sections", remedy))
        return {}
    known, out = known_keys(), {}
    for section, values in (data or {}).items():
        if section not in known or not isinstance(values, dict):
            problems.append(_unknown(str(section), "", source, known))
            continue
        out[section] = {name: value for name, value in values.items() if name in known[section]}
        for name in values:
            if name not in known[section]:
                problems.append(_unknown(f"{section}.{name}", str(values[name]), source, known))
    return out


def _unknown(key: str, value: str, source: str, known: dict[str, set[str]]) -> ConfigProblem:
    names = [f"{s}.{n}" for s, keys in known.items() for n in keys]
    near = difflib.get_close_matches(key, [*names, *known], 1, 0.6)
    remedy = f"Did you mean {near[0]}?" if near else "See docs/configuration.md for all keys."
    return ConfigProblem(key, value, source, "there is no such setting", remedy)


def _problem(error: Any, layers: Mapping[str, dict[str, Any]]) -> ConfigProblem:
    loc = [str(part) for part in error["loc"]]
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    if not loc:
        # What a check of several sections says begins with the key that it is about.
        key, _, message = message.partition(": ")
        loc = key.split(".")
    section, name = [*loc, "", ""][:2]
    message, _, remedy = message.partition("; ")
    source = next((s for s, layer in layers.items() if name in layer.get(section, {})), "")
    value = next((layer[section][name] for layer in layers.values() if name in layer.get(section, {})), "")
    if not name:
        # About several settings together: whoever set one of them last has the say.
        source = next((s for s, layer in layers.items() if not section or section in layer), "")
    return ConfigProblem(
        ".".join(filter(None, (section, name))) or "settings",
        "…" if name == "token" else str(value),
        source or "the defaults",
        message[0].lower() + message[1:],
        (remedy or _expected(section, name))[:1].upper() + (remedy or _expected(section, name))[1:] + ".",
    )


def _expected(section: str, name: str) -> str:
    """Say in the documentation's words what a setting wants."""
    kind = Settings.model_fields[section].annotation if section in Settings.model_fields else None
    if isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
        field = kind.model_fields[name]
        default = _shown(kind, name, field.get_default(call_default_factory=True))
        return f"it sets: {field.description}; its default is {default}"
    return "correct it; docs/configuration.md lists all settings"


def as_toml(settings: Settings) -> str:
    """Return the effective settings as a TOML file, secrets left out."""
    lines = []
    for section, values in settings.model_dump().items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            if (section, name) == ("auth", "token") and value:
                lines.append("# token = (set, not shown)")
            elif (section, name) == ("memory", "budget") and value == 0:
                lines.append('budget = "auto"')
            else:
                # JSON's strings, lists and booleans are TOML's as well, but for what a path or a name never holds.
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the table of all settings for the documentation."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    defaults = load_settings(environ={}).model_dump()
    for section, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        for name, field in kind.model_fields.items():
            shown = _shown(kind, name, defaults[section][name])
            lines.append(f"| `{section}.{name}` | `{shown}` | {field.description or ''} |")
    return "\n".join(lines) + "\n"


def _shown(kind: type[BaseModel], name: str, value: object) -> str:
    """Return a default as one would write it."""
    parsers = {v.func for v in kind.model_fields[name].metadata if isinstance(v, BeforeValidator)}
    if parse_budget in parsers and value == 0:
        return '"auto"'
    if isinstance(value, int) and parsers & {parse_size, parse_chunk, parse_budget}:
        unit = next(u for u in ("TiB", "GiB", "MiB", "KiB", "") if value % UNITS[u.lower()] == 0)
        return f'"{value // UNITS[unit.lower()]}{unit}"'
    if isinstance(value, float) and parse_span in parsers:
        return f'"{value:g}s"'
    return json.dumps(value)
