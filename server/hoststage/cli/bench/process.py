"""What processes cost, and the daemons and servers that a run starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 60.0
_COPIES = re.compile(r"^hoststage_page_copies_total\s+([0-9.e+]+)", re.MULTILINE)


class BenchError(Exception):
    """The benchmark cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Core-seconds of a process so far: by `/proc/PID/stat` (whole clock ticks), and by its living threads (nanoseconds)."""

    ticks: float
    threads: float

    @classmethod
    def of(cls, pid: int) -> CpuTime:
        """Read both, user and system time together."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile, or the kernel keeps no such account
                threads += int((task / "schedstat").read_text().split()[0])
        return cls((int(fields[11]) + int(fields[12])) / _TICKS, threads / 1e9)

    def since(self, before: CpuTime) -> float:
        """Return core-seconds since then. The fine account loses threads that ended; the coarse one is off by a tick at each end."""
        return max(self.threads - before.threads, self.ticks - before.ticks - 2 / _TICKS, 0.0)


def own_cpu_seconds() -> float:
    """Return core-seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes(pid: int, *, anonymous: bool = False) -> int:
    """Return resident memory of a process; anonymous alone leaves shared memory and files out."""
    text = Path(f"/proc/{pid}/status").read_text()
    field = "RssAnon" if anonymous else "VmRSS"
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise BenchError(f"/proc/{pid}/status has no {field}; this kernel is too old for the measurement")
    return int(found[1]) << 10


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon that is measured. `http`: host:port of its operators' page, empty where it has none. `folder`: of a daemon of our own."""

    address: str
    http: str
    pid: int
    store: str
    folder: Path | None = None

    def copies(self) -> float | None:
        """Return pages that the daemon has copied so far, None where it has no metrics."""
        if not self.http:
            return None
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as response:
            found = _COPIES.search(response.read().decode())
        return float(found[1]) if found else None


@contextlib.contextmanager
def own_daemon(store: str, budget: int, store_limit: int, settings: tuple[str, ...] = ()) -> Iterator[Node]:
    """Run a daemon in a temporary folder. store: `file`, `memory:` or `none`; budget, store_limit: bytes. Raises `BenchError`."""
    folder = Path(tempfile.mkdtemp(prefix="hoststage-bench-"))
    (folder / "store").mkdir()
    url = f"file://{folder / 'store'}" if store == "file" else store
    socket_path = folder / "hoststage.sock"
    command = [
        *(sys.executable, "-m", "hoststage.cli.main", "serve", "--socket", str(socket_path)),
        *("--http", "127.0.0.1:0", "--store", url, "--log-format", "json", "--budget", str(budget)),
        *("--set", "store.min_free=256MiB", "--set", f"store.limit={store_limit}"),
        *(part for setting in settings for part in ("--set", setting)),
    ]
    log = folder / "daemon.log"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HOSTSTAGE_")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=clean)
    try:
        http = _wait_ready(process, log)
        yield Node(f"unix://{socket_path}", http, process.pid, store, folder)
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    http = ""
    while True:
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event.get("event") == "http.ready":
                    http = str(event["address"])
                if event.get("event") == "daemon.ready":
                    return http
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"the daemon did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def given_daemon(address: str, http: str) -> Node:
    """Return a daemon that runs already, found by its Unix socket. Raises `BenchError`."""
    path = address.removeprefix("unix://").removeprefix("unix:")
    if not path.startswith("/"):
        raise BenchError(
            f"--address {address}: name a Unix socket, unix:///path; processes of other hosts cannot be measured"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise BenchError(f"--address {address}: nobody answers there ({error}); start hoststage serve") from None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Node(f"unix://{path}", http, pid, "given")


@contextlib.contextmanager
def helper_server(kind: str) -> Iterator[str]:
    """Run one of the bare servers of `servers.py` in a process of its own; yields the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="hoststage-bench-") as folder:
        path = str(Path(folder) / "s.sock")
        command = [sys.executable, "-m", "hoststage.cli.bench.servers", kind, path]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != b"ready":
                raise BenchError(f"the bare {kind} server did not start")
            yield path
        finally:
            _end(process)
            process.stdout.close()


def memory_available() -> int:
    """Return bytes that the machine could still give."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0
