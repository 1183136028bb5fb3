#!/bin/sh
# Makes the environment in which `hoststage bench` runs a peer that cannot share ours, and prints the path of its Python.
#
#   tools/peer_env.sh lmcache
#   tools/peer_env.sh mooncake       (needs libibverbs.so.1: apt-get install libibverbs1)
#
# It takes several GB and some minutes the first time. Where the CPU build of torch will do,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves most of the size. HOSTSTAGE_ENGINE_CACHE says where
# (default /var/cache/hoststage, or ~/.cache/hoststage for a user who may not write there), PYTHON which interpreter.
set -eu

peer=${1:?usage: peer_env.sh PEER}
case $peer in
  # Without its own pins: they ask for CUDA builds. The rest is what its multiprocess server imports.
  lmcache)
    release="lmcache==0.5.6"
    needs="torch numpy msgspec pyzmq sortedcontainers blake3 aiofile aiofiles cachetools nvtx httpx aiohttp requests
      opentelemetry-api opentelemetry-sdk opentelemetry-exporter-prometheus opentelemetry-exporter-otlp fastapi uvicorn
      httptools safetensors numba py-cpuinfo cryptography redis psutil pyyaml prometheus_client grpcio protobuf transformers" ;;
  mooncake)
    release="mooncake-transfer-engine-non-cuda==0.3.13.post1"
    needs="numpy" ;;
  *) echo "peer_env.sh: no recipe for peer '$peer'" >&2; exit 2 ;;
esac

cache=${HOSTSTAGE_ENGINE_CACHE:-/var/cache/hoststage}
if [ -z "${HOSTSTAGE_ENGINE_CACHE:-}" ] && ! { mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null; then
  cache="${XDG_CACHE_HOME:-$HOME/.cache}/hoststage"
fi
env="$cache/peers-$peer"
stamp="$release $needs"
if [ "$(cat "$env/.stamp" 2>/dev/null)" != "$stamp" ]; then
  "${PYTHON:-python3}" -m venv "$env" >&2
  "$env/bin/pip" install --quiet --no-deps "$release" >&2
  # shellcheck disable=SC2086 # a list of words
  "$env/bin/pip" install --quiet $needs >&2
  printf '%s\n' "$stamp" > "$env/.stamp"
fi
echo "$env/bin/python"
