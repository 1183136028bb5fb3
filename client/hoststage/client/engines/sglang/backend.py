"""The storage backend: SGLang's HiCacheStorage contract over hoststage.

SGLang keeps its own host pools; this copies pages between them and the daemon's shared memory, by address, in batches that let other Python
threads run, and leaves staging, storing and sharing to the daemon. Turned on by

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "hoststage",
      "module_path": "hoststage.client.engines.sglang.backend", "class_name": "HostStageStorage", "interface_v1": 1}'
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from hoststage.client._pages import ScatteredPages
from hoststage.client.engines.sglang import stacks
from hoststage.client.engines.sglang.channel import Channel
from hoststage.client.engines.sglang.hostpages import HostPages, host_pages
from hoststage.client.engines.sglang.keys import key_of, keys_of
from hoststage.client.engines.sglang.settings import Settings, drafts_of
from hoststage.client.engines.sglang.sharedpools import SharedPool, regions_of, shared_pool
from hoststage.client.errors import HostStageError
from hoststage.shm.copy import address_of

_log = logging.getLogger(__name__)
_F = TypeVar("_F", bound=Callable[..., Any])
_Flags = npt.NDArray[np.bool_]


def _answers(otherwise: Callable[..., Any]) -> Callable[[_F], _F]:
    """Make a method answer `otherwise(its arguments)` where it fails.

    The engine calls these from its own threads, some of which end with the first exception, and every one of its ranks waits in a collective for the
    others. So nothing may escape here; each method's first failure is logged with its trace, and the rest are counted in `failures`.
    """

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def guarded(self: HostStageStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                seen = self.failures[method.__name__] = self.failures.get(method.__name__, 0) + 1
                if seen == 1:
                    _log.exception("hoststage: %s failed; it answers with a miss, now and in future", method.__name__)
                return otherwise(*args, **kwargs)

        return cast(_F, guarded)

    return wrap


def _all_false(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class HostStageStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's storage backend. Built by its `StorageBackendFactory` as `cls(storage_config, kwargs)`.

    Answers are a function of what is stored: exact sets of restorable lengths, never a guess. A page counts as read only once its bytes are copied to
    the host pool, and as stored only once the store has acknowledged it.

    :raises StackError: for settings that mean nothing.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.storage_config = storage_config
        self.settings = Settings.of(storage_config.extra_config)
        stacks.check_config(storage_config)
        self.failures: dict[str, int] = {}
        self._engine = stacks.engine_identity()
        self._pools: dict[str, HostPages | None] = {}
        self._channels: dict[str, Channel] = {}
        self._building = threading.Lock()
        self._page_tokens = 1
        self._closed = False

    # -------------------------------------------------------------- registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the anchor pool."""
        self.mem_pool_host = mem_pool_host
        self._page_tokens = int(mem_pool_host.page_size)
        self._register(mem_pool_host, stacks.ANCHOR)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool, also one that comes later."""
        self._register(host_pool, str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Shake hands for every pool, and say how it went.

        Where hoststage is `required`, a daemon that is absent or refuses raises here, which makes SGLang's launch fail with every finding and remedy.

        :raises StackError: for `slots` of a pool that is not there, or is part of another one.
        """
        there = [name for name, pages in self._pools.items() if pages is not None]
        sources = dict.fromkeys(stacks.family_of(name, there).source for name in there)
        self.settings.check_slots(sources, drafts_of(stacks.engine_args()))
        for name, pages in list(self._pools.items()):
            if pages is None:
                continue
            channel = self._channel(name)
            try:
                channel.open()
            except HostStageError as error:
                if self.settings.required:
                    raise
                _log.warning("hoststage: no host tier for %s for now: %s", name, error)

    def _register(self, pool: Any, name: str) -> None:
        known = self._pools.get(name)
        if known is not None and known.pool is pool:
            return
        pages = host_pages(pool, name)
        with self._building:
            self._pools[name] = pages
            # A pool that came later may have joined a family whose session does not know it.
            family = stacks.family_of(name, list(self._pools))
            stale = [self._channels.pop(member) for member in family.names if member in self._channels]
        for channel in dict.fromkeys(stale):
            channel.close()

    def _channel(self, name: str) -> Channel:
        """Return the channel of a pool's family, made on first use."""
        with self._building:
            found = self._channels.get(name)
            if found is None:
                registered = {known: pages for known, pages in self._pools.items() if pages is not None}
                family = stacks.family_of(name, list(registered))
                stack = stacks.stack_of(
                    family, registered, self.storage_config, self.settings, self._engine, self._page_tokens
                )
                rank = f"tp{self.storage_config.tp_rank} pp{self.storage_config.pp_rank} pid {os.getpid()}"
                shared = _shared(family, registered)
                found = Channel(stack, self.settings, f"sglang {family.source} {rank}", shared=shared)
                self._channels.update(dict.fromkeys(family.names, found))
                if self._closed:
                    # A thread of the engine that outlived the detach: it hears of misses, and opens nothing anew.
                    found.close()
            return found

    # -------------------------------------------------------------- the kv pool by itself

    @_answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many of the keys, from the first, have a page."""
        if not keys or self._pools.get(stacks.ANCHOR) is None:
            return 0
        return _leading(self._channel(stacks.ANCHOR).present(keys_of(keys)))

    @_answers(_all_false)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool; true for those, from the first, that came."""
        return self._get({stacks.ANCHOR: host_indices}, keys)

    @_answers(_all_false)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; true for all where every one is stored."""
        return self._set({stacks.ANCHOR: host_indices}, keys)

    @_answers(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read one page into a flat tensor; None for a miss."""
        row = self._flat_row(target_location)
        if row is None or not self._channel(stacks.ANCHOR).read([key_of(key)], {stacks.ANCHOR: row}):
            return None
        return target_location

    @_answers(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages into flat tensors; None for each that did not come."""
        rows = [self._flat_row(target) for target in target_locations or []]
        if not rows or len(rows) != len(keys) or any(row is None for row in rows):
            return [None] * len(keys)
        count = self._channel(stacks.ANCHOR).read(keys_of(keys), {stacks.ANCHOR: _joined(cast(Any, rows))})
        return [target if i < count else None for i, target in enumerate(target_locations)]

    @_answers(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page given as a flat tensor."""
        return bool(self.batch_set([key], [value]))

    @_answers(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages given as flat tensors; true where every one is stored."""
        rows = [self._flat_row(value) for value in values or []]
        if not rows or len(rows) != len(keys) or any(row is None for row in rows):
            return False
        return self._channel(stacks.ANCHOR).write(keys_of(keys), {stacks.ANCHOR: _joined(cast(Any, rows))})

    @_answers(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether a key has a page."""
        return self.batch_exists([key]) == 1

    def _flat_row(self, tensor: Any) -> ScatteredPages | None:
        """Return the place of a flat page; None where it is none, or the pool's pages are kept in an order that is not the flat one."""
        pages = self._pools.get(stacks.ANCHOR)
        if tensor is None or pages is None or pages.order != "flat":
            return None
        place = address_of(tensor)
        if place.nbytes != pages.page_bytes:
            return None
        sizes = np.array([place.nbytes], dtype=np.int64)
        return ScatteredPages(np.array([[place.address]], dtype=np.int64), sizes, tensor)

    # -------------------------------------------------------------- several pools

    @_answers(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return every prefix length that can be restored: those at which each pool has what its policy asks for."""
        transfers = list(pool_transfers or [])
        kv = self._kv_pages(keys, transfers)
        hits: dict[Any, int] = {PoolName.KV: kv} if kv else {}
        ok = np.ones(kv, dtype=np.bool_)
        packed = keys_of(keys[:kv])
        asked: dict[str, _Flags] = {}
        for transfer in transfers:
            if not ok.any():
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                if covered := self._group_pages(transfer, keys[:kv]):
                    hits[transfer.name] = min(covered, kv)
                continue
            source = self._channel(str(transfer.name)).names[0]
            if source not in asked:
                asked[source] = self._channel(str(transfer.name)).present(packed)
            lengths = _lengths(asked[source], transfer)
            if lengths.any():
                hits[transfer.name] = int(np.flatnonzero(lengths)[-1]) + 1
            ok &= lengths
        restorable = [int(at) + 1 for at in np.flatnonzero(ok)]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _kv_pages(self, keys: list[str], transfers: Sequence[Any]) -> int:
        """Return the pages of the anchor's prefix. A logical anchor has no bytes: what its pools have decides, if they cover everything."""
        if self._pools.get(stacks.ANCHOR) is not None:
            return self.batch_exists(keys)
        return len(keys) if any(t.hit_policy == PoolHitPolicy.ALL_PAGES for t in transfers) else 0

    def _group_pages(self, transfer: Any, keys: list[str]) -> int:
        """Return the pages that a pool's leading whole groups cover."""
        group, block = int(transfer.group_pages), int(transfer.block_pages)
        if group < 1 or block < 1:
            return 0
        there = self._channel(str(transfer.name)).present(keys_of(transfer.keys or keys))
        return _leading(there) // group * block

    @_answers(_none_of)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read each transfer's pages into its pool; per pool, true for those, from the first, that came."""
        return self._each_family(transfers, self._get)

    @_answers(_none_of)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store each transfer's pages; per pool, true for all where every one is stored."""
        return self._each_family(transfers, self._set)

    def _each_family(
        self, transfers: Sequence[Any], move: Callable[[dict[str, Any], list[str]], list[bool]]
    ) -> dict[str, list[bool]]:
        """Move the transfers of one family and the same keys together."""
        out: dict[str, list[bool]] = {}
        groups: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
        for transfer in transfers:
            name, keys = str(transfer.name), tuple(transfer.keys or ())
            source = name if self._pools.get(name) is None else self._channel(name).names[0]
            groups.setdefault((source, keys), []).append(transfer)
        for (_, keys), members in groups.items():
            # Each has its own guard: one pool's trouble is not another's.
            done = move({str(member.name): member.host_indices for member in members}, list(keys))
            out.update({member.name: list(done) for member in members})
        return out

    # -------------------------------------------------------------- moving

    @_answers(lambda _indices, keys: [False] * len(keys))
    def _get(self, indices: dict[str, Any], keys: list[str]) -> list[bool]:
        rows = self._rows(indices, len(keys))
        if rows is None:
            return [False] * len(keys)
        if not rows or not keys:
            return [True] * len(keys)
        count = self._channel(next(iter(rows))).read(keys_of(keys), rows)
        return [i < count for i in range(len(keys))]

    @_answers(lambda _indices, keys: [False] * len(keys))
    def _set(self, indices: dict[str, Any], keys: list[str]) -> list[bool]:
        rows = self._rows(indices, len(keys))
        if rows is None:
            return [False] * len(keys)
        stored = not rows or not keys or self._channel(next(iter(rows))).write(keys_of(keys), rows)
        return [stored] * len(keys)

    def _rows(self, indices: dict[str, Any], count: int) -> dict[str, ScatteredPages] | None:
        """Return where the pages are; nothing of a logical anchor, None where a pool is unknown or a part of a family is missing."""
        if any(name not in self._pools for name in indices):
            return None
        rows = {
            name: pages.rows(given, count)
            for name, given in indices.items()
            if (pages := self._pools[name]) is not None
        }
        if rows and set(self._channel(next(iter(rows))).names) != set(rows):
            # Codes without the scales that were computed with them must neither be kept nor be served.
            return None
        return rows

    # -------------------------------------------------------------- the rest

    def clear(self) -> None:
        """Nothing is deleted: other engines of the namespace use these pages. An operator clears a namespace with the daemon's own command."""
        _log.warning("hoststage keeps its pages; clear the namespace with the daemon's own command")

    def close(self) -> None:
        """End the sessions. Safe to repeat."""
        with self._building:
            self._closed = True
            channels = list(dict.fromkeys(self._channels.values()))
        for channel in channels:
            channel.close()


def _shared(family: stacks.Family, pools: dict[str, HostPages]) -> dict[str, SharedPool]:
    """Return the pools of a family, where all of them lie in memfds that the daemon can be given."""
    found = {name: shared_pool(pools[name]) for name in family.names}
    shared = {name: pool for name, pool in found.items() if pool is not None}
    if len(shared) == len(found):
        return shared
    if any(regions_of(pools[name].pool) for name in family.names):
        _log.warning(
            "hoststage copies the pages of %s in this process: they do not lie at fixed places of the pool's memfds",
            "+".join(family.names),
        )
    return {}


def _leading(flags: _Flags) -> int:
    """Return how many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def _lengths(there: _Flags, transfer: Any) -> _Flags:
    """Return, for each prefix length from 1, whether a pool has the pages that a transfer's policy asks for."""
    n = len(there)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return np.arange(n) < _leading(there)
    at = np.arange(n)
    last_missing = np.maximum.accumulate(np.where(there, -1, at))
    trailing = max(1, len(transfer.keys or ()))
    return at - last_missing >= np.minimum(trailing, at + 1)


def _joined(rows: Sequence[ScatteredPages]) -> ScatteredPages:
    """Return flat pages as one batch."""
    return ScatteredPages(np.concatenate([row.addresses for row in rows]), rows[0].sizes, [row.keep for row in rows])
