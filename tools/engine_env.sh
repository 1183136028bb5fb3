#!/bin/sh
# Makes the environment in which the tests of one engine run, and prints the path of its Python.
#
#   tools/engine_env.sh sglang
#   "$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines
#
# It takes several GB and some minutes the first time; afterwards nothing is done unless the requirements changed.
# Where the CPU build of torch will do, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves most of the size.
# HOSTSTAGE_ENGINE_CACHE says where (default /var/cache/hoststage, or ~/.cache/hoststage for a user who may not write
# there), PYTHON which interpreter (3.11 or later).
set -eu

engine=${1:?usage: engine_env.sh ENGINE}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
requirements="$root/tests/engines/$engine-requirements.txt"
cache=${HOSTSTAGE_ENGINE_CACHE:-/var/cache/hoststage}
if [ -z "${HOSTSTAGE_ENGINE_CACHE:-}" ] && ! { mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null; then
  cache="${XDG_CACHE_HOME:-$HOME/.cache}/hoststage"
fi
env="$cache/engines-$engine"

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
