"""Lookups: which prefixes are there, in host memory and in the store, and a pin over what was answered."""

from __future__ import annotations

from collections.abc import Sequence

from hoststage.core.prefix import Rules, restorable
from hoststage.core.sessions import SessionCore, SessionState
from hoststage.core.tier import Tier
from hoststage.server.contract import Reply
from hoststage.server.staging.engine import Engine
from hoststage.v1 import ops


class Lookups:
    """The lookups of one session."""

    def __init__(self, core: SessionCore, tier: Tier, engine: Engine) -> None:
        self._core = core
        self._tier = tier
        self._engine = engine

    def begin(self, op: ops.Lookup, keys: list[bytes], reply: Reply) -> None:
        """Answer a lookup of well-formed keys, at once where everything is resident, else when the store has answered."""
        present = self._tier.presence(self._core.namespace, keys)
        if self._engine.store is None or _all_there(self._core.namespace.rules, present):
            reply(self._answer(op, keys, present))
            return
        self._engine.spawn(self._in_store(op, keys, present, reply))

    async def _in_store(
        self, op: ops.Lookup, keys: list[bytes], present: list[list[bytes | None]], reply: Reply
    ) -> None:
        store, space = self._engine.store, self._core.namespace
        assert store is not None
        end = len(keys)
        on_host = [i for i, rule in enumerate(space.rules.pools) if rule.on_host]
        order = sorted(on_host, key=lambda i: i != space.rules.anchor)
        for place in order:
            rule, pages = space.rules.pools[place], present[place]
            missing = [i for i in range(end) if pages[i] is None]
            if missing:
                found = await store.exists(space.name, rule.name, [keys[i] for i in missing])
                for i, commit_id in zip(missing, found, strict=True):
                    pages[i] = commit_id
                # A belief that the store contradicts would keep the page from ever being stored again.
                gone = space.beliefs[place].drop([keys[i] for i in missing if pages[i] is None])
                self._tier.counters["beliefs_healed", ""] += gone
            if place == space.rules.anchor and rule.needed(end) == (0, end):
                # Beyond the anchor's first gap nothing can be restored: no need to ask further.
                end = next((i for i in range(end) if pages[i] is None), end)
        self._tier.counters["beliefs_healed", ""] += space.heal(keys[:end], present)
        if self._core.state is SessionState.ACTIVE:
            reply(self._answer(op, keys[:end], [pages[:end] for pages in present]))
            self._engine.settle()

    def _answer(self, op: ops.Lookup, keys: list[bytes], present: Sequence[Sequence[bytes | None]]) -> ops.LookupReply:
        runs = restorable(self._core.namespace.rules, present)
        self._tier.counters["lookup", "hit" if runs else "miss"] += 1
        if not runs or not op.pin_ms:
            return ops.LookupReply(tuple(runs))
        until = self._engine.now() + min(op.pin_ms / 1000, self._tier.limits.max_pin_seconds)
        longest = [(runs[-1][1], runs[-1][1])]
        for answer in (runs, longest):
            pin = self._tier.pin(self._core, keys, answer, until)
            if pin:
                return ops.LookupReply(tuple(answer), pin)
        return ops.LookupReply(tuple(runs))


def _all_there(rules: Rules, present: Sequence[Sequence[bytes | None]]) -> bool:
    return all(
        page is not None for rule, pages in zip(rules.pools, present, strict=True) if rule.on_host for page in pages
    )
