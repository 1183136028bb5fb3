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

MAX_PIECE_BYTES = 64 << 30
"""One huge registration fails on some drivers."""

_REGISTER_PORTABLE = 0x01
_REGISTER_READ_ONLY = 0x08
_ATTR_READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported


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


def pieces(size: int, stride: int, most: int = MAX_PIECE_BYTES) -> list[tuple[int, int]]:
    """Return `(offset, bytes)` of pieces of at most `most` bytes, cut at slot boundaries."""
    step = max(stride, most // stride * stride)
    return [(at, min(step, size - at)) for at in range(0, size, step)]


class _Runtime:
    """The few calls of the CUDA runtime that are needed, from the library that torch has loaded."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(_runtime_library())
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._lib.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._lib.cudaHostUnregister.argtypes = [ctypes.c_void_p]

    def read_only_supported(self) -> bool:
        device, value = ctypes.c_int(), ctypes.c_int()
        if self._lib.cudaGetDevice(ctypes.byref(device)):
            self.clear()
            return False
        if self._lib.cudaDeviceGetAttribute(ctypes.byref(value), _ATTR_READ_ONLY_SUPPORTED, device):
            self.clear()
            return False
        return bool(value.value)

    def register(self, address: int, size: int, flags: int) -> str:
        """Register a range; returns "" or why not. A failure leaves no pending error behind for the next kernel launch to find."""
        code = self._lib.cudaHostRegister(address, size, flags)
        if not code:
            return ""
        self.clear()
        return f"cudaHostRegister of {size} bytes: {self._text(code)}"

    def unregister(self, address: int) -> None:
        if self._lib.cudaHostUnregister(address):
            self.clear()

    def clear(self) -> None:
        self._lib.cudaGetLastError()

    def _text(self, code: int) -> str:
        return str((self._lib.cudaGetErrorString(code) or b"").decode("ascii", "replace"))


def _runtime_library() -> str:
    """Path of the CUDA runtime that this process has loaded: two runtimes would not know each other's errors."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").rpartition(" ")[2]
            if "/libcudart" in path and ".so" in path:
                return path
    return "libcudart.so"


class Registration:
    """What is registered of a session's arenas. `arenas` reports each; `reason` says why nothing is, where nothing is."""

    def __init__(self, arenas: Sequence[Pinned] = (), reason: str = "", runtime: _Runtime | None = None) -> None:
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
                for address, _ in arena.ranges:
                    self._runtime.unregister(address)
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
        runtime = _Runtime()
    except (OSError, AttributeError) as error:
        if wish == "require":
            raise RegistrationFailed(
                f"CUDA registration is required and the runtime cannot be called: {error}"
            ) from error
        return Registration(reason=f"not available: {error}")
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


def _register(runtime: _Runtime, arena: Arena) -> Pinned:
    flags = _REGISTER_PORTABLE
    if not arena.mapping.writable:
        if not runtime.read_only_supported():
            reason = "the device does not support read-only registration; copies from this arena are unpinned"
            return Pinned(arena.arena_id, arena.pool, arena.kind, (), reason)
        flags |= _REGISTER_READ_ONLY
    ranges: list[tuple[int, int]] = []
    for offset, size in pieces(arena.mapping.size, arena.stride):
        reason = runtime.register(arena.mapping.address + offset, size, flags)
        if reason:
            for address, _ in ranges:
                runtime.unregister(address)
            return Pinned(arena.arena_id, arena.pool, arena.kind, (), reason)
        ranges.append((arena.mapping.address + offset, size))
    return Pinned(arena.arena_id, arena.pool, arena.kind, tuple(ranges))


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
