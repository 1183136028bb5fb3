"""Cases over shared memory and messages: copies, round trips, views, the inline path."""

from __future__ import annotations

import statistics

from hoststage.cli.bench.ceilings import Memcpy, Ping, PlainStream
from hoststage.cli.bench.process import helper_server
from hoststage.cli.bench.product import Stores
from hoststage.cli.bench.rig import MIB, Call, Meter, Rig, ceiling, cycle, in_turns, product, ratio
from hoststage.cli.bench.rows import Kind, at_least, at_most, measured


def store_batch(rig: Rig) -> None:
    """1 MiB × 32 over shm until accepted, against memcpy of the same pages."""
    case, rounds = "store_batch", rig.settings.pick(8, 24)
    shape = rig.shape(batch=32, store="memory:")
    slots = 3 * shape.batch
    with (
        rig.daemon("memory:", store_limit=256 * MIB) as node,
        rig.client(node, shape, write=slots, credits=shape.batch) as client,
    ):
        memcpy = Memcpy(shape.page_bytes, slots)
        rows = client.source["kv"]
        store = Stores(client)
        with Meter(node, "store", shape) as meter:
            times = in_turns({"memcpy": lambda: memcpy.copy_in(rows), "store": store}, rounds, warm=3)
        stored = store.stored
        costs = meter.costs(len(stored))
    rig.add(
        ceiling(case, "memcpy", "copy", shape, times["memcpy"]),
        product(case, "store handed over", shape, store.handed_over[-rounds:]),
        product(case, "store to accepted", shape, times["store"]),
        product(case, "store to stored", shape, stored[-rounds:], note="into a store of plain memory"),
        product(case, "cost of both", shape, stored, costs, "client CPU includes the memcpy ceiling's"),
        at_least(
            case, "shm store 1 MiB × 32 to accepted, over memcpy", ratio(times["memcpy"], times["store"], rounds), 0.85
        ),
    )


def load_views(rig: Rig) -> None:
    """Resident pages as zero-copy views, 128 a call."""
    case, rounds, calls = "load_views", rig.settings.pick(5, 9), rig.settings.pick(100, 300)
    shape = rig.shape(page_bytes=64 << 10, batch=128, mode="cache", store="none")
    with rig.daemon("none") as node, rig.client(node, shape, write=128, read=4 * 128 + 64) as client:
        take = cycle(client.fill(3))
        in_turns({"views": lambda: client.views(take())}, 1, calls=20)
        with Meter(node, "views", shape) as meter:
            times = in_turns({"views": lambda: client.views(take())}, rounds, calls=calls, warm=0)["views"]
        costs = meter.costs(len(times))
    cpu = ((costs.daemon_cpu_seconds or 0) + (costs.client_cpu_seconds or 0)) / len(times) / shape.pages * 1e6
    wall = statistics.median(times) / shape.pages * 1e6
    rig.add(
        product(case, "load as views and release", shape, times, costs),
        at_most(case, "load of resident views, µs a page of CPU (client plus daemon)", cpu, 8, "µs"),
        at_most(case, "load of resident views, µs a page of wall time", wall, 8, "µs"),
    )


def lookup_ping(rig: Rig) -> None:
    """One lookup of one page, against a raw ping."""
    case, rounds, calls = "lookup_ping", rig.settings.pick(5, 11), rig.settings.pick(300, 1000)
    shape = rig.shape(page_bytes=64 << 10, mode="cache", store="none")
    with (
        helper_server("echo") as path,
        Ping(path) as ping,
        rig.daemon("none") as node,
        rig.client(node, shape, write=8, read=64) as client,
    ):
        run = client.fill(1)[0]
        with Meter(node, "lookup", shape) as meter:
            times = in_turns({"ping": ping, "lookup": lambda: client.lookup(run)}, rounds, calls=calls)
        costs = meter.costs(len(times["lookup"]))
    rig.add(
        ceiling(case, "raw ping", "round trip", shape.but(page_bytes=64), times["ping"]),
        product(case, "lookup of one page", shape, times["lookup"], costs, "client CPU includes the pings'"),
        at_most(case, "lookup of one page, p50 over a raw ping", ratio(times["lookup"], times["ping"], rounds), 2.0),
    )


def one_page(rig: Rig) -> None:
    """One page of 1 MiB: store until accepted, stored and readable; load into the caller's memory; against memcpy and a ping."""
    case, rounds, calls = "one_page", rig.settings.pick(7, 15), rig.settings.pick(8, 20)
    floor = {}
    with helper_server("echo") as path, Ping(path) as ping:
        shape = rig.shape(mode="buffer_only", store="file")
        with rig.daemon("file") as node, rig.client(node, shape, write=32, credits=16) as client:
            memcpy, rows, store = Memcpy(shape.page_bytes, 32), client.source["kv"], Stores(client)
            calls_of: dict[str, Call] = {"memcpy": lambda: memcpy.copy_in(rows), "ping": ping, "store": store}
            times = in_turns(calls_of, rounds, calls=calls)
            floor = {"store": [a + b for a, b in zip(times["memcpy"], times["ping"], strict=True)]}
            rig.add(
                ceiling(case, "memcpy", "copy in", shape, times["memcpy"]),
                ceiling(case, "raw ping", "round trip", shape.but(page_bytes=64), times["ping"]),
                product(case, "store handed over", shape, store.handed_over[-rounds * calls :]),
                product(case, "store to accepted", shape, times["store"]),
                product(case, "store to stored", shape, store.stored[-rounds * calls :], note="into files, direct I/O"),
                at_most(
                    case,
                    "store of one 1 MiB page handed over, over memcpy + ping",
                    ratio(store.handed_over[-rounds * calls :], floor["store"], rounds),
                    1.3,
                ),
                at_most(
                    case,
                    "store of one 1 MiB page to accepted, over memcpy + ping",
                    ratio(times["store"], floor["store"], rounds),
                    1.3,
                ),
            )
        shape = rig.shape(mode="cache", store="none")
        with rig.daemon("none") as node, rig.client(node, shape, write=16, read=96, credits=16) as client:
            client.fill(32)
            runs = cycle(client.runs[:32])
            memcpy = Memcpy(shape.page_bytes, 32)
            target = client.target["kv"]
            calls_of = {"memcpy": lambda: memcpy.copy_out(target), "ping": ping, "load": lambda: client.load(runs())}
            times = in_turns(calls_of, rounds, calls=calls)
            base = [a + b for a, b in zip(times["memcpy"], times["ping"], strict=True)]
            readable = [client.readable_after() for _ in range(rig.settings.pick(10, 30))]
            rig.add(
                ceiling(case, "memcpy", "copy out", shape, times["memcpy"]),
                product(case, "load into memory", shape, times["load"]),
                product(case, "store to readable", shape, readable, note="published in cache; lookups poll for it"),
                at_most(
                    case,
                    "load of one resident 1 MiB page into memory, over memcpy + ping",
                    ratio(times["load"], base, rounds),
                    1.3,
                ),
            )


def inline_stream(rig: Rig) -> None:
    """Pages of 1 MiB in messages, against a plain protobuf-bytes stream."""
    case, rounds = "inline", rig.settings.pick(5, 11)
    shape = rig.shape(batch=16, path="inline", mode="cache", store="none")
    with (
        helper_server("plain") as path,
        rig.daemon("none") as node,
        rig.client(node, shape, write=16, read=96) as client,
    ):
        plain = PlainStream(path)
        rows, target = client.source["kv"], client.target["kv"]
        client.fill(1)
        run = client.runs[0]

        def store() -> float:
            return client.store_through()[0]

        with Meter(node, "store", shape) as meter:
            stores = in_turns({"plain": lambda: plain.store(rows), "store": store}, rounds)
        costs = meter.costs(rounds + 1)
        client.fill(1)
        run = client.runs[-1]
        with Meter(node, "load", shape) as load_meter:
            loads = in_turns({"plain": lambda: plain.load(target), "load": lambda: client.load(run)}, rounds)
        load_costs = load_meter.costs(rounds + 1)
        plain.close()
    both = "client CPU includes the plain stream's"
    rig.add(
        measured(Kind.CEILING, case, "plain gRPC stream", "store", shape, stores["plain"]),
        product(case, "store to accepted", shape, stores["store"], costs, both),
        measured(Kind.CEILING, case, "plain gRPC stream", "load", shape, loads["plain"]),
        product(case, "load into memory", shape, loads["load"], load_costs, both),
        at_least(
            case, "inline store, 1 MiB pages, over a plain stream", ratio(stores["plain"], stores["store"], rounds), 2.5
        ),
        at_least(
            case, "inline load, 1 MiB pages, over a plain stream", ratio(loads["plain"], loads["load"], rounds), 2.5
        ),
    )


def copies(rig: Rig) -> None:
    """Copies that the daemon makes of each page, as it counts them itself."""
    case, runs = "copies", rig.settings.pick(8, 16)
    for path, mode, bound in (
        ("shm", "buffer_only", 0.0),
        ("shm", "cache", 1.0),
        ("imported", "buffer_only", 1.0),
        ("imported", "cache", 1.0),
    ):
        store = "file"
        shape = rig.shape(page_bytes=256 << 10, batch=16, path=path, mode=mode, store=store)
        with rig.daemon(store) as node, rig.client(node, shape, write=32, read=16 * (runs + 4)) as client:
            with Meter(node, "store", shape) as meter:
                times = [client.store_through()[1] for _ in range(runs)]
            costs = meter.costs(runs)
            with Meter(node, "load", shape) as load_meter:
                loads = [client.load(run) for run in client.runs[-runs:]]
            load_costs = load_meter.costs(runs)
        rig.add(
            product(case, "store to stored", shape, times, costs),
            product(case, "load into memory", shape, loads, load_costs),
        )
        if costs.daemon_copies is None or load_costs.daemon_copies is None:
            rig.skip(case, f"copies in {mode}, {path}", "the daemon shows no metrics here; pass --http host:port")
            continue
        worst = max(costs.daemon_copies, load_costs.daemon_copies)
        rig.add(at_most(case, f"copies by the daemon a page, {mode}, {path}", worst, bound, "copies"))
