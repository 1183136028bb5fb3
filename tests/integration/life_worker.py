"""A worker that comes to a given point of its work, says so, and waits there to be killed or stopped.

Arguments: stage, address, model, mode, and `fork` where a child is to live on with its sockets and mappings.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hoststage.client import Mode, Retraction, RetractionWish, Session, connect
from hoststage.v1 import ops
from tests.life_support import KV, keys_of, pages, stack

Kept = list[Any]


def reserved(session: Session, model: str) -> Kept:
    batch = session.reserve(keys_of(5, f"{model}/reserved"), {"kv": 5})
    assert batch, batch.detail
    return [batch]


def half_copied(session: Session, model: str) -> Kept:
    keys = keys_of(5, f"{model}/half_copied")
    batch = session.reserve(keys, {"kv": 5})
    assert batch, batch.detail
    made = pages("kv", keys, "half")
    for i in range(2):
        batch.views["kv"][i][:] = made[i]
    batch.views["kv"][2][: KV // 2] = made[2][: KV // 2]
    return [batch]


def committed(session: Session, model: str) -> Kept:
    keys = keys_of(5, f"{model}/committed")
    return [session.store(keys, {"kv": pages("kv", keys, "committed")})]


def loading(session: Session, model: str) -> Kept:
    stream = session.load_groups(keys_of(8, f"{model}/there"))
    assert not stream.loaded
    return [stream]


def leasing(session: Session, model: str) -> Kept:
    loaded = session.load(keys_of(8, f"{model}/there"))
    assert loaded
    return [loaded, loaded.pages("kv")]


def pinning(session: Session, model: str) -> Kept:
    match = session.lookup(keys_of(8, f"{model}/there"), pin_seconds=30)
    assert match.pin
    return [match]


def holding(session: Session, model: str) -> Kept:
    hold = session.hold(b"owner", "request", 1, {"kv": 3})
    assert hold, hold.detail
    for view in hold.views["kv"]:
        view[:] = b"h" * KV
    hold.seal(b"note")
    return [hold]


def everything(session: Session, model: str) -> Kept:
    return [step(session, model) for step in (leasing, reserved, half_copied, committed, loading)]


def unread(session: Session, model: str) -> Kept:
    """Ask without end and read nothing."""
    session._core._stop.set()
    time.sleep(0.1)
    sock = session._core.link.lane._sock  # type: ignore[union-attr]
    sock.settimeout(1.0)
    from hoststage.v1 import lane

    frame = lane.encode(ops.Lookup(ops.Span(b"".join(keys_of(8, f"{model}/there")), 32)), 77)
    sent = 0
    try:
        while sent < 64 << 20:
            sent += sock.send(frame * 64)
    except OSError:
        pass
    return [sock]


def main() -> None:
    """Come to the stage, say `ready`, wait."""
    stage, address, model, mode, *more = sys.argv[1:]
    wish = RetractionWish(Retraction.HOST_POOL if stage == "holding" else Retraction.NONE)
    spec = stack(model, Mode(mode), retraction=wish, largest_request_tokens=256)
    session = connect(address, stack=spec, worker=stage, timeout=20)
    kept = globals()[stage](session, model)
    if "fork" in more and os.fork() == 0:
        time.sleep(120)
        os._exit(0)
    print("ready", flush=True)
    time.sleep(120)
    del kept


if __name__ == "__main__":
    main()
