"""Write ``requirements.lock`` from pyproject.toml, or say where the two disagree.

The lock holds one version of everything that any extra needs, and is given to pip as constraints.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PROJECT = "hoststage"
# Resolved for every Python that pyproject.toml admits, on Linux (see [tool.uv] there).
COMPILE = (
    "pip",
    "compile",
    "pyproject.toml",
    "--universal",
    "--python-version",
    "3.11",
    "--all-extras",
    "--quiet",
)


def declared() -> list[Requirement]:
    """Return the direct requirements of the base install and of all extras, without references to extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    return [r for r in map(Requirement, lines) if canonicalize_name(r.name) != PROJECT]


def locked() -> tuple[dict[str, list[str]], set[str]]:
    """Return the locked versions by package, and the packages that the lock holds for the project's own sake."""
    versions: dict[str, list[str]] = {}
    direct: set[str] = set()
    name = ""
    for line in LOCK.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line):
            name = canonicalize_name(match[1])
            versions.setdefault(name, []).append(match[2])
        elif name and re.search(rf"\b{PROJECT} \(pyproject\.toml\)", line):
            direct.add(name)
    return versions, direct


def disagreements() -> list[str]:
    """Return one line for each difference between pyproject.toml and the lock."""
    if not LOCK.exists():
        return [f"{LOCK.name} is missing"]
    versions, direct = locked()
    found = []
    wanted = {canonicalize_name(r.name) for r in declared()}
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name not in versions:
            found.append(f"pyproject.toml asks for {requirement}, which {LOCK.name} does not hold")
        found += [
            f"pyproject.toml asks for {requirement}, {LOCK.name} holds {version}"
            for version in versions.get(name, [])
            if not requirement.specifier.contains(version, prereleases=True)
        ]
    found += [
        f"{LOCK.name} holds {name} for {PROJECT}, which no longer asks for it" for name in sorted(direct - wanted)
    ]
    return found


def main() -> int:
    """Run ``write`` or ``check``; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="resolve anew, keeping locked versions where they still fit")
    write.add_argument("--upgrade", action="store_true", help="take the newest releases")
    commands.add_parser("check", help="fail when pyproject.toml and the lock disagree")
    options = parser.parse_args()
    if options.command == "write":
        upgrade = ["--upgrade"] if options.upgrade else []
        command = [
            sys.executable,
            "-m",
            "uv",
            *COMPILE,
            *upgrade,
            "--quiet",
            "--custom-compile-command",
            "make lock",
        ]
        subprocess.run([*command, "--output-file", LOCK.name], cwd=ROOT, check=True)
    found = disagreements()
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("run `make lock` and commit requirements.lock", file=sys.stderr)
    else:
        print(f"{LOCK.name} agrees with pyproject.toml")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
