"""What a session is opened with, and the first message that says it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hoststage.client.errors import StackError
from hoststage.client.stack import PayloadPath, StackSpec
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import ops

FEATURES = (
    "lane",
    "inline",
    "imported",
    "data",
    "pins",
    "holds",
    "whole_arenas",
    "credits",
    "page_index",
    "lease_board",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What `connect` was given. `register`: whether mappings are registered with CUDA: "auto", "never" or "require"."""

    address: str
    stack: StackSpec
    worker: str = ""
    client: str = ""
    token: str = ""
    timeout: float = 30.0
    credits: int = 0
    copy_threads: int = 1
    register: str = "auto"

    def hello(self, previous: Previous) -> pb.Hello:
        """Return the first message of the handshake."""
        return pb.Hello(
            protocol_min=ops.PROTOCOL_MIN,
            protocol_max=ops.PROTOCOL_MAX,
            features=FEATURES,
            client=self.client,
            worker=self.worker,
            stack=self._reachable().to_proto(),
            token=self.token,
            previous_session=previous.session,
            previous_epoch=previous.epoch,
            previous_token=previous.token,
            retained_bytes=previous.retained_bytes,
            credits=self.credits,
            pid=os.getpid(),
        )

    def _reachable(self) -> StackSpec:
        """The stack with the paths that the address allows: no memory is shared over TCP."""
        local = self.address.startswith("unix:")
        paths = tuple(p for p in self.stack.paths if p is PayloadPath.INLINE or local)
        if not paths:
            raise StackError(
                "paths",
                [p.value for p in self.stack.paths],
                f"this client can use inline alone at {self.address}",
            )
        return replace(self.stack, paths=paths)


@dataclass(frozen=True, slots=True)
class Previous:
    """The session that a new one replaces (0: none), its secret, and bytes of its arenas that views still hold."""

    session: int = 0
    epoch: bytes = b""
    retained_bytes: int = 0
    token: bytes = b""
