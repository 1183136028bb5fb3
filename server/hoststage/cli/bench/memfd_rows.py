"""Rows of pages in a memfd of this process, which the daemon reads and writes itself."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.client import ImportedPages, Session

Pages = npt.NDArray[np.uint8]


class MemfdRows:
    """One array of pages a pool, side by side in one memfd that is imported into a session. They stay mapped until the process ends."""

    def __init__(self, session: Session, names: Sequence[str], count: int, page_bytes: int) -> None:
        size = len(names) * count * page_bytes
        fd = os.memfd_create("bench", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            memory: Any = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
            imported = session.import_memory(fd, name="bench")
        finally:
            os.close(fd)
        each = memory.reshape(len(names), count, page_bytes)
        self.arrays: dict[str, Pages] = {name: each[i] for i, name in enumerate(names)}
        sizes = np.array([page_bytes], dtype=np.int64)
        self.pages = {
            name: ImportedPages(imported, (i * count + np.arange(count, dtype=np.int64))[:, None] * page_bytes, sizes)
            for i, name in enumerate(names)
        }
