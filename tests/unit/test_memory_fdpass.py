"""Descriptors and their payload arrive whole, or an error does and nothing leaks."""

import array
import fcntl
import os
import resource
import socket
import struct
import threading

import pytest

from hoststage.shm import peer
from hoststage.shm.fdpass import FdPassError, close_all, recv_fds, send_fds


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        yield left, right


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def devnulls():
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(600)]
    yield fds
    close_all(fds)


@pytest.mark.parametrize("count", [0, 1, 250, 251, 600])
def test_any_number_of_descriptors_arrives_in_order_and_close_on_exec(pair, count):
    fds = [os.memfd_create(f"n{i}") for i in range(count)]
    try:
        sender = threading.Thread(target=send_fds, args=(pair[0], b"payload", fds))
        sender.start()
        payload, got = recv_fds(pair[1], 100, 600)
        sender.join()
        assert payload == b"payload"
        assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in fds]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in got)
        close_all(got)
    finally:
        close_all(fds)


def test_a_payload_larger_than_the_socket_buffer_and_several_messages(pair):
    fd = os.open("/dev/null", os.O_RDONLY)
    big = os.urandom(1 << 20)

    def send():
        send_fds(pair[0], big, [fd])
        send_fds(pair[0], b"", [])
        send_fds(pair[0], b"last", [fd, fd])

    sender = threading.Thread(target=send)
    sender.start()
    got = [recv_fds(pair[1], 1 << 20, 4) for _ in range(3)]
    sender.join()
    os.close(fd)
    assert [(payload, len(fds)) for payload, fds in got] == [(big, 1), (b"", 0), (b"last", 2)]
    for _, fds in got:
        close_all(fds)


def test_too_large_a_payload_or_too_many_descriptors_are_refused_and_closed(pair, devnulls):
    before = open_fds()
    send_fds(pair[0], b"x" * 50, devnulls[:3])
    with pytest.raises(FdPassError, match="50 bytes, at most 49"):
        recv_fds(pair[1], 49, 3)
    assert open_fds() == before


def test_more_descriptors_than_announced_are_closed(pair, devnulls):
    before = open_fds()
    rights = array.array("i", devnulls[:5])
    pair[0].sendmsg([struct.pack("<II", 0, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(FdPassError, match="announced 1 descriptors, 5 arrived"):
        recv_fds(pair[1], 10, 10)
    assert open_fds() == before


def test_more_descriptors_than_allowed_are_closed(pair, devnulls):
    before = open_fds()
    send_fds(pair[0], b"", devnulls[:9])
    with pytest.raises(FdPassError, match="more than 8"):
        recv_fds(pair[1], 10, 8)
    assert open_fds() == before


def test_a_message_cut_short_is_an_error_and_its_descriptors_are_closed(pair, devnulls):
    before = open_fds()
    rights = array.array("i", devnulls[:2])
    pair[0].sendmsg([struct.pack("<II", 10, 2) + b"only"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(FdPassError, match="6 bytes before the end"):
        recv_fds(pair[1], 10, 2)
    assert open_fds() == before


def test_descriptors_lost_at_the_limit_of_open_files_are_an_error(pair, devnulls):
    before = open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    send_fds(pair[0], b"", devnulls[:20])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(devnulls) + 10, hard))
    try:
        with pytest.raises(FdPassError, match="RLIMIT_NOFILE"):
            recv_fds(pair[1], 10, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_fds() == before


def test_a_silent_peer_runs_into_the_sockets_timeout(pair):
    pair[1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        recv_fds(pair[1], 10, 1)


def test_the_peer_is_known_by_credentials_and_a_pidfd(pair):
    found = peer.peer_credentials(pair[0])
    assert (found.pid, found.uid, found.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert found.pid_visible
    fd = peer.peer_pidfd(pair[0])
    if fd is None:
        pytest.skip("this kernel has no SO_PEERPIDFD")
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert peer.pid_of_pidfd(fd) == os.getpid()
    assert not peer.pidfd_has_exited(fd)
    os.close(fd)


def test_foreign_namespaces_identify_nobody():
    assert not peer.PeerCredentials(0, 65534, 65534).pid_visible
    assert not peer.PeerCredentials(0, 65534, 65534).identifies_user


def test_only_a_pidfd_passes_for_one():
    own = peer.pidfd_of_self()
    null = os.open("/dev/null", os.O_RDONLY)
    assert peer.is_pidfd(own)
    assert not peer.is_pidfd(null)
    close_all([own, null])


def test_a_pidfd_tells_of_the_end_of_its_process():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    fd = os.pidfd_open(pid)
    assert peer.pidfd_has_exited(fd, timeout=10)
    os.waitpid(pid, 0)
    assert peer.pid_of_pidfd(fd) is None
    assert peer.is_pidfd(fd)
    os.close(fd)
