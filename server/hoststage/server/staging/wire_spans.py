"""Spans as the wire names them, checked and turned into what the core wants, and the core's slots as the wire names them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoststage.core import effects as fx
from hoststage.core.sessions import SpanPart
from hoststage.core.stack import MAX_KEY_BYTES
from hoststage.server.contract import RequestError
from hoststage.v1 import ops


def keys_of(span: ops.Span, limit: int) -> list[bytes]:
    """Return the keys of a span that is well formed. Raises `RequestError`."""
    size = span.key_bytes
    if not 1 <= size <= MAX_KEY_BYTES:
        raise RequestError("KEY_SIZE", f"key_bytes is {size}, must be 1 to {MAX_KEY_BYTES}", field="span.key_bytes")
    if len(span.keys) % size:
        raise RequestError(
            "KEY_SIZE", f"{len(span.keys)} bytes of keys are no multiple of key_bytes {size}", field="span.keys"
        )
    if len(span.keys) // size > limit:
        raise RequestError(
            "SPAN_TOO_LONG",
            f"{len(span.keys) // size} keys, at most {limit} are allowed",
            code="RESOURCE_EXHAUSTED",
            field="span.keys",
            remedy="split the span",
        )
    keys = span.split()
    if len(keys) > 1 and len(set(keys)) != len(keys):
        raise RequestError("DUPLICATE_KEY", "a key stands twice in the span", field="span.keys")
    return keys


def parts_of(
    span: ops.Span, keys: list[bytes], pools: int, slots: Sequence[ops.PoolSlots] | None = None
) -> list[SpanPart]:
    """Return the ranges of a span as the core wants them. Raises `RequestError`."""
    n = len(keys)
    if slots is not None and len(slots) != len(span.ranges):
        raise RequestError("RANGES", f"{len(slots)} lists of slots for {len(span.ranges)} ranges", field="slots")
    seen: set[int] = set()
    parts = []
    for i, r in enumerate(span.ranges):
        if r.pool >= pools:
            raise RequestError("RANGES", f"pool {r.pool}: the stack has {pools}", field=f"span.ranges[{i}].pool")
        if r.pool in seen:
            raise RequestError("RANGES", f"pool {r.pool} has two ranges", field=f"span.ranges[{i}].pool")
        seen.add(r.pool)
        if n and r.first + r.count > n:
            raise RequestError(
                "RANGES", f"keys [{r.first}, {r.first + r.count}) of {n}", field=f"span.ranges[{i}].count"
            )
        part = SpanPart(r.pool, r.first, r.count, keys[r.first : r.first + r.count] if n else ())
        if slots is not None:
            check_paired(slots[i], f"slots[{i}]")
            if slots[i].pool != r.pool or len(slots[i].slots) != r.count:
                raise RequestError(
                    "RANGES",
                    f"pool {slots[i].pool} with {len(slots[i].slots)} slots for range {r}",
                    field=f"slots[{i}]",
                )
            part.slots = slots[i].slots.astype(np.uint32, copy=False)
            part.generations = slots[i].generations.astype(np.uint32, copy=False)
        parts.append(part)
    return parts


def check_paired(entry: ops.PoolSlots, at: str) -> None:
    """Check that every slot has its generation. Raises `RequestError`."""
    if len(entry.slots) != len(entry.generations):
        raise RequestError(
            "RANGES",
            f"{len(entry.slots)} slots with {len(entry.generations)} generations",
            field=f"{at}.generations",
            remedy="name a generation for each slot, as they were granted",
        )


def pool_slots(parts: Sequence[fx.PartSlots]) -> tuple[ops.PoolSlots, ...]:
    """Return slots as the wire names them."""
    return tuple(ops.PoolSlots(p.pool, p.slots, p.generations) for p in parts)


def ranges(parts: Sequence[fx.PartSlots]) -> tuple[ops.PoolRange, ...]:
    """Return the ranges of keys that slots stand for."""
    return tuple(ops.PoolRange(p.pool, p.first, len(p.slots)) for p in parts)


def reserve_reply(result: fx.ReserveResult) -> ops.ReserveReply:
    """Return the answer to a reservation."""
    return ops.ReserveReply(ops.Outcome(result.outcome), pool_slots(result.parts), result.detail)
