"""Cases through the file store: drain and fill against direct I/O, and what the daemon spends on them."""

from __future__ import annotations

import tempfile
from collections import deque
from functools import partial
from pathlib import Path

from hoststage.cli.bench.ceilings import DirectIO
from hoststage.cli.bench.peers import PeerAbsent
from hoststage.cli.bench.peers.foreign import open_sglang
from hoststage.cli.bench.process import CpuTime
from hoststage.cli.bench.rig import MIB, Rig, ceiling, in_turns, product, ratio
from hoststage.cli.bench.rows import Costs, Kind, at_least, at_most, measured
from hoststage.server.store.file.layout import BLOCK, slot_bytes_for, unpack_segment, unpack_trailer

DEPTH = 8
"""Requests in flight: the daemon's default number of threads for writes, and for reads."""


def file_store(rig: Rig) -> None:
    """Drain and fill of 1 MiB pages against direct I/O at equal depth and SGLang's file backend; the daemon's CPU a GB.

    Neither has a copy of the client's in it, as direct I/O has none: a drain is timed from the commit of pages that were written in
    place until they are stored, a fill until there are views, beside direct reads of the daemon's own files. A store from the caller's memory, its copy included, stands beside them.
    """
    case, rounds = "file_store", rig.settings.pick(3, 9)
    shape = rig.shape(batch=64, store="file")
    with (
        tempfile.TemporaryDirectory(prefix="hoststage-bench-", dir=rig.settings.folder) as folder,
        rig.daemon("file", budget=1 << 30, store_limit=2 << 30) as node,
        rig.client(node, shape, write=2 * shape.batch, read=2 * shape.batch) as client,
    ):
        io = DirectIO(Path(folder), shape.page_bytes, shape.batch, DEPTH, files=rounds + 1)
        spent = {"drain": 0.0, "fill": 0.0, "direct drain": 0.0, "direct fill": 0.0}

        def drain() -> float:
            before = CpuTime.of(node.pid)
            seconds = client.drain()
            spent["drain"] += CpuTime.of(node.pid).since(before)
            return seconds

        def fill() -> float:
            before = CpuTime.of(node.pid)
            # The oldest run: in buffer_only nothing stays in host memory, and both sides bypass the kernel's cache.
            seconds = client.views(client.runs[0])
            client.runs.append(client.runs.pop(0))
            spent["fill"] += CpuTime.of(node.pid).since(before)
            return seconds

        stretches: deque[list[tuple[Path, int]]] = deque()

        def bare_read() -> float:
            if not stretches and node.folder is not None:
                found = _stretches(node.folder, shape.page_bytes, shape.batch)
                # Half a turn away from what the daemon reads: neither finds the other's pages in the cache of whatever carries the disk.
                stretches.extend(found[len(found) // 2 :] + found[: len(found) // 2])
            if not stretches:
                return io.read()
            stretches.rotate(-1)
            return io.read_at(stretches[-1])

        def bare(operation: str) -> float:
            before = io.cpu_seconds
            seconds = io.write() if operation == "drain" else bare_read()
            spent[f"direct {operation}"] += io.cpu_seconds - before
            return seconds

        drains = in_turns({"direct": lambda: bare("drain"), "hoststage": drain}, rounds)
        fills = in_turns({"direct": lambda: bare("fill"), "hoststage": fill}, rounds)
        copies = node.copies()
        whole = in_turns({"direct": lambda: bare("drain"), "hoststage": lambda: client.store_through()[1]}, rounds)
    calls, gigabytes = rounds + 1, shape.bytes * (rounds + 1) / 1e9
    for name, times, bound in (("drain", drains, 0.85), ("fill", fills, 0.85)):
        costs = Costs(daemon_cpu_seconds=spent[name] * rounds / calls)
        bare_cpu = spent[f"direct {name}"]
        rig.add(
            ceiling(
                case,
                "direct I/O",
                name,
                shape,
                times["direct"],
                f"depth {DEPTH}; {bare_cpu / gigabytes:.3f} CPU s a GB",
            ),
            product(
                case,
                f"{name} to the end",
                shape,
                times["hoststage"],
                costs,
                f"copies by the daemon: {copies:.0f}" if copies is not None else "",
            ),
            at_least(
                case,
                f"file store {name}, 1 MiB pages, over direct I/O at depth {DEPTH}",
                ratio(times["direct"], times["hoststage"], rounds),
                bound,
            ),
            at_most(
                case,
                f"daemon CPU a GB, shm + file store, {name}, above the I/O itself",
                (spent[name] - bare_cpu) / gigabytes,
                0.25,
                "core-s/GB",
            ),
        )
    share = ratio(whole["direct"], whole["hoststage"], rounds)
    note = f"the client's copy included; {share:.2f} of direct I/O in the same rounds"
    rig.add(product(case, "store to stored", shape, whole["hoststage"], note=note))
    _beside_sglang(rig, case, rounds)


def _stretches(folder: Path, page_bytes: int, batch: int) -> list[list[tuple[Path, int]]]:
    """Return where the stored pages lie in the files of a daemon of our own, in batches: a disk is not everywhere equally fast."""
    places = []
    for file in sorted(folder.rglob("*.seg")):
        with file.open("rb") as opened:
            header = unpack_segment(opened.read(BLOCK))
            if header is None or header.slot_bytes != slot_bytes_for(page_bytes):
                continue
            for place in range(BLOCK, header.file_bytes, header.slot_bytes):
                opened.seek(place + header.slot_bytes - BLOCK)
                if unpack_trailer(opened.read(BLOCK)) is not None:
                    places.append((file, place))
    return [places[at : at + batch] for at in range(0, len(places) - batch + 1, batch)]


def _beside_sglang(rig: Rig, case: str, rounds: int) -> None:
    """SGLang's file backend writes and reads one file a page through the kernel's cache; measured in turns with the product."""
    shape = rig.shape(batch=32, store="file")
    try:
        peer = open_sglang(rig.settings.folder)
    except PeerAbsent as reason:
        rig.skip(case, "SGLang's file backend", str(reason))
        return
    with (
        peer,
        rig.daemon("file", budget=512 * MIB, store_limit=2 << 30) as node,
        rig.client(node, shape, write=2 * shape.batch, read=2 * shape.batch) as client,
    ):

        def store() -> float:
            return client.store_through()[1]

        def load() -> float:
            client.runs.append(client.runs.pop(0))
            return client.load(client.runs[0])

        size = (shape.batch, shape.page_bytes)
        found = {
            "store": in_turns({"peer": partial(peer.store, *size), "hoststage": store}, rounds),
            "load": in_turns({"peer": partial(peer.load, *size), "hoststage": load}, rounds),
            "store synced": in_turns({"peer": partial(peer.store_synced, *size), "hoststage": store}, rounds),
            "load cold": in_turns({"peer": partial(peer.load_cold, *size), "hoststage": load}, rounds),
        }
    for name, times in found.items():
        reached = name in ("store synced", "load cold")
        note = "the device takes part" if reached else "in the kernel's page cache; the device takes no part"
        value = ratio(times["peer"], times["hoststage"], rounds)
        rig.add(
            measured(Kind.PEER, case, peer.name, name, shape, times["peer"], note=note),
            product(case, f"{name.split()[0]} beside it", shape, times["hoststage"], note="direct I/O"),
            at_least(case, f"file store {name}, 1 MiB × 32, over SGLang's file backend", value, 3.0, note=note),
        )
