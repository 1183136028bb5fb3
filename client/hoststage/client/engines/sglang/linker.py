"""The external linker: SGLang's device pages straight to hoststage and back, with no host tier in the engine.

Turned on by

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "HostStageLinker",
      "linker_module_path": "hoststage.client.engines.sglang.linker", "linker_extra_config": {"hoststage": {…}}}'

SGLang's tree drives it from the scheduler's thread: a lookup pins what it answers, a load consumes the pin, a batch of loads is copied layer by layer while its
forward pass runs, an offload is one commit over all pools. Nothing of it raises at the engine, or makes it wait for a daemon that is away.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils import get_device_module

from hoststage.client.engines.sglang import stacks
from hoststage.client.engines.sglang.devicecopy import copies_for
from hoststage.client.engines.sglang.devicepools import by_pool, device_pages, pool_group
from hoststage.client.engines.sglang.linkchannel import LinkChannel
from hoststage.client.engines.sglang.linkload import LoadCounter, Loader, QueuedLoad, release_pins
from hoststage.client.engines.sglang.linkoffload import Offloader
from hoststage.client.engines.sglang.linkpins import Pins
from hoststage.client.engines.sglang.linkstack import KV, ROLES, Worker, stack_of
from hoststage.client.engines.sglang.settings import Settings
from hoststage.client.errors import HostStageError
from hoststage.client.stack import Parallel, Role

_log = logging.getLogger(__name__)


class HostStageLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """SGLang's `UnifiedCacheLinker` over hoststage. Built by its `create_unified_cache_linker`, once for each rank.

    :raises StackError: for settings that mean nothing, and device pools that are not served.
    :raises HostStageError: where hoststage is `required` and the daemon is away or refuses, with every finding.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.settings = Settings.of(extra_config)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = pool_group(kvcache, params, components, params.page_size)
        self.pools = self._group.entry_map
        self._pages = device_pages(self._group)
        worker, self._writes = _worker(server_args, params, kvcache, self._group.rank_replicated)
        stack = stack_of(self._pages, worker, self.settings, stacks.engine_identity())
        place = worker.parallel
        name = f"sglang linker tp{place.tp_rank} pp{place.pp_rank} pid {os.getpid()}"
        self.channel = LinkChannel(stack, self.settings, name, register="auto")
        try:
            self.channel.open()
        except HostStageError as error:
            if self.settings.required:
                raise
            _log.warning("hoststage: no host tier for now: %s", error)
        device = next(iter(self.pools.values())).kv_buffer[0].device
        self.layer_done_counter = LoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.pins = Pins(self.channel, self.settings.pin_seconds)
        self._queued: dict[str, QueuedLoad] = {}
        self._closed = False
        self.loader = Loader(self.channel, self._pages, self.layer_done_counter, copies_for(device, self._pinned))
        self.offloader = Offloader(
            self.channel, self._pages, copies_for(device, self._pinned), self.settings.store_timeout
        )

    def _pinned(self) -> bool:
        session = self.channel.session
        return session is not None and session.registration.pinned

    # -------------------------------------------------------------- loading

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return every prefix length of the uncached tail, in pages, that can be restored; each is pinned until it is loaded."""
        keys = next((t.keys for t in transfers if str(t.name) == KV), None)
        if not keys:
            return []
        try:
            return self.pins.lookup(rid, keys)
        except Exception:
            # The other ranks wait in a collective for this one's answer.
            _log.exception("hoststage: a lookup failed; it answers with a miss")
            return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load of what a lookup found. The answer depends on the transfers alone, so that all ranks give the same."""
        wanted = by_pool(self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True))
        pin = self.pins.take(rid)
        queued = QueuedLoad(wanted, pin)
        if not wanted:
            release_pins([queued])
            return False
        if rid in self._queued:
            release_pins([self._queued[rid]])
        self._queued[rid] = queued
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancel a load that has not started."""
        self.pins.drop(rid)
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        release_pins([queued])
        return True

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads as one batch and return its index; -1 where there are none."""
        batch, self._queued = list(self._queued.values()), {}
        if not batch:
            return -1
        ready = get_device_module().Event()
        ready.record()
        return self.loader.start(batch, ready)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes no more to the device; whether every page of it landed."""
        return self.layer_done_counter.finish(counter_index)

    # -------------------------------------------------------------- offloading

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages of all pools for one commit, to be read once the forward pass has written them.

        The answer depends on the transfers alone. What cannot be stored is dropped, counted, and reported as not done.
        """
        wanted = by_pool(self._group.resolve_transfers(transfers, allow_partial=True))
        if not wanted:
            return False
        if self._writes:
            self.offloader.submit(wanted, self.record_offload_ready())
        else:
            self.offloader.skip()
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offloads, from the oldest, have a result."""
        return self.offloader.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest result: whether all pages of it are stored."""
        return self.offloader.pop()

    # -------------------------------------------------------------- life

    def reset(self) -> None:
        """Quiesce all transfers and forget what was asked. What is stored stays: other engines use it."""
        release_pins(list(self._queued.values()))
        self._queued.clear()
        self.pins.clear()
        self.loader.join()
        self.offloader.reset()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Quiesce all transfers and end the session. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        self.loader.close()
        self.offloader.close()
        _log.info(
            "hoststage linker: %d offloads stored, %d dropped, %d batches of loads failed",
            *(self.offloader.stored, self.offloader.dropped, self.loader.failed),
        )
        self.channel.close()


def _worker(server_args: Any, params: Any, kvcache: Any, replicated: bool) -> tuple[Worker, bool]:
    """Return what this rank is, and whether it writes: of ranks with the same pages, the first one does."""
    rank, size = 0, max(1, int(get_parallel().tp_size))
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    worker = Worker(
        model=get_model().model_path,
        dtype=str(kvcache.dtype).removeprefix("torch."),
        page_tokens=params.page_size,
        window_tokens=params.swa_retain_window or 0,
        parallel=Parallel(
            tp_rank=rank,
            tp_size=size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            cp_rank=params.attn_cp_rank,
            cp_size=params.attn_cp_size,
        ),
        role=ROLES.get(getattr(server_args, "disaggregation_mode", ""), Role.MIXED),
        replicated=replicated,
    )
    return worker, not replicated or rank == 0
