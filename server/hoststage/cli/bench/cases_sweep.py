"""Throughput and latency along each axis: page size, batch, pools, sessions, path; or every combination that is asked for."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

from hoststage.cli.bench.product import slots_for
from hoststage.cli.bench.rig import MIB, Meter, Rig, cycle, product
from hoststage.cli.bench.rows import Shape
from hoststage.cli.bench.sessions import crowd

PAGE_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 * MIB, 4 * MIB, 16 * MIB)
QUICK_PAGE_SIZES = (16 << 10, 256 << 10, 4 * MIB)
CALL_BYTES = 16 * MIB
"""Bytes of a call along the axis of page sizes."""
ROOM = 6
"""Batches that a session's memory must hold: two under way on the writing side, the others resident."""


def shapes(rig: Rig) -> Iterator[Shape]:
    """Yield the shapes to measure: the combinations asked for, or one axis after the other."""
    s = rig.settings
    if s.page_sizes or s.batches or s.pools or s.sessions or s.modes or s.paths or s.stores:
        axes = (
            s.page_sizes or (1 * MIB,),
            s.batches or (16,),
            s.pools or (1,),
            s.sessions or (1,),
            s.modes or ("buffer_only",),
            s.paths or ("shm",),
            s.stores or ("memory:",),
        )
        for size, batch, pools, sessions, mode, path, store in itertools.product(*axes):
            yield Shape(size, batch, pools, sessions, mode, path, store, s.verify)
        return
    sizes = QUICK_PAGE_SIZES if s.quick else PAGE_SIZES
    for path in ("shm", "inline"):
        for size in sizes:
            batch = max(1, min(128, CALL_BYTES // size))
            yield rig.shape(page_bytes=size, batch=batch, mode="cache", store="none", path=path)
    for pools in (4,) if s.quick else (2, 4, 8):
        yield rig.shape(page_bytes=64 << 10, batch=16, pools=pools, mode="cache", store="none")
    for store, mode in (("file", "buffer_only"), ("file", "cache"), ("memory:", "buffer_only")):
        yield rig.shape(batch=16, mode=mode, store=store)
    for sessions in (2,) if s.quick else (1, 2, 4, 8, 16):
        yield rig.shape(page_bytes=64 << 10, batch=16, sessions=sessions, mode="cache", store="none")


def sweep(rig: Rig) -> None:
    """Measure every shape: store to accepted and to stored, load into memory, load as views."""
    case = "sweep"
    for shape in shapes(rig):
        side = 2 * shape.bytes
        needed = side * (8 if shape.mode == "cache" else 2)
        if shape.mode == "buffer_only" and shape.store == "none":
            rig.skip(case, _label(shape), "buffer_only needs a store; the fences refuse it")
        elif needed * shape.sessions > rig.settings.most_bytes:
            rig.skip(case, _label(shape), f"it needs {needed * shape.sessions >> 20} MiB of arenas; raise --memory")
        elif shape.sessions > 1:
            _many(rig, case, shape)
        else:
            _one(rig, case, shape)


def _label(shape: Shape) -> str:
    size = f"{shape.page_bytes >> 10} KiB × {shape.batch}"
    return f"{size}, {shape.pools} pools, {shape.sessions} sessions, {shape.mode}, {shape.path}, {shape.store}"


def _one(rig: Rig, case: str, shape: Shape) -> None:
    # Enough calls for a p99, but no more than a fixed amount of data.
    calls = max(
        rig.settings.pick(6, 12), min(rig.settings.pick(20, 100), rig.settings.pick(64, 512) * MIB // shape.bytes)
    )
    with (
        rig.daemon(shape.store, store_limit=2 << 30) as node,
        rig.client(node, shape, write=2 * shape.batch, read=ROOM * shape.batch) as client,
    ):
        client.store_through()
        with Meter(node, "store", shape) as meter:
            both = [client.store_through() for _ in range(calls)]
        costs = meter.costs(calls)
        rig.add(
            product(case, "store to accepted", shape, [a for a, _ in both]),
            product(case, "store to stored", shape, [b for _, b in both], costs),
        )
        take = cycle(client.runs[-2:] if shape.mode == "cache" else client.runs[-4:])
        for operation, call in (("load", client.load), ("views", client.views)):
            if operation == "views" and shape.path != "shm":
                continue
            call(take())
            with Meter(node, operation, shape) as load_meter:
                times = [call(take()) for _ in range(calls)]
            name = "load into memory" if operation == "load" else "load as views"
            rig.add(product(case, name, shape, times, load_meter.costs(calls)))


def _many(rig: Rig, case: str, shape: Shape) -> None:
    seconds = float(rig.settings.pick(1, 3))
    for operation in ("load", "store"):
        read = ROOM * shape.batch * (shape.sessions if shape.mode == "cache" else 1)
        slots = slots_for(shape, 2 * shape.batch, read)
        with rig.daemon(shape.store, store_limit=1 << 30) as node:
            found = crowd(node, shape, operation, uuid.uuid4().hex[:12], slots, seconds)
        rig.add(found.row(case, "load into memory" if operation == "load" else "store to stored"))
