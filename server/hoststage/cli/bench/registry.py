"""The cases of the benchmark, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hoststage.cli.bench import cases_memory, cases_peers, cases_scale, cases_store, cases_sweep
from hoststage.cli.bench.rig import Rig


@dataclass(frozen=True, slots=True)
class Case:
    """A case. quick_seconds: what it takes with `--quick` on two cores, by which a quick run leaves out what it has no time for."""

    name: str
    run: Callable[[Rig], None]
    quick_seconds: float

    @property
    def help(self) -> str:
        """The first line of what it says of itself."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("store_batch", cases_memory.store_batch, 4),
        Case("load_views", cases_memory.load_views, 4),
        Case("lookup_ping", cases_memory.lookup_ping, 4),
        Case("one_page", cases_memory.one_page, 5),
        Case("inline", cases_memory.inline_stream, 7),
        Case("copies", cases_memory.copies, 5),
        Case("file_store", cases_store.file_store, 15),
        Case("handshake", cases_scale.handshake, 5),
        Case("residency", cases_scale.residency, 8),
        Case("peers", cases_peers.peers, 35),
        Case("prefault", cases_scale.prefault, 7),
        Case("fairness", cases_scale.fairness, 15),
        Case("flatness", cases_scale.flatness, 12),
        Case("sweep", cases_sweep.sweep, 35),
    )
}
