"""Peers that live in another Python environment: a script there does the work and the timing, driven line by line."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from hoststage.cli.bench.peers import PeerAbsent

SGLANG_PYTHON = "HOSTSTAGE_BENCH_SGLANG_PYTHON"
MOONCAKE_PYTHON = "HOSTSTAGE_BENCH_MOONCAKE_PYTHON"
LMCACHE_PYTHON = "HOSTSTAGE_BENCH_LMCACHE_PYTHON"
_CACHES = ("/var/cache/hoststage", "~/.cache/hoststage")


class ForeignPeer:
    """A script beside this module, run by another interpreter. Raises `PeerAbsent` where it does not come up."""

    def __init__(self, name: str, python: str, script: str, argument: str, environment: Mapping[str, str]) -> None:
        self.name = name
        path = Path(__file__).with_name(script)
        # -I: none of our import roots may leak into the other environment.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 — closed with the peer
        self._process = subprocess.Popen(
            [python, "-I", str(path), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env={**os.environ, **environment},
        )
        answer = self._answer()
        if answer.get("event") != "ready":
            self.close()
            raise PeerAbsent(f"{name} did not start: {answer.get('error', 'no word from it')}")

    def store(self, batch: int, page_bytes: int) -> float:
        """Store a batch there."""
        return self.ask("store", batch, page_bytes)

    def load(self, batch: int, page_bytes: int) -> float:
        """Load the last batch of that shape there."""
        return self.ask("load", batch, page_bytes)

    def ask(self, operation: str, batch: int, page_bytes: int) -> float:
        """Ask the script for an operation that it knows; return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([operation, batch, page_bytes]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "seconds" not in answer:
            raise PeerAbsent(f"{self.name} failed at {operation}: {answer.get('error', 'no word from it')}")
        return float(str(answer["seconds"]))

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, object] = json.loads(line)
                return answer
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        return {"error": words[-1] if words else "it ended"}

    def close(self) -> None:
        """End the script."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SglangPeer(ForeignPeer):
    """SGLang's file backend, in a folder of its own."""

    def __init__(self, python: str, folder: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hoststage-bench-", dir=folder)
        try:
            super().__init__("SGLang's file backend", python, "sglang_file.py", self._folder.name, {})
        except PeerAbsent:
            self._folder.cleanup()
            raise

    def store_synced(self, batch: int, page_bytes: int) -> float:
        """Store a batch and make the device have it, as direct I/O does."""
        return self.ask("store synced", batch, page_bytes)

    def load_cold(self, batch: int, page_bytes: int) -> float:
        """Load a batch that the kernel's page cache no longer holds."""
        return self.ask("load cold", batch, page_bytes)

    def close(self) -> None:
        """End it and remove its files."""
        super().close()
        self._folder.cleanup()


def open_sglang(folder: Path | None) -> SglangPeer:
    """Return SGLang's file backend under `folder`. Raises `PeerAbsent`."""
    return SglangPeer(_python("sglang", "engines-sglang", "tools/engine_env.sh sglang", SGLANG_PYTHON), folder)


def open_lmcache(transport: str) -> ForeignPeer:
    """Return LMCache's multiprocess server over `zmq` or `grpc`, in CPU mode. Raises `PeerAbsent`."""
    python = _python("lmcache", "peers-lmcache", "tools/peer_env.sh lmcache", LMCACHE_PYTHON)
    return ForeignPeer(f"LMCache ({transport})", python, "lmcache_mp.py", transport, {})


def open_mooncake(kind: str) -> ForeignPeer:
    """Return Mooncake's client of a node over `shm` or `tcp`. Raises `PeerAbsent`."""
    python = _python("mooncake", "peers-mooncake", "tools/peer_env.sh mooncake", MOONCAKE_PYTHON)
    return ForeignPeer(f"Mooncake ({kind})", python, "mooncake_client.py", kind, {})


def _python(package: str, place: str, recipe: str, variable: str) -> str:
    places = [os.environ.get(variable, ""), *(f"{os.path.expanduser(cache)}/{place}/bin/python" for cache in _CACHES)]
    python = next((path for path in places if path and Path(path).exists()), None)
    if python is None:
        raise PeerAbsent(f"there is no environment with {package}; run {recipe}, or name its Python in {variable}")
    return python
