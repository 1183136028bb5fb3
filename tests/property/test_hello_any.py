"""Any Hello at all is answered: granted, refused with findings, or refused by the name of a field; and it leaves nothing behind."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoststage.core.findings import Severity
from hoststage.server.contract import Refusal, RequestError
from hoststage.server.memory.arena import MemoryPolicy, MemoryUnavailable
from hoststage.server.memory.pool import ArenaPool
from hoststage.server.rpc import status
from hoststage.server.rpc.convert_stack import request_from_proto
from hoststage.server.staging.service import Service, ServiceOptions
from hoststage.server.store.memory import MemoryStore
from hoststage.v1 import hoststage_pb2 as pb
from hoststage.v1 import stack_pb2 as spb

BUDGET = 16 << 20

u32 = st.one_of(st.integers(0, 8), st.integers(0, 2**32 - 1), st.just(2**32 - 1))
u64 = st.one_of(st.integers(0, 8), st.sampled_from([16, 4096, 8192]), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
enum = st.one_of(st.integers(0, 4), st.sampled_from([-1, 99, 2**31 - 1]))
text = st.one_of(st.sampled_from(["", "kv", "swa", "indexer", "m"]), st.text(max_size=8), st.just("x" * 600))
yes = st.booleans()

pools = st.builds(
    spb.Pool,
    name=text,
    kind=enum,
    page_bytes=u64,
    page_tokens=u32,
    layers=u32,
    sliding_window=u32,
    hit_policy=enum,
    trailing_pages=u32,
    group_pages=u32,
    layout=enum,
    placement=enum,
    indices_from_pool=text,
    shares_arena_with=text,
    replicated=yes,
    pieces=st.lists(u64, max_size=3),
    host_slots=u64,
    device_slots=u64,
)
plausible = st.builds(
    spb.Pool,
    name=st.sampled_from(["kv", "swa", "state"]),
    kind=st.sampled_from([1, 1, 2, 3]),
    page_bytes=st.sampled_from([4096, 10_000]),
    page_tokens=st.just(16),
    sliding_window=st.sampled_from([0, 64]),
    host_slots=st.sampled_from([0, 32, 64]),
)
stacks = st.builds(
    spb.Stack,
    identity=st.builds(spb.Identity, model=text, tenant=text, dtype=text),
    parallel=st.builds(spb.Parallel, tp_rank=u32, tp_size=u32, dcp_rank=st.none() | u32, dcp_size=u32, pp_rank=u32),
    pools=st.one_of(st.lists(plausible, min_size=1, max_size=3), st.lists(pools, max_size=4)),
    role=enum,
    write_policy=enum,
    modes=st.lists(st.builds(spb.ModeWish, mode=enum, required=yes), max_size=3),
    retraction=st.builds(spb.RetractionWish, retraction=enum, window_only=yes, concurrent_receive=yes, required=yes),
    paths=st.lists(enum, max_size=3),
    largest_request_tokens=u64,
    prefetch_threshold_tokens=u64,
    cannot_map_sidecars=yes,
    cannot_hand_over_state=yes,
    requires_pinned=yes,
)
hellos = st.builds(
    pb.Hello,
    protocol_min=st.sampled_from([0, 1, 1, 1, 2, 2**32 - 1]),
    protocol_max=st.sampled_from([0, 1, 1, 1, 2, 2**32 - 1]),
    features=st.lists(text, max_size=2),
    client=text,
    worker=text,
    stack=stacks,
    token=text,
    previous_session=u64,
    previous_epoch=st.binary(max_size=9),
    retained_bytes=st.just(0) | u64,
    credits=u32,
    pid=u32,
)


class Port:
    def push(self, message):
        return True


async def answer(hello):
    """Shake hands with a daemon's tier and leave again; return how it ended."""
    executor = ThreadPoolExecutor(2)
    store = MemoryStore()
    service = Service(ServiceOptions(BUDGET), store, ArenaPool(MemoryPolicy(2 << 20, lock=False, threads=1)), executor)
    try:
        try:
            session = await service.open(request_from_proto(hello), Port())
        except RequestError as error:
            return "malformed" if status.of_request_error(error).details else "untyped"
        except Refusal as refusal:
            findings = refusal.verdict.findings
            told = any(f.severity is Severity.REFUSED for f in findings) and status.of_verdict(refusal.verdict).details
            return "refused" if told else "untyped"
        except MemoryUnavailable:
            return "no memory"
        assert service.facts().granted_bytes <= BUDGET + hello.retained_bytes
        service.end(session.session_id, "test")
        await service.engine.idle()
        assert service.facts().sessions == ()
        held = [h.name for h in service.ledger.holders() if h.bytes and not h.name.startswith(("namespace", "idle"))]
        assert held == []
        return "granted"
    finally:
        await service.close()
        executor.shutdown()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(hellos)
def test_any_hello_gets_a_typed_answer_and_leaves_nothing_behind(hello):
    assert asyncio.run(answer(pb.Hello.FromString(hello.SerializeToString()))) != "untyped"


@pytest.mark.parametrize(
    ("page_bytes", "ends"), [(4096, "granted"), (0, "refused"), (2**64 - 1, "refused")], ids=["granted", "zero", "huge"]
)
def test_the_harness_sees_each_ending(page_bytes, ends):
    pool = spb.Pool(name="kv", kind=1, page_bytes=page_bytes, page_tokens=16, host_slots=32)
    hello = pb.Hello(stack=spb.Stack(identity=spb.Identity(model="m"), pools=[pool]))
    assert asyncio.run(answer(hello)) == ends
