"""Reading an SGLang launch command line as it stands.

The flags that say something about the cache become a typed `SglangFlags`; all others are listed as unread. Names, aliases and
defaults are those of SGLang 0.5.23. Nothing of the engine is imported.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any


class CommandLineError(ValueError):
    """A command line that cannot be read. `flag` names what is wrong, `remedy` says what to do."""

    def __init__(self, flag: str, problem: str, remedy: str) -> None:
        super().__init__(f"{flag}: {problem}. {remedy}")
        self.flag = flag
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class SglangFlags:
    """The flags that matter here, with SGLang's defaults. None is SGLang's "unset".

    unread: flags that were there and were not read. given: fields that the command line set.
    unified_kv: whether the command's environment selects the `unified_kv` layout.
    """

    model_path: str = ""
    nnodes: int = 1
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    enable_dp_attention: bool = False
    page_size: int | None = None
    attention_backend: str | None = None
    decode_attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    kv_cache_dtype: str = "auto"
    swa_full_tokens_ratio: float | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float | None = None
    mamba_ssm_dtype: str | None = None
    enable_hierarchical_cache: bool = False
    hicache_host_memory_mode: str = "cache"
    hicache_ratio: float | None = None
    hicache_size: float = 0
    hicache_write_policy: str = "write_through"
    hicache_mem_layout: str = "page_first"
    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    disable_radix_cache: bool = False
    radix_cache_backend: str | None = None
    enable_unified_memory: bool = False
    enable_unified_cache_external_linker: bool = False
    unified_cache_external_linker_backend: str = "mooncake"
    unified_cache_external_linker_config: str | None = None
    enable_lmcache: bool = False
    disaggregation_mode: str = "null"
    disaggregation_decode_retraction_backup: str | None = None
    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_enable_offload_kvcache: bool = False
    disaggregation_decode_host_receive_threshold: float = 1.0
    enable_priority_scheduling: bool = False
    disable_priority_preemption: bool = False
    speculative_algorithm: str | None = None
    json_model_override_args: str = "{}"
    unified_kv: bool = False
    given: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    @property
    def backend_page_size(self) -> int | None:
        """Tokens of a page after the attention backend has had its say; None where nobody has."""
        decoders = {self.attention_backend, self.decode_attention_backend}
        every = decoders | {self.prefill_attention_backend}
        size = self.page_size
        if "flashmla" in decoders:
            size = 64
        if ("trtllm_mla" in decoders or "cutedsl_mla" in every) and size not in (32, 64):
            size = 64
        if "trtllm_mha" in every and size not in (16, 32, 64, 128):
            size = 64
        return 64 if "hpc_ops" in every else size

    @property
    def decode(self) -> bool:
        return self.disaggregation_mode == "decode"

    @property
    def buffer_only(self) -> bool:
        return self.hicache_host_memory_mode == "buffer_only"

    @property
    def host_tier(self) -> bool:
        """Whether SGLang builds a HiCache at all, for caching or for what decode parks in it."""
        if self.enable_unified_cache_external_linker:
            return False
        parks = self.decode and self.disaggregation_decode_retraction_backup in (None, "host_pool")
        return self.enable_hierarchical_cache or self.disaggregation_decode_enable_offload_kvcache or parks


ALIASES = {
    "--model": "model_path",
    "--tp": "tp_size",
    "--tensor-parallel-size": "tp_size",
    "--pp": "pp_size",
    "--pipeline-parallel-size": "pp_size",
    "--dp": "dp_size",
    "--data-parallel-size": "dp_size",
    "--attention-data-parallel-size": "attn_dp_size",
    "--attention-context-parallel-size": "attn_cp_size",
    "--dcp": "dcp_size",
    "--decode-context-parallel-size": "dcp_size",
    "--enable-hicache": "enable_hierarchical_cache",
}
"""Other spellings of flags, beside the field's name with hyphens."""

CHOICES: dict[str, tuple[str, ...]] = {
    "hicache_host_memory_mode": ("cache", "buffer_only"),
    "hicache_write_policy": ("write_back", "write_through", "write_through_selective"),
    "hicache_mem_layout": (
        "layer_first",
        "page_first",
        "page_first_direct",
        "page_first_kv_split",
        "page_head",
    ),
    "disaggregation_mode": ("null", "prefill", "decode"),
    "disaggregation_decode_retraction_backup": ("cpu_tensor", "host_pool", "none"),
    "unified_cache_external_linker_backend": ("mooncake", "mori", "dynamic"),
}

POSITIVE = frozenset(
    {
        "nnodes",
        "tp_size",
        "pp_size",
        "dp_size",
        "attn_dp_size",
        "attn_cp_size",
        "dcp_size",
        "page_size",
        "max_total_tokens",
        "context_length",
        "max_mamba_cache_size",
    }
)
"""Sizes that are at least one where they are given."""

NOT_FLAGS = frozenset({"unified_kv", "given", "unread"})

FLAG_NAMES: dict[str, str] = {
    f"--{f.name.replace('_', '-')}": f.name for f in fields(SglangFlags) if f.name not in NOT_FLAGS
} | ALIASES
"""Every spelling that is read, and its field."""

SWITCHES = frozenset({"--trust-remote-code", "--enable-metrics", "--log-requests", "--skip-server-warmup"})
"""Common flags without a value that say nothing about the cache; others are recognised by what follows them."""

UNIFIED_KV_VARIABLE = "SGLANG_HACK_FLASHMLA_BACKEND"


def read_command(argv: Sequence[str]) -> SglangFlags:
    """Read a launch command (`python -m sglang.launch_server …`, `sglang serve …`), or bare flags.

    Environment assignments and wrappers before the command are passed over. One argument with the whole command in it is
    split as a shell would. Raises `CommandLineError`.
    """
    tokens = shlex.split(argv[0]) if len(argv) == 1 and " " in argv[0].strip() else list(argv)
    start = _start(tokens)
    return _read(tokens[start:], unified_kv=_unified_kv(tokens[:start]))


def _start(tokens: list[str]) -> int:
    """Return where the flags begin."""
    if not tokens or tokens[0].startswith("--"):
        return 0
    for i, token in enumerate(tokens):
        if token == "sglang.launch_server" or PurePath(token).name == "launch_server.py":
            return i + 1
        if token == "serve" and i and PurePath(tokens[i - 1]).name == "sglang":
            return i + 1
    raise CommandLineError(
        tokens[0],
        "is not an SGLang launch command",
        "Give one after `--` (python -m sglang.launch_server …, sglang serve …), or its flags alone; for other engines "
        "use a stack file (--stack)",
    )


def _unified_kv(before: list[str]) -> bool:
    return f"{UNIFIED_KV_VARIABLE}=unified_kv_triton" in before


def _read(tokens: list[str], *, unified_kv: bool) -> SglangFlags:
    by_name = {f.name: f for f in fields(SglangFlags)}
    values: dict[str, Any] = {}
    unread: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        if not token.startswith("--"):
            if i == 1:
                values["model_path"] = token
            continue
        flag, equals, inline = token.partition("=")
        name = FLAG_NAMES.get(flag.replace("_", "-"))
        switch = name is not None and isinstance(by_name[name].default, bool)
        if switch and not equals:
            values[str(name)] = True
            continue
        value: str | None = inline if equals else None
        if value is None and flag not in SWITCHES and i < len(tokens) and not tokens[i].startswith("--"):
            value, i = tokens[i], i + 1
        if name is None:
            unread.append(flag)
        elif value is None:
            raise CommandLineError(flag, "has no value", f"Give one: {flag} VALUE")
        else:
            values[name] = _parse(flag, name, str(by_name[name].type), value)
    return SglangFlags(**values, unified_kv=unified_kv, given=frozenset(values), unread=tuple(unread))


PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "a string"),
}


def _parse(flag: str, name: str, annotation: str, value: str) -> object:
    if annotation == "bool":
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise CommandLineError(flag, f"is {value!r}", "It takes no value")
    parser, expected = PARSERS[annotation.split(" | ", maxsplit=1)[0]]
    try:
        parsed = parser(value)
    except ValueError as error:
        raise CommandLineError(flag, f"is {value!r}", f"Give {expected}") from error
    if name in POSITIVE and parsed < 1:
        raise CommandLineError(flag, f"is {value}", "Give at least 1")
    if name in CHOICES and parsed not in CHOICES[name]:
        raise CommandLineError(flag, f"is {value!r}", f"Give one of {', '.join(CHOICES[name])}")
    return parsed


def json_object(flag: str, text: str | None) -> dict[str, object] | None:
    """Return the JSON object that a flag holds; None where it is unset or names a file (`@path`)."""
    if text is None or text.startswith("@"):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandLineError(flag, f"is no JSON: {error}", "Give a JSON object") from error
    if not isinstance(value, dict):
        raise CommandLineError(flag, f"is {text!r}", "Give a JSON object")
    return value
