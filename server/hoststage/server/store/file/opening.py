"""The blocking halves of opening, syncing and closing a store; all run off the event loop."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hoststage.server.store.errors import StoreConfigError
from hoststage.server.store.file.directory import StoreDirectory, config_error
from hoststage.server.store.file.index import Entry, Index
from hoststage.server.store.file.recovery import Recovered, recover
from hoststage.server.store.file.segment import Segment
from hoststage.server.store.file.space import Space
from hoststage.server.store.file.syscalls import free_bytes, punch
from hoststage.server.store.options import StoreOptions


@dataclass(frozen=True, slots=True)
class Opened:
    """A locked directory and what it holds."""

    directory: StoreDirectory
    recovered: Recovered
    index: Index
    space: Space


def open_directory(root: Path, options: StoreOptions) -> Opened:
    """Check and lock ``root`` and find its pages. Raises ``StoreConfigError``, and then holds nothing."""
    if options.create_directory:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise config_error(root, error) from error
    directory = StoreDirectory(root, options.direct_io)
    recovered = Recovered()
    try:
        recovered = recover(directory, options.io_threads)
        free, total = free_bytes(root)
        _check_room(options, directory, recovered, free, total)
    except BaseException as error:
        for segment in recovered.segments:
            segment.close()
        directory.close()
        if isinstance(error, OSError):
            raise config_error(root, error) from error
        raise
    index, space = _fill(options, recovered)
    space.look(free)
    return Opened(directory, recovered, index, space)


def _fill(options: StoreOptions, recovered: Recovered) -> tuple[Index, Space]:
    index, space = Index(), Space(options)
    for page in recovered.pages:
        group = index.hold(page.segment.header.namespace, page.key)
        entry = Entry(page.segment, page.slot, page.page_bytes, page.sequence, page.commit_id, page.checksum)
        index.put(group, page.pool, entry)
        index.release(group)
        space.used += page.segment.header.slot_bytes
    return index, space


def _check_room(options: StoreOptions, directory: StoreDirectory, recovered: Recovered, free: int, total: int) -> None:
    if not recovered.pages and free <= options.min_free_bytes:
        raise StoreConfigError(
            "store.min_free_bytes",
            str(options.min_free_bytes),
            f"The disk under {directory.root} has only {free} bytes free, so that nothing could be stored.",
            "Make room on the disk, name a directory on another, or lower the floor.",
        )
    if free <= options.min_free_bytes:
        directory.notices.append(
            f"The disk has {free} bytes free, the floor is {options.min_free_bytes}: there is no room for new pages."
        )
    if options.limit_bytes > total:
        directory.notices.append(
            f"limit_bytes ({options.limit_bytes}) is larger than the disk ({total} bytes): the disk decides."
        )


def sync_segments(segments: Iterable[Segment]) -> dict[Segment, OSError]:
    """Put the written pages of these segments on the medium, and return those for which that failed."""
    failed: dict[Segment, OSError] = {}
    for segment in segments:
        try:
            os.fdatasync(segment.fd)
        except OSError as error:
            failed[segment] = error
    return failed


def trim_segments(segments: Iterable[Segment]) -> None:
    """Give back the blocks that were allocated ahead of writing. Failing that, later pages use them."""
    for segment in segments:
        first = segment.fresh
        if segment.allocated > first:
            start = segment.offset(first)
            punch(segment.fd, start, segment.offset(segment.allocated) - start)
