"""Offloads: device pages out to write slots and into commits, in order, answered once the store has acknowledged them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Any

from hoststage.client._ticket import StoreTicket
from hoststage.client.engines.sglang.devicecopy import Copies
from hoststage.client.engines.sglang.devicepools import DevicePages
from hoststage.client.engines.sglang.keys import packed_keys_of
from hoststage.client.engines.sglang.linkchannel import LinkChannel
from hoststage.v1.ops import Outcome

_log = logging.getLogger(__name__)
_GOOD = (Outcome.STORED, Outcome.RESIDENT, Outcome.BELIEVED_STORED)


@dataclass(slots=True, eq=False)
class _Offload:
    """One offload. ok: its result, None while it is not known. due: when it counts as dropped, so that device pages are not held for ever.

    copied: whether its device pages are read no more; before that they must not be given up, whatever the time.
    """

    due: float
    ok: bool | None = None
    copied: bool = False


class Offloader:
    """Copies and commits offloads in a thread of its own. Results are taken by the scheduler's thread, oldest first.

    `dropped` counts those that were not stored: the daemon was away, refused, was too slow or had no room.
    """

    def __init__(
        self, channel: LinkChannel, pages: Mapping[str, DevicePages], copies: Copies, store_timeout: float
    ) -> None:
        self._channel = channel
        self._pages = pages
        self._copies = copies
        self._timeout = store_timeout
        self.stored = 0
        self.dropped = 0
        self._dropping = False
        self._results: deque[_Offload] = deque()
        self._queue: Queue[tuple[_Offload, Mapping[str, Any], Sequence[Any]] | None] = Queue()
        self._thread = threading.Thread(target=self._work, name="hoststage-offload", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- the scheduler's side

    def submit(self, transfers: Mapping[str, Any], ready: Sequence[Any]) -> None:
        """Queue an offload; `ready`: the events after which its device pages may be read."""
        offload = _Offload(time.monotonic() + self._timeout)
        self._results.append(offload)
        self._queue.put((offload, transfers, ready))

    def skip(self) -> None:
        """Count an offload as done: another rank writes these very pages."""
        self._results.append(_Offload(0.0, True))

    def completed(self) -> int:
        """Return how many results, from the oldest, are known."""
        count, now = 0, time.monotonic()
        for offload in self._results:
            if offload.ok is None and offload.copied and now > offload.due:
                self._end(offload, "the store does not acknowledge in time")
            if offload.ok is None:
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Return the oldest result and forget it. Raises `IndexError` where none is known."""
        if not self._results or self._results[0].ok is None:
            raise IndexError("no offload has completed")
        return bool(self._results.popleft().ok)

    def reset(self) -> None:
        """Wait until no device page is read any more, and forget all results."""
        self._queue.join()
        self._results.clear()

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._queue.put(None)
        self._thread.join()

    # -------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            offload, transfers, ready = task
            try:
                with self._copies.here():
                    for event in ready:
                        self._copies.after(event)
                    # Slot ids are computed on the device, too.
                    self._copies.wait()
                    ticket = self._put(offload, transfers)
                offload.copied = True
                if ticket is None:
                    self._end(offload, "the daemon is away")
                else:
                    self._follow(offload, ticket)
            except Exception:
                _log.exception("hoststage: an offload failed")
                self._end(offload, "see the trace above")
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _put(self, offload: _Offload, transfers: Mapping[str, Any]) -> StoreTicket | None:
        """Copy the pages of all pools out and commit them together."""
        hashes: list[str] = max((t.keys for t in transfers.values()), key=len)
        rows, first = {}, {}
        for name, transfer in transfers.items():
            first[name] = hashes.index(transfer.keys[0])
            rows[name] = self._pages[name].rows(transfer.host_indices, self._copies.store)
        left = offload.due - time.monotonic()
        if left <= 0:
            # It has waited behind others: a store that is slower than the engine must not hold its device pages.
            return None
        return self._channel.put(packed_keys_of(hashes), rows, first, left)

    def _follow(self, offload: _Offload, ticket: StoreTicket) -> None:
        def ended(done: StoreTicket) -> None:
            self._end(offload, "" if done.outcome in _GOOD else done.outcome.name)

        ticket.add_done_callback(ended)

    def _end(self, offload: _Offload, why: str) -> None:
        if offload.ok is not None:
            return
        offload.ok = not why
        if not why:
            self.stored += 1
            if self._dropping:
                self._dropping = False
                _log.warning("hoststage: offloads are stored again; %d were dropped so far", self.dropped)
            return
        self.dropped += 1
        if not self._dropping:
            self._dropping = True
            _log.warning("hoststage: offloads are dropped for now: %s", why)
