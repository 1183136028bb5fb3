"""The one place that wires: settings, memory, store, tier, wire and operators' port, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hoststage.core.commits import DrainPolicy
from hoststage.core.sessions import SessionLimits
from hoststage.server.config import Settings
from hoststage.server.memory.arena import HugePages, MemoryPolicy
from hoststage.server.memory.limits import default_budget, detect_limits, doubt_of_budget
from hoststage.server.memory.pool import ArenaPool
from hoststage.server.rpc import sockets
from hoststage.server.rpc.admin import AdminServicer
from hoststage.server.rpc.connections import Connections, InlineLimits
from hoststage.server.rpc.dataserver import DataServer
from hoststage.server.rpc.fdsocket import FdSocketServer
from hoststage.server.rpc.lane import lane_factory
from hoststage.server.rpc.peers import PeerPolicy
from hoststage.server.rpc.servicer import HostStageServicer, WireOptions
from hoststage.server.staging.durable import HoldOptions
from hoststage.server.staging.service import Service, ServiceOptions
from hoststage.server.store.base import BreakerState, Store
from hoststage.server.store.breaker import BreakerOptions, BreakerStore
from hoststage.server.store.factory import open_store
from hoststage.server.store.options import DirectIo, StoreOptions, SyncPolicy
from hoststage.server.supervisor import Supervisor
from hoststage.server.telemetry.http import HttpPort
from hoststage.server.telemetry.metrics import make_registry
from hoststage.server.telemetry.wire import WireMetrics
from hoststage.v1 import admin_pb2, admin_pb2_grpc, hoststage_pb2, hoststage_pb2_grpc

log = structlog.get_logger(__name__)

SERVICES = (
    hoststage_pb2.DESCRIPTOR.services_by_name["HostStage"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


COLLECTOR_THRESHOLDS = (10_000, 20, 50)
"""Objects made between collections of the youngest, and how many of each generation make one of the next."""
LAST_RESORT_SECONDS = 10.0
"""How long the daemon's parts may take to end once it has drained, or was told not to: a medium that hangs never ends its I/O."""


class StartError(Exception):
    """The daemon cannot start; the message says why and what to do."""


def version() -> str:
    """Return the installed version, or "unknown" in a bare checkout."""
    try:
        return metadata.version("hoststage")
    except metadata.PackageNotFoundError:
        return "unknown"


def _token(settings: Settings) -> str:
    if not settings.auth.token_file:
        return settings.auth.token
    try:
        return Path(settings.auth.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StartError(
            f"auth.token_file {settings.auth.token_file}: {error.strerror}; name a readable file"
        ) from error


def _wire_options(settings: Settings) -> WireOptions:
    s = settings.staging
    return WireOptions(
        server=f"hoststage {version()}",
        fd_path=settings.listen.fd_path,
        lane_path=settings.listen.lane_path,
        data_path=settings.listen.data_path,
        token=_token(settings),
        max_message_bytes=s.max_message,
        max_open_requests=s.max_open_requests,
        max_span_keys=s.max_span_keys,
        max_read_leases=s.max_read_leases,
        max_open_commits=s.max_open_commits,
        max_pin_ms=int(s.max_pin * 1000),
        max_credits=s.max_credits,
    )


def _store_options(settings: Settings) -> StoreOptions:
    s = settings.store
    return StoreOptions(
        limit_bytes=s.limit,
        high_watermark=s.high_watermark,
        low_watermark=s.low_watermark,
        min_free_bytes=s.min_free,
        io_threads=s.io_threads,
        direct_io=DirectIo(s.direct_io),
        sync=SyncPolicy(s.sync),
        create_directory=s.create_directory,
    )


def _hold_identity(settings: Settings) -> str:
    """What names this daemon's index of durable holds: a local store has one daemon, wherever it is mounted."""
    if settings.store.url.startswith("file:"):
        return "embedded"
    return f"{socket.gethostname()} {settings.listen.socket}"


@dataclass(slots=True)
class _Stop:
    """How the daemon was asked to stop. `fatal`: why it had to."""

    asked: asyncio.Event
    now: asyncio.Event
    fatal: str = ""

    def signalled(self) -> None:
        """The first signal drains, the second stops at once."""
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def die(self, reason: str) -> None:
        """Stop at once with an error."""
        self.fatal = reason
        self.asked.set()
        self.now.set()


class Daemon:
    """One daemon. `run` returns its exit status."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self._draining = False

    async def run(self) -> int:
        """Serve until a signal. Raises `StartError`, `StoreConfigError` or `SocketError` where it cannot start."""
        loop = asyncio.get_running_loop()
        stop = _Stop(asyncio.Event(), asyncio.Event())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.signalled)
        async with self._stack:
            await self._start(loop, stop)
            _notify("READY=1")
            await stop.asked.wait()
            await self._drain(stop)
            last_resort = threading.Timer(LAST_RESORT_SECONDS, _stop_hard)
            last_resort.daemon = True
            last_resort.start()
        last_resort.cancel()
        if stop.fatal:
            log.error("daemon.failed", reason=stop.fatal)
        log.info("daemon.stopped")
        return 1 if stop.fatal else 0

    # -------------------------------------------------------------- starting

    async def _start(self, loop: asyncio.AbstractEventLoop, stop: _Stop) -> None:
        settings, stack = self._settings, self._stack
        wire = _wire_options(settings)
        _raise_file_limit()
        # The socket is claimed first: two daemons must not open one store even for a moment.
        owned = sockets.Owned.take(settings.listen.socket)
        stack.callback(owned.release)
        self._store = await self._open_store()
        if self._store is not None:
            stack.push_async_callback(self._store.close)
        self._service = self._make_service()
        stack.push_async_callback(self._service.close)
        self._supervisor = Supervisor(stop.die)
        stack.push_async_callback(self._supervisor.stop)
        self._supervisor.run("tick", self._service.engine.ticking)
        self._supervisor.run("holds", self._service.holds.durable.sweeping)
        auth = settings.auth
        policy = PeerPolicy(frozenset(auth.allow_uids), frozenset(auth.allow_gids), bool(wire.token))
        limits = InlineLimits(settings.staging.max_inline, 2 * settings.staging.max_inline)
        self._wire_metrics = WireMetrics()
        self._connections = Connections(self._service, policy, self._wire_metrics, limits)
        stack.callback(self._connections.close)
        await self._listen_local(loop, wire)
        wire = replace(wire, data_port=self._listen_data(wire))
        await self._listen_grpc(wire)
        await self._listen_http()
        log.info(
            "daemon.ready",
            version=version(),
            socket=settings.listen.socket,
            budget_bytes=self._service.options.budget_bytes,
            store=settings.store.url,
            boot_epoch=self._service.boot_epoch.hex(),
        )

    async def _open_store(self) -> Store | None:
        url = self._settings.store.url
        if url in ("", "none"):
            return None
        store = await open_store(url, _store_options(self._settings))
        for notice in store.stats().notices:
            log.warning("store.notice", notice=notice)
        return BreakerStore(store, BreakerOptions())

    def _make_service(self) -> Service:
        settings = self._settings
        limits = detect_limits()
        basis = default_budget(limits)
        budget = settings.memory.budget or basis.bytes
        log.info("memory.budget", bytes=budget, why="configured" if settings.memory.budget else basis.why)
        if settings.memory.budget and (doubt := doubt_of_budget(budget, limits)):
            log.warning("memory.budget_doubtful", budget_bytes=doubt.bytes, bound_bytes=doubt.bound, why=doubt.why)
        policy = MemoryPolicy(
            settings.memory.chunk,
            HugePages(settings.memory.huge_pages),
            settings.memory.lock,
            settings.memory.prefault_threads,
            settings.memory.numa == "interleave",
            settings.memory.register_cuda == "auto",
        )
        pool = ArenaPool(policy, settings.memory.keep_idle, keep_whole=settings.memory.keep_pools)
        executor = ThreadPoolExecutor(settings.staging.copy_threads + 2, "staging")
        self._stack.callback(executor.shutdown)
        s = settings.staging
        session_limits = SessionLimits(
            max_span_keys=s.max_span_keys,
            max_read_leases=s.max_read_leases,
            max_open_commits=s.max_open_commits,
            max_pin_seconds=s.max_pin,
            max_credits=s.max_credits,
            load_deadline=s.load_deadline,
        )
        lockable = limits.memlock_bytes < 0 or os.geteuid() == 0
        options = ServiceOptions(
            budget_bytes=budget,
            limits=session_limits,
            drains=DrainPolicy(max_pages=s.drain_pages, deadline=s.store_deadline),
            beliefs_per_pool=s.beliefs,
            pinned="mlock" if settings.memory.lock and lockable else ("none" if limits.swap_bytes else "resident"),
            pin_problem="" if lockable else f"RLIMIT_MEMLOCK is {limits.memlock_bytes} bytes",
            memlock_bytes=limits.memlock_bytes,
            holds=HoldOptions(s.hold_ttl, s.max_hold_ttl, s.max_durable_holds, _hold_identity(settings)),
        )
        return Service(options, self._store, pool, executor)

    async def _listen_local(self, loop: asyncio.AbstractEventLoop, wire: WireOptions) -> None:
        mode = int(self._settings.listen.socket_mode, 8)
        fd_listener = sockets.listen(wire.fd_path, mode)
        self._stack.callback(sockets.remove, wire.fd_path)
        fd_server = FdSocketServer(fd_listener, self._connections, loop)
        fd_server.start()
        self._stack.callback(fd_server.close)
        self._supervisor.run("fd-socket", fd_server.watching)
        lane_listener = sockets.listen(wire.lane_path, mode)
        self._stack.callback(sockets.remove, wire.lane_path)
        server = await loop.create_unix_server(
            lane_factory(self._connections, wire.max_message_bytes, wire.max_open_requests),
            sock=lane_listener,
            backlog=sockets.BACKLOG,
        )
        self._stack.callback(server.close)

    def _listen_data(self, wire: WireOptions) -> int:
        """Listen for data connections; return the TCP port, 0 where there is none."""
        server, port = DataServer(self._connections, wire.max_message_bytes), 0
        self._stack.push_async_callback(server.stop)
        server.listen(sockets.listen(wire.data_path, int(self._settings.listen.socket_mode, 8)))
        self._stack.callback(sockets.remove, wire.data_path)
        if where := self._settings.listen.data_tcp:
            try:
                port = server.listen_tcp(where)
            except OSError as error:
                raise StartError(f"cannot listen on listen.data_tcp {where}: {error}") from error
        self._supervisor.run("data", server.serving)
        return port

    async def _listen_grpc(self, wire: WireOptions) -> None:
        settings = self._settings
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        server = grpc.aio.server(
            options=[
                # Room for an envelope around a message of the promised size.
                ("grpc.max_receive_message_length", wire.max_message_bytes + (1 << 20)),
                ("grpc.max_send_message_length", wire.max_message_bytes + (1 << 20)),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.max_metadata_size", 32 * 1024),
                ("grpc.so_reuseport", 0),
            ]
        )
        hoststage_pb2_grpc.add_HostStageServicer_to_server(
            HostStageServicer(self._service, self._connections, wire), server
        )
        admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(self._service, wire.token, self.drain), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{settings.listen.socket}")
        except RuntimeError as error:
            raise StartError(f"cannot listen on {settings.listen.socket}: {error}") from error
        finally:
            os.umask(before)
        if settings.listen.tcp:
            try:
                server.add_insecure_port(settings.listen.tcp)
            except RuntimeError as error:
                raise StartError(f"cannot listen on listen.tcp {settings.listen.tcp}: {error}") from error
        self._stack.callback(sockets.remove, settings.listen.socket)
        await server.start()
        os.chmod(settings.listen.socket, int(settings.listen.socket_mode, 8))
        self._stack.push_async_callback(server.stop, 0.2)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, state: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", *SERVICES):
            await self._health.set(name, state)

    async def _listen_http(self) -> None:
        where = self._settings.http.listen
        if not where:
            return
        host, _, port = where.rpartition(":")
        about = {
            "version": version(),
            "socket": self._settings.listen.socket,
            "pinned": self._service.options.pinned,
            "store": self._settings.store.url,
        }
        registry = make_registry(self._service.facts, self._store, version())
        registry.register(self._wire_metrics)
        http = HttpPort(registry, self._service.facts, self._store, self.problems, about)
        try:
            self.http_port = await http.start(host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise StartError(
                f"cannot serve http.listen {where}: {error}; set another address, or empty for none"
            ) from error
        self._stack.push_async_callback(http.stop)
        log.info("http.ready", address=f"{host}:{self.http_port}")

    # -------------------------------------------------------------- running and stopping

    def problems(self) -> list[str]:
        """Why the daemon is not ready, empty where it is."""
        out = ["the daemon is draining"] if self._draining else []
        out += self._service.facts().problems
        if self._store is not None and self._store.stats().breaker is not BreakerState.CLOSED:
            out.append("the store fails; its circuit breaker is open: loads miss and commits are dropped")
        return out

    def drain(self) -> int:
        """Take no new work from now on; return the number of commits that are not stored yet. An operator asked for it."""
        if not self._draining:
            self._begin_draining(0.0)
        return self._service.drain()

    def _begin_draining(self, grace: float) -> None:
        self._draining = True
        open_commits = self._service.drain()
        log.info("daemon.draining", open_commits=open_commits, grace_seconds=grace)
        self._connections.announce_draining(grace)
        self._unhealthy = asyncio.create_task(self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING))

    async def _drain(self, stop: _Stop) -> None:
        """Finish what was accepted, for as long as the grace lasts and nobody asks again."""
        _notify("STOPPING=1")
        grace = self._settings.shutdown.grace
        self._begin_draining(grace)
        await self._unhealthy
        drained = asyncio.create_task(self._service.drained())
        now = asyncio.create_task(stop.now.wait())
        await asyncio.wait({drained, now}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            log.warning("daemon.undrained", open_commits=self._service.tier.open_commits())
        for task in (drained, now):
            task.cancel()


def _stop_hard() -> None:
    """End the process though I/O is under way that does not end. The files are as after a crash, for which they are made."""
    log.error("daemon.stopped_hard", reason=f"store I/O did not end within {LAST_RESORT_SECONDS:g} seconds")
    os._exit(1)


def _notify(state: str) -> None:
    """Tell systemd, where it started us."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
            out.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)


def serve(settings: Settings) -> int:
    """Run a daemon on uvloop until it is stopped; return its exit status."""
    _tame_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(settings).run())


def _tame_collector() -> None:
    """Let the cycle collector look seldom, and never at what is there from the start.

    The tier's objects are freed by their counts. With a collection for each 700 objects that a large commit makes, and whole ones that walk the
    indexes of a million pages, requests beside it wait for nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def _raise_file_limit() -> None:
    """Allow this process as many files as it may allow itself: how many sessions, arenas and imports there may be follows from it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            log.info("files.limit_raised", before=soft, now=hard)
