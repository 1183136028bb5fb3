"""What operators look at, through their own tools: a real Prometheus scrapes, a real browser renders the page."""

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request

import numpy as np
import pytest

from hoststage.client import Identity, PoolKind, PoolSpec, StackSpec, connect
from tests.integration.daemon import Daemon, eventually

BROWSER_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--virtual-time-budget=4000",
        "--hide-scrollbars",
    ),
]


def need(program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install {program})")


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A daemon with a session that stored eight pages and leases some."""
    daemon = Daemon(tmp_path_factory.mktemp("operators")).start()
    stack = StackSpec(
        identity=Identity(model="observed <model>"),
        pools=(PoolSpec(name="kv", kind=PoolKind.KV, page_bytes=8192, page_tokens=16, host_slots=64),),
    )
    keys = [bytes([i]) * 32 for i in range(8)]
    with connect(daemon.address, stack=stack, worker="worker-7", client="test") as session:
        assert session.store(keys, {"kv": np.zeros((8, 8192), dtype=np.uint8)}).wait(20)
        with session.load(keys) as loaded:
            assert loaded.prefix == 8
            yield daemon
    daemon.kill()


def test_the_exposition_passes_the_linter(busy):
    need("promtool")
    result = subprocess.run(
        ["promtool", "check", "metrics"],
        input=busy.get("/metrics"),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    ours = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("hoststage")]
    assert ours == []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_real_prometheus_scrapes_the_daemon(busy, tmp_path):
    need("prometheus")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: hoststage, static_configs: [{{targets: ['{busy.http}']}}]}}]\n"
    )
    port = free_port()
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]

    def query(expression):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return json.load(response)["data"]["result"]
        except OSError:
            return []

    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        [up] = eventually(lambda: query("up{job='hoststage'} == 1"), 40)
        assert up["value"][1] == "1"
        [stored] = eventually(lambda: query("hoststage_commit_pages_total{outcome='stored'}"), 20)
        assert float(stored["value"][1]) == 8
        [leases] = query("hoststage_read_leases")
        assert float(leases["value"][1]) == 8
    finally:
        process.terminate()
        process.wait(20)


def browse(busy, profile, *flags):
    command = ["chromium", *BROWSER_FLAGS, f"--user-data-dir={profile}", *flags, f"http://{busy.http}/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


def test_the_page_shows_the_session_the_pools_and_the_store(busy, tmp_path):
    need("chromium")
    page = browse(busy, tmp_path, "--dump-dom")
    assert 'role="status" class="good">ready<' in page
    for text in ("worker-7", "observed &lt;model&gt;", "buffer_only", "shm", "ready 8", "8 pages"):
        assert text in page, text
    assert "observed <model>" not in page, "what clients say of themselves is text, never markup"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen(busy, tmp_path, width):
    need("chromium")
    shot = tmp_path / "page.png"
    browse(busy, tmp_path / "profile", f"--window-size={width},900", f"--screenshot={shot}")
    assert shot.stat().st_size > 10_000
