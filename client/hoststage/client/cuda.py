"""Registration of mapped arenas with CUDA, and copies on a side stream.

Nothing here imports torch by itself at import time, and nothing fails for want of a device: where CUDA is absent, the report says so
("not available: …") and copies go through ordinary host memory. Registration belongs to the process: the daemon's own does
not help a worker.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from hoststage.client._arenas import Arena, ArenaKind
from hoststage.client.errors import HostStageError
from hoststage.shm.copy import address_of
from hoststage.shm.cuda import CudaUnavailable, Runtime


class RegistrationFailed(HostStageError, RuntimeError):
    """CUDA registration was required and did not succeed; the message says why."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of one arena: the ranges registered (address, bytes), or why it stays unpinned."""

    arena_id: int
    pool: int
    kind: ArenaKind
    ranges: tuple[tuple[int, int], ...]
    reason: str = ""

    @property
    def pinned(self) -> bool:
        return bool(self.ranges)


class Registration:
    """What is registered of a session's arenas. `arenas` reports each; `reason` says why nothing is, where nothing is."""

    def __init__(self, arenas: Sequence[Pinned] = (), reason: str = "", runtime: Runtime | None = None) -> None:
        self.arenas = tuple(arenas)
        self.reason = reason
        self._runtime = runtime

    @property
    def pinned(self) -> bool:
        """Whether every arena is pinned for CUDA."""
        return bool(self.arenas) and all(arena.pinned for arena in self.arenas)

    def close(self) -> None:
        """Unregister everything: before the mappings go. Safe to repeat."""
        if self._runtime is not None:
            for arena in self.arenas:
                self._runtime.unregister(arena.ranges)
            self._runtime = None
        self.arenas = ()


def availability(*, load_torch: bool = False) -> str:
    """Return "" where CUDA can be used through torch, else "not available: …" with the reason.

    load_torch: import torch where it is not loaded yet; otherwise a process that has not loaded it is taken not to use a device.
    """
    if "torch" not in sys.modules and not load_torch:
        return "not available: torch is not loaded in this process"
    try:
        import torch
    except ImportError as error:
        return f"not available: {error}"
    if not torch.cuda.is_available():
        return "not available: torch sees no CUDA device"
    return ""


def register_arenas(arenas: Sequence[Arena], wish: str = "auto") -> Registration:
    """Register mapped arenas with CUDA.

    wish: "auto" registers where torch is loaded and sees a device; "require" loads torch and raises `RegistrationFailed` where an
    arena stays unpinned; "never" does nothing. Must not run during a graph capture.
    """
    if wish not in ("auto", "never", "require"):
        raise ValueError(f'register is {wish!r}: pass "auto", "never" or "require"')
    if wish == "never":
        return Registration(reason="not asked for")
    reason = availability(load_torch=wish == "require")
    if not reason:
        reason = _capturing()
    if reason:
        if wish == "require":
            raise RegistrationFailed(f"CUDA registration is required and {reason}")
        return Registration(reason=reason)
    try:
        runtime = Runtime()
    except CudaUnavailable as error:
        if wish == "require":
            raise RegistrationFailed(
                f"CUDA registration is required and the runtime cannot be called: {error}"
            ) from error
        return Registration(reason=str(error))
    done = Registration([_register(runtime, arena) for arena in arenas], runtime=runtime)
    failed = [f"{a.kind.value} arena of pool {a.pool}: {a.reason}" for a in done.arenas if not a.pinned]
    if failed and wish == "require":
        done.close()
        raise RegistrationFailed("CUDA registration is required; " + "; ".join(failed))
    return done


def _capturing() -> str:
    import torch

    torch.cuda.current_stream()  # makes the context, without which nothing can be registered
    if torch.cuda.is_current_stream_capturing():
        return "not available: a graph is being captured"
    return ""


def _register(runtime: Runtime, arena: Arena) -> Pinned:
    mapping = arena.mapping
    done = runtime.register(mapping.address, mapping.size, arena.stride, read_only=not mapping.writable)
    return Pinned(arena.arena_id, arena.pool, arena.kind, done.ranges, done.reason)


# -------------------------------------------------------------- copies


def on_device(buffer: object) -> bool:
    """Whether a buffer is a tensor in CUDA memory."""
    return getattr(getattr(buffer, "device", None), "type", "") == "cuda"


_side_streams: dict[Any, Any] = {}


def side_stream(device: Any) -> Any:
    """Return this process's side stream for copies of a device."""
    import torch

    stream = _side_streams.get(device)
    if stream is None:
        stream = _side_streams[device] = cast(Any, torch.cuda.Stream)(device)
    return stream


def copy_rows(pairs: Sequence[tuple[Any, memoryview]], *, to_device: bool) -> None:
    """Copy pages between CUDA tensors and host pages on a side stream, ordered after the caller's stream, and wait for them.

    pairs: one CUDA tensor and one host page of the same bytes each. On return the host pages are read or written; the caller's
    stream is made to wait for the copies, so that what it launches next sees them.
    """
    if not pairs:
        return
    import torch

    device = pairs[0][0].device
    stream, current = side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for tensor, page in pairs:
            host = _host_tensor(page)
            flat = tensor.reshape(-1).view(torch.uint8)
            if to_device:
                flat.copy_(host, non_blocking=True)
            else:
                host.copy_(flat, non_blocking=True)
        event = cast(Any, torch.cuda.Event)()
        event.record(stream)
    current.wait_event(event)
    # Blocks in C with the GIL released.
    event.synchronize()


def _host_tensor(page: memoryview) -> Any:
    import torch

    # Through an address, as torch warns of every read-only buffer; a page of a read arena is only ever read here.
    place = address_of(page)
    return torch.frombuffer((ctypes.c_ubyte * place.nbytes).from_address(place.address), dtype=torch.uint8)
