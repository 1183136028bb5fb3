"""The two worker processes of the demo.

`prefill` runs a pretrained model over a long prompt, stores its whole pages through the daemon, goes on decoding as the uninterrupted run,
and writes what it saw into a file. `decode` starts afterwards in a process of its own: it looks the prefix up, loads the pages,
compares every one with what the first worker's model computed, and decodes from them.

Each prints one JSON object a line: progress while it works, its result at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hoststage.cli.demo import corpus, generate, models, pages
from hoststage.client import (
    HitPolicy,
    Identity,
    Mode,
    ModeWish,
    PayloadPath,
    PoolKind,
    PoolSpec,
    Retraction,
    RetractionWish,
    Session,
    StackSpec,
    connect,
)

CALL_SECONDS = 60.0
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What both workers are told. `run` names the run; its pages meet no other's."""

    address: str
    model: str
    mode: str
    path: str
    run: str
    prompt_tokens: int
    new_tokens: int
    notes: Path
    threads: int


@dataclass(slots=True)
class PoolTraffic:
    """Pages and bytes of one pool that crossed the daemon."""

    pages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Result:
    """What a worker measured. Seconds; `digests`: per pool, a digest of each page by its index."""

    role: str
    load_model_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer_seconds: float = 0.0
    restore_seconds: float = 0.0
    first_token_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    digests: dict[str, dict[int, str]] = field(default_factory=dict)
    traffic: dict[str, PoolTraffic] = field(default_factory=dict)
    pinned: str = ""
    prefix_pages: int = 0
    pages_identical: bool = False
    stored: str = ""


def say(**event: Any) -> None:
    """Print one event for the parent."""
    print(json.dumps(event), flush=True)


def progress(phase: str, done: int, total: int) -> None:
    """Report progress; `total` is 0 where it is not known."""
    say(event="progress", phase=phase, done=done, total=total)


def digest(page: pages.Buffer) -> str:
    """Return a digest by which pages of two processes are compared."""
    return hashlib.blake2b(np.frombuffer(page, dtype=np.uint8).data, digest_size=16).hexdigest()


def stack_of(model: models.LoadedModel, work: Work, *, retract: bool = False) -> StackSpec:
    """Return the stack that a model presents: one pool a kind of layer. `retract`: with holds of one request."""
    pools = []
    for shape in pages.stack_shape(model):
        sliding = shape.window_tokens > 0
        pools.append(
            PoolSpec(
                name=shape.name,
                kind=PoolKind.SWA if sliding else PoolKind.KV,
                page_bytes=shape.page_bytes,
                page_tokens=shape.page_tokens,
                layers=len(shape.layers),
                sliding_window=shape.window_tokens,
                hit_policy=HitPolicy.TRAILING_PAGES if sliding else HitPolicy.ALL_PAGES,
                pieces=shape.pieces,
                # Room for the whole prompt in the read arena, and for a staging depth of writes.
                host_slots=2 * len(shape.pages_for(work.prompt_tokens)) + 2,
            )
        )
    identity = Identity(
        model=work.model,
        tenant=f"demo-{work.run}",
        weights_revision=model.weights_sha256,
        dtype=model.dtype,
        layout="layer_first",
        key_hash="blake2b-256",
    )
    wish = RetractionWish(Retraction.HOST_POOL, required=True) if retract else RetractionWish()
    return StackSpec(
        identity=identity,
        pools=tuple(pools),
        modes=(ModeWish(Mode(work.mode), required=True),),
        paths=(PayloadPath(work.path),),
        retraction=wish,
        largest_request_tokens=work.prompt_tokens + work.new_tokens,
    )


def open_session(model: models.LoadedModel, work: Work, role: str, *, retract: bool = False) -> Session:
    """Connect as the worker of that role."""
    stack = stack_of(model, work, retract=retract)
    return connect(work.address, stack=stack, worker=f"demo-{role}", client="hoststage demo", timeout=CALL_SECONDS)


class _Measured(Protocol):
    load_model_seconds: float


def load_model(work: Work, result: _Measured) -> models.LoadedModel:
    """Load the model and warm it up."""
    model = models.load(models.DemoModel(work.model), threads=work.threads, page_tokens=PAGE_TOKENS, progress=progress)
    result.load_model_seconds = model.load_seconds
    generate.warm_up(model)
    return model


def pinned(session: Session) -> str:
    """Return how firmly the daemon holds the memory that is mapped."""
    levels = {a.pin.level.value for a in session.arenas}
    return ", ".join(sorted(levels)) or "none (inline)"


def note_pages(result: Result, held: dict[str, dict[int, memoryview]]) -> None:
    """Note digest, number and bytes of loaded pages."""
    for name, by_index in held.items():
        result.digests[name] = {i: digest(page) for i, page in by_index.items()}
        result.traffic[name] = PoolTraffic(len(by_index), sum(len(p) for p in by_index.values()))


def run_prefill(work: Work) -> Result:
    """Prefill, store, and decode on as the uninterrupted run."""
    result = Result("prefill")
    model = load_model(work, result)
    prompt = corpus.prompt_tokens(model, work.prompt_tokens)
    reusable = pages.reusable_tokens(len(prompt), PAGE_TOKENS)
    keys = pages.chain_keys(prompt[:reusable], PAGE_TOKENS)
    taken: dict[str, npt.NDArray[np.uint8]] = {}

    def take(cache: Any, end: int) -> None:
        if end != reusable:
            return
        for shape in pages.stack_shape(model):
            wanted = shape.pages_for(reusable)
            rows = np.empty((len(wanted), shape.page_bytes), dtype=np.uint8)
            for row, index in zip(rows, wanted, strict=True):
                pages.extract_page(cache, shape, index, row)
            taken[shape.name] = rows

    with open_session(model, work, "prefill") as session:
        result.pinned = pinned(session)
        started = time.perf_counter()
        prefilled = generate.prefill(model, prompt, on_chunk=take, progress=progress)
        result.prefill_seconds = time.perf_counter() - started
        progress("store", 0, 0)
        started = time.perf_counter()
        ticket = session.store(keys, dict(taken), timeout=CALL_SECONDS)
        stored = ticket.wait(CALL_SECONDS)
        result.transfer_seconds = time.perf_counter() - started
        result.stored = stored.outcome.name.lower()
    for name, rows in taken.items():
        first = len(keys) - len(rows)
        result.digests[name] = {first + i: digest(row) for i, row in enumerate(rows)}
        result.traffic[name] = PoolTraffic(len(rows), rows.nbytes)
    result.tokens = generate.decode(model, prefilled.cache, prefilled.next_token, work.new_tokens, progress=progress)
    return result


def run_decode(work: Work, seen: dict[str, Any]) -> Result:
    """Look up, load, compare, restore, and decode."""
    result = Result("decode")
    model = load_model(work, result)
    prompt = corpus.prompt_tokens(model, work.prompt_tokens)
    reusable = pages.reusable_tokens(len(prompt), PAGE_TOKENS)
    keys = pages.chain_keys(prompt[:reusable], PAGE_TOKENS)
    with open_session(model, work, "decode") as session:
        result.pinned = pinned(session)
        progress("load", 0, 0)
        started = time.perf_counter()
        match = session.lookup(keys, pin_seconds=10.0)
        if match.longest != len(keys):
            raise SystemExit(f"the lookup found {match.longest} of {len(keys)} pages")
        with session.load(keys, match.longest, pin=match, timeout=CALL_SECONDS) as loaded:
            result.transfer_seconds = time.perf_counter() - started
            result.prefix_pages = loaded.prefix
            held = {
                shape.name: dict(enumerate(loaded.pages(shape.name), loaded.first(shape.name)))
                for shape in pages.stack_shape(model)
            }
            cache = pages.restore(model, held, reusable)
            result.restore_seconds = time.perf_counter() - started
            prefilled = generate.prefill(model, prompt, cache=cache, progress=progress)
            first = prefilled.next_token
            result.first_token_seconds = time.perf_counter() - started
            # Compared outside the timing, on the very memory that was loaded.
            note_pages(result, held)
            # A view that outlives the session keeps its memory mapped, and so the session alive.
            del held
    wanted = {name: {int(i): d for i, d in by_index.items()} for name, by_index in seen["digests"].items()}
    result.pages_identical = result.digests == wanted
    result.tokens = generate.decode(model, prefilled.cache, first, work.new_tokens, progress=progress)
    return result


def parse(arguments: list[str] | None, program: str, text: str, roles: list[str]) -> tuple[str, Work]:
    """Return the role and the work that a worker is told on its command line."""
    parser = argparse.ArgumentParser(prog=program, description=text)
    parser.add_argument("role", choices=roles)
    for name in ("address", "model", "mode", "path", "run"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="where the first worker's result is kept")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = vars(parser.parse_args(arguments))
    return options.pop("role"), Work(**options)


def main(arguments: list[str] | None = None) -> None:
    """Run one worker."""
    role, work = parse(arguments, "hoststage.cli.demo.worker", str(__doc__), ["prefill", "decode"])
    if role == "prefill":
        result = run_prefill(work)
        work.notes.write_text(json.dumps(asdict(result)), encoding="utf-8")
    else:
        result = run_decode(work, json.loads(work.notes.read_text(encoding="utf-8")))
    say(event="result", result=asdict(result))


if __name__ == "__main__":
    main(sys.argv[1:])
