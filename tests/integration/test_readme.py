"""The README's example runs as printed, its commands exist, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.daemon import ROOT, Daemon, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.kill()


def test_the_client_example_runs_as_printed(daemon, tmp_path):
    [example] = blocks("python")
    assert len(example.splitlines()) <= 20
    script = tmp_path / "example.py"
    script.write_text(example)
    for outcome in ("STORED", "BELIEVED_STORED"):
        result = subprocess.run(
            [sys.executable, str(script)],
            env=environment() | {"HOSTSTAGE_ADDRESS": daemon.address},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == [
            "granted: buffer_only by shm",
            f"store: {outcome}",
            "loaded: 8 pages, identical: True",
        ]


@pytest.mark.parametrize("command", [c for b in blocks("sh") for c in b.splitlines() if c.startswith("hoststage ")])
def test_each_printed_command_has_the_options_that_are_printed(command):
    words = command.split("#")[0].split()[1:]
    shown = subprocess.run(
        [sys.executable, "-m", "hoststage.cli.main", words[0], "--help"],
        env=environment() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(rf"{word}(?![\w-])", shown), word


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_each_link_leads_somewhere(target):
    assert target.startswith("http") or (ROOT / target).exists()


def test_the_configuration_table_names_real_keys_and_variables():
    from hoststage.server.config import known_keys

    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `(HOSTSTAGE_\w+)` ", README, re.M)
    assert len(rows) >= 8
    for section, name, variable in rows:
        assert name in known_keys()[section]
        assert variable == f"HOSTSTAGE_{section}_{name}".upper()


def test_the_example_of_bad_configuration_is_what_the_daemon_says():
    [command] = re.findall(r"`HOSTSTAGE_STORE_LIMIT=much hoststage (serve [^`]*)` says:", README)
    [said] = [block for block in blocks("text") if block.startswith("memory.budgt")]
    result = subprocess.run(
        [sys.executable, "-m", "hoststage.cli.main", *command.split()],
        env=environment() | {"HOSTSTAGE_STORE_LIMIT": "much"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == said


def test_every_command_of_an_operator_is_in_the_table_with_options_that_it_has():
    rows = re.findall(r"^\| `hoststage (\w+)[^`]*` \| (.*)$", README, re.M)
    assert {name for name, _ in rows} == {"status", "top", "health", "drain", "evict", "clear", "doctor"}
    for name, text in rows:
        shown = subprocess.run(
            [sys.executable, "-m", "hoststage.cli.main", name, "--help"],
            env=environment() | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for option in re.findall(r"(--[\w-]+)", text):
            assert re.search(rf"{option}(?![\w-])", shown), (name, option)


def test_the_configuration_page_is_the_generated_one():
    from hoststage.server.config import as_markdown

    assert as_markdown() in Path(ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
