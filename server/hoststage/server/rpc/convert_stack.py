"""The handshake's messages as the core's plain data, and the other way round.

An enum value that this version does not know is read as the field's documented default where that is safe, and
refused by name where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from hoststage.core import stack as core
from hoststage.core.findings import Finding, Grant, PoolGrant, Severity, Verdict
from hoststage.server.contract import ArenaFacts, PinFacts, RequestError, SessionRequest
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import stack_pb2 as spb

E = TypeVar("E", bound=Enum)

MAX_POOLS = 32
MAX_TEXT = 512
MAX_LISTED = 256
"""Entries of a list of wishes, paths or features."""
MAX_PIECES = 1 << 16
"""Pieces of one page."""

_KIND = {
    spb.POOL_KIND_KV: core.PoolKind.KV,
    spb.POOL_KIND_SWA: core.PoolKind.SWA,
    spb.POOL_KIND_MAMBA: core.PoolKind.MAMBA,
    spb.POOL_KIND_SIDECAR: core.PoolKind.SIDECAR,
}
_POLICY = {
    spb.HIT_POLICY_ALL_PAGES: core.HitPolicy.ALL_PAGES,
    spb.HIT_POLICY_TRAILING_PAGES: core.HitPolicy.TRAILING_PAGES,
    spb.HIT_POLICY_BLOCK_GROUPS: core.HitPolicy.BLOCK_GROUPS,
}
_LAYOUT = {spb.KV_LAYOUT_PAGED: core.KvLayout.PAGED, spb.KV_LAYOUT_UNIFIED_KV: core.KvLayout.UNIFIED_KV}
_PLACEMENT = {
    spb.PLACEMENT_HOST_POOL: core.Placement.HOST_POOL,
    spb.PLACEMENT_DEVICE_ONLY: core.Placement.DEVICE_ONLY,
}
_MODE = {spb.MODE_BUFFER_ONLY: core.Mode.BUFFER_ONLY, spb.MODE_CACHE: core.Mode.CACHE}
_ROLE = {spb.ROLE_PREFILL: core.Role.PREFILL, spb.ROLE_DECODE: core.Role.DECODE, spb.ROLE_MIXED: core.Role.MIXED}
_WRITE = {
    spb.WRITE_POLICY_WRITE_THROUGH: core.WritePolicy.WRITE_THROUGH,
    spb.WRITE_POLICY_WRITE_THROUGH_SELECTIVE: core.WritePolicy.WRITE_THROUGH_SELECTIVE,
    spb.WRITE_POLICY_WRITE_BACK: core.WritePolicy.WRITE_BACK,
}
_RETRACTION = {
    spb.RETRACTION_NONE: core.Retraction.NONE,
    spb.RETRACTION_CPU_TENSOR: core.Retraction.CPU_TENSOR,
    spb.RETRACTION_HOST_POOL: core.Retraction.HOST_POOL,
}
_PATH = {
    spb.PAYLOAD_PATH_SHM: core.PayloadPath.SHM,
    spb.PAYLOAD_PATH_IMPORTED: core.PayloadPath.IMPORTED,
    spb.PAYLOAD_PATH_INLINE: core.PayloadPath.INLINE,
}
_SEVERITY = {
    Severity.REFUSED: spb.SEVERITY_REFUSED,
    Severity.ADJUSTED: spb.SEVERITY_ADJUSTED,
    Severity.NOTICE: spb.SEVERITY_NOTICE,
}
_ARENA = {
    "write": spb.ARENA_KIND_WRITE,
    "read": spb.ARENA_KIND_READ,
    "whole": spb.ARENA_KIND_WHOLE,
    "index": spb.ARENA_KIND_INDEX,
    "board": spb.ARENA_KIND_BOARD,
}
_PIN = {
    "none": spb.PIN_LEVEL_NONE,
    "resident": spb.PIN_LEVEL_RESIDENT,
    "mlock": spb.PIN_LEVEL_MLOCK,
    "cuda": spb.PIN_LEVEL_CUDA,
}


def _back(table: Mapping[Any, E]) -> dict[E, Any]:
    return {v: k for k, v in table.items()}


_MODE_TO = _back(_MODE)
_PATH_TO = _back(_PATH)
_RETRACTION_TO = _back(_RETRACTION)
_WRITE_TO = _back(_WRITE)


def _strict(table: Mapping[Any, E], value: int, field: str) -> E:
    """Look up an enum value that has no safe default."""
    found = table.get(value)
    if found is None:
        raise RequestError(
            "UNKNOWN_VALUE",
            f"{field} is {value}, which this daemon does not know",
            code="INVALID_ARGUMENT",
            field=field,
            remedy=f"use one of {', '.join(str(v.value) for v in table.values())}, or a newer daemon",
        )
    return found


def _or(table: Mapping[Any, E], value: int, default: E, field: str) -> E:
    """Look up an enum value; unset means the default, unknown is refused by name."""
    return default if value == 0 else _strict(table, value, field)


def text_of(value: str, field: str) -> str:
    """Return a name that is short enough for logs and status. Raises `RequestError`."""
    if len(value) > MAX_TEXT:
        raise RequestError(
            "TEXT_TOO_LONG",
            f"{field} has {len(value)} characters, at most {MAX_TEXT}",
            field=field,
            remedy="choose a shorter one",
        )
    return value


def _listed(count: int, most: int, field: str) -> None:
    if count > most:
        raise RequestError(
            "TOO_MANY_ENTRIES",
            f"{field} has {count} entries, at most {most} are allowed",
            field=field,
            remedy="name each once",
        )


def _policy(kind: core.PoolKind) -> core.HitPolicy:
    trailing = kind in (core.PoolKind.SWA, core.PoolKind.MAMBA)
    return core.HitPolicy.TRAILING_PAGES if trailing else core.HitPolicy.ALL_PAGES


def _pool(m: spb.Pool, at: str) -> core.Pool:
    kind = _strict(_KIND, m.kind, f"{at}.kind")
    _listed(len(m.pieces), MAX_PIECES, f"{at}.pieces")
    return core.Pool(
        name=text_of(m.name, f"{at}.name"),
        kind=kind,
        page_bytes=m.page_bytes,
        page_tokens=m.page_tokens,
        layers=m.layers or 1,
        sliding_window=m.sliding_window,
        hit_policy=_or(_POLICY, m.hit_policy, _policy(kind), f"{at}.hit_policy"),
        trailing_pages=m.trailing_pages,
        group_pages=m.group_pages,
        layout=_or(_LAYOUT, m.layout, core.KvLayout.PAGED, f"{at}.layout"),
        placement=_or(_PLACEMENT, m.placement, core.Placement.HOST_POOL, f"{at}.placement"),
        indices_from_pool=text_of(m.indices_from_pool, f"{at}.indices_from_pool"),
        shares_arena_with=text_of(m.shares_arena_with, f"{at}.shares_arena_with"),
        replicated=m.replicated,
        pieces=tuple(m.pieces),
        host_slots=m.host_slots,
        device_slots=m.device_slots,
    )


def _parallel(m: spb.Parallel) -> core.Parallel:
    return core.Parallel(
        m.tp_rank,
        m.tp_size or 1,
        m.pp_rank,
        m.pp_size or 1,
        m.cp_rank,
        m.cp_size or 1,
        m.dp_rank,
        m.dp_size or 1,
        m.dcp_rank if m.HasField("dcp_rank") else (0 if m.dcp_size <= 1 else None),
        m.dcp_size or 1,
    )


def _identity(m: spb.Identity) -> core.Identity:
    return core.Identity(
        model=text_of(m.model, "identity.model"),
        tenant=text_of(m.tenant, "identity.tenant") or "default",
        weights_revision=text_of(m.weights_revision, "identity.weights_revision"),
        quantization=text_of(m.quantization, "identity.quantization"),
        kv_scales=text_of(m.kv_scales, "identity.kv_scales"),
        dtype=text_of(m.dtype, "identity.dtype"),
        layout=text_of(m.layout, "identity.layout"),
        key_hash=text_of(m.key_hash, "identity.key_hash"),
    )


def stack_from_proto(m: spb.Stack) -> core.Stack:
    """Return the stack that a client presents. Raises `RequestError` naming the field."""
    if not 1 <= len(m.pools) <= MAX_POOLS:
        raise RequestError(
            "POOL_GEOMETRY", f"the stack has {len(m.pools)} pools, must have 1 to {MAX_POOLS}", field="stack.pools"
        )
    _listed(len(m.modes), MAX_LISTED, "stack.modes")
    _listed(len(m.paths), MAX_LISTED, "stack.paths")
    if not m.identity.model:
        raise RequestError("IDENTITY", "the model has no name", field="stack.identity.model", remedy="name the model")
    modes = tuple(
        core.ModeWish(_strict(_MODE, w.mode, f"stack.modes[{i}].mode"), w.required) for i, w in enumerate(m.modes)
    )
    paths = tuple(p for p in (_PATH.get(value) for value in m.paths) if p is not None)
    wish = m.retraction
    return core.Stack(
        identity=_identity(m.identity),
        pools=tuple(_pool(p, f"stack.pools[{i}]") for i, p in enumerate(m.pools)),
        parallel=_parallel(m.parallel),
        role=_or(_ROLE, m.role, core.Role.MIXED, "stack.role"),
        write_policy=_or(_WRITE, m.write_policy, core.WritePolicy.WRITE_THROUGH, "stack.write_policy"),
        modes=modes or (core.ModeWish(core.Mode.BUFFER_ONLY), core.ModeWish(core.Mode.CACHE)),
        retraction=core.RetractionWish(
            _or(_RETRACTION, wish.retraction, core.Retraction.NONE, "stack.retraction.retraction"),
            wish.window_only,
            wish.concurrent_receive,
            wish.required,
        ),
        # A path that we do not know is one that we do not have: the client's next one is taken.
        paths=paths or (() if m.paths else (core.PayloadPath.SHM, core.PayloadPath.INLINE)),
        largest_request_tokens=m.largest_request_tokens,
        prefetch_threshold_tokens=m.prefetch_threshold_tokens,
        maps_sidecars=not m.cannot_map_sidecars,
        hands_over_state=not m.cannot_hand_over_state,
        requires_pinned=m.requires_pinned,
    )


def request_from_proto(m: pb.Hello) -> SessionRequest:
    """Return the request in a Hello. Raises `RequestError` naming the field."""
    if m.protocol_min > m.protocol_max:
        raise RequestError(
            "PROTOCOL", f"protocol_min {m.protocol_min} exceeds protocol_max {m.protocol_max}", field="protocol_min"
        )
    _listed(len(m.features), MAX_LISTED, "features")
    return SessionRequest(
        stack=stack_from_proto(m.stack),
        client=text_of(m.client, "client"),
        worker=text_of(m.worker, "worker"),
        pid=m.pid,
        protocol=(m.protocol_min or 1, m.protocol_max or 1),
        features=tuple(m.features),
        credits=m.credits,
        previous_session=m.previous_session,
        previous_epoch=m.previous_epoch,
        previous_token=m.previous_token,
        retained_bytes=m.retained_bytes,
    )


def finding_to_proto(f: Finding) -> spb.Finding:
    """Return a finding's protobuf form."""
    return spb.Finding(
        rule=f.rule,
        severity=_SEVERITY[f.severity],
        subject=f.subject,
        message=f.message,
        remedy=f.remedy,
        mode=_MODE_TO[f.mode] if f.mode else spb.MODE_UNSPECIFIED,
        values={k: str(v) for k, v in f.values.items()},
    )


def grant_to_proto(g: Grant) -> spb.Grant:
    """Return a grant's protobuf form."""
    return spb.Grant(
        mode=_MODE_TO[g.mode],
        path=_PATH_TO[g.path],
        retraction=_RETRACTION_TO[g.retraction],
        window_only_holds=g.window_only_holds,
        namespace=g.namespace,
        write_policy=_WRITE_TO[g.write_policy],
        pools=[
            spb.PoolGrant(
                pool=p.pool,
                stride=p.stride,
                write_slots=p.write_slots,
                read_slots=p.read_slots,
                reserve_slots=p.reserve_slots,
                hold_slots=p.hold_slots,
                window_pages=p.window_pages,
            )
            for p in g.pools
        ],
    )


def pin_to_proto(pin: PinFacts) -> spb.PinReport:
    """Return a pin report's protobuf form."""
    level = _PIN.get(pin.level, spb.PIN_LEVEL_UNSPECIFIED)
    return spb.PinReport(level=level, reason=pin.reason, huge_pages=pin.huge_pages)


def arena_to_proto(a: ArenaFacts) -> spb.ArenaGrant:
    """Return an arena's protobuf form."""
    return spb.ArenaGrant(
        arena_id=a.arena_id,
        kind=_ARENA[a.kind],
        pool=a.pool,
        slots=a.slots,
        stride=a.stride,
        chunk_bytes=a.chunk_bytes,
        pin=pin_to_proto(a.pin),
        trailing_pages=a.trailing_pages,
    )


def verdict_to_proto(v: Verdict) -> pb.NegotiateResponse:
    """Return a verdict as the answer of Negotiate."""
    return pb.NegotiateResponse(
        grant=grant_to_proto(v.grant) if v.grant else None, findings=[finding_to_proto(f) for f in v.findings]
    )


def arena_kind_to_proto(kind: str) -> Any:
    """Return the enum value of "write", "read", "whole", "index" or "board"."""
    return _ARENA[kind]


def mode_by_name(name: str) -> Any:
    """Return the enum value of a mode's name."""
    return _MODE_TO[core.Mode(name)]


def path_by_name(name: str) -> Any:
    """Return the enum value of a payload path's name."""
    return _PATH_TO[core.PayloadPath(name)]


_KIND_TO = _back(_KIND)
_POLICY_TO = _back(_POLICY)
_LAYOUT_TO = _back(_LAYOUT)
_PLACEMENT_TO = _back(_PLACEMENT)
_ROLE_TO = _back(_ROLE)
_SEVERITY_FROM = {v: k for k, v in _SEVERITY.items()}


def _pool_to_proto(p: core.Pool) -> spb.Pool:
    return spb.Pool(
        name=p.name,
        kind=_KIND_TO[p.kind],
        page_bytes=p.page_bytes,
        page_tokens=p.page_tokens,
        layers=p.layers,
        sliding_window=p.sliding_window,
        hit_policy=_POLICY_TO[p.hit_policy],
        trailing_pages=p.trailing_pages,
        group_pages=p.group_pages,
        layout=_LAYOUT_TO[p.layout],
        placement=_PLACEMENT_TO[p.placement],
        indices_from_pool=p.indices_from_pool,
        shares_arena_with=p.shares_arena_with,
        replicated=p.replicated,
        pieces=p.pieces,
        host_slots=p.host_slots,
        device_slots=p.device_slots,
    )


def stack_to_proto(s: core.Stack) -> spb.Stack:
    """Return a stack's protobuf form. Raises `ValueError` for a number that the wire cannot carry."""
    i, p = s.identity, s.parallel
    return spb.Stack(
        identity=spb.Identity(
            tenant=i.tenant,
            model=i.model,
            weights_revision=i.weights_revision,
            quantization=i.quantization,
            kv_scales=i.kv_scales,
            dtype=i.dtype,
            layout=i.layout,
            key_hash=i.key_hash,
        ),
        parallel=spb.Parallel(
            tp_rank=p.tp_rank,
            tp_size=p.tp_size,
            pp_rank=p.pp_rank,
            pp_size=p.pp_size,
            cp_rank=p.cp_rank,
            cp_size=p.cp_size,
            dp_rank=p.dp_rank,
            dp_size=p.dp_size,
            dcp_rank=p.dcp_rank,
            dcp_size=p.dcp_size,
        ),
        pools=[_pool_to_proto(pool) for pool in s.pools],
        role=_ROLE_TO[s.role],
        write_policy=_WRITE_TO[s.write_policy],
        modes=[spb.ModeWish(mode=_MODE_TO[w.mode], required=w.required) for w in s.modes],
        retraction=spb.RetractionWish(
            retraction=_RETRACTION_TO[s.retraction.retraction],
            window_only=s.retraction.window_only,
            concurrent_receive=s.retraction.concurrent_receive,
            required=s.retraction.required,
        ),
        paths=[_PATH_TO[path] for path in s.paths],
        largest_request_tokens=s.largest_request_tokens,
        prefetch_threshold_tokens=s.prefetch_threshold_tokens,
        cannot_map_sidecars=not s.maps_sidecars,
        cannot_hand_over_state=not s.hands_over_state,
        requires_pinned=s.requires_pinned,
    )


def verdict_from_proto(m: pb.NegotiateResponse) -> Verdict:
    """Return the verdict in an answer of Negotiate. Numbers among the findings' values are numbers again."""
    findings = tuple(
        Finding(
            f.rule,
            _SEVERITY_FROM.get(f.severity, Severity.NOTICE),
            f.subject,
            f.message,
            f.remedy,
            _MODE.get(f.mode),
            values={k: int(v) if v.lstrip("-").isdigit() else v for k, v in f.values.items()},
        )
        for f in m.findings
    )
    if not m.HasField("grant"):
        return Verdict(None, findings)
    g = m.grant
    grant = Grant(
        _MODE[g.mode],
        _PATH[g.path],
        _RETRACTION.get(g.retraction, core.Retraction.NONE),
        g.window_only_holds,
        tuple(
            PoolGrant(p.pool, p.stride, p.write_slots, p.read_slots, p.reserve_slots, p.hold_slots, p.window_pages)
            for p in g.pools
        ),
        g.namespace,
        _WRITE.get(g.write_policy, core.WritePolicy.WRITE_THROUGH),
    )
    return Verdict(grant, findings)
