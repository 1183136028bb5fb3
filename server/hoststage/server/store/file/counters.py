"""The counters of a file store since it was opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Pages and bytes; the names are those of ``StoreStats``."""

    reads: int = 0
    writes: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    read_failed: int = 0
    read_bytes: int = 0
    stored: int = 0
    written_bytes: int = 0
    full: int = 0
    failed: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    deleted_pages: int = 0
