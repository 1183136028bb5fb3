"""The operators' port: /metrics, /healthz, /readyz, /status.json and the status page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from hoststage.server.contract import TierFacts
from hoststage.server.store.base import Store


class HttpPort:
    """Serves HTTP on one address. `problems` returns why the daemon is not ready, empty where it is."""

    def __init__(
        self,
        registry: CollectorRegistry,
        facts: Callable[[], TierFacts],
        store: Store | None,
        problems: Callable[[], list[str]],
        about: dict[str, Any],
    ) -> None:
        self._registry = registry
        self._facts = facts
        self._store = store
        self._problems = problems
        self._about = about
        self._page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Start serving; return the port. Raises `OSError` where the address is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/status.json", self._status),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _: web.Request) -> web.Response:
        # That the loop answers is what this says.
        return web.json_response({"ok": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        problems = self._problems()
        return web.json_response({"ready": not problems, "problems": problems}, status=503 if problems else 200)

    async def _status(self, _: web.Request) -> web.Response:
        facts = self._facts()
        stats = asdict(self._store.stats()) if self._store is not None else None
        if stats is not None:
            stats["breaker"] = stats["breaker"].value
        counters = [{"name": n, "label": label, "value": v} for (n, label), v in sorted(facts.counters.items())]
        return web.json_response(
            {
                "about": self._about,
                "problems": self._problems(),
                "budget_bytes": facts.budget_bytes,
                "granted_bytes": facts.granted_bytes,
                "sessions": [asdict(s) for s in facts.sessions],
                "pools": [asdict(p) for p in facts.pools],
                "holds": asdict(facts.holds),
                "imports": asdict(facts.imports),
                "counters": counters,
                "store": stats,
            }
        )
