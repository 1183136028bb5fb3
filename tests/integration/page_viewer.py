"""Holds views of pages that `page_writer` stores, for a while each, and compares every byte before it lets go.

Reads the number of the newest page from standard input, a line each time; ends with it. Prints at the end how many views it looked at, and how many of them it
had leased without a request. Arguments: address, bytes of a page, host slots, and "hold" to take what the board has room for, say so, and wait to be killed.
"""

import hashlib
import random
import sys
import threading
import time
from collections import deque

import numpy as np

from hoststage.client import Identity, Mode, ModeWish, PayloadPath, PoolKind, PoolSpec, StackSpec, connect

address, page, slots, hold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["hold"]
STACK = StackSpec(
    Identity("churn"),
    (PoolSpec("kv", PoolKind.KV, page, 16, host_slots=slots),),
    modes=(ModeWish(Mode.CACHE, True),),
    paths=(PayloadPath.SHM,),
)
head = [-1]
over = threading.Event()


def follow():
    for line in sys.stdin:
        head[0] = int(line)
    over.set()


def key_of(i):
    return hashlib.sha256(f"churn {i}".encode()).digest()


def compare(i, loaded):
    expected = np.tile(np.frombuffer(key_of(i), dtype=np.uint8), page // 32)
    [view] = loaded.pages("kv")
    assert np.array_equal(np.frombuffer(view, dtype=np.uint8), expected), f"page {i} was overwritten under its view"
    del view
    loaded.release()


threading.Thread(target=follow, daemon=True).start()
with connect(address, stack=STACK, timeout=20) as session:
    entries = session._core.link.arenas.board.slots
    readable = session.grant.pools[0].read_slots
    held = deque()
    looked = own = 0
    while not over.is_set():
        if head[0] < 0:
            time.sleep(0.001)
            continue
        if hold and len(held) == entries:
            print("holding", entries, flush=True)
            over.wait()
        # Most of them old: the next to be evicted.
        i = head[0] - (random.randrange(8) if hold else int(readable * random.random() ** 0.25))
        wanted = i >= 0 and not (hold and i in dict(held))
        loaded = session.load([key_of(i)]) if wanted else None
        if not loaded:
            continue
        if hold and (loaded._own is None or i in dict(held)):
            # Held must be as many pages as the board has entries, all by the board.
            loaded.release()
            continue
        held.append((i, loaded))
        looked += 1
        own += loaded._own is not None
        if len(held) > entries + 2 and not hold:
            # Some by the board, and some beyond it, which are the daemon's to lease.
            for _ in range(random.randint(1, entries)):
                compare(*held.popleft())
            time.sleep(0.005)
    while held:
        compare(*held.popleft())
    print("looked", looked, own, flush=True)
