"""The two worker processes of `hoststage demo --retract`.

`whole` runs a prompt and decodes from it without a break, and notes the pages of its cache where the other worker will stop. `retract` decodes the
same prompt in a process of its own; half way it parks the request's pages in a hold, the partly filled last page among them, and of sliding layers
the trailing window alone. It drops its cache, serves another request from start to end with the same model and through the same daemon, restores the
first one from the hold and decodes on.

Each prints one JSON object a line, like the workers of the plain demo.
"""

from __future__ import annotations

import gc
import json
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hoststage.cli.demo import corpus, generate, models, pages, worker
from hoststage.cli.demo.worker import CALL_SECONDS, PAGE_TOKENS, PoolTraffic, Work, digest, progress, say
from hoststage.client import Session

OTHER_TOKENS = 320
"""Length of the other request's prompt, at most."""


@dataclass(slots=True)
class RetractResult:
    """What a worker measured. Seconds; `digests`: per pool, a digest of each page of the cache where the request is retracted."""

    role: str
    load_model_seconds: float = 0.0
    prefill_seconds: float = 0.0
    hold_seconds: float = 0.0
    restore_seconds: float = 0.0
    retracted_after: int = 0
    other_tokens: int = 0
    other_pages: int = 0
    tokens: list[int] = field(default_factory=list)
    digests: dict[str, dict[int, str]] = field(default_factory=dict)
    traffic: dict[str, PoolTraffic] = field(default_factory=dict)
    pinned: str = ""
    pages_identical: bool = False


def decoded_before(new_tokens: int) -> int:
    """Return after how many decoded tokens the request is retracted."""
    return max(1, new_tokens // 2)


def _held_tokens(prompt_tokens: int, new_tokens: int) -> int:
    """Tokens in the cache at that point: the last one that was decoded is not in it yet."""
    return prompt_tokens + decoded_before(new_tokens) - 1


def _take(cache: Any, model: models.LoadedModel, n_tokens: int, views: Mapping[str, list[memoryview]]) -> None:
    """Copy the request's pages out of its cache."""
    for shape in pages.stack_shape(model):
        for index, view in zip(shape.pages_for(n_tokens), views[shape.name], strict=True):
            pages.extract_partial_page(cache, shape, index, view)


def _digests(
    model: models.LoadedModel, n_tokens: int, views: Mapping[str, list[memoryview]]
) -> dict[str, dict[int, str]]:
    return {
        shape.name: {i: digest(v) for i, v in zip(shape.pages_for(n_tokens), views[shape.name], strict=True)}
        for shape in pages.stack_shape(model)
    }


def run_whole(work: Work) -> RetractResult:
    """Prefill and decode without a break."""
    result = RetractResult("whole")
    model = worker.load_model(work, result)
    prompt = corpus.prompt_tokens(model, work.prompt_tokens)
    started = time.perf_counter()
    prefilled = generate.prefill(model, prompt, progress=progress)
    result.prefill_seconds = time.perf_counter() - started
    first = decoded_before(work.new_tokens)
    tokens = generate.decode(model, prefilled.cache, prefilled.next_token, first, progress=progress)
    n_tokens = _held_tokens(len(prompt), work.new_tokens)
    mine = {
        shape.name: [memoryview(bytearray(shape.page_bytes)) for _ in shape.pages_for(n_tokens)]
        for shape in pages.stack_shape(model)
    }
    _take(prefilled.cache, model, n_tokens, mine)
    result.digests = _digests(model, n_tokens, mine)
    rest = generate.decode(model, prefilled.cache, tokens[-1], work.new_tokens - first + 1, progress=progress)
    result.tokens = tokens + rest[1:]
    return result


def run_retract(work: Work, seen: dict[str, Any]) -> RetractResult:
    """Decode, retract into a hold, serve another request, restore, decode on."""
    result = RetractResult("retract")
    model = worker.load_model(work, result)
    prompt = corpus.prompt_tokens(model, work.prompt_tokens)
    owner, request = secrets.token_bytes(32), f"request-{work.run}"
    with worker.open_session(model, work, "retract", retract=True) as session:
        result.pinned = worker.pinned(session)
        prefilled = generate.prefill(model, prompt, progress=progress)
        first = result.retracted_after = decoded_before(work.new_tokens)
        tokens = generate.decode(model, prefilled.cache, prefilled.next_token, first, progress=progress)
        n_tokens = _held_tokens(len(prompt), work.new_tokens)
        _hold(session, model, prefilled.cache, n_tokens, (owner, request), result)
        # Nothing of the request is left here: what it goes on from can only come out of the hold.
        del prefilled
        gc.collect()
        _serve_another(session, model, prompt, result)
        progress("restore", 0, 0)
        started = time.perf_counter()
        with_pages = session.restore(owner, request, 0, timeout=CALL_SECONDS)
        if not with_pages:
            raise SystemExit(f"the hold is not there: {with_pages.outcome.name} {with_pages.detail}")
        held = {
            shape.name: dict(zip(shape.pages_for(n_tokens), with_pages.views[shape.name], strict=True))
            for shape in pages.stack_shape(model)
        }
        cache = pages.restore(model, held, int(with_pages.note))
        result.restore_seconds = time.perf_counter() - started
        result.digests = _digests(model, n_tokens, with_pages.views)
        del held
        with_pages.discard()
        rest = generate.decode(model, cache, tokens[-1], work.new_tokens - first + 1, progress=progress)
        result.tokens = tokens + rest[1:]
    wanted = {name: {int(i): d for i, d in by_index.items()} for name, by_index in seen["digests"].items()}
    result.pages_identical = result.digests == wanted
    return result


def _hold(
    session: Session,
    model: models.LoadedModel,
    cache: Any,
    n_tokens: int,
    name: tuple[bytes, str],
    result: RetractResult,
) -> None:
    progress("hold", 0, 0)
    shapes = pages.stack_shape(model)
    started = time.perf_counter()
    counts = {shape.name: len(shape.pages_for(n_tokens)) for shape in shapes}
    with session.hold(*name, 0, counts, timeout=CALL_SECONDS) as hold:
        if not hold:
            raise SystemExit(f"no hold was granted: {hold.outcome.name} {hold.detail}")
        _take(cache, model, n_tokens, hold.views)
        hold.seal(str(n_tokens).encode(), timeout=CALL_SECONDS)
        hold.views.clear()
    result.hold_seconds = time.perf_counter() - started
    result.traffic = {s.name: PoolTraffic(counts[s.name], counts[s.name] * s.page_bytes) for s in shapes}


def _serve_another(session: Session, model: models.LoadedModel, prompt: list[int], result: RetractResult) -> None:
    """Serve another request from start to end while the first one is parked: compute it, store its pages, load them back."""
    progress("another request", 0, 0)
    other = prompt[len(prompt) // 2 :][:OTHER_TOKENS]
    reusable = pages.reusable_tokens(len(other), PAGE_TOKENS)
    taken: dict[str, list[memoryview]] = {}

    def take(cache: Any, end: int) -> None:
        if end == reusable:
            for shape in pages.stack_shape(model):
                taken[shape.name] = [memoryview(bytearray(shape.page_bytes)) for _ in shape.pages_for(reusable)]
                for index, view in zip(shape.pages_for(reusable), taken[shape.name], strict=True):
                    pages.extract_page(cache, shape, index, view)

    prefilled = generate.prefill(model, other, on_chunk=take, progress=progress)
    result.other_tokens = len(other) + len(
        generate.decode(model, prefilled.cache, prefilled.next_token, 8, progress=progress)
    )
    if not reusable:
        return
    keys = pages.chain_keys(other[:reusable], PAGE_TOKENS)
    stored = session.store(keys, taken, timeout=CALL_SECONDS).wait(CALL_SECONDS)
    if not stored.ok:
        raise SystemExit(f"the other request's pages were not stored: {stored.outcome.name}")
    with session.load(keys, timeout=CALL_SECONDS) as loaded:
        for name, mine in taken.items():
            if [bytes(p) for p in loaded.pages(name)] != [bytes(p) for p in mine]:
                raise SystemExit(f"the other request's pages of pool {name} came back different")
            result.other_pages += len(mine)


def main(arguments: list[str] | None = None) -> None:
    """Run one worker."""
    role, work = worker.parse(arguments, "hoststage.cli.demo.retract", str(__doc__), ["whole", "retract"])
    if role == "whole":
        result = run_whole(work)
        work.notes.write_text(json.dumps(asdict(result)), encoding="utf-8")
    else:
        result = run_retract(work, json.loads(work.notes.read_text(encoding="utf-8")))
    say(event="result", result=asdict(result))


if __name__ == "__main__":
    main(sys.argv[1:])
