"""The path `imported` inside the daemon: sessions that end, wait or are refused in the middle of a move, and what one session may have."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from hoststage.core import effects as fx
from hoststage.core.sessions import SessionLimits
from hoststage.core.stack import Mode, PayloadPath
from hoststage.server.contract import RequestError, SessionRequest
from hoststage.server.staging import imported as staging_imported
from hoststage.server.staging.imports import MOST_MEMFDS, MOST_WAITING, DescriptorBudget, Imports
from hoststage.v1 import ops
from hoststage.v1.imported import ImportedLoad, ImportedStore, Places
from tests.integration.test_service import PAGE, Inbox, ask, keys_of, service, span, stack

__all__ = ["service"]

SIZES = np.array([PAGE], dtype=np.int64)
ZERO = np.zeros(1, dtype=np.int64)


def _memfd(pages: int) -> int:
    fd = os.memfd_create("test")
    os.write(fd, os.urandom(pages * PAGE))
    return fd


async def _session(service, *, slots=64, mode=Mode.BUFFER_ONLY):
    described = replace(stack(mode, slots=slots), paths=(PayloadPath.IMPORTED,))
    return await service.open(SessionRequest(described, credits=32), Inbox())


def _import(session, fd: int) -> int:
    number = session.imported.announce("test", [os.fstat(fd).st_size])
    assert session.imported.attach(number, [os.dup(fd)])
    return number


def _places(number: int, *rows: int) -> Places:
    return Places(number, 0, ZERO, SIZES, np.array(rows, dtype=np.int64)[:, None] * PAGE)


def _store(number: int, keys: bytes, *rows: int, wait_ms: int = 0) -> ImportedStore:
    return ImportedStore(span(keys, (0, 0, len(rows))), (_places(number, *rows),), wait_ms)


def _load(number: int, keys: bytes, *rows: int) -> ImportedLoad:
    return ImportedLoad(ops.Load(span(keys), len(rows)), (_places(number, *rows),))


def _free(service) -> bool:
    return all(set(pool.by_state) <= {"free", "resident"} for pool in service.facts().pools)


class Slowly:
    """Stands in for a move, and holds its thread until it is told to go on."""

    def __init__(self, monkeypatch, name: str) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._move = getattr(staging_imported, name)
        monkeypatch.setattr(staging_imported, name, self)

    def __call__(self, pieces) -> None:
        self.began.set()
        assert self.go_on.wait(10)
        self._move(pieces)


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
@pytest.mark.parametrize("direction", ["read_pieces", "write_pieces"])
async def test_memory_of_both_sides_outlasts_a_move_though_its_session_ends(service, monkeypatch, direction, mode):
    session, fd = await _session(service, mode=mode), _memfd(3)
    number, keys = _import(session, fd), keys_of(3)
    assert (await session.imported.store(_store(number, keys, 0, 1, 2), 1)).outcome is ops.Outcome.ACCEPTED
    await service.engine.idle()
    slow = Slowly(monkeypatch, direction)
    if direction == "read_pieces":
        move = asyncio.create_task(session.imported.store(_store(number, keys_of(3, b"x"), 0, 1, 2), 2))
    else:
        move = asyncio.create_task(session.imported.load(_load(number, keys, 0, 1, 2)))
    assert await asyncio.to_thread(slow.began.wait, 10)
    kept = session.imported.imports.get(number, "").files
    service.end(session.session_id, "its process died")
    await asyncio.sleep(0.05)
    # A thread uses both: were one of them gone by now, the daemon would die, or move bytes of another's file.
    assert [s.state for s in service.facts().sessions] == ["ending"]
    assert session._write[0].arena.view(0, 8) is not None
    assert os.fstat(kept[0]).st_ino == os.fstat(fd).st_ino
    slow.go_on.set()
    with pytest.raises(RequestError) as told:
        await move
    assert told.value.reason in ("SESSION_OVER", "LOAD_RELEASED")
    await service.engine.idle()
    assert service.facts().sessions == ()
    assert _free(service)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept[0])


@pytest.mark.parametrize("how", ["quarantine", "end"])
async def test_a_store_that_waits_for_slots_ends_with_its_session(service, how):
    session, fd = await _session(service, slots=16), _memfd(20)
    number = _import(session, fd)
    usable = session.core.write[0].usable
    held = await ask(session, ops.Reserve(span(keys_of(usable), (0, 0, usable))))
    assert held.outcome is ops.Outcome.ACCEPTED
    waiting = asyncio.create_task(session.imported.store(_store(number, keys_of(2, b"w"), 0, 1, wait_ms=60_000), 2))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    getattr(service, how)(session.session_id, "its connection broke")
    async with asyncio.timeout(5):
        with pytest.raises(RequestError) as told:
            await waiting
    assert told.value.reason == "SESSION_OVER"
    service.end(session.session_id, "its process died")
    await service.engine.idle()
    assert service.facts().sessions == ()


@pytest.mark.parametrize("mode", [Mode.BUFFER_ONLY, Mode.CACHE])
async def test_a_store_that_is_refused_after_its_copy_leaves_no_slot_taken(service, mode):
    service.tier.limits = SessionLimits(max_open_commits=0)
    session, fd = await _session(service, mode=mode), _memfd(5)
    number = _import(session, fd)
    for i in range(20):
        reply = await session.imported.store(_store(number, keys_of(5, bytes([i])), 0, 1, 2, 3, 4), i + 1)
        assert reply.outcome is ops.Outcome.BACKLOG_FULL
    assert _free(service)


async def test_a_store_whose_parent_is_looked_for_meanwhile_is_published_without_a_copy(service):
    session, fd = await _session(service, mode=Mode.CACHE), _memfd(3)
    number, keys = _import(session, fd), keys_of(4)
    assert (await session.imported.store(_store(number, keys[:32], 0), 1)).outcome is ops.Outcome.ACCEPTED
    await service.engine.idle()
    # The store has the parent, the daemon does not know it any more.
    for beliefs, pool in zip(session.core.namespace.beliefs, session.core.namespace.pools, strict=True):
        beliefs.clear()
        pool.drop(list(pool.index))
    m = ImportedStore(span(keys[32:96], (0, 0, 2), parent=keys[:32]), (_places(number, 1, 2),))
    copies = service.engine.daemon_copies
    assert (await session.imported.store(m, 2)).outcome is ops.Outcome.ACCEPTED
    assert service.engine.daemon_copies - copies == 2
    await service.engine.idle()
    assert _free(service)
    assert (await session.imported.load(_load(number, keys[:96], 0, 1, 2))).outcome is ops.Outcome.READY


async def test_no_slots_are_granted_ahead_to_whom_cannot_write_them(service):
    session, fd = await _session(service), _memfd(5)
    number = _import(session, fd)
    for i in range(20):
        reply = await session.imported.store(_store(number, keys_of(5, bytes([i])), 0, 1, 2, 3, 4), i + 1)
        assert (reply.outcome, reply.credits) == (ops.Outcome.ACCEPTED, ())
    await service.engine.idle()
    assert _free(service)


async def test_a_load_whose_leases_were_released_in_the_middle_is_no_success(service, monkeypatch):
    session, fd = await _session(service), _memfd(6)
    number, keys = _import(session, fd), keys_of(3)
    assert (await session.imported.store(_store(number, keys, 0, 1, 2), 1)).outcome is ops.Outcome.ACCEPTED
    await service.engine.idle()
    slow = Slowly(monkeypatch, "write_pieces")
    move = asyncio.create_task(session.imported.load(_load(number, keys, 3, 4, 5)))
    assert await asyncio.to_thread(slow.began.wait, 10)
    # Only a client that guesses can do this: it was never told the number.
    session.submit(ops.Release(tuple(session.core.loads)), 0, lambda _: None)
    slow.go_on.set()
    with pytest.raises(RequestError, match="released"):
        await move
    assert _free(service)


async def test_leases_of_a_move_are_asked_back_of_the_daemon_alone(service, monkeypatch):
    session, fd = await _session(service), _memfd(6)
    number, keys = _import(session, fd), keys_of(3)
    assert (await session.imported.store(_store(number, keys, 0, 1, 2), 1)).outcome is ops.Outcome.ACCEPTED
    await service.engine.idle()
    slow = Slowly(monkeypatch, "write_pieces")
    move = asyncio.create_task(session.imported.load(_load(number, keys, 3, 4, 5)))
    assert await asyncio.to_thread(slow.began.wait, 10)
    [load_id] = session.core.loads
    session.core.revocations[77] = (load_id,)
    seen = len(session._port.messages)
    session.leases_revoked(fx.Revoke(session.session_id, 77, (load_id,), "a load waits"))
    assert len(session._port.messages) == seen
    slow.go_on.set()
    assert (await move).outcome is ops.Outcome.READY
    assert session.core.revocations == {}
    assert os.pread(fd, 3 * PAGE, 3 * PAGE) == os.pread(fd, 3 * PAGE, 0)


async def test_an_import_that_is_dropped_in_the_middle_is_closed_when_the_move_has_ended(service, monkeypatch):
    session, fd = await _session(service), _memfd(3)
    number = _import(session, fd)
    slow = Slowly(monkeypatch, "read_pieces")
    move = asyncio.create_task(session.imported.store(_store(number, keys_of(3), 0, 1, 2), 1))
    assert await asyncio.to_thread(slow.began.wait, 10)
    drop = asyncio.create_task(session.imported.drop(number))
    await asyncio.sleep(0.05)
    assert not drop.done()
    with pytest.raises(RequestError) as told:
        await session.imported.store(_store(number, keys_of(1, b"y"), 0), 2)
    assert told.value.reason == "IMPORT_UNKNOWN"
    slow.go_on.set()
    assert (await move).outcome is ops.Outcome.ACCEPTED
    async with asyncio.timeout(5):
        await drop
    assert service.imported_descriptors.taken == 0


@pytest.mark.parametrize("span", [ops.Span(b"k" * 16, 16), ops.Span(b"", 16)], ids=["no ranges", "no keys"])
async def test_a_store_of_nothing_is_refused_by_name(service, span):
    session = await _session(service)
    with pytest.raises(RequestError, match="names no") as refused:
        await session.imported.store(ImportedStore(span, ()), 7)
    assert (refused.value.reason, refused.value.field) == ("RANGES", "span.keys" if not span.keys else "span.ranges")
    assert _free(service)


async def test_another_path_has_no_imports(service):
    session = await service.open(SessionRequest(stack()), Inbox())
    with pytest.raises(RequestError) as told:
        session.imported.announce("test", [4096])
    assert (told.value.reason, told.value.field) == ("IMPORTED_PATH", "paths")
    assert "imported" in told.value.remedy


def test_the_descriptors_of_one_session_and_of_all_are_bounded():
    budget = DescriptorBudget(20)
    one, two, three = Imports(budget), Imports(budget), Imports(budget)
    one.announce("a", [1] * 10)
    with pytest.raises(RequestError, match="may have 10"):
        one.announce("b", [1])
    number = two.announce("a", [1] * 10)
    with pytest.raises(RequestError, match="by all sessions"):
        three.announce("a", [1])
    two.forget(number)
    three.announce("a", [1])
    one.end()
    three.end()
    assert budget.taken == 0
    roomy = Imports(DescriptorBudget(10_000))
    for sizes in ([], [1] * (MOST_MEMFDS + 1), [4096, 0]):
        with pytest.raises(RequestError):
            roomy.announce("a", sizes)
    for _ in range(MOST_WAITING):
        roomy.announce("a", [1])
    with pytest.raises(RequestError, match="have not come"):
        roomy.announce("a", [1])


def test_descriptors_are_taken_once():
    imports = Imports(DescriptorBudget(20))
    number = imports.announce("a", [4096])
    fd = os.memfd_create("a")
    assert imports.attach(number, [fd])
    assert not imports.attach(number, [fd])
    assert imports.awaited(number) is None
    imports.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
