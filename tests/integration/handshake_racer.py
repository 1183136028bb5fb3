"""One of several client processes that race for the budget: `handshake_racer.py ADDRESS NAME SLOTS`.

For each line on its standard input it opens a session, and closes it at the next one. It prints one line of JSON for each attempt.
"""

from __future__ import annotations

import json
import sys

from hoststage.client import Identity, Mode, ModeWish, PayloadPath, PoolKind, PoolSpec, Refused, StackSpec, connect


def main() -> None:
    address, name, slots = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pool = PoolSpec("kv", PoolKind.KV, 8192, 16, host_slots=slots)
    stack = StackSpec(Identity(name), (pool,), modes=(ModeWish(Mode.BUFFER_ONLY),), paths=(PayloadPath.SHM,))
    print("ready", flush=True)
    while sys.stdin.readline():
        try:
            session = connect(address, stack=stack, worker=name, timeout=30)
        except Refused as refused:
            findings = [{"rule": f.rule, "message": f.message, "values": f.values} for f in refused.findings]
            print(json.dumps({"granted": 0, "findings": findings, "text": str(refused)}), flush=True)
            sys.stdin.readline()
            continue
        granted = session.grant.pool("kv")
        assert granted is not None
        print(json.dumps({"granted": (granted.write_slots + granted.read_slots) * granted.stride}), flush=True)
        sys.stdin.readline()
        session.close()


if __name__ == "__main__":
    main()
