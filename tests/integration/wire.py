"""A client that speaks the wire by hand, so that tests can also speak it badly."""

from __future__ import annotations

import mmap
import queue
import socket
import struct
from dataclasses import dataclass, field

import grpc

from hoststage.shm import fdpass
from hoststage.v1 import fdsocket, lane
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import hoststage_pb2_grpc as pb_grpc
from hoststage.v1 import stack_pb2 as spb

PAGE = 8192
TIMEOUT = 15


def hello(path=spb.PAYLOAD_PATH_SHM, mode=spb.MODE_BUFFER_ONLY, slots=32, **more):
    """A Hello with one full-attention pool."""
    pool = spb.Pool(name="kv", kind=spb.POOL_KIND_KV, page_bytes=PAGE, page_tokens=16, host_slots=slots)
    stack = spb.Stack(
        identity=spb.Identity(model=more.pop("model", "m")),
        pools=[pool],
        modes=[spb.ModeWish(mode=mode, required=True)],
        paths=[path],
    )
    return pb.Hello(protocol_min=1, protocol_max=1, client="test", worker="w", stack=stack, **more)


def span(keys, pools=(0,)):
    """A span of keys (bytes of one length), all pages of the given pools."""
    ranges = [pb.PoolRange(pool=p, first=0, count=len(keys)) for p in pools]
    return pb.Span(keys=b"".join(keys), key_bytes=len(keys[0]), ranges=ranges)


def keys_of(n, seed=0):
    return [struct.pack("<QQ", seed, i) for i in range(n)]


@dataclass
class Wire:
    """One gRPC stream, read by hand."""

    address: str
    options: tuple = ()
    outgoing: queue.Queue = field(default_factory=queue.Queue)
    welcome: pb.Welcome | None = None

    def __post_init__(self):
        self.channel = grpc.insecure_channel(self.address.replace("unix://", "unix:"), options=self.options)
        self.call = pb_grpc.HostStageStub(self.channel).Session(iter(self.outgoing.get, None), timeout=60)

    def open(self, message=None):
        self.send(pb.ClientMessage(request_id=1, hello=message or hello()))
        answer = next(self.call)
        assert answer.WhichOneof("body") == "welcome"
        self.welcome = answer.welcome
        return self

    def send(self, message):
        self.outgoing.put(message)

    def ask(self, request_id, **body):
        """Send a request; return its answer (skipping what is pushed meanwhile)."""
        self.send(pb.ClientMessage(request_id=request_id, **body))
        return self.answer(request_id)

    def answer(self, request_id):
        for message in self.call:
            if message.request_id == request_id:
                return message
        raise AssertionError("the stream ended")

    def pushed(self, kind):
        for message in self.call:
            if message.WhichOneof("body") == kind:
                return getattr(message, kind)
        raise AssertionError("the stream ended")

    def half_close(self):
        self.outgoing.put(None)

    def close(self):
        self.outgoing.put(None)
        self.call.cancel()
        self.channel.close()


def connect(path, kind=socket.SOCK_STREAM):
    made = socket.socket(socket.AF_UNIX, kind)
    # Blocking until it is in the queue: with a timeout, a full one is an error.
    made.connect(str(path))
    made.settimeout(TIMEOUT)
    return made


def ask_fds(path, token):
    """Return `(reply, descriptors)` of the fd socket."""
    with connect(path) as made:
        fdpass.send_fds(made, fdsocket.encode_request(fdsocket.Kind.ARENAS, token, has_pidfd=False), [])
        packet, fds = fdpass.recv_fds(made, fdsocket.MAX_PACKET_BYTES, 250)
    return fdsocket.decode_reply(packet), fds


def map_arenas(welcome):
    """Fetch and map the arenas of a session: `{arena_id: mmap}` of one-chunk arenas."""
    reply, fds = ask_fds(welcome.fd_socket, welcome.fd_token)
    assert not reply.refusal, reply.refusal
    writable = {a.arena_id for a in welcome.arenas if a.kind == spb.ARENA_KIND_WRITE}
    out = {}
    for record, fd in zip(reply.records, fds, strict=True):
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if record.arena_id in writable else 0)
        out[record.arena_id] = mmap.mmap(fd, record.size, prot=prot)
    fdpass.close_all(fds)
    return out


@dataclass
class Lane:
    """One lane, read by hand."""

    path: str
    reader: lane.FrameReader = field(default_factory=lambda: lane.FrameReader(1 << 26))
    got: list = field(default_factory=list)

    def __post_init__(self):
        self.socket = connect(self.path)

    def attach(self, session, token):
        """Return the refusal, "" where the lane is attached."""
        self.raw(lane.frame(lane.Op.ATTACH, 1, lane.ATTACH_BODY.pack(session, token)))
        op, _, body = self.next()
        assert op == lane.Op.ATTACH
        return body[1:].decode() if body[0] else ""

    def raw(self, data):
        self.socket.sendall(data)

    def next(self):
        while not self.got:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.got += self.reader.feed(data)
        return self.got.pop(0)

    def ask(self, message, request_id):
        self.raw(lane.encode(message, request_id))
        op, answered, body = self.next()
        assert answered == request_id
        return server_message(body) if op == lane.Op.PROTOBUF else lane.decode(op, body)

    def closed(self):
        """Whether the daemon closes the lane, within the socket's timeout."""
        try:
            while self.next():
                pass
        except (EOFError, ConnectionResetError):
            return True

    def close(self):
        self.socket.close()


def server_message(body):
    return pb.ServerMessage.FromString(body)
