"""The gRPC stream of a session: the handshake, and for clients without a lane everything else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from hoststage.client._status import error_of_call
from hoststage.client._wire import Deadline, Request, Router, Waiter, park
from hoststage.client.errors import DaemonUnavailable, DeadlineExceeded, Refused
from hoststage.client.verdict import findings_from
from hoststage.v1 import convert, hoststage_pb2_grpc
from hoststage.v1 import hoststage_pb2 as pb

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A session's own channel: a shared one would answer a new attempt from the backoff of an old one.
    ("grpc.use_local_subchannel_pool", 1),
)
HANDSHAKE_ID = 1


def open_channel(address: str) -> grpc.Channel:
    """Return a channel to a daemon's address (`unix:///path` or `host:port`)."""
    return grpc.insecure_channel(address, options=_OPTIONS)


class Stream:
    """An open `Session` call. A thread of its own reads what the daemon sends and hands it to the router."""

    def __init__(self, address: str, router: Router) -> None:
        self.address = address
        self.router = router
        self._channel = open_channel(address)
        self._outgoing: queue.SimpleQueue[pb.ClientMessage | None] = queue.SimpleQueue()
        self._welcome = Waiter()
        self._open = True
        self._call: Any = None

    def handshake(self, hello: pb.Hello, deadline: Deadline) -> pb.Welcome:
        """Open the call. Raises `Refused`, `DaemonUnavailable`, `DeadlineExceeded` or `RequestRejected`."""
        stub: Any = hoststage_pb2_grpc.HostStageStub(self._channel)
        self._outgoing.put(pb.ClientMessage(request_id=HANDSHAKE_ID, hello=hello))
        self._call = stub.Session(self._requests())
        threading.Thread(target=self._reading, name="hoststage-stream", daemon=True).start()
        if not park(self._welcome, deadline):
            self.close()
            raise DeadlineExceeded(f"the daemon at {self.address} did not answer the handshake in time")
        if self._welcome.error is not None:
            error = self._welcome.error
            if isinstance(error, Refused):
                error = self._completed(error, stub, hello, deadline)
            self.close()
            raise error
        message = self._welcome.result
        if not isinstance(message, pb.ServerMessage) or message.WhichOneof("body") != "welcome":
            self.close()
            raise DaemonUnavailable(f"what answers at {self.address} speaks no hoststage protocol: no Welcome came")
        return message.welcome

    @staticmethod
    def _completed(refused: Refused, stub: Any, hello: pb.Hello, deadline: Deadline) -> Refused:
        """Return a refusal with every finding: trailers have room for the refusing ones only, and for few of those."""
        try:
            answer = stub.Negotiate(pb.NegotiateRequest(hello=hello), timeout=max(0.001, deadline.left))
        except grpc.RpcError:
            return refused
        findings = findings_from(answer.findings)
        told = {(f.rule, f.subject, f.mode) for f in refused.findings}
        # The node may have changed in between: then what was told is what counts.
        same = not answer.HasField("grant") and told <= {(f.rule, f.subject, f.mode) for f in findings}
        return Refused(refused.message, findings) if same else refused

    def _requests(self) -> Iterator[pb.ClientMessage]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _reading(self) -> None:
        reason = "the daemon ended the session's stream"
        try:
            for envelope in self._call:
                if self._welcome.done:
                    self.router.deliver_proto(envelope)
                else:
                    self._welcome.finish(envelope)
        except grpc.RpcError as error:
            self._welcome.fail(error_of_call(error, self.address))
            reason = f"the session's stream broke: {error.details() or error.code().name}"
        self._welcome.fail(DaemonUnavailable(reason))
        self.router.fail(reason)

    def send(self, message: Request, request_id: int, deadline: Deadline) -> None:
        """Queue one message. Raises `SessionLost` where the stream is over."""
        if self.router.lost is not None:
            raise self.router.lost
        if isinstance(message, pb.ClientMessage):
            message.request_id = request_id
        else:
            envelope = convert.to_proto(message, request_id)
            assert isinstance(envelope, pb.ClientMessage)
            message = envelope
        self._outgoing.put(message)

    def wait(self, waiter: Waiter, deadline: Deadline) -> bool:
        """Wait until the waiter ends; returns whether it has."""
        return park(waiter, deadline)

    def half_close(self) -> None:
        """Say that no more messages come."""
        self._outgoing.put(None)

    def close(self) -> None:
        """End the call and the channel; safe to repeat."""
        if self._open:
            self._open = False
            self._outgoing.put(None)
            if self._call is not None:
                self._call.cancel()
            self._channel.close()
