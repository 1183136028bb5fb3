"""One engine process of the tests: does what it reads from standard input, a line each, and prints what it saw.

A line is `write|read LAYOUT|mla RANK SIZE [ALLOCATOR]`: eight pages, from slots of their own, or into others. ALLOCATOR: of SGLang's, where the pools' memory
comes from.
"""

from __future__ import annotations

import hashlib
import json
import sys

from tests.engines import sglang_support as sg


def work(address: str, verb: str, layout: str, rank: int, size: int, allocator: str) -> dict[str, list]:
    """Write or read, with a backend attached for this alone."""
    replicated = layout == "mla"
    with sg.allocated_by(allocator):
        pool = sg.mla("page_first") if replicated else sg.mha(layout)
    sg.fill(pool, 100 + rank if verb == "write" else 7)
    backend = sg.open_backend(
        address, pool, is_mla_model=replicated, tp_rank=rank, tp_size=size, model_name="tests/processes"
    )
    keys = sg.hashes("processes", 8)
    pages = list(range(8)) if verb == "write" else list(range(20, 28))
    move = backend.batch_set_v1 if verb == "write" else backend.batch_get_v1
    ok = move(keys, sg.ids(pool, pages))
    digests = [hashlib.sha256(sg.page_bytes(pool, page)).hexdigest() for page in pages]
    backend.close()
    return {"ok": ok, "pages": digests}


def main() -> None:
    for line in sys.stdin:
        verb, layout, rank, size, *allocator = line.split()
        done = work(sys.argv[1], verb, layout, int(rank), int(size), *(allocator or ["default"]))
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
