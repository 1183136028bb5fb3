"""Redis or Valkey over a Unix socket: pages are values."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hoststage.cli.bench.peers import PeerAbsent

_START_SECONDS = 10.0


class RedisPeer:
    """A server of our own without persistence, and one client. Batches go in one pipeline."""

    def __init__(self) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            raise PeerAbsent("there is no valkey-server or redis-server (Debian: apt-get install redis-server)")
        try:
            import redis
        except ImportError:
            raise PeerAbsent("the Python package redis is not installed (pip install 'hoststage[bench]')") from None
        self.name = "Valkey" if program.endswith("valkey-server") else "Redis"
        self._folder = tempfile.TemporaryDirectory(prefix="hoststage-bench-")
        path = str(Path(self._folder.name) / "redis.sock")
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        command += ["--dir", self._folder.name, "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client: Any = redis.Redis(unix_socket_path=path)
        self._names = itertools.count()
        self._pages: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}
        self._last: dict[tuple[int, int], list[str]] = {}
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._client.ping()
                break
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline:
                    self.close()
                    raise PeerAbsent(f"{program} did not start within {_START_SECONDS:g} s") from None
                time.sleep(0.02)

    def store(self, batch: int, page_bytes: int) -> float:
        """Set one key a page."""
        shape = (batch, page_bytes)
        if shape not in self._pages:
            self._pages[shape] = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        rows = self._pages[shape]
        keys = [f"page-{next(self._names)}" for _ in range(batch)]
        self._last[shape] = keys
        started = time.perf_counter()
        if batch == 1:
            self._client.set(keys[0], memoryview(rows[0]))
        else:
            pipeline = self._client.pipeline(transaction=False)
            for key, row in zip(keys, rows, strict=True):
                pipeline.set(key, memoryview(row))
            pipeline.execute()
        return time.perf_counter() - started

    def load(self, batch: int, page_bytes: int) -> float:
        """Get every page and copy it to the caller's memory."""
        shape = (batch, page_bytes)
        keys, rows = self._last[shape], self._pages[shape]
        started = time.perf_counter()
        found = [self._client.get(keys[0])] if batch == 1 else self._client.mget(keys)
        for row, value in zip(rows, found, strict=True):
            if value is None:
                raise PeerAbsent(f"{self.name} lost a page; its memory is too small for the measurement")
            ctypes.memmove(row.ctypes.data, value, page_bytes)
        return time.perf_counter() - started

    def close(self) -> None:
        """Stop the server."""
        self._client.close()
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
