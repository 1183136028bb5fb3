"""The client's page: its code runs as printed, prints what it says, and its links lead somewhere."""

import re
import subprocess
import sys

import pytest

from tests.integration.daemon import ROOT, Daemon, environment

PAGE = ROOT / "docs" / "client.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path).start()
    yield made
    made.kill()


def test_the_blocks_run_one_after_the_other_and_print_what_their_comments_say(daemon, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(BLOCKS), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment() | {"HOSTSTAGE_ADDRESS": daemon.address},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said = [line.rpartition("  # ")[2] for line in "\n".join(BLOCKS).splitlines() if re.match(r" *print\(", line)]
    assert len(said) >= 12
    assert result.stdout.splitlines() == said
    # The last block closes with a view alive: that is said once.
    assert result.stderr.count("stay mapped") == 1, result.stderr


def test_every_error_that_the_client_may_raise_is_in_the_table():
    from hoststage.client import errors

    names = [n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert "SessionLost" in names
    for name in names:
        assert f"`{name}" in TEXT, name


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_each_link_leads_somewhere(target):
    assert target.startswith("http") or (PAGE.parent / target).exists()
