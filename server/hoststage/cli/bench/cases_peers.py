"""Store and load beside each peer, in turns, in the same run."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from hoststage.cli.bench.peers import Peer, PeerAbsent
from hoststage.cli.bench.peers.foreign import open_lmcache, open_mooncake, open_sglang
from hoststage.cli.bench.peers.redis import RedisPeer
from hoststage.cli.bench.product import Stores
from hoststage.cli.bench.rig import MIB, Call, Rig, cycle, in_turns, product, ratio
from hoststage.cli.bench.rows import Kind, Shape, at_least, measured
from hoststage.shm.copy import MOST_THREADS

SHAPES = ((1 * MIB, 1, 2.5), (4 * MIB, 1, 1.5), (1 * MIB, 32, 1.5), (4 * MIB, 16, 1.5))
"""Bytes of a page, pages of a call, and how many times faster than the best peer the product must be."""
VIEWS_FACTOR = 5.0
_LEAST_READ = 64
"""Slots of the smallest read arena in which a session leases views without a request; served ones have thousands."""
_IN_PLACE = "slots and commit alone: the pages are written where they are staged, as Mooncake's worker over shared memory has its own"
THREADS = min(MOST_THREADS, os.cpu_count() or 1)
"""Threads that share a large copy of the product's client. Peers are left as they come."""


def peers(rig: Rig) -> None:
    """One page and batches of 1 and 4 MiB: store until accepted, load into memory, load as views."""
    case = "peers"
    found: list[Peer] = []
    for name, open_peer in (
        ("Redis or Valkey", RedisPeer),
        ("SGLang's file backend", partial(open_sglang, rig.settings.folder)),
        ("LMCache's multiprocess server, ZMQ", partial(open_lmcache, "zmq")),
        ("LMCache's multiprocess server, gRPC", partial(open_lmcache, "grpc")),
        ("Mooncake's client, shared memory", partial(open_mooncake, "shm")),
        ("Mooncake's client, TCP", partial(open_mooncake, "tcp")),
    ):
        try:
            found.append(open_peer())
        except PeerAbsent as reason:
            rig.skip(case, name, str(reason))
    try:
        for page_bytes, batch, bound in SHAPES[:2] if rig.settings.quick else SHAPES:
            shape = rig.shape(page_bytes=page_bytes, batch=batch, mode="cache", store="none")
            _beside(rig, case, shape, bound, found)
    finally:
        for peer in found:
            peer.close()


def _beside(rig: Rig, case: str, shape: Shape, bound: float, found: list[Peer]) -> None:
    rounds = rig.settings.pick(5, 15) if shape.batch == 1 else rig.settings.pick(4, 9)
    calls = rig.settings.pick(4, 10) if shape.batch == 1 else 1
    size = (shape.batch, shape.page_bytes)
    storing = shape.but(mode="buffer_only", store="memory:")
    with (
        rig.daemon(storing.store, budget=2 << 30, store_limit=512 * MIB) as node,
        rig.client(node, storing, write=4 * shape.batch, credits=2 * shape.batch, copy_threads=THREADS) as client,
    ):
        store, place = Stores(client), Stores(client, in_place=True)
        subjects: dict[str, Call] = {"store": store, "in place": place}
        stores = in_turns(subjects | {p.name: partial(p.store, *size) for p in found}, rounds, calls)
    with (
        rig.daemon(shape.store, budget=2 << 30) as node,
        # Room for three runs beside the one that is being published: what is loaded stays resident.
        rig.client(
            node, shape, write=2 * shape.batch, read=max(6 * shape.batch, _LEAST_READ), copy_threads=THREADS
        ) as client,
    ):
        runs = cycle(client.fill(2))
        ours: dict[str, Call] = {"load": lambda: client.load(runs()), "views": lambda: client.views(runs())}
        loads = in_turns(ours | {p.name: partial(p.load, *size) for p in found}, rounds, calls)
    rig.add(
        product(case, "store handed over", storing, store.handed_over[-rounds * calls :]),
        product(case, "store to accepted", storing, stores["store"]),
        product(case, "store to stored", storing, store.stored[-rounds * calls :]),
        product(case, "store in place handed over", storing, place.handed_over[-rounds * calls :], note=_IN_PLACE),
        product(case, "store in place", storing, stores["in place"], note=f"to accepted; {_IN_PLACE}"),
        product(case, "load into memory", shape, loads["load"]),
        product(case, "load as views", shape, loads["views"]),
    )
    if not found:
        return
    label = f"{shape.page_bytes // MIB} MiB × {shape.batch}"
    judged = [("store", stores, "store", bound), ("load", loads, "load", bound)]
    if shape.batch == 1:
        judged.append(("load as views", loads, "views", VIEWS_FACTOR))
    for operation, times, name, least in judged:
        ratios = {p.name: ratio(times[p.name], times[name], rounds) for p in found}
        if operation != "load as views":
            for peer, value in ratios.items():
                row = measured(Kind.PEER, case, peer, operation, shape, times[peer])
                rig.add(replace(row, value=round(value, 3), unit="× its time over ours"))
        best = min(ratios, key=lambda peer: ratios[peer])
        others = ", ".join(f"{peer} {value:.2f}" for peer, value in ratios.items())
        rig.add(at_least(case, f"{operation} {label}, over the best peer ({best})", ratios[best], least, note=others))
