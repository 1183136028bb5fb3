"""What the tests of engines share: a daemon of a module's own, and torch's process group of one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    # In a short path of its own: that of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="512MiB").start()
        yield daemon
        daemon.kill()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Only in an engine's own environment is torch there for sure.
    import torch

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
