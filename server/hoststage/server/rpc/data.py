"""Data connections: pages of `inline` sessions as raw bytes, received into slots and sent out of them without a copy of the daemon's.

Every connection has a thread, in blocking calls that release the GIL, so that no client's pace is the loop's. What is decided, is decided on the
loop: the thread asks and waits. `hoststage.v1.data` has the frames.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from hoststage.server.contract import PageMoves, PagesInPlace, RequestError
from hoststage.server.rpc.dispatch import error_message, fault
from hoststage.shm import bulk
from hoststage.v1 import data, lane, ops

if TYPE_CHECKING:
    from hoststage.server.rpc.connections import Connection, Connections

log = structlog.get_logger(__name__)

STALL_SECONDS = 30.0
"""How long a client may neither send nor take a byte in the middle of a request."""

_T = TypeVar("_T")
_Filling = tuple[ops.ReserveReply, list[PagesInPlace]]
_Sending = tuple[ops.LoadReply, list[PagesInPlace]]


class DataConnection:
    """One attached data connection. `start` and `close` run on the loop, `_run` in the thread."""

    def __init__(
        self, connections: Connections, connection: Connection, sock: socket.socket, request_id: int, max_message: int
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._sock = sock
        self._attach_id = request_id
        self._max_message = max_message
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[Any] | None = None
        self._load_id = 0
        self._closing = False
        self.ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"hoststage-data-{connection.session}", daemon=True)

    @property
    def _moves(self) -> PageMoves:
        assert self._connection.live is not None
        return self._connection.live.moves

    def start(self) -> None:
        """Serve it from now on. Raises `RuntimeError` where the system gives no thread."""
        self._thread.start()
        self._connection.data.add(self)
        self._connections.metrics.data += 1

    def close(self) -> None:
        """End it. What its thread waits for or does is cut short; `ended` is set once the thread uses nothing any more."""
        if self._closing:
            return
        self._closing = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._load_id and self._connection.live is not None:
            self._connection.live.cancel_load(self._load_id)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _over(self, kind: str, reason: str) -> None:
        self.close()
        self._sock.close()
        self._connection.data.discard(self)
        self._connections.metrics.data -= 1
        if kind != "ended":
            self._connections.metrics.closed["data", kind] += 1
            log.info("data.closed", session=self._connection.session, reason=reason)
        self.ended.set()

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        kind, reason = "ended", "end of file"
        try:
            self._send([lane.frame(lane.Op.ATTACH, self._attach_id, b"\x00")])
            while True:
                self._request(*data.receive_frame(self._sock, self._max_message, _patience, idle=_forever))
        except (bulk.Ended, CancelledError):
            pass
        except bulk.Stalled as error:
            kind, reason = "slow", str(error)
        except lane.FrameError as error:
            kind, reason = "malformed", f"malformed frame: {error}"
        except OSError as error:
            reason = str(error)
        except Exception as error:
            kind, reason = "fault", repr(error)
            log.error("data.fault", session=self._connection.session, error=repr(error), exc_info=error)
        finally:
            with suppress(CancelledError):
                self._on_loop(self._over, kind, reason)

    def _request(self, op: int, request_id: int, body: bytes) -> None:
        if op not in (lane.Op.RESERVE, lane.Op.LOAD):
            raise lane.FrameError(f"operation {op} is no request of a data connection")
        message = lane.decode(op, body)
        started = perf_counter()
        try:
            if isinstance(message, ops.Reserve):
                self._store(request_id, message)
            elif isinstance(message, ops.Load):
                self._load(request_id, message)
        except RequestError as error:
            self._send([lane.frame(lane.Op.PROTOBUF, request_id, _refusal(request_id, error))])
            self._on_loop(self._connections.metrics.errors.update, (error.reason,))
        self._on_loop(self._answered, "store" if op == lane.Op.RESERVE else "load", perf_counter() - started)

    def _answered(self, operation: str, seconds: float) -> None:
        self._connections.metrics.latency("data", operation).observe(seconds)

    def _store(self, request_id: int, op: ops.Reserve) -> None:
        moves = self._moves

        def reserve(done: Callable[[_Filling], None]) -> None:
            moves.reserve(op, request_id, lambda reply, pages: done((reply, pages)))

        def undo(filling: _Filling) -> None:
            if filling[0].outcome is ops.Outcome.ACCEPTED:
                moves.not_filled(filling[0].slots)

        granted, pages = self._ask(reserve, undo)
        if granted.outcome is not ops.Outcome.ACCEPTED:
            self._send([lane.encode(granted, request_id)])
            return
        try:
            self._send([lane.encode(granted, request_id)])
            self._announced(request_id, sum(p.nbytes for p in pages))
            bulk.receive(self._sock, _views(pages), _patience)
        except BaseException:
            self._on_loop(moves.not_filled, granted.slots)
            raise

        def commit(done: Callable[[ops.HotReply], None]) -> None:
            moves.filled(op.span, granted.slots, request_id, done)

        reply = self._ask(commit)
        self._send([lane.encode(reply, request_id)])

    def _announced(self, request_id: int, due: int) -> None:
        """Take the frame that precedes a store's bytes. Raises `FrameError` for any other."""
        op, its_id, body = data.receive_frame(self._sock, self._max_message, _patience)
        if op != data.Op.PAGES or its_id != request_id:
            raise lane.FrameError(f"PAGES of request {request_id} were due, operation {op} of request {its_id} came")
        if (announced := data.pages_bytes(body)) != due:
            raise lane.FrameError(f"{announced} bytes are announced for pages of {due}")

    def _load(self, request_id: int, op: ops.Load) -> None:
        moves = self._moves

        def load(done: Callable[[_Sending], None]) -> None:
            self._load_id = moves.load(op, lambda reply, pages: done((reply, pages)))

        def undo(sending: _Sending) -> None:
            if sending[0].outcome is ops.Outcome.READY:
                moves.sent(sending[0].load_id)

        reply, pages = self._ask(load, undo)
        if reply.outcome is not ops.Outcome.READY:
            self._send([lane.encode(reply, request_id)])
            return
        try:
            announced = data.pages(request_id, sum(p.nbytes for p in pages))
            bulk.send(self._sock, [lane.encode(reply, request_id), announced, *_views(pages)], _patience)
        except BaseException:
            self._on_loop(moves.sent, reply.load_id)
            raise

        def sent(done: Callable[[bool], None]) -> None:
            done(moves.sent(reply.load_id))

        whole = self._ask(sent)
        self._send([data.sent(request_id, whole=whole)])

    def _send(self, parts: Sequence[bytes]) -> None:
        bulk.send(self._sock, parts, _patience)

    # -------------------------------------------------------------- asking the loop

    def _ask(self, begin: Callable[[Callable[[_T], None]], None], undo: Callable[[_T], None] = lambda _: None) -> _T:
        """Have something begun on the loop and wait for its answer. An answer that comes when nobody waits any more is undone.

        Raises what `begin` raises, and `CancelledError` once the connection is being closed.
        """
        future: Future[_T] = Future()

        def done(answer: _T) -> None:
            try:
                future.set_result(answer)
            except InvalidStateError:
                undo(answer)

        def run() -> None:
            self._waiting = future
            try:
                begin(done)
            except RequestError as error:
                _fail(future, error)
            except Exception as error:
                _fail(future, fault(self._connection.session, error))
            if self._closing:
                future.cancel()

        self._on_loop(run)
        try:
            return future.result()
        finally:
            # It holds the answer, and with it pages of the session.
            self._waiting = None

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop is closed: the daemon has ended, and there is nobody to tell.
            raise CancelledError from None


def _fail(future: Future[Any], error: RequestError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)


def _refusal(request_id: int, error: RequestError) -> bytes:
    return error_message(request_id, error).SerializeToString()


def _views(pages: Sequence[PagesInPlace]) -> list[memoryview]:
    return [view for part in pages for view in part.views()]


def _patience() -> float:
    return STALL_SECONDS


def _forever() -> float:
    return math.inf
