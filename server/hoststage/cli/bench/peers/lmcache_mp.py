"""Runs in LMCache's own environment: starts its multiprocess server and drives it as an engine's worker. Imports nothing of ours.

The worker's part is LMCache's engine-driven transfer over shared memory, what it uses on a machine without CUDA: prepare, copy, commit.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

CHUNK_TOKENS = 256
START_SECONDS = 60.0
CALL_SECONDS = 30.0


def start_server(transport: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start the server on a free port of this host; return it and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Its name for the shared memory must be new: servers that were killed leave theirs behind.
    command = [
        *(sys.executable, "-m", "lmcache.v1.multiprocess.server", "--transport", transport, "--host", "127.0.0.1"),
        *("--port", str(port), "--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"),
        *("--l1-size-gb", "1", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *("--shm-name", f"hoststage-bench-{os.getpid()}", "--disable-observability"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    return process, f"{'tcp' if transport == 'zmq' else 'grpc'}://127.0.0.1:{port}"


class Worker:
    """One engine worker with pages of one size: a chunk of LMCache is a page of ours."""

    def __init__(self, client: Any, page_bytes: int, number: int) -> None:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
        from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm

        self._client, self._key_of, self._instance = client, IPCCacheServerKey.from_token_ids, number
        self._model = f"bench-{page_bytes}"
        payload = RegisterEngineDrivenContextPayload(
            instance_id=number,
            model_name=self._model,
            world_size=1,
            block_size=16,
            num_layers=1,
            hidden_dim_size=page_bytes // CHUNK_TOKENS // 4,
            dtype_str="float16",
            use_mla=False,
        )
        granted = client.register_kv_cache_engine_driven_context(payload).result(timeout=CALL_SECONDS)
        if not granted.shm_name:
            raise SystemExit("the server granted no shared memory")
        fields = getattr(EngineDrivenContextMetadata, "__dataclass_fields__", {})
        facts = {"layout_desc": None, "block_size": 16, "use_mla": False}
        metadata = EngineDrivenContextMetadata(**{k: v for k, v in facts.items() if k in fields})
        self._memory = EngineDrivenContextShm(metadata, client, CALL_SECONDS, granted.shm_name, granted.pool_size)
        self._requests = itertools.count()
        self._last: dict[int, list[int]] = {}
        self._rows: dict[int, Any] = {}

    def _key(self, tokens: list[int], reader: int | None) -> Any:
        request = f"{self._instance}-{next(self._requests)}"
        return self._key_of(self._model, 1, reader, tokens, 0, len(tokens), request_id=request)

    def rows(self, batch: int, page_bytes: int) -> Any:
        """Return the caller's memory, one row a page."""
        import torch

        if batch not in self._rows:
            self._rows[batch] = torch.randint(0, 256, (batch, page_bytes), dtype=torch.uint8)
        return self._rows[batch]

    def store(self, batch: int, page_bytes: int) -> float:
        """Store a batch of fresh chunks; return seconds until the server has committed it."""
        import torch

        rows = self.rows(batch, page_bytes)
        first = time.monotonic_ns() % (1 << 31)
        tokens = [first, *range(1, batch * CHUNK_TOKENS)]
        self._last[batch] = tokens
        key = self._key(tokens, 0)
        started = time.perf_counter()
        prepared = self._memory.prepare_store(key, self._instance)
        if prepared is None or len(prepared[0]) != batch:
            raise SystemExit("the server did not take the whole batch")
        for row, slot in zip(rows, prepared[0], strict=True):
            slot.view(-1).view(torch.uint8).copy_(row)
        if not self._memory.commit_store(key, self._instance, []):
            raise SystemExit("the server did not commit")
        seconds = time.perf_counter() - started
        self._client.end_session(key.request_id).result(timeout=CALL_SECONDS)
        return seconds

    def load(self, batch: int, page_bytes: int) -> float:
        """Look the last batch up and copy it to the caller's memory; return seconds."""
        import torch

        rows = self.rows(batch, page_bytes)
        key = self._key(self._last[batch], 0)
        started = time.perf_counter()
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=CALL_SECONDS)
        found = None
        while found is None:
            found = self._client.wait_prefetch_status(key.request_id, CALL_SECONDS).result(timeout=2 * CALL_SECONDS)
        slots = self._memory.prepare_retrieve(key, self._instance)
        if slots is None or len(slots) != batch:
            raise SystemExit(f"the server found {found} and handed out {0 if slots is None else len(slots)} of {batch}")
        for row, slot in zip(rows, slots, strict=True):
            row.copy_(slot.view(-1).view(torch.uint8))
        self._memory.commit_retrieve(key, self._instance)
        seconds = time.perf_counter() - started
        self._client.end_session(key.request_id).result(timeout=CALL_SECONDS)
        return seconds


def main(transport: str) -> None:
    """Answer one request a line: ["store" or "load", pages, bytes of a page] → {"seconds": …}."""
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    server, address = start_server(transport)
    try:
        client: Any = RequestClientFactory.create(address)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client.noop().result(timeout=2.0)
                break
            except Exception as error:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not answer: {error!r}") from None
                time.sleep(0.2)
        workers: dict[int, Worker] = {}
        print(json.dumps({"event": "ready"}), flush=True)
        for line in sys.stdin:
            operation, batch, page_bytes = json.loads(line)
            if page_bytes not in workers:
                workers[page_bytes] = Worker(client, page_bytes, 1000 + len(workers))
            call = workers[page_bytes].store if operation == "store" else workers[page_bytes].load
            print(json.dumps({"seconds": call(batch, page_bytes)}), flush=True)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.chdir(tempfile.gettempdir())
    main(sys.argv[1])
