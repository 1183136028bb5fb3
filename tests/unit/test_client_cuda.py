"""Registration with CUDA, with the device's answers played: what fails is undone, reported and leaves nothing pending."""

import os

import pytest

from hoststage.client import ArenaKind, Pin, PinLevel, RegistrationFailed, cuda
from hoststage.client._arenas import Arena
from hoststage.shm import cuda as shm_cuda
from hoststage.shm.mapping import Chunk, Mapping

SLOT = 4096


class Library:
    """Plays the CUDA runtime library below `Runtime`: refuses registration number `fails_at`, and keeps its error pending."""

    def __init__(self, fails_at=None, read_only=True):
        self.fails_at, self.read_only = fails_at, read_only
        self.live, self.flags, self.calls, self.pending = {}, [], 0, 0

    def cudaGetDevice(self, device):
        return 0

    def cudaDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = int(self.read_only)
        return 0

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            self.pending = 2
            return 2
        self.live[address] = size
        self.flags.append(flags)
        return 0

    def cudaHostUnregister(self, address):
        del self.live[address]
        return 0

    def cudaGetLastError(self):
        pending, self.pending = self.pending, 0
        return pending

    def cudaGetErrorString(self, code):
        return b"out of memory"


@pytest.fixture
def arenas():
    made = []
    for kind in (ArenaKind.WRITE, ArenaKind.READ):
        fd = os.memfd_create("test")
        os.ftruncate(fd, 4 * SLOT)
        mapping = Mapping.map([Chunk(fd, 4 * SLOT)], kind is ArenaKind.WRITE)
        os.close(fd)
        made.append(Arena(len(made), kind, 0, 4, SLOT, SLOT, Pin(PinLevel.NONE, "", False), mapping))
    yield made
    for arena in made:
        arena.mapping.unmap()


@pytest.fixture
def play(monkeypatch):
    def install(library):
        runtime = shm_cuda.Runtime.__new__(shm_cuda.Runtime)
        runtime._lib = library
        monkeypatch.setattr(cuda, "Runtime", lambda: runtime)
        monkeypatch.setattr(cuda, "availability", lambda **_: "")
        monkeypatch.setattr(cuda, "_capturing", lambda: "")
        cut = shm_cuda.pieces
        monkeypatch.setattr(shm_cuda, "pieces", lambda size, stride: cut(size, stride, 2 * SLOT))
        return library

    return install


def test_every_piece_is_registered_read_arenas_read_only_and_all_is_undone_at_the_end(play, arenas):
    device = play(Library())
    done = cuda.register_arenas(arenas)
    assert done.pinned
    assert device.live == {a.mapping.address + at: 2 * SLOT for a in arenas for at in (0, 2 * SLOT)}
    assert device.flags == [1, 1, 9, 9]
    done.close()
    done.close()
    assert device.live == {}


def test_a_piece_that_fails_undoes_its_arena_alone_and_is_reported(play, arenas):
    device = play(Library(fails_at=1))
    done = cuda.register_arenas(arenas)
    assert [a.pinned for a in done.arenas] == [False, True]
    assert "out of memory" in done.arenas[0].reason
    assert not device.pending
    assert set(device.live) == {arenas[1].mapping.address, arenas[1].mapping.address + 2 * SLOT}


def test_a_device_without_read_only_registration_leaves_read_arenas_unpinned_and_says_so(play, arenas):
    play(Library(read_only=False))
    done = cuda.register_arenas(arenas)
    assert [a.pinned for a in done.arenas] == [True, False]
    assert "read-only" in done.arenas[1].reason


def test_what_is_required_and_fails_is_an_error_that_leaves_nothing_registered(play, arenas):
    device = play(Library(fails_at=3))
    with pytest.raises(RegistrationFailed, match="out of memory"):
        cuda.register_arenas(arenas, "require")
    assert device.live == {}


def test_required_without_a_device_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(cuda, "availability", lambda **_: "not available: torch sees no CUDA device")
    with pytest.raises(RegistrationFailed, match="not available"):
        cuda.register_arenas([], "require")
