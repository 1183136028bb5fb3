"""Descriptions are checked where they are made, and mean on the wire what they say."""

import pytest

from hoststage.client import (
    HitPolicy,
    Identity,
    Mode,
    ModeWish,
    Parallel,
    PayloadPath,
    PoolKind,
    PoolSpec,
    Retraction,
    RetractionWish,
    StackError,
    StackSpec,
)
from hoststage.client import stack as spec
from hoststage.v1 import stack_pb2 as pb


def kv(**changes):
    return PoolSpec(**{"name": "kv", "kind": PoolKind.KV, "page_bytes": 4096, "page_tokens": 16} | changes)


@pytest.mark.parametrize(
    "kind",
    [
        spec.PoolKind,
        spec.HitPolicy,
        spec.KvLayout,
        spec.Placement,
        spec.Mode,
        spec.Role,
        spec.WritePolicy,
        spec.Retraction,
        spec.PayloadPath,
    ],
)
def test_every_value_has_its_number_on_the_wire_and_comes_back(kind):
    assert [spec.from_wire(kind, spec.wire(value)) for value in kind] == list(kind)
    assert spec.from_wire(kind, 0) is None
    assert spec.from_wire(kind, 9999) is None


def test_a_stack_means_on_the_wire_what_it_says():
    stack = StackSpec(
        Identity("m", tenant="t", dtype="bf16"),
        (kv(), kv(name="swa", kind=PoolKind.SWA, sliding_window=64, hit_policy=HitPolicy.TRAILING_PAGES)),
        parallel=Parallel(tp_rank=1, tp_size=2, dcp_rank=None),
        modes=(ModeWish(Mode.CACHE, True),),
        retraction=RetractionWish(Retraction.HOST_POOL, required=True),
        paths=(PayloadPath.INLINE,),
        maps_sidecars=False,
    )
    message = stack.to_proto()
    assert (message.identity.tenant, message.identity.dtype) == ("t", "bf16")
    assert message.parallel.tp_rank == 1
    assert not message.parallel.HasField("dcp_rank")
    assert [p.hit_policy for p in message.pools] == [pb.HIT_POLICY_UNSPECIFIED, pb.HIT_POLICY_TRAILING_PAGES]
    assert (message.modes[0].mode, message.modes[0].required) == (pb.MODE_CACHE, True)
    assert message.retraction.required
    assert list(message.paths) == [pb.PAYLOAD_PATH_INLINE]
    assert message.cannot_map_sidecars
    assert not message.cannot_hand_over_state


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: kv(name="KV!"), "pools.name"),
        (lambda: kv(page_bytes=0), "page_bytes"),
        (lambda: kv(page_bytes=True), "page_bytes"),
        (lambda: kv(kind="kv"), "kind"),
        (lambda: kv(pieces=(1, 2)), "pieces"),
        (lambda: Identity(""), "identity.model"),
        (lambda: Parallel(tp_rank=2, tp_size=2), "parallel.tp_rank"),
        (lambda: StackSpec(Identity("m"), ()), "pools"),
        (lambda: StackSpec(Identity("m"), (kv(), kv())), "pools.name"),
        (lambda: StackSpec(Identity("m"), (kv(indices_from_pool="none"),)), "indices_from_pool"),
        (lambda: ModeWish("cache"), "modes.mode"),
    ],
)
def test_what_no_daemon_would_take_is_refused_by_name(make, field):
    with pytest.raises(StackError) as caught:
        make()
    assert field in caught.value.field
    assert caught.value.remedy
    assert caught.value.field in str(caught.value)
