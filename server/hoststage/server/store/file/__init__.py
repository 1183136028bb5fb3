"""The file store: pages in sparse segment files under one directory, with their index in memory."""

from __future__ import annotations

from hoststage.server.store.file.driver import FileStore

__all__ = ["FileStore"]
