"""The client of hoststage: describe a stack, open a session, store pages, look prefixes up, load them.

`connect` opens the synchronous face, `hoststage.client.aio.connect` the asyncio one. Needs grpcio, protobuf and numpy; torch is used where
the caller hands in tensors.
"""

from hoststage.client._arenas import Arena, ArenaKind, Pin, PinLevel
from hoststage.client._holds import HoldBatch, RestoredHold
from hoststage.client._imported import Imported, ImportedPages
from hoststage.client._load import LoadStream
from hoststage.client._loaded import Loaded, LoadGroup, Match
from hoststage.client._pages import ScatteredPages
from hoststage.client._store import WriteBatch
from hoststage.client._ticket import StoreResult, StoreTicket
from hoststage.client.cuda import RegistrationFailed
from hoststage.client.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    ForkedSession,
    HostStageError,
    QuotaExceeded,
    Refused,
    RequestRejected,
    SessionClosed,
    SessionLost,
    StackError,
)
from hoststage.client.session import DEFAULT_ADDRESS, Budget, Session, connect, negotiate
from hoststage.client.stack import (
    HitPolicy,
    Identity,
    KvLayout,
    Mode,
    ModeWish,
    Parallel,
    PayloadPath,
    Placement,
    PoolKind,
    PoolSpec,
    Retraction,
    RetractionWish,
    Role,
    StackSpec,
    WritePolicy,
)
from hoststage.client.verdict import Finding, Grant, PoolGrant, Severity, Verdict
from hoststage.v1.ops import Outcome

__all__ = [
    "DEFAULT_ADDRESS",
    "Arena",
    "ArenaKind",
    "Budget",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "Finding",
    "ForkedSession",
    "Grant",
    "HitPolicy",
    "HoldBatch",
    "HostStageError",
    "Identity",
    "Imported",
    "ImportedPages",
    "KvLayout",
    "LoadGroup",
    "LoadStream",
    "Loaded",
    "Match",
    "Mode",
    "ModeWish",
    "Outcome",
    "Parallel",
    "PayloadPath",
    "Pin",
    "PinLevel",
    "Placement",
    "PoolGrant",
    "PoolKind",
    "PoolSpec",
    "QuotaExceeded",
    "Refused",
    "RegistrationFailed",
    "RequestRejected",
    "RestoredHold",
    "Retraction",
    "RetractionWish",
    "Role",
    "ScatteredPages",
    "Session",
    "SessionClosed",
    "SessionLost",
    "Severity",
    "StackError",
    "StackSpec",
    "StoreResult",
    "StoreTicket",
    "Verdict",
    "WriteBatch",
    "WritePolicy",
    "connect",
    "negotiate",
]
