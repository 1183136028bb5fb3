"""What SGLang itself refuses for the flags given, told before it is launched.

These are the engine's rules, not hoststage's: their ids begin with `SGLANG_`, their messages say that SGLang refuses, and their
remedies name the way that works. They follow `arg_groups/hicache_hook.py`, `arg_groups/serving_hook.py`,
`mem_cache/registry.py`, `mem_cache/unified_radix_cache.py` and `buffer_mode/pipeline.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hoststage.cli.sglang_args import SglangFlags, json_object
from hoststage.core.findings import Finding, Severity
from hoststage.core.stack import Placement, PoolKind, Stack
from hoststage.models import SGLANG_RELEASE

PREFIX = "SGLANG_"
NO_HOST_TIER = "NO_HOST_TIER"

BACKEND_CONFIG = (
    '{"backend_name": "hoststage", "module_path": "hoststage.client.engines.sglang.backend", '
    '"class_name": "HostStageStorage", "interface_v1": 1}'
)
"""What names hoststage's storage backend to SGLang; `docs/sglang.md` has the whole launch line."""

BACKEND_FLAGS = f"--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{BACKEND_CONFIG}'"
LINKER_CONFIG = '{"linker": "HostStageLinker", "linker_module_path": "hoststage.client.engines.sglang.linker"}'
LINKER_FIELDS = frozenset({"linker", "linker_module_path", "linker_extra_config"})
LINKER_FLAGS = (
    "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
    f"--unified-cache-external-linker-config '{LINKER_CONFIG}'"
)
NO_BUFFER = "Leave --hicache-host-memory-mode buffer_only out"
CPU_TENSOR = "Use --disaggregation-decode-retraction-backup cpu_tensor"

Check = Callable[[SglangFlags, Stack], Iterable[Finding]]


def is_engine_rule(finding: Finding) -> bool:
    """Whether a finding is one of SGLang's rules, not one of hoststage's fences."""
    return finding.rule.startswith(PREFIX)


def builds_no_host_tier(findings: Iterable[Finding]) -> bool:
    """Whether the findings say that, with the flags as they are, SGLang would not use a host tier at all."""
    return any(f.rule == f"{PREFIX}{NO_HOST_TIER}" for f in findings)


def settled_rules(flags: SglangFlags) -> frozenset[str]:
    """Return hoststage's rules whose advice the flags follow already, so that a notice of them would tell nothing."""
    linked = flags.enable_unified_cache_external_linker and flags.unified_cache_external_linker_backend == "dynamic"
    offloads = flags.disaggregation_decode_enable_offload_kvcache and flags.hicache_storage_backend == "dynamic"
    return frozenset({"DECODE_ROLE"} if flags.decode and (linked or offloads) else ())


def engine_findings(flags: SglangFlags, stack: Stack) -> tuple[Finding, ...]:
    """Return what SGLang refuses, changes or ignores for `flags` on the stack of one rank."""
    return tuple(finding for check in CHECKS for finding in check(flags, stack))


def _finding(severity: Severity, rule: str, subject: str, message: str, remedy: str, **values: int | str) -> Finding:
    named: dict[str, int | str] = {"engine": "sglang", "engine_version": SGLANG_RELEASE, **values}
    return Finding(f"{PREFIX}{rule}", severity, subject, message, remedy, values=named)


def _refused(rule: str, subject: str, why: str, remedy: str, **values: int | str) -> Finding:
    return _finding(Severity.REFUSED, rule, subject, f"SGLang itself refuses {why}", remedy, **values)


def _notice(rule: str, subject: str, message: str, remedy: str = "", **values: int | str) -> Finding:
    return _finding(Severity.NOTICE, rule, subject, message, remedy, **values)


def store_required(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """buffer_only needs a storage backend."""
    if flags.host_tier and flags.buffer_only and flags.hicache_storage_backend is None:
        yield _refused(
            "STORE_REQUIRED",
            "--hicache-storage-backend",
            "--hicache-host-memory-mode buffer_only without a storage backend: all cached data lives there.",
            f"Add {BACKEND_FLAGS}",
        )


def decode_role(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """buffer_only is refused on decode instances."""
    if flags.host_tier and flags.buffer_only and flags.decode:
        yield _refused(
            "DECODE_ROLE",
            "--disaggregation-mode",
            "--hicache-host-memory-mode buffer_only with --disaggregation-mode decode: its decode paths bypass the "
            "buffer-mode pipeline. hoststage serves decode sessions.",
            f"{NO_BUFFER} on decode instances. The way that SGLang leaves open is the external linker, without HiCache: "
            f"{LINKER_FLAGS} --disaggregation-decode-enable-radix-cache. Or store what they decode with "
            f"--disaggregation-decode-enable-offload-kvcache and hoststage's storage backend: {BACKEND_FLAGS}",
        )


def write_back(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """write_back becomes write_through."""
    if flags.host_tier and flags.buffer_only and flags.hicache_write_policy == "write_back":
        yield _notice(
            "WRITE_BACK_RESOLVED",
            "--hicache-write-policy",
            "SGLang changes write_back to write_through in buffer_only: there is no host tier to write back to.",
            "Give --hicache-write-policy write_through.",
        )


def decode_context_parallel(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """DCP with HiCache: MLA only, never buffer_only, never a dynamic backend."""
    if flags.dcp_size <= 1 or not flags.enable_hierarchical_cache or flags.enable_unified_cache_external_linker:
        return
    backend = flags.hicache_storage_backend
    if backend is not None and flags.buffer_only:
        yield _refused(
            "DCP_UNSUPPORTED",
            "--dcp-size",
            f"--dcp-size {flags.dcp_size} with --hicache-host-memory-mode buffer_only and a storage backend.",
            "Run without decode context parallelism, or with --hicache-host-memory-mode cache.",
            dcp_size=flags.dcp_size,
        )
    if backend is not None and backend not in ("file", "mooncake"):
        yield _refused(
            "DCP_BACKEND",
            "--hicache-storage-backend",
            f"--dcp-size {flags.dcp_size} with the storage backend {backend!r}: with decode context parallelism it takes "
            "file and mooncake only.",
            "Run without decode context parallelism, or without a storage backend.",
            dcp_size=flags.dcp_size,
            backend=backend,
        )
    anchor = stack.anchor
    if anchor is not None and not anchor.replicated:
        yield _refused(
            "DCP_NOT_MLA",
            "--dcp-size",
            f"--dcp-size {flags.dcp_size} with HiCache for a model that is not MLA.",
            "Run without decode context parallelism.",
            dcp_size=flags.dcp_size,
        )


def swa_pool_required(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Under unified_kv there is no SWA staging pool."""
    if not (flags.host_tier and flags.buffer_only):
        return
    for pool in stack.of_kind(PoolKind.SWA):
        if pool.placement is Placement.DEVICE_ONLY:
            yield _refused(
                "SWA_POOL_REQUIRED",
                pool.name,
                "--hicache-host-memory-mode buffer_only for a window pool without a host staging pool: the unified_kv "
                "layout keeps it as a ring on the device.",
                "Launch with a paged KV layout, or with --hicache-host-memory-mode cache.",
                layout=pool.layout.value,
            )


def swa_pool_too_small(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """A window pool must hold two windows, where the flags tell its size."""
    if not (flags.host_tier and flags.buffer_only):
        return
    for pool in stack.of_kind(PoolKind.SWA):
        tokens, needed = pool.host_slots * pool.page_tokens, 2 * pool.window_pages * pool.page_tokens
        if 0 < tokens < needed:
            yield _refused(
                "SWA_POOL_TOO_SMALL",
                pool.name,
                f"a host pool of {tokens} window tokens: buffer_only needs {needed}, two windows of "
                f"{pool.window_pages} pages. hoststage grows it within its budget, but the engine sizes its own.",
                "Raise --hicache-size or --hicache-ratio, or --swa-full-tokens-ratio.",
                tokens=tokens,
                needed_tokens=needed,
            )


def pure_swa_tree(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """A model without full attention gets another tree, which knows no buffer_only."""
    if flags.enable_hierarchical_cache and flags.buffer_only and _pure_swa(stack):
        yield _refused(
            "PURE_SWA_TREE",
            "--hicache-host-memory-mode",
            "--hicache-host-memory-mode buffer_only for a model with window layers only: it selects another radix tree.",
            f"{NO_BUFFER}.",
        )


def retraction(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Host-pool retraction: no recurrent state, no pure SWA, and plain or hybrid-SWA pools only."""
    if flags.disaggregation_decode_retraction_backup != "host_pool":
        return
    flag = "--disaggregation-decode-retraction-backup"
    if stack.of_kind(PoolKind.MAMBA):
        yield _refused(
            "RETRACTION_MAMBA", flag, "host-pool retraction for a model with recurrent state.", f"{CPU_TENSOR}."
        )
    elif _pure_swa(stack):
        yield _refused(
            "RETRACTION_PURE_SWA",
            flag,
            "host-pool retraction for a model with window layers only. hoststage holds the window alone on opt-in.",
            f"{CPU_TENSOR}.",
        )
    elif stack.anchor is not None and stack.anchor.replicated:
        yield _refused(
            "RETRACTION_STACK",
            flag,
            "host-pool retraction for latent (MLA) and compressed pools: it takes plain and hybrid-SWA pools only.",
            f"{CPU_TENSOR}.",
        )
    if flags.disaggregation_decode_enable_offload_kvcache:
        yield _refused(
            "RETRACTION_OFFLOAD",
            flag,
            "host_pool together with --disaggregation-decode-enable-offload-kvcache: both build a decode host pool.",
            "Drop one of the two.",
        )


def host_receive(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Receiving into the host pool needs host-pool retraction."""
    if (
        flags.disaggregation_decode_host_receive_threshold < 1
        and flags.disaggregation_decode_retraction_backup == "cpu_tensor"
    ):
        yield _refused(
            "HOST_RECEIVE",
            "--disaggregation-decode-host-receive-threshold",
            "decode host receive with --disaggregation-decode-retraction-backup cpu_tensor.",
            "Give --disaggregation-decode-retraction-backup host_pool, or leave the threshold at 1.",
        )


def linker(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """The external linker excludes HiCache and needs the radix cache, which decode instances switch off."""
    if not flags.enable_unified_cache_external_linker:
        return
    name = "--enable-unified-cache-external-linker"
    if flags.enable_hierarchical_cache:
        yield _refused(
            "LINKER_EXCLUSIVE", name, f"{name} with --enable-hierarchical-cache.", "Drop --enable-hierarchical-cache."
        )
    if flags.hicache_storage_backend is not None:
        yield _refused(
            "LINKER_EXCLUSIVE", name, f"{name} with --hicache-storage-backend.", "Drop --hicache-storage-backend."
        )
    if flags.radix_cache_backend is not None or flags.disable_radix_cache:
        yield _refused(
            "LINKER_RADIX",
            name,
            f"{name} without its default radix cache.",
            "Drop --disable-radix-cache and --radix-cache-backend.",
        )
    if flags.decode and not flags.disaggregation_decode_enable_radix_cache:
        yield _refused(
            "LINKER_RADIX",
            name,
            f"{name} on a decode instance whose radix cache is off, as it is by default.",
            "Add --disaggregation-decode-enable-radix-cache.",
        )
    if flags.decode and flags.disaggregation_decode_retraction_backup == "host_pool":
        yield _notice(
            "LINKER_EXCLUSIVE",
            name,
            "With --disaggregation-decode-retraction-backup host_pool SGLang builds a host pool and no linker.",
            f"{CPU_TENSOR}.",
        )
    if flags.enable_unified_memory:
        yield _refused("LINKER_UNIFIED_MEMORY", name, f"{name} with --enable-unified-memory.", "Drop one of the two.")
    if flags.enable_lmcache:
        yield _refused("LINKER_EXCLUSIVE", name, f"{name} with --enable-lmcache.", "Drop --enable-lmcache.")
    if flags.unified_cache_external_linker_backend == "dynamic":
        config = flags.unified_cache_external_linker_config
        missing = _missing(config, "--unified-cache-external-linker-config", ("linker", "linker_module_path"))
        if missing:
            yield _refused(
                "LINKER_CONFIG",
                "--unified-cache-external-linker-config",
                f"the dynamic linker backend without {' and '.join(missing)} in its config.",
                f"Give {LINKER_FLAGS}.",
            )
        unknown = sorted(set(json_object("--unified-cache-external-linker-config", config) or {}) - LINKER_FIELDS)
        if unknown:
            yield _refused(
                "LINKER_CONFIG",
                "--unified-cache-external-linker-config",
                f"a linker config with unknown fields: {', '.join(unknown)}.",
                'Write hoststage\'s settings as "linker_extra_config": {"hoststage": {…}}, and nothing else beside '
                "linker and linker_module_path.",
            )


def dynamic_backend(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """A dynamic storage backend must say what to load."""
    if flags.hicache_storage_backend != "dynamic" or flags.enable_unified_cache_external_linker:
        return
    name = "--hicache-storage-backend-extra-config"
    text = flags.hicache_storage_backend_extra_config
    missing = _missing(text, name, ("backend_name", "module_path", "class_name"))
    if missing:
        yield _refused(
            "DYNAMIC_BACKEND",
            name,
            f"the dynamic storage backend without {', '.join(missing)} in {name}.",
            f"For hoststage give {name} '{BACKEND_CONFIG}'",
        )


def _missing(text: str | None, flag: str, needed: tuple[str, ...]) -> list[str]:
    """Return the keys that a JSON flag lacks; a file (`@path`) is not looked into."""
    if text is not None and text.startswith("@"):
        return []
    given = json_object(flag, text) or {}
    return [key for key in needed if key not in given]


def radix_disabled(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """HiCache needs the radix cache."""
    if not flags.enable_hierarchical_cache or flags.enable_unified_cache_external_linker:
        return
    name = "--enable-hierarchical-cache"
    if flags.disable_radix_cache:
        yield _refused("RADIX_DISABLED", name, f"{name} with --disable-radix-cache.", "Drop --disable-radix-cache.")
    elif flags.decode and not flags.disaggregation_decode_enable_radix_cache:
        yield _refused(
            "RADIX_DISABLED",
            name,
            f"{name} on a decode instance whose radix cache is off, as it is by default.",
            "Add --disaggregation-decode-enable-radix-cache.",
        )


def offload(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Decode offload is for decode instances with a storage backend."""
    if not flags.disaggregation_decode_enable_offload_kvcache:
        return
    name = "--disaggregation-decode-enable-offload-kvcache"
    if not flags.decode:
        yield _refused("OFFLOAD", name, f"{name} without --disaggregation-mode decode.", f"Drop {name}.")
    if flags.hicache_storage_backend is None:
        yield _refused("OFFLOAD", name, f"{name} without a storage backend.", f"Add {BACKEND_FLAGS}")


def compressed_size(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """DeepSeek V4 takes no absolute host size."""
    if flags.host_tier and flags.hicache_size > 0 and stack.pool("deepseek_v4_c4") is not None:
        yield _refused(
            "V4_HICACHE_SIZE", "--hicache-size", "--hicache-size for DeepSeek V4.", "Give --hicache-ratio instead."
        )


def lmcache(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """LMCache excludes HiCache."""
    if flags.enable_lmcache and flags.enable_hierarchical_cache:
        yield _refused(
            "LMCACHE", "--enable-lmcache", "--enable-lmcache with --enable-hierarchical-cache.", "Drop one of the two."
        )


def no_host_tier(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Without HiCache and linker nothing of this is used."""
    if not flags.host_tier and not flags.enable_unified_cache_external_linker:
        ignored = sorted(f"--{name.replace('_', '-')}" for name in flags.given if name.startswith("hicache_"))
        tail = f", and ignores {', '.join(ignored)}" if ignored else ""
        yield _notice(
            NO_HOST_TIER,
            "--enable-hierarchical-cache",
            f"SGLang builds no host tier for these flags{tail}.",
            "Add --enable-hierarchical-cache.",
        )


def page_size(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Attention backends have pages of their own."""
    resolved = flags.backend_page_size
    if resolved is not None and resolved != flags.page_size:
        asked = "its default" if flags.page_size is None else str(flags.page_size)
        yield _notice(
            "PAGE_SIZE",
            "--page-size",
            f"SGLang changes the page from {asked} to {resolved} tokens for the attention backend given.",
            f"Give --page-size {resolved}.",
            page_size=resolved,
        )
    if "fa4" in (flags.attention_backend, flags.decode_attention_backend, flags.prefill_attention_backend):
        yield _notice(
            "PAGE_SIZE",
            "--page-size",
            "On Blackwell, SGLang changes the page to 128 tokens for fa4 where the model is not MLA.",
            "Give --page-size 128.",
        )


def speculative(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Draft pools are not derived from the target's config."""
    if flags.speculative_algorithm not in (None, "NGRAM"):
        yield _notice(
            "DRAFT_POOLS",
            "--speculative-algorithm",
            f"The draft pools of {flags.speculative_algorithm} are not part of this verdict: their model was not described.",
            "Describe them as sidecars in a stack file (--stack).",
        )


def unread(flags: SglangFlags, stack: Stack) -> Iterator[Finding]:
    """Flags that were not read; those of a configuration file could matter."""
    if "--config" in flags.unread:
        yield _notice(
            "CONFIG_FILE",
            "--config",
            "SGLang's own configuration file was not read, and what it sets is not part of this verdict.",
            "Give its flags on the command line.",
        )
    if flags.unread:
        names = ", ".join(dict.fromkeys(flags.unread))
        yield _notice("FLAGS_UNREAD", "command", f"Not read, since no rule here depends on them: {names}.", flags=names)


def _pure_swa(stack: Stack) -> bool:
    return bool(stack.of_kind(PoolKind.SWA)) and not stack.of_kind(PoolKind.KV)


CHECKS: tuple[Check, ...] = (
    store_required,
    decode_role,
    write_back,
    decode_context_parallel,
    swa_pool_required,
    swa_pool_too_small,
    pure_swa_tree,
    retraction,
    host_receive,
    linker,
    dynamic_backend,
    radix_disabled,
    offload,
    compressed_size,
    lmcache,
    no_host_tier,
    page_size,
    speculative,
    unread,
)
"""Every rule of the engine's that is judged here, in the order of findings."""
