#!/usr/bin/env bash
# Install the base package with the lowest versions that pyproject.toml allows and import what a light client imports.
# Usage: tools/check_bounds.sh BIN, where BIN is the folder that holds uv and a Python interpreter.
set -euo pipefail

cd "$(dirname "$0")/.."
bin=$1
scratch=$(mktemp -d -t hoststage-bounds-XXXXXX)
trap 'rm -rf "$scratch"' EXIT

"$bin/uv" venv --quiet --python "$bin/python" "$scratch/venv"
# From a copy: setuptools leaves its build folder in the source, where a later wheel would find stale modules.
mkdir "$scratch/source"
cp -r pyproject.toml README.md LICENSE proto server client "$scratch/source/"
"$bin/uv" pip install --quiet --python "$scratch/venv/bin/python" --resolution lowest-direct "$scratch/source"
cd "$scratch"
"$scratch/venv/bin/python" - <<'PY'
import importlib
import pkgutil
import sys
from importlib.metadata import version

import hoststage.v1

names = [m.name for m in pkgutil.iter_modules(hoststage.v1.__path__, "hoststage.v1.")]
stubs = [name for name in names if "_pb2" in name]
if not stubs:
    sys.exit("bounds-check: hoststage.v1 holds no generated module")
for name in [*names, "hoststage.shm", "hoststage.client"]:
    importlib.import_module(name)
for heavy in ("torch", "uvloop", "pydantic", "aiohttp"):
    if heavy in sys.modules:
        sys.exit(f"bounds-check: a light import of the client pulled in {heavy}")
print("bounds-check: the light client imports with", ", ".join(f"{p} {version(p)}" for p in ("grpcio", "protobuf", "numpy")))
PY
