"""Stores pages without end: page `i` under the hash of `i`, filled with its key. Prints a line for each.

Arguments: address, bytes of a page, and host slots (48 where not given).
"""

import hashlib
import itertools
import sys

import numpy as np

from hoststage.client import Identity, Mode, ModeWish, PayloadPath, PoolKind, PoolSpec, StackSpec, connect

address, page, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 48
STACK = StackSpec(
    Identity("churn"),
    (PoolSpec("kv", PoolKind.KV, page, 16, host_slots=slots),),
    modes=(ModeWish(Mode.CACHE, True),),
    paths=(PayloadPath.SHM,),
)
with connect(address, stack=STACK, timeout=20) as session:
    for i in itertools.count():
        key = hashlib.sha256(f"churn {i}".encode()).digest()
        row = np.tile(np.frombuffer(key, dtype=np.uint64), page // 32)
        session.store([key], {"kv": [row]}).wait(20)
        print(i, flush=True)
