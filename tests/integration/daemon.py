"""A real daemon process for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return an environment in which child processes find the package, without settings of the developer's own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HOSTSTAGE_")}
    roots = [str(ROOT / r) for r in ("proto", "server", "client")]
    clean["PYTHONPATH"] = os.pathsep.join([*roots, *filter(None, [clean.get("PYTHONPATH")])])
    return clean


@dataclass
class Daemon:
    """`hoststage serve` in a folder of its own. `flags`: further `section.name=value` settings. `store`: its address, by default of files."""

    folder: Path
    flags: list[str] = field(default_factory=list)
    budget: str = "256MiB"
    store: str = ""
    process: subprocess.Popen[bytes] | None = None
    http: str = ""

    @property
    def socket(self) -> Path:
        return self.folder / "h.sock"

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def log_file(self) -> Path:
        return self.folder / "daemon.log"

    def command(self) -> list[str]:
        """The program, without its arguments."""
        return [sys.executable, "-m", "hoststage.cli.main"]

    def environment(self) -> dict[str, str]:
        """Its environment."""
        return environment()

    def start(self) -> Daemon:
        """Start it and wait until it is ready."""
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        command = [
            *(*self.command(), "serve"),
            *("--socket", str(self.socket), "--http", "127.0.0.1:0", "--store", self.store or f"file://{store}"),
            *("--budget", self.budget, "--log-format", "json", "--set", "store.limit=1GiB"),
            *("--set", "store.min_free=64MiB"),
        ]
        for flag in self.flags:
            command += ["--set", flag]
        self.log_file.touch()
        seen = self.log_file.stat().st_size
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment())
        self._wait_ready(seen)
        return self

    def _wait_ready(self, seen: int) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log_file.read_text()}")
            for event in self.events(seen):
                if event.get("event") == "http.ready":
                    self.http = event["address"]
                if event.get("event") == "daemon.ready":
                    return
            time.sleep(0.02)
        raise AssertionError(f"the daemon was not ready in time:\n{self.log_file.read_text()}")

    def events(self, seen: int = 0) -> list[dict]:
        """Return the log's events, from byte `seen` on."""
        out = []
        with self.log_file.open("rb") as log:
            log.seek(seen)
            for line in log.read().decode(errors="replace").splitlines():
                try:
                    out.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return out

    def get(self, path: str) -> str:
        """Return what the operators' port answers."""
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as response:
            return response.read().decode()

    def asked(self, operation: str) -> float:
        """Return how often that operation was requested, whichever way."""
        series = rf'hoststage_request_seconds_count\{{[^}}]*operation="{operation}"[^}}]*\}} ([0-9.e+]+)'
        return sum(map(float, re.findall(series, self.get("/metrics"))))

    def status(self) -> dict:
        """Return the status as data."""
        return json.loads(self.get("/status.json"))

    def kill(self) -> None:
        """SIGKILL it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM it and return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


def eventually(check, seconds: float = 10.0):
    """Return the first truthy result of `check`, asked again and again."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {check}")
        time.sleep(0.01)
