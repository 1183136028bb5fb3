"""What is on its way into one gRPC stream, bounded, so that a client that never reads costs no more than that."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from hoststage.v1 import hoststage_pb2 as pb


class Outbox:
    """A queue of messages, bounded in bytes.

    Answers to requests are bounded by not reading further requests (`room`); pushes cannot wait, and overflow. Pages
    of inline loads are bounded where the load is admitted, and do not count here.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._queue: deque[tuple[pb.ServerMessage | Callable[[], None], int]] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._ended = False
        self.overflowed = asyncio.Event()

    def put(self, message: pb.ServerMessage, *, counted: bool = True) -> bool:
        """Queue a message; False where the peer is too slow, after which nothing more is taken."""
        if self._ended or self.overflowed.is_set():
            return False
        size = message.ByteSize() if counted else 0
        # One message is always taken, however large: only a queue that is not drained overflows.
        if self._held and self._held + size > self._limit:
            self.overflowed.set()
            return False
        self._held += size
        if self._held > self._limit // 4:
            self._room.clear()
        self._queue.append((message, size))
        self._changed.set()
        return True

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call `then` when everything queued so far has gone out; never, where the stream breaks first."""
        self._queue.append((then, 0))
        self._changed.set()

    def end(self) -> None:
        """No more messages; what is queued still goes out."""
        self._ended = True
        self._changed.set()

    async def get(self) -> pb.ServerMessage | None:
        """Return the next message, None at the end."""
        while True:
            while not self._queue:
                if self._ended:
                    return None
                self._changed.clear()
                await self._changed.wait()
            message, size = self._queue.popleft()
            self._held -= size
            if self._held <= self._limit // 4:
                self._room.set()
            if isinstance(message, pb.ServerMessage):
                return message
            message()

    async def room(self) -> None:
        """Wait until the peer has read most of what it was sent."""
        await self._room.wait()
