"""What the machine itself can do: copies, pings, direct I/O, populating memory, and a plain gRPC stream."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.wrappers_pb2 import BytesValue

from hoststage.cli.bench.process import own_cpu_seconds
from hoststage.cli.bench.servers import CHANNEL_OPTIONS, SERVICE

Pages = npt.NDArray[np.uint8]
_libc = ctypes.CDLL(None)
_memmove = _libc.memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memset = _libc.memset
_memset.restype = ctypes.c_void_p
_memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
PING_BYTES = 64


def aligned(shape: tuple[int, int]) -> Pages:
    """Return populated memory of `shape` bytes that begins at a memory page, as direct I/O needs it."""
    return aligned_on(mmap.mmap(-1, shape[0] * shape[1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), shape)


def aligned_on(memory: mmap.mmap, shape: tuple[int, int]) -> Pages:
    """Return an array over a mapping, every page touched."""
    out = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    out[:] = 1
    return out


class Memcpy:
    """Copies pages one by one into a ring of slots in shared memory, as a client that had the arena to itself."""

    def __init__(self, page_bytes: int, slots: int) -> None:
        shape = (max(1, slots), page_bytes)
        self._ring = aligned_on(mmap.mmap(-1, shape[0] * shape[1]), shape)
        self._base = self._ring.ctypes.data
        self._page_bytes = page_bytes
        self._next = 0

    def copy_in(self, pages: Pages) -> float:
        """Copy pages into the ring; return seconds."""
        source, size, slots = pages.ctypes.data, self._page_bytes, len(self._ring)
        started = time.perf_counter()
        for i in range(len(pages)):
            _memmove(self._base + self._next * size, source + i * size, size)
            self._next = (self._next + 1) % slots
        return time.perf_counter() - started

    def copy_out(self, pages: Pages) -> float:
        """Copy pages out of the ring; return seconds."""
        target, size, slots = pages.ctypes.data, self._page_bytes, len(self._ring)
        started = time.perf_counter()
        for i in range(len(pages)):
            _memmove(target + i * size, self._base + self._next * size, size)
            self._next = (self._next + 1) % slots
        return time.perf_counter() - started


class Ping:
    """Round trips over a raw Unix socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._payload = bytes(PING_BYTES)

    def __call__(self) -> float:
        """Send one payload there and back; return seconds."""
        started = time.perf_counter()
        self._socket.sendall(self._payload)
        left = PING_BYTES
        while left:
            left -= len(self._socket.recv(left))
        return time.perf_counter() - started

    def __enter__(self) -> Ping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


class DirectIO:
    """Direct reads and writes of whole pages at a fixed depth, into fresh files on the file system of `folder`.

    files: the last so many are kept, and read in turn: one that is read over and over comes from the cache of whatever carries the disk.
    """

    def __init__(self, folder: Path, page_bytes: int, pages: int, depth: int, files: int = 1) -> None:
        self._folder = folder
        self._page_bytes = page_bytes
        self._memory = aligned((pages, page_bytes))
        self._depth = depth
        self._count = 0
        self._most = files
        self._files: deque[Path] = deque()
        self.cpu_seconds = 0.0

    def write(self) -> float:
        """Write all pages into a new file whose room is reserved beforehand; return seconds."""
        while len(self._files) >= self._most:
            self._files.popleft().unlink()
        self._count += 1
        self._files.append(self._folder / f"direct{self._count}.bin")
        handle = os.open(self._files[-1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(handle, 0, self._memory.nbytes)
        return self._run(handle, lambda at, row: os.pwrite(handle, row, at))

    def read(self) -> float:
        """Read all pages of the file whose turn it is; return seconds."""
        handle = os.open(self._files[0], os.O_RDONLY | os.O_DIRECT)
        self._files.rotate(-1)
        return self._run(handle, lambda at, row: os.preadv(handle, [row], at))

    def read_at(self, places: Sequence[tuple[Path, int]]) -> float:
        """Read one page from each of those places of somebody else's files; return seconds."""
        handles = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in {file for file, _ in places}}

        def read(at: int, row: memoryview) -> None:
            file, place = places[at // self._page_bytes]
            os.preadv(handles[file], [row], place)

        try:
            return self._timed(read)
        finally:
            for handle in handles.values():
                os.close(handle)

    def _run(self, handle: int, call: Any) -> float:
        try:
            return self._timed(call)
        finally:
            os.close(handle)

    def _timed(self, call: Any) -> float:
        rows: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(self._memory)):
            rows.put(i)

        def work() -> None:
            while True:
                try:
                    i = rows.get_nowait()
                except queue.Empty:
                    return
                call(i * self._page_bytes, self._memory[i].data)

        with ThreadPoolExecutor(self._depth) as pool:
            cpu, started = own_cpu_seconds(), time.perf_counter()
            for done in [pool.submit(work) for _ in range(self._depth)]:
                done.result()
            seconds = time.perf_counter() - started
            self.cpu_seconds += own_cpu_seconds() - cpu
        return seconds


class PlainStream:
    """Pages as protobuf bytes over one bidirectional gRPC stream each way."""

    def __init__(self, path: str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self._streams: dict[str, tuple[queue.SimpleQueue[Any], Any]] = {}
        for name in ("Store", "Load"):
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            call = self._channel.stream_stream(
                f"/{SERVICE}/{name}", BytesValue.SerializeToString, BytesValue.FromString
            )
            self._streams[name] = (requests, call(iter(requests.get, None)))

    def store(self, pages: Pages) -> float:
        """Send pages and wait for the answer to all of them; return seconds."""
        requests, replies = self._streams["Store"]
        started = time.perf_counter()
        for page in pages:
            requests.put(BytesValue(value=page.tobytes()))
        requests.put(BytesValue())
        next(replies)
        return time.perf_counter() - started

    def load(self, into: Pages) -> float:
        """Receive the pages that were sent last and copy them to the caller's memory; return seconds."""
        requests, replies = self._streams["Load"]
        started = time.perf_counter()
        requests.put(BytesValue(value=str(len(into)).encode()))
        for row in into:
            page = next(replies).value
            _memmove(row.ctypes.data, page, len(page))
        return time.perf_counter() - started

    def close(self) -> None:
        """End both streams."""
        for requests, _ in self._streams.values():
            requests.put(None)
        self._channel.close()


def parallel_memset(size: int, threads: int) -> float:
    """Populate fresh shared memory of `size` bytes with `threads` threads; return seconds."""
    handle = os.memfd_create("hoststage-bench")
    try:
        os.ftruncate(handle, size)
        memory = mmap.mmap(handle, size)
        view = np.frombuffer(memory, dtype=np.uint8)
        base, share = view.ctypes.data, -(-size // threads)
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            parts = [
                pool.submit(_memset, base + i * share, 0, max(0, min(share, size - i * share))) for i in range(threads)
            ]
            for part in parts:
                part.result()
            seconds = time.perf_counter() - started
        del view
        memory.close()
        return seconds
    finally:
        os.close(handle)
