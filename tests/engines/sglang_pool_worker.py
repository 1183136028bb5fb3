"""One engine process whose host pool may live in the daemon's memory: does what it reads from standard input, a word each, and prints what it saw.

Arguments: the daemon's address, the settings as JSON, `KIND LAYOUT PAGES`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from typing import Any

from tests.engines import sglang_support as sg

KEYS = 8


def digest(pool: Any) -> str:
    """Return a digest of all bytes of a pool."""
    found = hashlib.sha256()
    for tensor in sg.snapshot(pool):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def answer(word: str, pool: Any, backend: Any) -> Any:
    if word == "where":
        return [sg.mapping_at(tensor.data_ptr()) for tensor in sg.tensors_of(pool)]
    if word == "digest":
        return digest(pool)
    keys = sg.hashes("pool worker", KEYS)
    pages = list(range(KEYS)) if word == "store" else list(range(KEYS, 2 * KEYS))
    if word in ("store", "load"):
        move = backend.batch_set_v1 if word == "store" else backend.batch_get_v1
        ok = move(keys, sg.ids(pool, pages))
        return [ok, [hashlib.sha256(sg.page_bytes(pool, page)).hexdigest() for page in pages]]
    raise ValueError(word)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    address, section, shape = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split()
    sg.hook_host_pools()
    with sg.engine({"hoststage": {"address": address, **section}}):
        try:
            pool = sg.mla(shape[1], pages=int(shape[2])) if shape[0] == "mla" else sg.mha(shape[1], pages=int(shape[2]))
        except Exception as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
            return
        sg.fill(pool, 11)
        print(json.dumps({"allocator": type(pool.allocator).__name__}), flush=True)
        backend = sg.open_backend(address, pool, is_mla_model=shape[0] == "mla", model_name="tests/pool worker")
        for line in sys.stdin:
            if line.strip() == "wipe":
                sg.fill(pool, 12)
                print("null", flush=True)
            else:
                print(json.dumps(answer(line.strip(), pool, backend)), flush=True)


if __name__ == "__main__":
    main()
