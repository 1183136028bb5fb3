"""The light client stays light."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_client_needs_neither_daemon_nor_torch():
    code = (
        "import sys, hoststage.client, hoststage.client.aio\n"
        "heavy = {'torch', 'uvloop', 'pydantic', 'typer', 'structlog', 'xxhash', 'aiohttp', 'hoststage.server', 'hoststage.core'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in ("proto", "client"))}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
