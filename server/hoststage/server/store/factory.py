"""Opens the store that a URL names."""

from __future__ import annotations

from hoststage.server.store.base import Store
from hoststage.server.store.errors import StoreConfigError
from hoststage.server.store.memory import MemoryStore
from hoststage.server.store.null import NullStore
from hoststage.server.store.options import StoreOptions

SUPPORTED = ("file:///absolute/path", "memory:", "none")


async def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open the store at ``url`` on the running event loop, and return it when it is ready for calls.

    Recovery of an index happens off the loop; the caller awaits it. Raises ``StoreConfigError`` for a URL
    that no driver serves, for bad options, and for a medium that cannot be used.
    """
    options = options or StoreOptions()
    options.check()
    if url == "none":
        return NullStore()
    if url == "memory:":
        return MemoryStore(options.limit_bytes)
    raise StoreConfigError("store.url", url, "No driver serves this address.", f"Use one of: {', '.join(SUPPORTED)}.")
