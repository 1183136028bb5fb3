"""What a launch line says to hoststage's own parts in SGLang: the settings under `"hoststage"`, judged as the launch itself judges them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hoststage.cli.sglang_args import CommandLineError, SglangFlags, json_object
from hoststage.core.findings import BudgetHolder
from hoststage.core.stack import Mode, ModeWish, Stack
from hoststage.models import Assumption

if TYPE_CHECKING:
    from hoststage.client.engines.sglang.settings import Settings

EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
LINKER_CONFIG = "--unified-cache-external-linker-config"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch asks of hoststage. moves_pages: through its storage backend or linker; else it is asked for the memory of host pools alone."""

    settings: Settings
    moves_pages: bool = True


def launch_settings(flags: SglangFlags) -> Launch | None:
    """Return what the line asks of hoststage's storage backend or linker, or for host pools in the daemon's memory; None for none of them.

    Raises `CommandLineError` for what would stop the launch: a setting that does not exist or means nothing, and two owners of the host pools.
    """
    texts = (flags.hicache_storage_backend_extra_config or "", flags.unified_cache_external_linker_config or "")
    if not any("hoststage" in text or text.startswith("@") for text in texts):
        return None  # and without importing the client
    from hoststage.client.engines.sglang import plugin
    from hoststage.client.engines.sglang.settings import Settings

    linked = flags.enable_unified_cache_external_linker
    view = SimpleNamespace(
        enable_unified_cache_external_linker=linked,
        unified_cache_external_linker_backend=flags.unified_cache_external_linker_backend,
        unified_cache_external_linker_config=json_object(LINKER_CONFIG, flags.unified_cache_external_linker_config),
        hicache_storage_backend=flags.hicache_storage_backend,
        hicache_storage_backend_extra_config=flags.hicache_storage_backend_extra_config,
    )
    with _meant_by(_flag_of(flags)):
        extra = plugin.extra_config_of(view)
        settings = None if extra is None else Settings.of(extra)
    with _meant_by(EXTRA_CONFIG):
        leased = plugin.host_pool_settings(view)
    if settings is not None:
        return Launch(settings)
    return None if leased is None else Launch(leased, moves_pages=False)


def check_slots(stacks: Iterable[Stack], settings: Settings, flags: SglangFlags) -> None:
    """Raise `CommandLineError` where `slots` names a pool that none of the launch's processes has."""
    from hoststage.client.engines.sglang.stacks import check_described

    with _meant_by(_flag_of(flags)):
        check_described(settings, tuple(dict.fromkeys(pool.name for stack in stacks for pool in stack.pools)), flags)


def _flag_of(flags: SglangFlags) -> str:
    """Return the flag that has the settings."""
    return LINKER_CONFIG if flags.enable_unified_cache_external_linker else EXTRA_CONFIG


@contextmanager
def _meant_by(flag: str) -> Iterator[None]:
    """Tell of a setting that means nothing as of the flag that it stands in."""
    from hoststage.client import StackError

    try:
        yield
    except StackError as error:
        raise CommandLineError(
            flag, f"{error.field} is {error.value!r}", error.remedy[:1].upper() + error.remedy[1:]
        ) from error


def asked_modes(settings: Settings) -> tuple[ModeWish, ...]:
    """Return the modes that the launch asks the daemon for, in order, whatever SGLang's own host pools are for."""
    return tuple(ModeWish(Mode(wish.mode.value), required=wish.required) for wish in settings.modes)


def memory_stack(settings: Settings) -> Stack:
    """Return the stack that a process presents which asks for memory alone."""
    from hoststage.client.engines.sglang import hostpools
    from hoststage.server.rpc.convert_stack import stack_from_proto

    return stack_from_proto(hostpools.memory_stack(settings.tenant).to_proto())


def asked_slots(stack: Stack, settings: Settings) -> Stack:
    """Return the stack with the slots that the launch asks of the daemon: those of `slots`, never the sizes of SGLang's own host pools."""
    pools = tuple(replace(pool, host_slots=settings.slots.get(pool.name, 0)) for pool in stack.pools)
    return replace(stack, pools=pools)


def host_pools(stacks: Iterable[Stack], settings: Settings) -> tuple[BudgetHolder, ...]:
    """Return what SGLang's host pools take of the daemon's budget, all processes together: nothing where they are its own, or of a size that nobody gave.

    stacks: with the sizes of SGLang's own pools.
    """
    if settings.host_pools.value != "daemon":
        return ()
    leased = sum(pool.host_slots * pool.page_bytes for stack in stacks for pool in stack.pools if pool.has_host_pool)
    return (BudgetHolder("SGLang's host pools", leased),) if leased else ()


def memory_note(flags: SglangFlags, *, sized: bool) -> Assumption:
    """Return the notice that the pages themselves do not go to hoststage. sized: whether the size of the host pools is known."""
    backend = flags.hicache_storage_backend
    return Assumption(
        "session",
        f"pages go to {f'the storage backend {backend!r}' if backend else 'no storage backend'}; of hoststage each process asks for a session "
        f"of its smallest size, and for the memory of its host pools{'' if sized else ', of a size that nobody gave'}",
        "hoststage's storage backend or linker, for it to keep the pages too",
    )


def slots_note(stack: Stack, settings: Settings) -> Assumption | None:
    """Return the assumption that the daemon sizes the pools that `slots` does not name; None where it names all."""
    left = [pool.name for pool in stack.pools if pool.has_host_pool and not settings.slots.get(pool.name)]
    if not left:
        return None
    return Assumption(
        "host_slots", f"the daemon chooses its slots for {', '.join(left)}", 'slots under "hoststage", as {"kv": 512}'
    )
