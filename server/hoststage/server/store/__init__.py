"""The storage backends (L3) behind one small asynchronous protocol."""

from __future__ import annotations

from hoststage.server.store.base import (
    BreakerState,
    PageRead,
    PageReadResult,
    PageWrite,
    PageWriteResult,
    ReadOutcome,
    Store,
    StoreStats,
    WriteOutcome,
)
from hoststage.server.store.breaker import BreakerOptions, BreakerStore
from hoststage.server.store.errors import StoreClosedError, StoreConfigError, StoreError
from hoststage.server.store.factory import open_store
from hoststage.server.store.options import DirectIo, StoreOptions, SyncPolicy

__all__ = [
    "BreakerOptions",
    "BreakerState",
    "BreakerStore",
    "DirectIo",
    "PageRead",
    "PageReadResult",
    "PageWrite",
    "PageWriteResult",
    "ReadOutcome",
    "Store",
    "StoreClosedError",
    "StoreConfigError",
    "StoreError",
    "StoreOptions",
    "StoreStats",
    "SyncPolicy",
    "WriteOutcome",
    "open_store",
]
