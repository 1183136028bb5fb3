"""One rank of an engine as a process: `ADDRESS GROUP RANK SIZE`. Does what it reads from standard input, a JSON object a line, and prints what it saw.

`{"do": "store" | "load" | "silence", "kind": KIND, "first": TOKEN, "seed": N, "rank": RANK}`; all ranks get the same lines, and meet in SGLang's own collectives.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from typing import Any

import torch

from tests.engines import linker_support as ls


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)).hexdigest()


def _work(engine: ls.LinkedEngine, rank: int, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "silence":
        if order["rank"] == rank:
            engine.linker.channel.close()
        return {}
    tokens = array("q", range(order["first"], order["first"] + ls.PAGES * ls.PAGE))
    replicated = engine.kind == "mla"
    if order["do"] == "store":
        # Ranks that share their pages compute the same ones.
        rows = engine.store(tokens, order["seed"] + (0 if replicated else rank))
        return {"rows": _digest(rows), "dropped": engine.linker.offloader.dropped}
    engine.evict()
    engine.fill(order["seed"] + 100 + rank)
    req = engine.request(tokens, f"r{order['seed']}")
    if not req.host_hit_length:
        return {"hit": 0}
    at = engine.admit(req)
    failed = engine.forward([req])
    out = {"hit": req.host_hit_length, "failed": len(failed), "rows": _digest(engine.rows(at, _state(engine, req)))}
    engine.drop(req.rid)
    return out


def _state(engine: ls.LinkedEngine, req: Any) -> Any:
    return req.kv.mamba_pool_idx.unsqueeze(0) if "mamba" in engine.kind else None


def main() -> None:
    address, store = sys.argv[1:3]
    rank, size = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, size), rank=rank, world_size=size
    )
    group = torch.distributed.group.WORLD
    engines: dict[str, ls.LinkedEngine] = {}
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        kind = order["kind"]
        if kind not in engines:
            engines[kind] = ls.LinkedEngine(address, kind, group, tp=(rank, size), tenant=f"ranks-{kind}")
        print(json.dumps(_work(engines[kind], rank, order)), flush=True)


if __name__ == "__main__":
    main()
