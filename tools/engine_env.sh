#!/bin/sh
# Makes the environment in which the tests of one engine run, and prints the path of its Python.
#
#   tools/engine_env.sh sglang
#   "$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines
#
# It takes several GB and some minutes the first time; afterwards nothing is done unless the requirements changed.
# Where the CPU build of torch will do, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves most of the size.
# HOSTSTAGE_ENGINES_DIR says where (default /var/cache/hoststage), PYTHON which interpreter (3.11 or later).
set -eu

engine=${1:?usage: engine_env.sh ENGINE}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
requirements="$root/tests/engines/$engine-requirements.txt"
env="${HOSTSTAGE_ENGINES_DIR:-/var/cache/hoststage}/engines-$engine"

case $engine in
  sglang) release="sglang==0.5.23" ;;
  *) echo "engine_env.sh: no recipe for engine '$engine'" >&2; exit 2 ;;
esac

stamp="$(cksum < "$requirements") $release"
if [ "$(cat "$env/.stamp" 2>/dev/null)" != "$stamp" ]; then
  "${PYTHON:-python3}" -m venv "$env" >&2
  "$env/bin/pip" install --quiet --no-deps "$release" >&2
  "$env/bin/pip" install --quiet -r "$requirements" >&2
  printf '%s\n' "$stamp" > "$env/.stamp"
fi
echo "$env/bin/python"
