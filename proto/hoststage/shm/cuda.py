"""Registration of mapped memory with CUDA, in this process.

Registration belongs to a process: the daemon's does not help a worker, so both use this. Nothing fails for want of a device: what could not be
done is said in words.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass

MAX_PIECE_BYTES = 64 << 30
"""One huge registration fails on some drivers."""

REGISTER_PORTABLE = 0x01
REGISTER_READ_ONLY = 0x08
_MEMCPY_2D = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
)
_MEMCPY_DEFAULT = 4  # the direction follows from the addresses
_ATTR_READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported


class CudaUnavailable(RuntimeError):
    """The CUDA runtime cannot be used in this process; the message says why."""


class CudaFailed(RuntimeError):
    """A call of the CUDA runtime failed; the message has its words."""


def pieces(size: int, stride: int, most: int = MAX_PIECE_BYTES) -> list[tuple[int, int]]:
    """Return `(offset, bytes)` of pieces of at most `most` bytes, cut at slot boundaries."""
    step = max(stride, most // stride * stride)
    return [(at, min(step, size - at)) for at in range(0, size, step)]


def loaded_runtime() -> str:
    """Return the path of the CUDA runtime that this process has loaded, "" for none: two runtimes would not know each other's errors."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").rpartition(" ")[2]
            if "/libcudart" in path and ".so" in path:
                return path
    return ""


@dataclass(frozen=True, slots=True)
class Registered:
    """What became of one mapping: the ranges registered `(address, bytes)`, or why there are none."""

    ranges: tuple[tuple[int, int], ...]
    reason: str = ""


class Runtime:
    """The few calls of the CUDA runtime that are needed."""

    def __init__(self, path: str = "") -> None:
        """Load the runtime: `path`, or the one in this process, or the system's. Raises `CudaUnavailable`."""
        name = path or loaded_runtime() or ctypes.util.find_library("cudart") or "libcudart.so"
        try:
            self._lib = ctypes.CDLL(name)
            self._lib.cudaGetErrorString.restype = ctypes.c_char_p
            self._lib.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
            self._lib.cudaHostUnregister.argtypes = [ctypes.c_void_p]
            # For calls that only enqueue: handing the GIL over beside a busy thread may cost 5 ms each.
            self._enqueue = ctypes.PyDLL(name)
            for lib in (self._lib, self._enqueue):
                lib.cudaMemcpy2DAsync.argtypes = _MEMCPY_2D
        except (OSError, AttributeError) as error:
            raise CudaUnavailable(f"not available: {error}") from error

    def devices(self) -> int:
        """Return the number of devices; 0 also where the driver does not answer."""
        count = ctypes.c_int()
        if self._lib.cudaGetDeviceCount(ctypes.byref(count)):
            self.clear()
            return 0
        return count.value

    def read_only_supported(self) -> bool:
        """Whether the current device can register memory that this process may only read."""
        device, value = ctypes.c_int(), ctypes.c_int()
        if self._lib.cudaGetDevice(ctypes.byref(device)):
            self.clear()
            return False
        if self._lib.cudaDeviceGetAttribute(ctypes.byref(value), _ATTR_READ_ONLY_SUPPORTED, device):
            self.clear()
            return False
        return bool(value.value)

    def register(self, address: int, size: int, stride: int, *, read_only: bool) -> Registered:
        """Register a mapping in pieces at slot boundaries; nothing stays registered where one of them fails.

        Must not run during a graph capture. A failure leaves no pending error behind for the next kernel launch to find.
        """
        flags = REGISTER_PORTABLE
        if read_only:
            if not self.read_only_supported():
                return Registered(
                    (), "the device does not support read-only registration; copies from this arena are unpinned"
                )
            flags |= REGISTER_READ_ONLY
        done: list[tuple[int, int]] = []
        for offset, part in pieces(size, stride):
            code = self._lib.cudaHostRegister(address + offset, part, flags)
            if code:
                self.clear()
                self.unregister(done)
                return Registered((), f"cudaHostRegister of {part} bytes: {self._text(code)}")
            done.append((address + offset, part))
        return Registered(tuple(done))

    def copy_rows(
        self, to: tuple[int, int], source: tuple[int, int], width: int, rows: int, stream: int, *, pinned: bool
    ) -> None:
        """Copy `rows` rows of `width` bytes on a stream; `to` and `source` are `(address, bytes from row to row)`, each on the host or a device.

        pinned: the host's side is registered, so that the call only enqueues. Otherwise it may wait for the copy, and lets other threads run.

        :raises CudaFailed: where the runtime refuses.
        """
        lib = self._enqueue if pinned else self._lib
        code = lib.cudaMemcpy2DAsync(to[0], to[1], source[0], source[1], width, rows, _MEMCPY_DEFAULT, stream)
        if code:
            self.clear()
            raise CudaFailed(f"cudaMemcpy2DAsync of {rows} rows of {width} bytes: {self._text(code)}")

    def unregister(self, ranges: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> None:
        """Unregister ranges: before they are unmapped."""
        for address, _ in ranges:
            if self._lib.cudaHostUnregister(address):
                self.clear()

    def clear(self) -> None:
        """Take the pending error, so that nobody else finds it."""
        self._lib.cudaGetLastError()

    def _text(self, code: int) -> str:
        return str((self._lib.cudaGetErrorString(code) or b"").decode("ascii", "replace"))
