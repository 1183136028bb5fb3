"""Loads of a batch: started together, copied to the device layer by layer while the forward pass already runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter
from sglang.srt.utils import get_device_module

from hoststage.client._load import LoadStream
from hoststage.client._loaded import Loaded, Match
from hoststage.client._pages import ScatteredPages
from hoststage.client.engines.sglang.devicecopy import Copies
from hoststage.client.engines.sglang.devicepools import DevicePages
from hoststage.client.engines.sglang.keys import packed_keys_of
from hoststage.client.engines.sglang.linkchannel import LinkChannel
from hoststage.client.errors import HostStageError

_log = logging.getLogger(__name__)


class LoadFailed(RuntimeError):
    """Pages of a load did not come; the message says which and why."""


class LoadCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """Tells the forward pass which layers have come, and the scheduler whether all of a batch did.

    On a device a layer counts as there once its copy is enqueued: the forward's stream then waits for the copy's event, and the host for nothing.
    Whether the batch landed is known when its copies are over and the connection that lent the pages still stood.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._verdicts: dict[int, Future[bool]] = {}

    def update_producer(self) -> int:
        index: int = super().update_producer()
        self._verdicts[index] = Future()
        return index

    def complete(self, index: int, layer: int, event: Any = None) -> None:
        """Say that a layer is there, after `event` where there is one."""
        self.futures[index][layer].set_result(event)

    def settle(self, index: int, error: BaseException | None) -> None:
        """Say how a batch ended: once, and when nothing is written to the device any more."""
        if error is not None:
            self.fail(index, error)
        self._verdicts[index].set_result(error is None)

    def wait_until(self, threshold: int) -> None:
        futures = self.futures.get(self.consumer_index)
        if futures is None or futures[threshold].exception() is not None:
            return
        event = futures[threshold].result()
        if event is not None:
            get_device_module().current_stream().wait_event(event)

    def finish(self, index: int) -> bool:
        """Wait for a batch; True when every layer landed."""
        verdict = self._verdicts.get(index)
        if verdict is None:
            return True
        # The thread that loads uses the entries until it has settled the batch.
        landed = verdict.result()
        del self._verdicts[index], self.futures[index]
        return landed

    def reset(self) -> None:
        super().reset()
        self._verdicts.clear()


@dataclass(slots=True)
class QueuedLoad:
    """A load that was asked for: the transfers by pool, translated to the pools' own slot ids, and the pin that it consumes."""

    transfers: Mapping[str, Any]
    pin: Match | None

    @property
    def keys(self) -> list[str]:
        """The page hashes of the whole run; every pool has a suffix of them."""
        longest: list[str] = max((t.keys for t in self.transfers.values()), key=len)
        return longest


@dataclass(slots=True)
class _Job:
    """A load under way, and where its pages go. `copied`: layers that are on the device."""

    stream: LoadStream
    rows: dict[str, ScatteredPages]
    loaded: Loaded | None = None
    copied: set[int] = field(default_factory=set)


class Loader:
    """Loads batches, one after the other, in a thread of its own."""

    def __init__(
        self,
        channel: LinkChannel,
        pages: Mapping[str, DevicePages],
        counter: LoadCounter,
        copies: Copies,
    ) -> None:
        self._channel = channel
        self._pages = pages
        self._counter = counter
        self._copies = copies
        self.failed = 0
        self._queue: Queue[tuple[int, Sequence[QueuedLoad], Any] | None] = Queue()
        self._thread = threading.Thread(target=self._work, name="hoststage-load", daemon=True)
        self._thread.start()

    def start(self, batch: Sequence[QueuedLoad], ready: Any) -> int:
        """Start a batch; `ready`: the event after which its device pages may be written. Return its index."""
        index = self._counter.update_producer()
        self._queue.put((index, batch, ready))
        return index

    def join(self) -> None:
        """Wait until every batch is over."""
        self._queue.join()

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                # In a frame of its own: what a failure keeps alive, views of shared memory among it, must not outlast it.
                self._load(*task)
            finally:
                del task
                self._queue.task_done()
        self._queue.task_done()

    def _load(self, index: int, batch: Sequence[QueuedLoad], ready: Any) -> None:
        error: BaseException | None = None
        try:
            with self._copies.here():
                self._copies.after(ready)
                self._run(index, batch)
        except BaseException as failure:
            error = failure
            self.failed += 1
            # What was lost with the daemon is logged by the channel.
            expected = isinstance(failure, LoadFailed | HostStageError)
            level, trace = (logging.WARNING, None) if expected else (logging.ERROR, failure)
            _log.log(level, "hoststage: a batch of %d loads failed: %s", len(batch), failure, exc_info=trace)
        finally:
            self._counter.settle(index, error)

    def _run(self, index: int, batch: Sequence[QueuedLoad]) -> None:
        jobs: list[_Job] = []
        try:
            for queued in batch:
                jobs.append(self._begin(queued))
            for at, job in enumerate(jobs):
                if not job.stream.ended:
                    # The time is best used, and room for what is still to come is made, by bringing over what is there.
                    self._bring_over(jobs[:at])
                job.loaded = self._ended(job)
            for layer in range(self._counter.num_layers):
                for job in jobs:
                    self._copy(job, layer)
                self._counter.complete(index, layer, self._copies.mark())
            self._copies.wait()
            for job in jobs:
                if job.loaded is not None:
                    job.loaded.check()
        finally:
            # Nothing may be written to the device, nor read from shared memory, once this is over.
            self._copies.wait()
            for job in jobs:
                if job.loaded is None:
                    job.stream.cancel()
                else:
                    job.loaded.release()
            release_pins(batch[len(jobs) :])

    def _begin(self, queued: QueuedLoad) -> _Job:
        hashes = queued.keys
        ranges, rows = {}, {}
        for name, transfer in queued.transfers.items():
            count = len(transfer.keys)
            ranges[name] = (len(hashes) - count, count)
            rows[name] = self._pages[name].rows(transfer.host_indices, self._copies.load)
        stream = self._channel.begin(packed_keys_of(hashes), queued.pin, ranges)
        if stream is None:
            raise LoadFailed("the daemon is away")
        return _Job(stream, rows)

    def _ended(self, job: _Job) -> Loaded:
        loaded = job.stream.wait()
        if not loaded:
            raise LoadFailed(f"{loaded.outcome.name}: {loaded.detail}")
        return loaded

    def _bring_over(self, jobs: Sequence[_Job]) -> None:
        """Copy the loads that have come as a whole and give their leases up."""
        done = [job for job in jobs if job.loaded is not None and len(job.copied) < self._counter.num_layers]
        for job in done:
            for layer in range(self._counter.num_layers):
                self._copy(job, layer)
        self._copies.wait()
        for job in done:
            if job.loaded is not None:
                job.loaded.check()
                job.loaded.release()

    def _copy(self, job: _Job, layer: int) -> None:
        if layer in job.copied or job.loaded is None:
            return
        for name, rows in job.rows.items():
            pieces = self._pages[name].of_layer.get(layer)
            if pieces is not None:
                job.loaded.copy_pieces(name, rows, pieces)
        job.copied.add(layer)


def release_pins(batch: Sequence[QueuedLoad]) -> None:
    """Give up the pins of loads that will not start."""
    for queued in batch:
        if queued.pin is not None:
            with suppress(HostStageError):
                queued.pin.release()
