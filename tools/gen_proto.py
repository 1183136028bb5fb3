"""Generate the Python stubs of ``proto/hoststage/v1`` beside their sources, or check that they are current.

Run it through ``make proto`` and ``make proto-check``: it needs what ``tools/proto/requirements.txt`` pins.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
INCLUDE = ROOT / "tools/proto/include"  # google.rpc.Status, which protoc does not bring
PACKAGE = Path("hoststage/v1")
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def stubs_in(folder: Path) -> dict[str, bytes]:
    """Return the generated files under one folder, by file name."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name.endswith(STUB_SUFFIXES)}


def generate(out: Path) -> dict[str, bytes]:
    """Run protoc into ``out`` and return the stubs that are to be kept, by file name."""
    protos = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto file in {PROTO_ROOT / PACKAGE}")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", f"-I{INCLUDE}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    command += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    command += [str(p.relative_to(PROTO_ROOT)) for p in protos]
    # protoc finds protoc-gen-mypy by name, in the folder of this interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, cwd=PROTO_ROOT, env={**os.environ, "PATH": path}, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed with status {done.returncode}")
    made = stubs_in(out / PACKAGE)
    # protoc writes a grpc module for every file; one without a service holds nothing but a version check.
    with_service = {p.stem for p in protos if re.search(r"^\s*service\s", p.read_text(), re.MULTILINE)}
    return {n: b for n, b in made.items() if "_pb2_grpc" not in n or n.split("_pb2_grpc")[0] in with_service}


def demanded_versions(stubs: dict[str, bytes]) -> dict[str, str]:
    """Return the oldest protobuf and grpcio that the stubs accept at import."""
    demanded: dict[str, str] = {}
    for name, content in stubs.items():
        text = content.decode()
        if match := re.search(r"^# Protobuf Python Version: ([\d.]+)", text, re.MULTILINE):
            demanded["protobuf"] = match[1]
        if name.endswith("_grpc.py") and (match := re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)):
            demanded["grpcio"] = match[1]
    return demanded


def bound_errors(demanded: dict[str, str]) -> list[str]:
    """Compare what the stubs demand with the lower bounds that pyproject.toml declares."""
    declared = dict(re.findall(r'^\s*"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    errors = []
    for package, version in demanded.items():
        if padded(declared.get(package, "0")) != padded(version):
            errors.append(
                f"the stubs demand {package}>={version} but pyproject.toml declares "
                f">={declared.get(package, 'nothing')}: make the two equal"
            )
    return errors


def padded(version: str) -> tuple[int, ...]:
    """Return a version as three numbers, so that 1.74 equals 1.74.0."""
    return tuple(int(part) for part in [*version.split("."), "0", "0"][:3])


def main() -> int:
    """Write the stubs, or with ``--check`` name those that differ; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed stub differs")
    check: bool = parser.parse_args().check
    committed_folder = PROTO_ROOT / PACKAGE
    with tempfile.TemporaryDirectory(prefix="hoststage-proto-") as scratch:
        fresh = generate(Path(scratch))
    committed = stubs_in(committed_folder)
    errors = bound_errors(demanded_versions(fresh))
    drifted = sorted(n for n in fresh.keys() | committed.keys() if fresh.get(n) != committed.get(n))
    if check:
        errors += [f"{PROTO_ROOT.name}/{PACKAGE}/{name} is not what the .proto files give" for name in drifted]
        if drifted:
            errors.append("run `make proto` and commit the result")
    else:
        for name in drifted:
            if name in fresh:
                (committed_folder / name).write_bytes(fresh[name])
            else:
                (committed_folder / name).unlink()
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{len(fresh)} stubs, {len(drifted)} {'differ' if check else 'written or removed'}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
