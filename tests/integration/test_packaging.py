"""The wheel holds all three roots, and a base install stays light."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("v1", "shm", "core", "server", "cli", "client")
LIGHT = {"grpcio", "grpcio-status", "protobuf", "numpy"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the source, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("proto", "server", "client"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    out = tmp_path_factory.mktemp("dist")
    # Without isolation the build uses the setuptools of this environment and needs no network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=100)
    (built,) = out.glob("hoststage-*.whl")
    return built


def requirements(wheel: Path, extra: str) -> set[str]:
    """Return the names of what the wheel asks for directly, with one extra or with none ("")."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    asked = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return {r.name.lower() for r in asked if r.marker is None or r.marker.evaluate({"extra": extra})}


def test_wheel_holds_every_module_and_every_stub_of_the_three_roots(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT / root))
        for root in ("proto", "server", "client")
        for suffix in ("*.py", "*.pyi", "*.proto", "py.typed")
        for path in (ROOT / root / "hoststage").rglob(suffix)
    }
    assert wanted - held == set()
    for package in PACKAGES:
        assert f"hoststage/{package}/py.typed" in held
    assert any(name.startswith("hoststage/v1/") and name.endswith("_pb2.pyi") for name in held)


def test_wheel_is_a_namespace_package_and_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        (entry_points,) = [archive.read(n).decode() for n in held if n.endswith("entry_points.txt")]
    assert "hoststage/__init__.py" not in held
    folders = {n.split("/")[0] for n in held}
    assert all(f == "hoststage" or f.endswith(".dist-info") for f in folders), folders
    assert "hoststage = hoststage.cli.entry:main" in entry_points
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in held)


def test_base_install_is_light(wheel: Path) -> None:
    assert requirements(wheel, "") == LIGHT


def test_server_extra_brings_the_daemon_s_needs_and_no_torch(wheel: Path) -> None:
    server = requirements(wheel, "server")
    assert {"uvloop", "typer", "prometheus-client"} <= server
    assert not {"torch", "transformers"} & server


def test_wheel_unpacked_alone_imports_a_client_without_the_server_s_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hoststage.client, hoststage.v1;"
        "assert hoststage.client.__file__.startswith(sys.argv[1]), hoststage.client.__file__;"
        "print(*sorted({'torch', 'uvloop', 'pydantic', 'typer', 'aiohttp'} & set(sys.modules)))"
    )
    # Run outside the checkout, without the editable install's finder coming first.
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == ""
