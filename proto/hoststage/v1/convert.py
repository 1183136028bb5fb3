"""Conversion between the hot operations (`ops.py`) and their protobuf twins, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import ops


def _span_to(span: ops.Span) -> pb.Span:
    return pb.Span(keys=span.keys, key_bytes=span.key_bytes, parent=span.parent, ranges=_ranges_to(span.ranges))


def _span_from(m: pb.Span) -> ops.Span:
    return ops.Span(m.keys, m.key_bytes, _ranges_from(m.ranges), m.parent)


def _ranges_to(ranges: Iterable[ops.PoolRange]) -> list[pb.PoolRange]:
    return [pb.PoolRange(pool=r.pool, first=r.first, count=r.count) for r in ranges]


def _ranges_from(ranges: Iterable[pb.PoolRange]) -> tuple[ops.PoolRange, ...]:
    return tuple(ops.PoolRange(r.pool, r.first, r.count) for r in ranges)


def slots_to_proto(entries: Iterable[ops.PoolSlots]) -> list[pb.PoolSlots]:
    """Return the protobuf form of slot lists."""
    return [pb.PoolSlots(pool=e.pool, slots=e.slots.tolist(), generations=e.generations.tolist()) for e in entries]


def slots_from_proto(entries: Iterable[pb.PoolSlots]) -> tuple[ops.PoolSlots, ...]:
    """Return slot lists from their protobuf form."""
    return tuple(
        ops.PoolSlots(e.pool, np.asarray(e.slots, dtype=np.uint32), np.asarray(e.generations, dtype=np.uint32))
        for e in entries
    )


def _reserve_to(m: ops.Reserve) -> pb.Reserve:
    return pb.Reserve(span=_span_to(m.span), wait_ms=m.wait_ms)


def _reserve_reply_to(m: ops.ReserveReply) -> pb.ReserveReply:
    return pb.ReserveReply(outcome=m.outcome, slots=slots_to_proto(m.slots), detail=m.detail)  # type: ignore[arg-type]


def _commit_to(m: ops.Commit) -> pb.Commit:
    return pb.Commit(span=_span_to(m.span), slots=slots_to_proto(m.slots))


def _commit_reply_to(m: ops.CommitReply) -> pb.CommitReply:
    return pb.CommitReply(
        outcome=m.outcome,  # type: ignore[arg-type]
        commit_id=m.commit_id,
        credits=slots_to_proto(m.credits),
        detail=m.detail,
    )


def _lookup_to(m: ops.Lookup) -> pb.Lookup:
    return pb.Lookup(span=_span_to(m.span), pin_ms=m.pin_ms)


def _lookup_reply_to(m: ops.LookupReply) -> pb.LookupReply:
    return pb.LookupReply(runs=[n for run in m.runs for n in run], pin=m.pin)


def _lookup_reply_from(m: pb.LookupReply) -> ops.LookupReply:
    return ops.LookupReply(tuple(zip(m.runs[::2], m.runs[1::2], strict=False)), m.pin)


def _load_to(m: ops.Load) -> pb.Load:
    return pb.Load(
        span=_span_to(m.span),
        prefix=m.prefix,
        pin=m.pin,
        deadline_ms=m.deadline_ms,
        accept_shorter=m.accept_shorter,
    )


def load_to_proto(m: ops.Load) -> pb.Load:
    """Return the protobuf form of a load."""
    return _load_to(m)


def load_from_proto(m: pb.Load) -> ops.Load:
    """Return a load from its protobuf form (also carried inside InlineLoad and ImportedLoad)."""
    return ops.Load(_span_from(m.span), m.prefix, m.pin, m.deadline_ms, m.accept_shorter)


def _load_reply_to(m: ops.LoadReply) -> pb.LoadReply:
    return pb.LoadReply(
        outcome=m.outcome,  # type: ignore[arg-type]
        load_id=m.load_id,
        prefix=m.prefix,
        ranges=_ranges_to(m.ranges),
        slots=slots_to_proto(m.slots),
        detail=m.detail,
    )


def _load_reply_from(m: pb.LoadReply) -> ops.LoadReply:
    return ops.LoadReply(
        ops.Outcome(m.outcome), m.load_id, m.prefix, _ranges_from(m.ranges), slots_from_proto(m.slots), m.detail
    )


def _load_ready_to(m: ops.LoadReady) -> pb.LoadReady:
    return pb.LoadReady(
        load_id=m.load_id,
        outcome=m.outcome,  # type: ignore[arg-type]
        last=m.last,
        prefix=m.prefix,
        ranges=_ranges_to(m.ranges),
        slots=slots_to_proto(m.slots),
        detail=m.detail,
    )


def _load_ready_from(m: pb.LoadReady) -> ops.LoadReady:
    return ops.LoadReady(
        m.load_id,
        ops.Outcome(m.outcome),
        m.last,
        m.prefix,
        _ranges_from(m.ranges),
        slots_from_proto(m.slots),
        m.detail,
    )


def _stored_to(m: ops.Stored) -> pb.Stored:
    return pb.Stored(
        commit_id=m.commit_id,
        commit_request=m.commit_request,
        outcome=m.outcome,  # type: ignore[arg-type]
        pages=m.pages,
        detail=m.detail,
    )


_TO: dict[type, tuple[str, Callable[[Any], Any]]] = {
    ops.Reserve: ("reserve", _reserve_to),
    ops.Commit: ("commit", _commit_to),
    ops.Lookup: ("lookup", _lookup_to),
    ops.Load: ("load", _load_to),
    ops.Release: ("release", lambda m: pb.Release(load_ids=m.load_ids, pins=m.pins)),
    ops.ReserveReply: ("reserve_reply", _reserve_reply_to),
    ops.CommitReply: ("commit_reply", _commit_reply_to),
    ops.LookupReply: ("lookup_reply", _lookup_reply_to),
    ops.LoadReply: ("load_reply", _load_reply_to),
    ops.Stored: ("stored", _stored_to),
    ops.LoadReady: ("load_ready", _load_ready_to),
}

_FROM: dict[str, Callable[[Any], ops.HotMessage]] = {
    "reserve": lambda m: ops.Reserve(_span_from(m.span), m.wait_ms),
    "commit": lambda m: ops.Commit(_span_from(m.span), slots_from_proto(m.slots)),
    "lookup": lambda m: ops.Lookup(_span_from(m.span), m.pin_ms),
    "load": load_from_proto,
    "release": lambda m: ops.Release(tuple(m.load_ids), tuple(m.pins)),
    "reserve_reply": lambda m: ops.ReserveReply(ops.Outcome(m.outcome), slots_from_proto(m.slots), m.detail),
    "commit_reply": lambda m: ops.CommitReply(
        ops.Outcome(m.outcome), m.commit_id, slots_from_proto(m.credits), m.detail
    ),
    "lookup_reply": _lookup_reply_from,
    "load_reply": _load_reply_from,
    "stored": lambda m: ops.Stored(m.commit_id, m.commit_request, ops.Outcome(m.outcome), m.pages, m.detail),
    "load_ready": _load_ready_from,
}

_REQUESTS = (ops.Reserve, ops.Commit, ops.Lookup, ops.Load, ops.Release)


def span_to_proto(span: ops.Span) -> pb.Span:
    """Return the protobuf form of a span."""
    return _span_to(span)


def span_from_proto(m: pb.Span) -> ops.Span:
    """Return a span from its protobuf form."""
    return _span_from(m)


def to_proto(message: ops.HotMessage, request_id: int) -> pb.ClientMessage | pb.ServerMessage:
    """Return the protobuf envelope of a hot message: a `ClientMessage` for a request, else a `ServerMessage`."""
    name, convert = _TO[type(message)]
    if isinstance(message, _REQUESTS):
        return pb.ClientMessage(request_id=request_id, **{name: convert(message)})
    return pb.ServerMessage(request_id=request_id, **{name: convert(message)})


def from_proto(envelope: pb.ClientMessage | pb.ServerMessage) -> ops.HotMessage | None:
    """Return the hot message in an envelope, or None where it holds another operation."""
    name = envelope.WhichOneof("body")
    convert = _FROM.get(name) if name is not None else None
    return None if convert is None or name is None else convert(getattr(envelope, name))
