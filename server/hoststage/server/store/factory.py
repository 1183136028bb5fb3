"""Opens the store that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from hoststage.server.store.base import Store
from hoststage.server.store.errors import StoreConfigError
from hoststage.server.store.file import FileStore
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
    parts = urlsplit(url)
    if parts.scheme == "file":
        return await FileStore.open(_path_of(url), options)
    raise StoreConfigError("store.url", url, "No driver serves this address.", f"Use one of: {', '.join(SUPPORTED)}.")


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or parts.query or parts.fragment or "\0" in path:
        raise StoreConfigError(
            "store.url", url, "It does not name a local, absolute path.", "Write it as file:///absolute/path."
        )
    return Path(path)
