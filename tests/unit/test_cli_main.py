"""The command line's top: lazy, complete, and light."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.integration.daemon import environment

from hoststage.cli.main import COMMANDS, load

PATH = os.pathsep.join(["proto", "server", "client"])


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": PATH, "NO_COLOR": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "hoststage.cli.main", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command_with_its_line() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    for name, entry in COMMANDS.items():
        assert name in done.stdout
        assert entry.help[:40] in done.stdout


def test_help_imports_neither_torch_nor_grpc_nor_any_subcommand() -> None:
    code = (
        "import sys\n"
        "from hoststage.cli.main import COMMANDS, main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = [m for m in ('torch', 'grpc', 'numpy', 'uvloop') if m in sys.modules]\n"
        "own = [e.module for e in COMMANDS.values() if e.module in sys.modules]\n"
        "assert not heavy and not own, (heavy, own)\n"
    )
    env = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_entry_can_be_loaded() -> None:
    for name in COMMANDS:
        assert load(name).name == name


def test_unknown_command_is_a_usage_error() -> None:
    done = run("no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stderr


def test_version_runs() -> None:
    done = run("version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hoststage ")


def test_with_the_client_alone_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from hoststage.cli.entry import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 2
    assert "pip install 'hoststage[server]'" in result.stderr
    assert "Traceback" not in result.stderr
