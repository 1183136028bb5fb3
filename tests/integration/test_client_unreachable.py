"""What a client is told where it gets no session, and what it leaves behind: in words that say what to do."""

import logging
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from hoststage.client import DaemonUnavailable, DeadlineExceeded, Mode, PayloadPath, connect
from tests.integration.daemon import Daemon, environment, eventually
from tests.integration.test_client_session import keys_of, rows_of, stack
from tests.integration.test_daemon_operators import cli
from tests.life_support import slots_in_use


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = Daemon(tmp_path_factory.mktemp("d")).start()
    yield made
    made.stop()


def told(address):
    with pytest.raises(DaemonUnavailable) as caught:
        connect(address, stack=stack("unreachable", path=PayloadPath.INLINE), timeout=20)
    return str(caught.value)


def test_a_socket_that_is_not_there_is_named_once_with_the_systems_word(tmp_path):
    text = told(f"unix://{tmp_path}/h.sock")
    assert text == (
        f"no daemon answers at unix://{tmp_path}/h.sock: No such file or directory; "
        "is `hoststage serve` running, and is the address right?"
    )


def test_a_port_where_nobody_listens_is_named_with_the_systems_word():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert told(f"127.0.0.1:{port}").startswith(f"no daemon answers at 127.0.0.1:{port}: Connection refused; ")


def test_what_cannot_be_given_back_to_a_daemon_that_does_not_read_is_given_back_later(daemon):
    keys = keys_of(4, "stalled")
    spec = stack("stalled", mode=Mode.BUFFER_ONLY)
    with connect(daemon.address, stack=spec, timeout=20, credits=4) as session:
        assert session.store(keys, {"kv": rows_of(4)}).wait().ok
        # More than is kept ahead, so that slots are reserved beside those.
        loaded, batch = session.load(keys), session.reserve(keys_of(5, "other"), {"kv": 5})
        eventually(lambda: slots_in_use(daemon) == {"read/kv/ready": 4, "write/kv/reserved": 9})
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match="does not read"):
                for i in range(100_000):
                    with suppress_no_answer():
                        session.lookup([b"%032d" % i], timeout=0.001)
            with pytest.raises(DeadlineExceeded):
                session.store(keys_of(4, "new"), {"kv": rows_of(4)}, timeout=0.1)
            loaded.release()
            batch.abort()
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        eventually(lambda: slots_in_use(daemon) == {"write/kv/reserved": 4}, 20)
        assert session.store(keys_of(4, "new"), {"kv": rows_of(4)}).wait().ok


@contextmanager
def suppress_no_answer():
    try:
        yield
    except DeadlineExceeded as error:
        if "no answer" not in str(error):
            raise


AS_NOBODY = """
import os, sys
from hoststage.client import DaemonUnavailable, connect
from tests.integration.test_client_session import stack
spec = stack("denied")
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    connect(sys.argv[1], stack=spec, timeout=20)
except DaemonUnavailable as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_socket_that_may_not_be_opened_is_said_to_be_that_with_its_mode_and_owner(tmp_path):
    nobody = pwd.getpwnam("nobody").pw_uid
    path = f"/tmp/hoststage-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        try:
            os.chmod(path, 0o660)
            listener.listen(1)
            result = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, path, str(nobody)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        finally:
            os.unlink(path)
    assert path in result.stdout
    for words in (
        f"nobody ({nobody})",
        "may not be opened",
        "0660",
        "owner root (0)",
        "join the group root (0)",
        "listen.socket_mode",
    ):
        assert words in result.stdout
    assert "hoststage serve" not in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_socket_in_a_folder_that_may_not_be_entered_is_said_to_be_that(tmp_path):
    # tmp_path is this user's alone.
    nobody = str(pwd.getpwnam("nobody").pw_uid)
    command = [sys.executable, "-c", AS_NOBODY, f"{tmp_path}/h.sock", nobody]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert f"{tmp_path}/h.sock may not be opened by user nobody" in result.stdout
    assert "a folder above it may not be entered" in result.stdout


def test_closing_with_views_alive_warns_once_and_says_how_much_stays(daemon, caplog):
    session = connect(daemon.address, stack=stack("views"), timeout=20)
    keys = keys_of(2, "views")
    assert session.store(keys, {"kv": rows_of(2)}).wait(20)
    loaded = session.load(keys)
    view = loaded.pages("kv")[0]
    number = session.session_id
    with caplog.at_level(logging.WARNING, "hoststage.client"):
        session.close()
        session.close()
    [record] = caplog.records
    size = int(re.search(r"(\d+) bytes stay mapped", record.getMessage()).group(1))
    assert size == session.retained_bytes > 0
    assert number in {s["session"] for s in daemon.status()["sessions"]}
    del view, loaded
    eventually(lambda: number not in {s["session"] for s in daemon.status()["sessions"]})


def test_closing_without_views_says_nothing(daemon, caplog):
    with caplog.at_level(logging.WARNING, "hoststage.client"):
        connect(daemon.address, stack=stack("no-views"), timeout=20).close()
    assert not caplog.records


def test_a_draining_daemon_is_said_to_drain(daemon):
    # Last in the file: this daemon takes nobody any more.
    assert cli("drain", "--socket", str(daemon.socket)).returncode == 0
    text = told(daemon.address)
    assert "the daemon is draining and takes no new sessions" in text
    assert "connect again when it has been restarted" in text
    assert "hoststage serve" not in text
