"""Notes about pages that no longer matched their checksum, for whoever looks into a failing disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

import structlog

from hoststage.server.store.file.index import Entry
from hoststage.server.store.file.pageio import read_trailer

log = structlog.get_logger(__name__)

MOST_NOTES: Final = 64


def write_note(base: Path, entry: Entry, pool: str, key: bytes, problem: str) -> None:
    """Write what is known about a bad page under ``base``. Blocking; a disk that refuses is only logged.

    Only the newest ``MOST_NOTES`` notes are kept.
    """
    segment = entry.segment
    note = {
        "problem": problem,
        "namespace": segment.header.namespace,
        "pool": pool,
        "key": key.hex(),
        "commit_id": entry.commit_id.hex(),
        "page_bytes": entry.page_bytes,
        "sequence": entry.sequence,
        "segment": str(segment.path),
        "offset": segment.offset(entry.slot),
        "trailer": read_trailer(segment, entry.slot).rstrip(b"\0").hex(),
        "noted_at": time.time(),
    }
    folder = base / "quarantine"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{time.time_ns()}.json").write_text(json.dumps(note, indent=2) + "\n")
        for old in sorted(folder.glob("*.json"))[:-MOST_NOTES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("store_note_not_written", path=str(folder), error=error.strerror)
