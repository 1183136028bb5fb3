"""Runs in Mooncake's own environment: its master, one client that owns the node's memory, and a worker. Imports nothing of ours.

`shm`: the worker shares a memory pool with the node's client, and its pages lie in that pool, so it copies nothing itself.
`tcp`: the worker's pages lie in memory of its own that is registered, and travel over TCP.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_SECONDS = 30.0
SEGMENT_BYTES = 1 << 30
POOL_BYTES = 256 << 20


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until a server listens."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{name} did not start")
        time.sleep(0.1)


class Worker:
    """The worker: rows of one shape each, stored and loaded by the page."""

    def __init__(self, kind: str, master: int, owner: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._kind = kind
        if kind == "shm":
            status = self._store.setup_dummy(POOL_BYTES, 16 << 20, f"127.0.0.1:{owner}")
        else:
            status = self._store.setup(
                f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{master}"
            )
        if status:
            raise SystemExit(f"the worker could not be set up: status {status}")
        self._names = itertools.count()
        self._rows: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], list[str]] = {}
        self._kept: list[Any] = []

    def _base(self, shape: tuple[int, int]) -> int:
        if shape not in self._rows:
            size = shape[0] * shape[1]
            if self._kind == "shm":
                base = int(self._store.alloc_from_mem_pool(size))
            else:
                self._kept.append(ctypes.create_string_buffer(size))
                base = ctypes.addressof(self._kept[-1])
            if not base or self._store.register_buffer(base, size):
                raise SystemExit("a buffer could not be registered")
            ctypes.memset(base, 7, size)
            self._rows[shape] = base
        return self._rows[shape]

    def store(self, batch: int, page_bytes: int) -> float:
        """Put fresh keys."""
        shape = (batch, page_bytes)
        base = self._base(shape)
        if shape in self._last:
            for key in self._last[shape]:
                self._store.remove(key)
        keys = self._last[shape] = [f"page-{next(self._names)}" for _ in range(batch)]
        places = [base + i * page_bytes for i in range(batch)]
        started = time.perf_counter()
        found = self._store.batch_put_from(keys, places, [page_bytes] * batch)
        seconds = time.perf_counter() - started
        if any(found):
            raise SystemExit(f"a put failed with {found}")
        return seconds

    def load(self, batch: int, page_bytes: int) -> float:
        """Get the last batch into the caller's memory."""
        shape = (batch, page_bytes)
        base = self._base(shape)
        ctypes.memset(base, 0, batch * page_bytes)
        places = [base + i * page_bytes for i in range(batch)]
        started = time.perf_counter()
        found = self._store.batch_get_into(self._last[shape], places, [page_bytes] * batch)
        seconds = time.perf_counter() - started
        if any(n != page_bytes for n in found) or ctypes.string_at(places[-1] + page_bytes - 1, 1) != b"\x07":
            raise SystemExit(f"a get answered {found}")
        return seconds


def main(kind: str) -> None:
    """Answer one request a line: ["store" or "load", pages, bytes of a page] → {"seconds": …}."""
    import mooncake

    programs = Path(mooncake.__path__[0])
    master, metrics, owner = free_port(), free_port(), free_port()
    for program in ("mooncake_master", "mooncake_client"):
        (programs / program).chmod(0o755)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        command = [str(programs / "mooncake_master"), f"--rpc_port={master}", f"--metrics_port={metrics}"]
        servers.append(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
        wait_for(master, servers[-1], "mooncake_master")
        command = [
            *(str(programs / "mooncake_client"), f"--master_server_address=127.0.0.1:{master}", "--protocol=tcp"),
            *("--metadata_server=P2PHANDSHAKE", f"--global_segment_size={SEGMENT_BYTES >> 20} MB", "--host=127.0.0.1"),
            *(f"--port={owner}", "--threads=2"),
        ]
        servers.append(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
        wait_for(owner, servers[-1], "mooncake_client")
        worker = Worker(kind, master, owner)
        print(json.dumps({"event": "ready"}), flush=True)
        for line in sys.stdin:
            operation, batch, page_bytes = json.loads(line)
            call = worker.store if operation == "store" else worker.load
            print(json.dumps({"seconds": call(batch, page_bytes)}), flush=True)
    finally:
        for server in reversed(servers):
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


if __name__ == "__main__":
    os.chdir(tempfile.gettempdir())
    main(sys.argv[1])
