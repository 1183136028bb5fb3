"""The Admin service: what operators see and do."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import grpc

from hoststage.server.contract import PoolFacts, RequestError, SessionFacts, TierService
from hoststage.server.rpc import status
from hoststage.server.rpc.convert_stack import arena_kind_to_proto, mode_by_name, path_by_name, pin_to_proto
from hoststage.v1 import admin_pb2 as apb
from hoststage.v1 import admin_pb2_grpc as apb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(apb_grpc.AdminServicer):
    """`Admin` of the protocol. `token` empty: whoever reaches the socket may call. `drain`: drains the whole daemon."""

    def __init__(self, tier: TierService, token: str, drain: Callable[[], int]) -> None:
        self._tier = tier
        self._token = token
        self._drain = drain

    async def _allow(self, context: Context) -> None:
        given = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            error = RequestError(
                "TOKEN",
                "the bearer token is missing or wrong",
                code="UNAUTHENTICATED",
                field="authorization",
                remedy="send metadata `authorization: Bearer …` with the token of the daemon's auth.token_file",
            )
            await status.abort(context, status.of_request_error(error))

    async def ListSessions(self, request: apb.ListSessionsRequest, context: Context) -> apb.ListSessionsResponse:
        await self._allow(context)
        return apb.ListSessionsResponse(sessions=[_session(s) for s in self._tier.facts().sessions])

    async def ListPools(self, request: apb.ListPoolsRequest, context: Context) -> apb.ListPoolsResponse:
        await self._allow(context)
        facts = self._tier.facts()
        return apb.ListPoolsResponse(
            pools=[_pool(p) for p in facts.pools],
            budget_bytes=facts.budget_bytes,
            granted_bytes=facts.granted_bytes,
        )

    async def Drain(self, request: apb.DrainRequest, context: Context) -> apb.DrainResponse:
        await self._allow(context)
        return apb.DrainResponse(open_commits=self._drain())

    async def Evict(self, request: apb.EvictRequest, context: Context) -> apb.EvictResponse:
        await self._allow(context)
        return apb.EvictResponse(pages=self._tier.evict(request.namespace, request.pool))

    async def ClearNamespace(self, request: apb.ClearNamespaceRequest, context: Context) -> apb.ClearNamespaceResponse:
        await self._allow(context)
        name = request.namespace
        if len(name) != 64 or any(c not in "0123456789abcdef" for c in name):
            error = RequestError("NAMESPACE", f'"{name}" is no namespace: 64 hex digits', field="namespace")
            await status.abort(context, status.of_request_error(error))
        resident, stored = await self._tier.clear(name)
        return apb.ClearNamespaceResponse(resident_pages=resident, stored_pages=stored)


def _session(s: SessionFacts) -> apb.SessionInfo:
    return apb.SessionInfo(
        session=s.session,
        client=s.client,
        worker=s.worker,
        pid=s.pid,
        namespace=s.namespace,
        model=s.model,
        mode=mode_by_name(s.mode),
        path=path_by_name(s.path),
        state=s.state,
        write_bytes=s.write_bytes,
        open_commits=s.open_commits,
        read_leases=s.read_leases,
        connected_seconds=s.connected_seconds,
    )


def _pool(p: PoolFacts) -> apb.PoolInfo:
    return apb.PoolInfo(
        namespace=p.namespace,
        pool=p.pool,
        arena=arena_kind_to_proto(p.kind),
        session=p.session,
        stride=p.stride,
        slots=p.slots,
        by_state=p.by_state,
        reserve_slots=p.reserve_slots,
        pin=pin_to_proto(p.pin),
    )
