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
_SGLANG_PLACES = ("/var/cache/hoststage/engines-sglang/bin/python", "~/.cache/hoststage/engines-sglang/bin/python")


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
    places = [os.environ.get(SGLANG_PYTHON, ""), *(os.path.expanduser(place) for place in _SGLANG_PLACES)]
    python = next((place for place in places if place and Path(place).exists()), None)
    if python is None:
        raise PeerAbsent(
            f"there is no environment with sglang; run tools/engine_env.sh sglang, or name one in {SGLANG_PYTHON}"
        )
    return SglangPeer(python, folder)
