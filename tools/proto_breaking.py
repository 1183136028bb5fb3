"""Compare the .proto files with their last published version and fail on a breaking change.

The baseline is the last tag whose tree has .proto files. Before the first such tag it is the last ancestor
whose .proto files differ from the working tree; there a breaking change may pass if it was declared as
conventional commits do (``!`` before the colon, or a ``BREAKING CHANGE:`` footer), or with
``ALLOW_BREAKING=1`` before it is committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = "proto"
INCLUDE = "tools/proto/include"
DECLARED = re.compile(r"^\w+(\([^)]*\))?!:|^BREAKING[ -]CHANGE:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A revision to compare with; ``released`` when it is a tag."""

    revision: str
    released: bool


def git(*arguments: str) -> str:
    """Run git at the repository root and return what it prints; raise when it fails."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout


def protos_at(revision: str) -> dict[str, str]:
    """Return the blob of every .proto file of a revision, by path."""
    blobs = {}
    for line in git("ls-tree", "-r", revision, "--", PROTO).splitlines():
        meta, path = line.split("\t", 1)
        if path.endswith(".proto"):
            blobs[path] = meta.split()[2]
    return blobs


def protos_here() -> dict[str, str]:
    """Return the blob of every .proto file of the working tree, by path."""
    paths = sorted(str(p.relative_to(ROOT)) for p in (ROOT / PROTO).rglob("*.proto"))
    return dict(zip(paths, git("hash-object", "--", *paths).split(), strict=True)) if paths else {}


def candidates() -> Iterator[Baseline]:
    """Yield the revisions to compare with, best first."""
    for tag in git("tag", "--merged", "HEAD", "--sort=-version:refname", "v*").split():
        yield Baseline(tag, released=True)
    for commit in git("rev-list", "HEAD", "--", f"{PROTO}/*.proto").split():
        yield Baseline(commit, released=False)


def choose() -> Baseline | None:
    """Return the baseline, or None when there is no earlier version."""
    here = protos_here()
    for baseline in candidates():
        protos = protos_at(baseline.revision)
        if protos and (baseline.released or protos != here):
            return baseline
    return None


def declared_since(baseline: Baseline) -> bool:
    """Return whether a commit after the baseline that touched the .proto files declared a breaking change."""
    log = git("log", "--format=%B%x00", f"{baseline.revision}..HEAD", "--", f"{PROTO}/*.proto")
    return os.environ.get("ALLOW_BREAKING") == "1" or DECLARED.search(log.replace("\0", "")) is not None


def main() -> int:
    """Run ``buf breaking`` against the baseline; return the exit status."""
    buf = Path(sys.argv[1]).resolve()
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        print("this clone is shallow: tags and earlier versions may be missing", file=sys.stderr)
    baseline = choose()
    if baseline is None:
        print("no earlier version of the .proto files: nothing can break")
        return 0
    archive = subprocess.run(
        ["git", "archive", baseline.revision, PROTO], cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=60
    ).stdout
    with tempfile.TemporaryDirectory(prefix="hoststage-buf-") as scratch:
        subprocess.run(["tar", "-x", "-C", scratch], input=archive, check=True, timeout=60)
        shutil.copy(ROOT / "buf.yaml", scratch)
        shutil.copytree(ROOT / INCLUDE, Path(scratch) / INCLUDE)
        done = subprocess.run([buf, "breaking", ".", "--against", scratch], cwd=ROOT, check=False, timeout=300)
    name = baseline.revision if baseline.released else baseline.revision[:12]
    if done.returncode == 0:
        print(f"no breaking change since {name}")
        return 0
    if not baseline.released and declared_since(baseline):
        print(f"breaking changes since {name}, declared before the first release: accepted")
        return 0
    print(
        f"breaking changes since {name}; add fields, retire numbers with `reserved`, or declare it",
        file=sys.stderr,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
