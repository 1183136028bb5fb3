"""The plug-in that SGLang loads at start (entry point group `sglang.srt.plugins`): the handshake before weights are loaded.

SGLang runs `register` in every process. It hooks the resolution of the arguments, where the model's configuration and all flags are known and nothing is loaded
yet; there alone an exception stops the launch. Where the launch uses neither hoststage's storage backend, nor its linker, nor its memory for host pools,
nothing happens.

The stack is described by `hoststage check` in a process of its own, which asks the daemon about every pipeline stage and answers with all findings. The backend
confirms it once SGLang's host pools exist, with their true sizes.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoststage.client.engines.sglang.hostpools import FIELD, Leases
from hoststage.client.engines.sglang.settings import SECTION, HostPools, Settings
from hoststage.client.engines.sglang.stacks import check_described
from hoststage.client.errors import HostStageError, StackError
from hoststage.client.session import resolve_address

_log = logging.getLogger(__name__)

TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
MODULE = "hoststage.client.engines.sglang.backend"
LINKER_MODULE = "hoststage.client.engines.sglang.linker"
MAKE_HOST_POOLS = ("sglang.srt.managers.scheduler", "sglang.srt.mem_cache.pool_host.common")
OWN_MEMORY = ("mooncake", "mori", "shm", "tensorcast")
"""Storage backends, and `"allocator"`s, whose host pools are in memory that they bring themselves."""

FLAGS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "attn_dp_size",
    "attn_cp_size",
    "dcp_size",
    "nnodes",
    "page_size",
    "kv_cache_dtype",
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "swa_full_tokens_ratio",
    "context_length",
    "max_mamba_cache_size",
    "mamba_full_memory_ratio",
    "mamba_ssm_dtype",
    "json_model_override_args",
    "speculative_algorithm",
)
"""Arguments that shape the pools. Those that size SGLang's own host pools are left out: hoststage's are sized by the daemon, or by `slots`."""

_SECONDS = 60.0


class LaunchRefused(RuntimeError):
    """The launch is stopped: hoststage is required, and the daemon is away or refuses the stack. The message has every finding and its remedy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of the question. granted: the mode, None where it is refused. findings: a line each. problem: why there is no verdict, empty where there is one.

    away: whether it was the daemon that could not be asked. pools: those that the model was described with.
    """

    granted: str | None
    findings: tuple[str, ...] = ()
    problem: str = ""
    away: bool = False
    pools: tuple[str, ...] = ()


def register() -> None:
    """Hook SGLang's resolution of the arguments. Called by SGLang in every process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, around_resolution, HookType.AROUND)
    if any(module in sys.modules for module in MAKE_HOST_POOLS):
        # A process that makes host pools, of arguments that were resolved elsewhere. Others are spared an import of a second and more.
        from hoststage.client.engines.sglang import allocator

        allocator.hook()


def around_resolution(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Resolve the arguments, then shake hands once. Children get resolved arguments, and so ask nothing.

    :raises LaunchRefused: where hoststage is `required` and the daemon is away or refuses.
    :raises StackError: for settings that mean nothing.
    """
    before = getattr(server_args, "_resolution_finished", False)
    result = original(server_args, *args, **kwargs)
    if not before and getattr(server_args, "_resolution_finished", True):
        from sglang.srt.arg_groups.overrides import resolving_view

        view = resolving_view(server_args)
        extra = extra_config_of(view)
        if extra is not None:
            shake_hands(view, Settings.of(extra), lambda: _model_config(server_args))
        prepare_host_pools(view)
    return result


def extra_config_of(view: Any) -> Mapping[str, Any] | None:
    """Return the extra configuration of a launch that uses hoststage's backend or linker, else None."""
    linked = linker_config_of(view)
    if linked is not None:
        given = linked.get("linker_extra_config", {})
        return given if isinstance(given, Mapping) else None
    extra = read_extra(view)
    if getattr(view, "hicache_storage_backend", None) != "dynamic" or extra is None:
        return None
    return extra if extra.get("module_path") == MODULE else None


def read_extra(view: Any) -> Mapping[str, Any] | None:
    """Return the extra configuration of a launch, whatever its storage backend. None for none; what cannot be read is left for SGLang to refuse."""
    given = getattr(view, "hicache_storage_backend_extra_config", None)
    if not isinstance(given, str):
        return None
    try:
        extra = _read_file(Path(given[1:])) if given.startswith("@") else json.loads(given)
    except (OSError, ValueError):
        return None
    return extra if isinstance(extra, Mapping) else None


def prepare_host_pools(view: Any) -> None:
    """Where host pools are to live in the daemon's memory, ask what it has, and hook SGLang's allocation.

    :raises StackError: where the storage backend brings memory of its own. :raises LaunchRefused: where the daemon is `required` and away, or refuses.
    """
    settings = host_pool_settings(view)
    if settings is None:
        return
    supply = Leases(settings, "launch")
    try:
        free = supply.free()
    except HostStageError as error:
        if settings.required:
            raise LaunchRefused(f"{FIELD} is {settings.host_pools.value!r} and required, but {error}") from error
        _log.warning("hoststage: SGLang is to allocate its host pools itself, the daemon does not: %s", error)
    else:
        _log.info(
            "hoststage: host pools come from the daemon at %s, %.2f GB are free there", supply.address, free / 1e9
        )
    finally:
        supply.close()
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hoststage.client.engines.sglang import allocator

    allocator.hook()
    HookRegistry.apply_hooks()


def host_pool_settings(view: Any) -> Settings | None:
    """Return the settings of a launch whose host pools are to live in the daemon's memory, else None.

    :raises StackError: for settings that mean nothing, and where the storage backend brings memory of its own.
    """
    extra = read_extra(view)
    if extra is None or SECTION not in extra:
        return None
    settings = Settings.of(extra)
    if settings.host_pools is not HostPools.DAEMON:
        return None
    for name, value in (
        ("hicache_storage_backend", getattr(view, "hicache_storage_backend", None)),
        ("allocator", extra.get("allocator")),
    ):
        if value in OWN_MEMORY:
            raise StackError(
                name, value, f'choose: {value} brings host memory of its own, "host_pools": "daemon" is the daemon\'s'
            )
    return settings


def linker_config_of(view: Any) -> Mapping[str, Any] | None:
    """Return the linker's configuration where the launch uses hoststage's, else None."""
    config = getattr(view, "unified_cache_external_linker_config", None)
    dynamic = getattr(view, "unified_cache_external_linker_backend", None) == "dynamic"
    if not getattr(view, "enable_unified_cache_external_linker", False) or not dynamic:
        return None
    ours = isinstance(config, Mapping) and config.get("linker_module_path") == LINKER_MODULE
    return config if ours else None


def _read_file(path: Path) -> Any:
    text = path.read_text()
    if path.suffix.lower() == ".toml":
        import tomllib

        return tomllib.loads(text)
    if path.suffix.lower() in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    return json.loads(text)


def shake_hands(view: Any, settings: Settings, model_config: Callable[[], Mapping[str, Any]]) -> Answer:
    """Ask the daemon, say what it answers, and stop the launch where that is due. Raises `StackError` for `slots` of a pool that the model lacks."""
    address = resolve_address(settings.address)
    answer = ask(view, settings, address, model_config)
    if answer.pools:
        check_described(settings, answer.pools, view)
    lines = "\n".join(f"  {line}" for line in answer.findings)
    if answer.problem and not answer.away:
        # No verdict, and no refusal: the model is none that `hoststage check` can describe. The pools will tell.
        _log.warning("hoststage cannot judge this launch beforehand: %s", answer.problem)
        return answer
    if answer.granted is not None:
        _log.info("hoststage at %s would grant %s%s", address, answer.granted, f"\n{lines}" if lines else "")
        return answer
    said = answer.problem or f"the daemon at {address} refuses the stack\n{lines}"
    if settings.required:
        raise LaunchRefused(f'hoststage is required ("{SECTION}": {{"required": true}}), but {said}')
    _log.warning("hoststage is not available, the engine runs without it until it is: %s", said)
    return answer


def ask(view: Any, settings: Settings, address: str, model_config: Callable[[], Mapping[str, Any]]) -> Answer:
    """Run `hoststage check` against the daemon and return its answer."""
    with _config_path(view, model_config) as path:
        command = [sys.executable, "-m", "hoststage.cli.main", "check", "--json", "--daemon", address]
        command += ["--timeout", str(settings.connect_timeout), "--config", path]
        for wish in settings.modes:
            command += ["--mode", wish.mode.value]
        command += ["--", *flags_of(view)]
        try:
            done = subprocess.run(
                command, env=_environment(settings), capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Answer(None, problem=f"the daemon at {address} did not answer within {_SECONDS:g} s", away=True)
    try:
        verdict = json.loads(done.stdout)
    except ValueError:
        problem = " ".join((done.stderr or done.stdout).split())[-800:] or f"exit status {done.returncode}"
        return Answer(None, problem=problem, away=problem.startswith("NegotiateError"))
    findings = [found for found in verdict["findings"] if _ours(found)]
    refused = any(found["severity"] == "refused" for found in findings)
    # SGLang judges its own flags itself; here only a part of them was shown.
    granted = verdict["granted"] or (None if refused else "nothing yet")
    pools = tuple(dict.fromkeys(pool["name"] for pool in verdict["pools"]))
    return Answer(granted, tuple(_line(found) for found in findings), pools=pools)


def _ours(finding: Mapping[str, Any]) -> bool:
    return finding["rule"] != "ASSUMED" and not str(finding["rule"]).startswith("SGLANG_")


def _line(finding: Mapping[str, Any]) -> str:
    mode = finding["values"].get("mode")
    where = f" [{mode}]" if mode else ""
    remedy = f" Remedy: {finding['remedy']}" if finding["remedy"] else ""
    return f"{finding['severity']} {finding['rule']}{where} {finding['subject']}: {finding['message']}{remedy}"


def flags_of(view: Any) -> Sequence[str]:
    """Return the resolved arguments that shape the pools, as flags."""
    out = []
    for name in FLAGS:
        value = getattr(view, name, None)
        if value is not None:
            out += [f"--{name.replace('_', '-')}", str(value)]
    linked, role = linker_config_of(view), getattr(view, "disaggregation_mode", None)
    if role == "prefill" or (linked is not None and role == "decode"):
        out += ["--disaggregation-mode", role]
    if linked is not None:
        if role == "decode" and getattr(view, "disaggregation_decode_enable_radix_cache", False):
            out.append("--disaggregation-decode-enable-radix-cache")
        out += ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
        # Without the settings, a token among them: a command line is for everyone to read.
        named = {name: linked[name] for name in ("linker", "linker_module_path") if name in linked}
        out += ["--unified-cache-external-linker-config", json.dumps(named)]
    return out


@contextmanager
def _config_path(view: Any, model_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
    """The model's configuration as a file: its own where it is local, else what SGLang has read."""
    local = Path(str(view.model_path))
    if (local / "config.json").is_file():
        yield str(local)
        return
    with tempfile.TemporaryDirectory(prefix="hoststage-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(), default=str))
        yield folder


def _model_config(server_args: Any) -> Mapping[str, Any]:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    found: Mapping[str, Any] = model_config_of(server_args).hf_config.to_dict()
    return found


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment of `hoststage check`: it finds the package where this process found it."""
    import hoststage

    roots = [str(Path(part).parent) for part in hoststage.__path__]
    paths = [*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if settings.token:
        env["HOSTSTAGE_TOKEN"] = settings.token
    return env
