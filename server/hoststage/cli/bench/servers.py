"""Bare servers, the bounds of what a service could reach: a uvloop echo on a Unix socket, and a plain stream of protobuf bytes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

SERVICE = "hoststage.bench.Plain"
CHUNK = 64 << 20
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", CHUNK), ("grpc.max_send_message_length", CHUNK)]


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
    print("ready", flush=True)
    await server.serve_forever()


async def _plain(path: str) -> None:
    """`Store`: pages come in, an empty message asks for the answer. `Load`: a number of pages is asked for, as many go out."""
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    kept: list[bytes] = []

    async def store(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        fresh: list[bytes] = []
        async for message in requests:
            if message.value:
                fresh.append(message.value)
            else:
                kept[:] = fresh
                fresh = []
                yield BytesValue(value=b"done")

    async def load(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for message in requests:
            for page in kept[: int(message.value)]:
                yield BytesValue(value=page)

    def method(behaviour: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(behaviour, BytesValue.FromString, BytesValue.SerializeToString)

    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    handlers = {"Store": method(store), "Load": method(load)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main(kind: str, path: str) -> None:
    """Run one server until it is terminated."""
    import uvloop

    uvloop.run({"echo": _echo, "plain": _plain}[kind](path))


if __name__ == "__main__":
    main(*sys.argv[1:3])
