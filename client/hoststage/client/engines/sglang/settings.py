"""What an operator writes under `"hoststage"` in SGLang's `--hicache-storage-backend-extra-config`, or in the linker's `linker_extra_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from hoststage.client.errors import StackError
from hoststage.client.stack import Mode, ModeWish

SECTION = "hoststage"
DRAFTS = ("draft", "draft_indexer", "draft_swa")
"""Pools of a draft model. Where there is one, they may come after the others."""


class HostPools(Enum):
    """Where SGLang's host pools live: in memory of the engine's own, or in the daemon's."""

    ENGINE = "engine"
    DAEMON = "daemon"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the storage backend, of the linker and of the host allocator. Times in seconds.

    address: of the daemon, as in `hoststage.client.connect`. tenant: pages never meet across it. weights_revision, quantization, kv_scales: parts of
    the identity that SGLang's own configuration does not tell, or not well enough. modes: what is asked of the daemon, in order. slots: host slots a
    pool, both sides together; a pool that is not named is sized by the daemon, one that the engine has not is an error. required: a daemon that is absent or refuses stops the launch;
    otherwise the engine runs on without it, every lookup a miss. pin_seconds: how long the linker's lookups keep what they found from being evicted.
    host_pools: where SGLang's host pools live, whatever its storage backend.
    host_pool_timeout: of one lease, in which the daemon populates the memory.
    """

    address: str | None = None
    token: str = ""
    tenant: str = "default"
    weights_revision: str = ""
    quantization: str = ""
    kv_scales: str = ""
    modes: tuple[ModeWish, ...] = (ModeWish(Mode.BUFFER_ONLY), ModeWish(Mode.CACHE))
    slots: Mapping[str, int] = field(default_factory=dict)
    required: bool = False
    host_pools: HostPools = HostPools.ENGINE
    connect_timeout: float = 5.0
    lookup_timeout: float = 2.0
    load_timeout: float = 10.0
    store_timeout: float = 30.0
    pin_seconds: float = 10.0
    host_pool_timeout: float = 600.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> Settings:
        """Read the section. Raises `StackError` for a name or a value that means nothing; it says what would do."""
        given = (extra_config or {}).get(SECTION, {})
        if not isinstance(given, Mapping):
            raise StackError(SECTION, given, "write an object with settings")
        names = {f.name: f for f in fields(cls)}
        unknown = sorted(set(given) - set(names))
        if unknown:
            # Its value stays unsaid: it may be a token under a misspelt name, and this goes into logs.
            raise StackError(f"{SECTION}.{unknown[0]}", "unknown", f"use one of {', '.join(sorted(names))}")
        return cls(**{name: _value(name, value) for name, value in given.items()})

    def check_slots(self, pools: Collection[str], later: Collection[str] = ()) -> None:
        """Raise `StackError` where `slots` names a pool that there is not. later: names that may still come, or are part of one of the pools."""
        for name in self.slots:
            if name not in pools and name not in later:
                raise StackError(f"{SECTION}.slots", name, f"name one of {', '.join(pools)}")


def drafts_of(args: Any) -> Collection[str]:
    """Return the pools of the draft model that SGLang's arguments name, none where they name none."""
    return DRAFTS if getattr(args, "speculative_algorithm", None) not in (None, "NGRAM") else ()


def _value(name: str, value: Any) -> Any:
    at = f"{SECTION}.{name}"
    if name == "modes":
        return tuple(_mode(at, word) for word in (value if isinstance(value, list) else [value]))
    if name == "slots":
        good = isinstance(value, Mapping) and all(_whole(n) for n in value.values())
        return dict(_need(good, at, value, 'write pools and numbers, as {"kv": 4096}'))
    if name == "host_pools":
        known = [place.value for place in HostPools]
        return HostPools(_need(value in known, at, value, f"use {' or '.join(known)}"))
    if name == "required":
        return _need(isinstance(value, bool), at, value, "write true or false")
    if name.endswith(("_timeout", "_seconds")):
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        return float(_need(good, at, value, "write seconds greater than 0"))
    said = f"a {type(value).__name__}" if name == "token" else value
    return _need(isinstance(value, str), at, said, "write text") and value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _mode(at: str, word: object) -> ModeWish:
    if word not in [mode.value for mode in Mode]:
        raise StackError(at, word, f"use {' or '.join(mode.value for mode in Mode)}, or a list of them")
    return ModeWish(Mode(word))


def _need(ok: bool, at: str, value: Any, remedy: str) -> Any:
    if not ok:
        raise StackError(at, value, remedy)
    return value
