"""Opens the store that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from hoststage.server.store.base import Store
from hoststage.server.store.errors import StoreConfigError
from hoststage.server.store.file import FileStore
from hoststage.server.store.memory import MemoryStore
from hoststage.server.store.null import NullStore
from hoststage.server.store.options import StoreOptions

_LONGEST_DELAY = 60.0
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
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return _memory_of(url, options.limit_bytes)
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


def _memory_of(url: str, limit_bytes: int) -> MemoryStore:
    """Return a memory store. ``?read_delay=0.2&write_delay=0.2`` make each call take so many seconds, for tests."""
    parts = urlsplit(url)
    delays = {"read_delay": 0.0, "write_delay": 0.0}
    try:
        for name, value in parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)):
            if name not in delays or not 0 <= float(value) <= _LONGEST_DELAY:
                raise ValueError(name)
            delays[name] = float(value)
        if parts.netloc or parts.path or parts.fragment:
            raise ValueError(url)
    except ValueError as error:
        raise StoreConfigError(
            "store.url",
            url,
            "It is no address of a memory store.",
            f"Write it as memory: or, for tests, memory:?read_delay=0.2&write_delay=0.2 (seconds, at most {_LONGEST_DELAY:g}).",
        ) from error
    store = MemoryStore(limit_bytes)
    store.faults.read_delay, store.faults.write_delay = delays["read_delay"], delays["write_delay"]
    return store
