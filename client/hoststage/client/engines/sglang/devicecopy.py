"""Copies between device pages and shared memory, layer by layer.

Pages of a device pool held in host memory are copied by the client's own batched copy. Those of a CUDA device go on a stream of their own,
in rectangles: the same piece of pages that lie at even steps is one call of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from hoststage.client._pages import Mover
from hoststage.client.errors import StackError
from hoststage.shm.cuda import CudaUnavailable, Runtime

_Places = npt.NDArray[np.int64]


class Copies(Protocol):
    """How pages move. `load` enqueues, and `mark` tells when what was enqueued so far is over; `store` is over when it returns."""

    load: Mover | None
    store: Mover | None

    def here(self) -> AbstractContextManager[object]:
        """What a thread that copies enters first."""
        ...

    def after(self, event: Any) -> None:
        """Let copies wait for an event of another stream."""
        ...

    def mark(self) -> Any:
        """Return an event after all copies so far; None where they are over already."""
        ...

    def wait(self) -> None:
        """Wait until every copy so far is over."""
        ...


class HostCopies:
    """Device pools in host memory."""

    load: Mover | None = None
    store: Mover | None = None

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after(self, event: Any) -> None:
        event.synchronize()

    def mark(self) -> Any:
        return None

    def wait(self) -> None:
        return None


class CudaCopies:
    """Pools of a CUDA device, on a side stream. Each thread that copies has one of its own."""

    def __init__(self, device: Any, pinned: Callable[[], bool]) -> None:
        """pinned: whether the shared memory is registered with CUDA in this process now. Raises `CudaUnavailable`."""
        import torch

        self._torch = torch
        self._runtime = Runtime()
        self._pinned = pinned
        self._stream = cast(Any, torch.cuda.Stream)(device)
        self.load: Mover | None = self._enqueue
        self.store: Mover | None = self._finish

    def here(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], self._torch.cuda.stream(self._stream))

    def after(self, event: Any) -> None:
        self._stream.wait_event(event)

    def mark(self) -> Any:
        event = cast(Any, self._torch.cuda.Event)()
        event.record(self._stream)
        return event

    def wait(self) -> None:
        self._stream.synchronize()

    def _enqueue(self, to: _Places, source: _Places, lengths: _Places) -> None:
        handle, pinned = int(self._stream.cuda_stream), self._pinned()
        for first, rows, to_step, source_step in rectangles(to, source, lengths):
            self._runtime.copy_rows(
                (int(to[first]), to_step),
                (int(source[first]), source_step),
                int(lengths[first]),
                rows,
                handle,
                pinned=pinned,
            )

    def _finish(self, to: _Places, source: _Places, lengths: _Places) -> None:
        self._enqueue(to, source, lengths)
        self._stream.synchronize()


def rectangles(to: _Places, source: _Places, lengths: _Places) -> list[tuple[int, int, int, int]]:
    """Group copies that follow each other at even steps: `(first, rows, step of the target, step of the source)`, in order.

    A step is never smaller than a row; a group of one row has its length for a step.
    """
    sizes = lengths.tolist()
    to_steps, source_steps = np.diff(to).tolist(), np.diff(source).tolist()
    out = []
    at, count = 0, len(sizes)
    while at < count:
        size, end = sizes[at], at + 1
        steps = (size, size)
        if end < count and sizes[end] == size and to_steps[at] >= size and source_steps[at] >= size:
            steps = (to_steps[at], source_steps[at])
            while end < count and sizes[end] == size and (to_steps[end - 1], source_steps[end - 1]) == steps:
                end += 1
        out.append((at, end - at, *steps))
        at = end
    return out


def copies_for(device: Any, pinned: Callable[[], bool]) -> Copies:
    """Return the copies for pools of a device. Raises `StackError` for a kind of device that is not served."""
    if device.type == "cpu":
        return HostCopies()
    if device.type != "cuda":
        raise StackError("device", device.type, "the linker copies from and to CUDA devices and host memory")
    try:
        return CudaCopies(device, pinned)
    except CudaUnavailable as error:
        raise StackError("device", str(device), f"the linker needs the CUDA runtime: {error}") from error
