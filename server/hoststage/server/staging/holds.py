"""Holds as the wire asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from hoststage.core.effects import PartSlots
from hoststage.core.findings import Grant
from hoststage.core.holds import HoldExists, HoldMissing, HoldName, HoldTable
from hoststage.core.sessions import SessionCore
from hoststage.core.stack import Retraction
from hoststage.server.contract import HoldKey, RequestError, RestoredHold
from hoststage.v1 import ops

MAX_TOKEN_BYTES = 64
MAX_REQUEST_BYTES = 256
MAX_NOTE_BYTES = 64 * 1024


class Holds:
    """Checks requests about holds and carries them out at once."""

    def __init__(self) -> None:
        self.table = HoldTable()

    @staticmethod
    def _name(session: SessionCore, key: HoldKey) -> HoldName:
        if not 1 <= len(key.owner_token) <= MAX_TOKEN_BYTES:
            raise RequestError(
                "HOLD_NAME",
                f"owner_token has {len(key.owner_token)} bytes, must have 1 to {MAX_TOKEN_BYTES}",
                field="id.owner_token",
            )
        if not 1 <= len(key.request.encode()) <= MAX_REQUEST_BYTES:
            raise RequestError("HOLD_NAME", f"request must have 1 to {MAX_REQUEST_BYTES} bytes", field="id.request")
        return (session.namespace.name, key.owner_token, key.request, key.attempt)

    def hold(
        self, session: SessionCore, key: HoldKey, ranges: Sequence[ops.PoolRange], durable: bool, grant: Grant
    ) -> ops.ReserveReply:
        """Grant hold slots. Raises `RequestError`."""
        name = self._name(session, key)
        if grant.retraction is not Retraction.HOST_POOL:
            raise RequestError(
                "RETRACTION",
                "the session was granted no holds",
                code="FAILED_PRECONDITION",
                remedy="ask for retraction host_pool at the handshake; its findings say why it was refused",
            )
        if durable:
            raise RequestError(
                "DURABLE_HOLD",
                "this daemon keeps no durable holds",
                code="UNIMPLEMENTED",
                field="durable",
                remedy="hold without durable",
            )
        wants: dict[int, int] = {}
        for i, r in enumerate(ranges):
            if r.pool >= len(session.write):
                raise RequestError("RANGES", f"pool {r.pool} is not in the stack", field=f"ranges[{i}].pool")
            wants[r.pool] = wants.get(r.pool, 0) + r.count
        try:
            result = self.table.hold(session, name, list(wants.items()))
        except HoldExists as error:
            raise RequestError(
                "HOLD_EXISTS", str(error), code="ALREADY_EXISTS", field="id", remedy="discard it, or raise the attempt"
            ) from error
        return ops.ReserveReply(ops.Outcome(result.outcome), _slots(result.parts), result.detail)

    def seal(self, session: SessionCore, key: HoldKey, note: bytes) -> None:
        """Mark a hold as written. Raises `RequestError`."""
        if len(note) > MAX_NOTE_BYTES:
            raise RequestError("HOLD_NOTE", f"the note has {len(note)} bytes, at most {MAX_NOTE_BYTES}", field="note")
        try:
            self.table.seal(session, self._name(session, key), note)
        except HoldMissing as error:
            raise RequestError("HOLD_MISSING", str(error), code="NOT_FOUND", field="id") from error

    def restore(self, session: SessionCore, key: HoldKey) -> RestoredHold:
        """Return the pages of a hold, or a miss."""
        found = self.table.restore(session, self._name(session, key))
        if found is None:
            return RestoredHold(ops.Outcome.MISS, detail="no sealed hold of that name")
        parts, note = found
        return RestoredHold(ops.Outcome.READY, "write", _slots(parts), note)

    def discard(self, session: SessionCore, key: HoldKey) -> None:
        """Free a hold. Raises `RequestError`."""
        try:
            self.table.discard(session, self._name(session, key))
        except HoldMissing as error:
            raise RequestError("HOLD_MISSING", str(error), code="NOT_FOUND", field="id") from error


def _slots(parts: Sequence[PartSlots]) -> tuple[ops.PoolSlots, ...]:
    return tuple(ops.PoolSlots(p.pool, p.slots, p.generations) for p in parts)
