"""Cases of size: many sessions, many resident pages, handshakes, populating memory, and whether the cost of a page stays flat."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Sequence

from hoststage.cli.bench.ceilings import parallel_memset
from hoststage.cli.bench.process import BenchError, memory_available, own_daemon, resident_bytes
from hoststage.cli.bench.product import Client, open_session, slots_for
from hoststage.cli.bench.rig import MIB, Rig, ceiling, in_turns, product
from hoststage.cli.bench.rows import Costs, Kind, Shape, at_least, at_most
from hoststage.cli.bench.sessions import Crowd, crowd
from hoststage.shm.pageindex import index_bytes

LOOKUP_KEYS = 4096
_NOTHING = 2e-6
"""Seconds of the daemon's CPU a page below which it does nothing for the page: clients serve themselves. Housekeeping does not count as a rise."""


def fairness(rig: Rig) -> None:
    """Sessions of processes of their own at full load: total throughput, and the slowest session's share."""
    case, seconds = "fairness", float(rig.settings.pick(2, 4))
    counts = rig.settings.sessions or ((1, 4) if rig.settings.quick else (1, 4, 16, 64))
    memcpy = _memcpy_crowds(rig, case, counts, seconds / 2)
    for operation, store in (("load", "none"), ("store", "memory:")):
        found: list[Crowd] = []
        for sessions in counts:
            mode = "cache" if operation == "load" else "buffer_only"
            shape = rig.shape(page_bytes=64 << 10, batch=16, sessions=sessions, mode=mode, store=store)
            slots = slots_for(shape, 2 * shape.batch, 8 * shape.batch * (sessions if mode == "cache" else 1))
            with rig.daemon(store, budget=2 << 30, store_limit=128 * MIB) as node:
                found.append(crowd(node, shape, operation, uuid.uuid4().hex[:12], slots, seconds))
            rig.add(found[-1].row(case, f"{operation} at full load"))
        last, best = found[-1], max(c.pages_per_s for c in found)
        label = f"{last.shape.sessions} sessions, {operation}"
        if last.shape.sessions < 64:
            rig.skip(case, f"64 sessions, {operation}", f"only {last.shape.sessions} in this run; run without --quick")
        rig.add(
            at_least(
                case,
                f"{label}: total throughput over the best count",
                last.pages_per_s / best,
                0.8,
                note=f"memcpy by as many processes: {memcpy:.2f} of its own best count",
            ),
            at_least(case, f"{label}: slowest session over its fair share", last.least_share, 0.5),
            at_most(
                case,
                f"rise of daemon CPU a page, {operation}, {counts[0]} to {counts[-1]} sessions",
                _rise_of_cpu(found),
                1.2,
            ),
        )


def _memcpy_crowds(rig: Rig, case: str, counts: Sequence[int], seconds: float) -> float:
    """Let processes without any session copy as loads do; return the throughput of the largest count over that of the best."""
    found: list[Crowd] = []
    for sessions in counts:
        shape = rig.shape(page_bytes=64 << 10, batch=16, sessions=sessions)
        found.append(crowd(None, shape, "memcpy", "", 0, seconds))
        rig.add(found[-1].row(case, "copy at full load", Kind.CEILING, "memcpy"))
    return found[-1].pages_per_s / max(c.pages_per_s for c in found)


def _rise_of_cpu(found: list[Crowd]) -> float:
    pages = found[0].shape.pages
    return rise([max(_NOTHING, c.daemon_cpu_seconds / sum(len(r.times) for r in c.reports) / pages) for c in found])


def residency(rig: Rig) -> None:
    """Many resident pages: memory of the daemon a page, and a lookup of 4,096 keys."""
    case, pages = "residency", rig.settings.pick(65_536, 1_000_000)
    needed = pages * 4096 * 5 // 4
    if needed > memory_available() // 2:
        pages = memory_available() // 2 // 4096 * 4 // 5
    if rig.settings.node is not None:
        rig.skip(case, f"{pages} resident pages", "the daemon of --address holds other things too")
        return
    shape = rig.shape(page_bytes=4096, batch=LOOKUP_KEYS, mode="cache", store="none")
    runs = -(-pages // LOOKUP_KEYS)
    with rig.daemon("none", budget=needed + (256 * MIB)) as node:
        before = resident_bytes(node.pid, anonymous=True)
        with rig.client(node, shape, write=LOOKUP_KEYS, read=(runs + 3) * LOOKUP_KEYS) as client:
            fill = [client.store_through()[1] for _ in range(runs)]
            held = runs * LOOKUP_KEYS
            costs = Costs(daemon_rss_bytes=resident_bytes(node.pid, anonymous=True))
            times = [client.lookup(client.runs[i % runs]) for i in range(rig.settings.pick(30, 100))]
            index = sum(index_bytes(g.read_slots) for g in client.session.grant.pools)
    each = ((costs.daemon_rss_bytes or 0) - before + index) / held
    note = f"{held} pages of 4 KiB; anonymous memory, from before the session on, and {index // held} bytes a page of shared index"
    rig.add(
        product(case, "store to resident", shape, fill, costs, note),
        product(case, f"lookup of {LOOKUP_KEYS} keys", shape, times),
        at_most(case, f"daemon memory a resident page, {held} pages", each, 250, "bytes", note),
        at_most(case, f"lookup of {LOOKUP_KEYS} keys, p50", statistics.median(times) * 1e3, 2.0, "ms"),
    )


def handshake(rig: Rig) -> None:
    """Opening a session whose arena the daemon has kept warm, from `connect` to memory mapped."""
    case, rounds = "handshake", rig.settings.pick(10, 30)
    shape = rig.shape(page_bytes=1 * MIB, mode="buffer_only", store="none" if rig.settings.node else "memory:")
    slots, tag = 128, uuid.uuid4().hex[:12]
    times: list[float] = []
    with rig.daemon("memory:") as node:
        for _ in range(rounds + 2):
            started = time.perf_counter()
            session = open_session(node.address, shape, tag, slots)
            times.append(time.perf_counter() - started)
            session.close()
            time.sleep(0.05)
    warm = times[2:]
    rig.add(
        product(case, "connect, first", shape.but(batch=slots), times[:1], note="the arena is populated"),
        product(case, "connect, warm", shape.but(batch=slots), warm),
        at_most(case, "handshake with a warm arena of 128 MiB, p50", statistics.median(warm) * 1e3, 20, "ms"),
    )


def prefault(rig: Rig) -> None:
    """Populating a large arena at a handshake, against memset of as much shared memory by as many threads."""
    case = "prefault"
    size = min(rig.settings.pick(512 * MIB, 8 << 30), memory_available() // 2)
    size -= size % (8 * MIB)
    if rig.settings.node is not None:
        rig.skip(case, "populating memory", "the daemon of --address may hold warm memory")
        return
    shape = rig.shape(page_bytes=4 * MIB, mode="buffer_only", store="memory:")
    slots, threads = size // shape.page_bytes, os.cpu_count() or 1
    cold: list[float] = []
    bare: list[float] = []
    for _ in range(rig.settings.pick(2, 3)):
        bare.append(parallel_memset(size, threads))
        with own_daemon("memory:", size + (64 * MIB), 1 << 30) as node:
            started = time.perf_counter()
            session = open_session(node.address, shape, uuid.uuid4().hex[:12], slots)
            cold.append(time.perf_counter() - started)
            session.close()
    whole = shape.but(batch=slots)
    rig.add(
        ceiling(case, "parallel memset", "populate", whole, bare, f"{threads} threads"),
        product(case, "first handshake", whole, cold, note="the whole handshake, populating included"),
        at_least(
            case,
            f"prefault of {size / (1 << 30):.2f} GiB over parallel memset",
            statistics.median(bare) / statistics.median(cold),
            0.8,
        ),
    )


def flatness(rig: Rig) -> None:
    """Cost of a page as batches, resident pages and sessions grow: it must not rise by more than a fifth."""
    _flat_over_batches(rig)
    _flat_over_residents(rig)


def rise(costs: list[float]) -> float:
    """Return the most by which a cost a page rises as the load grows: the largest ratio of a later one to an earlier."""
    if not costs:
        raise BenchError("the rise of nothing; measure at least one load")
    worst, least = 1.0, costs[0]
    for cost in costs:
        worst, least = max(worst, cost / least), min(least, cost)
    return worst


def _flat_over_batches(rig: Rig) -> None:
    case, rounds, calls = "flatness", rig.settings.pick(3, 7), rig.settings.pick(8, 20)
    batches = rig.settings.batches or ((1, 8, 32, 128) if rig.settings.quick else (1, 2, 4, 8, 16, 32, 64, 128))
    costs: dict[str, list[float]] = {"load": [], "views": [], "lookup": []}
    alone = 0
    with rig.daemon("none") as node:
        for batch in batches:
            shape = rig.shape(page_bytes=64 << 10, batch=batch, mode="cache", store="none")
            # The same memory for every batch: larger ones must not gain or lose by the caches.
            with rig.client(node, shape, write=128, read=640) as client:
                client.spread(128)
                alone += batch <= client.session.board_pages
                _growing(rig, case, client, shape, costs, rounds, calls, "batch")
    for operation, found in costs.items():
        # Views of a few pages are leased without a request, those of more with one: each way must be flat.
        for first, last in [(0, alone), (alone, len(batches))] if operation == "views" else [(0, len(batches))]:
            if first < last:
                label = f"rise of cost a page, {operation}, batch {batches[first]} to {batches[last - 1]}"
                rig.add(at_most(case, label, rise(found[first:last]), 1.2))


def _growing(
    rig: Rig, case: str, client: Client, shape: Shape, costs: dict[str, list[float]], rounds: int, calls: int, axis: str
) -> None:
    client.fill(max(1, 256 // shape.batch))
    runs = client.runs[:: max(1, len(client.runs) // 32)]
    at = 0

    def take() -> list[bytes]:
        nonlocal at
        at += 1
        return runs[at % len(runs)]

    subjects = {
        "load": lambda: client.load(take()),
        "views": lambda: client.views(take()),
        "lookup": lambda: client.lookup(take()),
    }
    for operation, times in in_turns({k: subjects[k] for k in costs}, rounds, calls).items():
        costs[operation].append(statistics.median(times) / shape.pages)
        rig.add(product(case, f"{operation} by {axis}", shape, times))


def _flat_over_residents(rig: Rig) -> None:
    case, rounds, calls = "flatness", rig.settings.pick(3, 7), rig.settings.pick(8, 20)
    steps = (1_024, 8_192, 32_768) if rig.settings.quick else (1_024, 8_192, 65_536, 131_072)
    costs: dict[str, list[float]] = {"views": [], "lookup": []}
    shape = rig.shape(page_bytes=4096, batch=128, mode="cache", store="none")
    with (
        rig.daemon("none", budget=1 << 30) as node,
        rig.client(node, shape, write=512, read=steps[-1] + 1_024) as client,
    ):
        for step in steps:
            client.fill((step - 128 * len(client.runs)) // 128 - 2)
            _growing(rig, case, client, shape, costs, rounds, calls, f"{step} resident pages")
    for operation, found in costs.items():
        label = f"rise of cost a page, {operation}, {steps[0]} to {steps[-1]} resident pages"
        rig.add(at_most(case, label, rise(found), 1.2))
