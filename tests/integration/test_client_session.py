"""The client against a real daemon: pages go out of one session and come whole into another."""

import hashlib
import os
import select
import threading
import time

import numpy as np
import pytest

from hoststage.client import (
    HitPolicy,
    Identity,
    Mode,
    ModeWish,
    Outcome,
    PayloadPath,
    PinLevel,
    PoolKind,
    PoolSpec,
    QuotaExceeded,
    Refused,
    RegistrationFailed,
    RequestRejected,
    Retraction,
    RetractionWish,
    SessionClosed,
    StackError,
    StackSpec,
    connect,
    negotiate,
)
from tests.integration.daemon import Daemon, eventually

PAGE = 10_000
SWA_PAGE = 5_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d")).start()
    yield made
    made.stop()


def stack(model, mode=Mode.BUFFER_ONLY, path=PayloadPath.SHM, *, swa=False, slots=64, page=PAGE, **changes):
    pools = [PoolSpec("kv", PoolKind.KV, page, 16, host_slots=slots)]
    if swa:
        pools.append(
            PoolSpec(
                "swa",
                PoolKind.SWA,
                SWA_PAGE,
                16,
                sliding_window=64,
                hit_policy=HitPolicy.TRAILING_PAGES,
                host_slots=slots,
            )
        )
    return StackSpec(Identity(model), tuple(pools), modes=(ModeWish(mode, True),), paths=(path,), **changes)


def keys_of(n, seed):
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]


def rows_of(n, size=PAGE):
    return np.frombuffer(os.urandom(n * size), dtype=np.uint8).reshape(n, size)


def open_session(daemon, spec, **named):
    return connect(daemon.address, stack=spec, worker="t", timeout=20, **named)


BOTH = pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
PATHS = pytest.mark.parametrize("path", [PayloadPath.SHM, PayloadPath.INLINE])


@BOTH
@PATHS
def test_what_one_session_stores_another_loads(daemon, mode, path):
    name = f"round-{mode.value}-{path.value}"
    spec = stack(name, mode, path, swa=True)
    keys = keys_of(8, name)
    kv, swa = rows_of(8), rows_of(4, SWA_PAGE)
    with open_session(daemon, spec) as writer:
        result = writer.store(keys, {"kv": kv, "swa": [bytes(row) for row in swa]}).wait(20)
        assert (result.outcome, result.pages) == (Outcome.STORED, 12), result
        again = writer.store(keys, {"kv": kv, "swa": swa}).wait(20)
        assert (again.outcome, again.pages) == (Outcome.BELIEVED_STORED, 0)
    with open_session(daemon, spec) as reader:
        match = reader.lookup(b"".join(keys), pin_seconds=10)
        assert match.runs == ((8, 8),)
        assert match.restorable(8)
        assert not match.restorable(7)
        with reader.load(keys, pin=match) as loaded:
            assert loaded.prefix == 8
            assert (loaded.first("kv"), loaded.first("swa")) == (0, 4)
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
            assert [bytes(p) for p in loaded.pages("swa")] == [bytes(r) for r in swa]
            assert all(page.readonly for page in loaded.pages("kv"))
        with pytest.raises(ValueError, match="released"):
            loaded.pages("kv")
        into = {"kv": np.zeros((8, PAGE), np.uint8), "swa": [bytearray(SWA_PAGE) for _ in range(4)]}
        copied = reader.load(keys, into=into)
        assert copied
        assert np.array_equal(into["kv"], kv)
        assert [bytes(b) for b in into["swa"]] == [bytes(r) for r in swa]
        assert not reader.load(keys_of(3, "nowhere"))


def test_a_run_larger_than_the_arena_is_stored_in_several_commits(daemon):
    with open_session(daemon, stack("long", slots=32)) as session:
        room = session.grant.pool("kv").write_slots
        n = 5 * room + 3
        keys, kv = keys_of(n, "long"), rows_of(n)
        result = session.store(keys, {"kv": kv}, parent=b"").wait(30)
        assert (result.outcome, result.pages) == (Outcome.STORED, n)
        assert session.lookup(keys).longest == n
        few = session.grant.pool("kv").read_slots // 2
        with session.load(keys, few) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv[:few]]


def test_pages_larger_than_a_message_cross_inline(daemon):
    spec = stack("large", path=PayloadPath.INLINE, page=6_000_001, slots=8)
    keys = keys_of(2, "large")
    kv = rows_of(2, 6_000_001)
    with open_session(daemon, spec) as session:
        assert session.store(keys, {"kv": kv}).wait(30).ok
        got = session.load(keys, 2)
        assert [bytes(p) for p in got.pages("kv")] == [bytes(r) for r in kv]


def test_credits_spare_the_reservation_and_come_back(daemon):
    with open_session(daemon, stack("credits", slots=64), credits=8) as session:
        keys, kv = keys_of(40, "credits"), rows_of(40)
        for i in range(0, 40, 4):
            assert session.store(keys[i : i + 4], {"kv": kv[i : i + 4]}).wait(20).ok
        with session.load(keys[:8]) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv[:8]]


def test_pages_are_written_in_place(daemon):
    keys = keys_of(3, "place")
    with open_session(daemon, stack("place")) as session:
        with session.reserve(keys, {"kv": 3}, wait=1) as batch:
            assert batch
            for i, view in enumerate(batch.views["kv"]):
                view[:] = bytes([i]) * PAGE
            view = None
            ticket = batch.commit()
        assert ticket.wait(20).outcome is Outcome.STORED
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes([i]) * PAGE for i in range(3)]
        with session.reserve(keys_of(2, "aborted"), {"kv": 2}) as batch:
            assert batch.open
        assert not batch.open
        assert batch.commit().wait(5).outcome is Outcome.CANCELLED


def test_slots_granted_ahead_are_written_in_place_without_asking(daemon):
    with open_session(daemon, stack("place-ahead"), credits=4) as session:
        asked = daemon.asked("reserve")
        keys, kv = keys_of(3, "place-ahead"), rows_of(3)

        def write(batch):
            for view, row in zip(batch.views["kv"], kv, strict=True):
                view[:] = row.data

        with session.reserve(keys, {"kv": 3}) as batch:
            write(batch)
            ticket = batch.commit()
        assert ticket.wait(20).outcome is Outcome.STORED
        # What is stored already is found out by the commit, and its slots are free again.
        with session.reserve(keys, {"kv": 3}) as batch:
            assert batch
            write(batch)
            assert batch.commit().wait(20).outcome is Outcome.BELIEVED_STORED
        assert daemon.asked("reserve") == asked
        with session.load(keys) as loaded:
            assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
        # An orphan's slots come back, and so do those of a batch that was left without a commit.
        orphan = session.reserve(keys_of(2, "orphan"), {"kv": 2}, parent=bytes(32))
        assert orphan.commit().wait(20).outcome is Outcome.PARENT_UNCOVERED
        with session.reserve(keys_of(1, "left"), {"kv": 1}) as batch:
            assert batch
        room = session.grant.pool("kv").write_slots
        with session.reserve(keys_of(room, "all"), {"kv": room}, wait=10) as batch:
            assert batch, batch.detail
        assert daemon.asked("reserve") > asked


def test_groups_arrive_in_the_order_of_the_prefix(daemon):
    keys, kv = keys_of(16, "groups"), rows_of(16)
    with open_session(daemon, stack("groups")) as session:
        assert session.store(keys, {"kv": kv}).wait(20).ok
        stream = session.load_groups(keys)
        got = []
        for group in stream:
            assert group.first["kv"] == len(got)
            got += [bytes(p) for p in group.pages["kv"]]
        assert got == [bytes(r) for r in kv]
        assert stream.loaded.prefix == 16
        stream.loaded.release()
        missing = session.load_groups(keys_of(4, "groups-none"))
        assert list(missing) == []
        assert not missing.loaded


def test_many_threads_share_one_session(daemon):
    spec = stack("threads", slots=256)
    failures = []

    def work(session, worker):
        try:
            for turn in range(6):
                keys, kv = keys_of(4, f"threads-{worker}-{turn}"), rows_of(4)
                assert session.store(keys, {"kv": kv}).wait(20).ok
                with session.load(keys) as loaded:
                    assert [bytes(p) for p in loaded.pages("kv")] == [bytes(r) for r in kv]
                assert session.ping(b"%d" % turn) == b"%d" % turn
        except BaseException as error:
            failures.append(error)

    with open_session(daemon, spec) as session:
        threads = [threading.Thread(target=work, args=(session, i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)


def test_a_push_wakes_who_watches_the_completions(daemon):
    with open_session(daemon, stack("eventfd")) as session:
        ticket = session.store(keys_of(2, "eventfd"), {"kv": rows_of(2)})
        poll = select.poll()
        poll.register(session.completions_fd(), select.POLLIN)
        while not ticket.done:
            assert poll.poll(10_000)
            os.eventfd_read(session.completions_fd())
        assert ticket.outcome is Outcome.STORED


def test_a_hold_is_parked_and_restored(daemon):
    spec = stack(
        "holds",
        slots=256,
        retraction=RetractionWish(Retraction.HOST_POOL, required=True),
        largest_request_tokens=16 * 16,
    )
    with open_session(daemon, spec) as session:
        with session.hold(b"me", "r1", 1, {"kv": 2}) as hold:
            assert hold, hold.detail
            hold.views["kv"][0][:] = b"a" * PAGE
            hold.views["kv"][1][:] = b"b" * PAGE
            hold.seal(b"note")
        assert not session.restore(b"me", "r1", 2)
        found = session.restore(b"me", "r1", 1)
        assert (found.note, [bytes(v[:1]) for v in found.views["kv"]]) == (b"note", [b"a", b"b"])
        session.discard(b"me", "r1", 1)
        assert not session.restore(b"me", "r1", 1)
        with pytest.raises(RequestRejected) as caught:
            session.discard(b"me", "r1", 1)
        assert caught.value.reason == "HOLD_MISSING"


def test_slots_are_free_again_when_a_session_closes(daemon):
    session = open_session(daemon, stack("closing"))
    batch = session.reserve(keys_of(4, "closing"), {"kv": 4})
    assert batch
    batch.views = {}
    mine = session.session_id
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.ping()
    eventually(lambda: mine not in [s["session"] for s in daemon.status()["sessions"]])


def test_a_refusal_shows_every_finding_with_its_remedy(daemon):
    spec = stack("refused", slots=10_000_000)
    with pytest.raises(Refused) as caught:
        open_session(daemon, spec)
    assert caught.value.findings
    for finding in caught.value.findings:
        assert finding.rule in str(caught.value)
        assert finding.remedy in str(caught.value)
    verdict = negotiate(daemon.address, spec)
    assert not verdict.accepted
    assert {f.rule for f in caught.value.findings} <= {f.rule for f in verdict.findings}
    assert negotiate(daemon.address, stack("accepted")).accepted


def test_what_is_out_of_form_is_refused_here_and_what_is_too_much_there(daemon):
    with open_session(daemon, stack("form")) as session:
        keys = keys_of(2, "form")
        for pages, words in (
            ({"kv": rows_of(3)}, "2 keys"),
            ({"kv": rows_of(2, 9)}, "10000"),
            ({"none": rows_of(2)}, "kv"),
            ({"kv": rows_of(4)[::2]}, "contiguous"),
        ):
            with pytest.raises(StackError, match=words):
                session.store(keys, pages)
        with pytest.raises(StackError):
            session.load(keys, 3)
        with pytest.raises(RequestRejected) as caught:
            session.lookup([keys[0], keys[0]])
        assert caught.value.reason == "DUPLICATE_KEY"
        with pytest.raises(QuotaExceeded) as caught:
            session.lookup(b"".join(i.to_bytes(32, "big") for i in range(session.limits.max_span_keys + 1)))
        assert caught.value.remedy


def test_memory_is_reported_as_it_is_held(daemon):
    with open_session(daemon, stack("memory")) as session:
        assert {arena.kind.value for arena in session.arenas} == {"write", "read"}
        assert all(isinstance(arena.pin.level, PinLevel) for arena in session.arenas)
        registration = session.registration
        assert registration.pinned or "not available" in registration.reason


def test_torch_tensors_go_in_and_out(daemon):
    torch = pytest.importorskip("torch")
    keys = keys_of(4, "torch")
    pages = torch.randint(0, 255, (4, PAGE), dtype=torch.uint8)
    with open_session(daemon, stack("torch")) as session:
        assert session.store(keys, {"kv": pages}).wait(20).ok
        target = torch.zeros_like(pages)
        assert session.load(keys, into={"kv": target})
        assert torch.equal(target, pages)


def test_a_session_closed_under_living_views_says_goodbye_once_they_are_gone(daemon):
    keys, kv = keys_of(2, "linger"), rows_of(2)
    session = open_session(daemon, stack("linger"))
    assert session.store(keys, {"kv": kv}).wait(20).ok
    pages = session.load(keys).pages("kv")
    mine = session.session_id
    session.close()
    assert [bytes(p) for p in pages] == [bytes(r) for r in kv]
    assert mine in [s["session"] for s in daemon.status()["sessions"]]
    pages.clear()
    eventually(lambda: mine not in [s["session"] for s in daemon.status()["sessions"]])


def test_an_arena_is_leased_whole_and_returned(daemon):
    with open_session(daemon, stack("whole")) as session:
        arena = session.lease_arena("engine pool", 1 << 20)
        whole = arena.whole()
        assert len(whole) >= 1 << 20
        whole[:5] = b"hello"
        with pytest.raises(StackError, match="view"):
            session.return_arena(arena)
        del whole
        session.return_arena(arena)
        assert arena.arena_id not in [a.arena_id for a in session.arenas]
        with pytest.raises(QuotaExceeded):
            session.lease_arena("too much", 1 << 40)


def test_the_housekeeper_sleeps_while_nothing_is_open_and_wakes_for_what_nobody_waits_for(daemon):
    with open_session(daemon, stack("idle"), credits=4) as session:
        alarm = session._core.alarm
        eventually(lambda: alarm.dozing)
        told = threading.Event()
        ticket = session.store(keys_of(2, "idle"), {"kv": rows_of(2)})
        assert not alarm.dozing
        ticket.add_done_callback(lambda _: told.set())
        assert told.wait(20)
        assert ticket.outcome is Outcome.STORED
        eventually(lambda: alarm.dozing)
        loaded = session.load(keys_of(2, "idle"))
        # A lease may be asked back, or dropped: the housekeeper looks often while there is one.
        eventually(lambda: not alarm.dozing)
        loaded.release()
        eventually(lambda: alarm.dozing)


@BOTH
@pytest.mark.parametrize("page", [4096, 10_000])
def test_pages_come_into_arrays_whole_wherever_their_slots_lie(daemon, mode, page):
    model = f"order-{mode.value}-{page}"
    with open_session(daemon, stack(model, mode, slots=256, page=page)) as session:
        keys, kv = keys_of(24, model), rows_of(24, page)
        assert session.store(keys, {"kv": kv}).wait(20).ok
        for order in ([*range(24)], [*range(23, -1, -1)], [*range(5, 12), *range(5), 20, 21, 22], [3, 4]):
            target = np.zeros((len(order), page), dtype=np.uint8)
            assert session.load([keys[i] for i in order], into={"kv": target})
            assert np.array_equal(target, kv[order]), order


def test_a_callback_that_raises_harms_no_call(daemon):
    def careless(_):
        raise RuntimeError("mine")

    with open_session(daemon, stack("careless"), on_push=careless) as session:
        ticket = session.store(keys_of(2, "careless"), {"kv": rows_of(2)})
        ticket.add_done_callback(careless)
        assert ticket.wait(20).ok
        assert session.ping(b"x") == b"x"


@pytest.mark.parametrize("how", ["dropped", "closed and dropped"])
def test_a_session_that_is_dropped_ends_when_its_last_view_is_gone(daemon, how):
    def states():
        return [s["state"] for s in daemon.status()["sessions"] if s["session"] == mine]

    session = open_session(daemon, stack(how))
    mine = session.session_id
    keys, kv = keys_of(2, how), rows_of(2)
    assert session.store(keys, {"kv": kv}).wait(20).ok
    loaded = session.load(keys)
    view = loaded.pages("kv")[1]
    if how != "dropped":
        session.close()
    del session, loaded
    # A goodbye would say that nothing is mapped here any more, an end without one would leave it in quarantine.
    time.sleep(0.5)
    assert states() == ["active"]
    assert bytes(view) == bytes(kv[1])
    del view
    eventually(lambda: states() == [])


def test_a_connect_that_fails_half_way_leaves_no_session_behind(daemon):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(RegistrationFailed, match="not available"):
        open_session(daemon, stack("half-way"), register="require")
    eventually(lambda: "half-way" not in [s["model"] for s in daemon.status()["sessions"]])


def test_a_declared_parent_is_checked_and_chained_through_the_commits_of_a_long_run(daemon):
    with open_session(daemon, stack("parents", swa=True, slots=64)) as session:
        room = session.grant.pool("kv").write_slots
        n = 3 * room
        keys, kv, swa = keys_of(n, "parents"), rows_of(n), rows_of(4, SWA_PAGE)
        orphan = session.store(keys[4:], {"kv": kv[4:]}, parent=keys[3]).wait(20)
        assert (orphan.outcome, orphan.pages) == (Outcome.PARENT_UNCOVERED, 0)
        assert session.store(keys[:4], {"kv": kv[:4]}).wait(20).ok
        rest = session.store(keys[4:], {"kv": kv[4:], "swa": swa}, parent=keys[3]).wait(30)
        assert (rest.outcome, rest.pages) == (Outcome.STORED, n), rest
        assert session.lookup(keys).runs == ((n, n),)
        # Nothing of the refused run is still reserved.
        with session.reserve(keys_of(room, "parents-all"), {"kv": room}, wait=5) as batch:
            assert batch, batch.detail


def test_a_shorter_prefix_is_accepted_where_the_caller_says_so(daemon):
    keys, kv = keys_of(8, "shorter"), rows_of(8)
    with open_session(daemon, stack("shorter")) as session:
        assert session.store(keys[:5], {"kv": kv[:5]}).wait(20).ok
        assert not session.load(keys)
        into = np.zeros((8, PAGE), np.uint8)
        got = session.load(keys, into={"kv": into}, accept_shorter=True)
        assert got.prefix == 5
        assert np.array_equal(into[:5], kv[:5])
        with session.load(keys, 5, ranges={"kv": (2, 3)}) as part:
            assert part.first("kv") == 2
            assert [bytes(p) for p in part.pages("kv")] == [bytes(r) for r in kv[2:5]]
