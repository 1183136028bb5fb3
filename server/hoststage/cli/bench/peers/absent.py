"""Peers that are not driven, each with its reason; a reason that can change is looked up at run time."""

from __future__ import annotations

import ctypes
import importlib.util

_MOONCAKE = (
    "the wheel mooncake-transfer-engine (0.3.13) links against libcudart.so.12, libcuda.so.1 and libibverbs.so.1, so it does not load "
    "without CUDA; the build without CUDA is not on the index that was tried"
)
_LMCACHE = (
    "the wheel lmcache (0.5.6) requires cupy-cuda13x and cuda-python; it was not set up on a machine without CUDA"
)


def absent_peers() -> list[tuple[str, str]]:
    """Return name and reason of each peer of the issue's list that this version cannot drive."""
    cuda = "" if _loads("libcuda.so.1") else "there is no libcuda.so.1 here; "
    return [
        ("LMCache's multiprocess server", f"{cuda}{_LMCACHE}{_driver('lmcache')}"),
        ("Mooncake's client", f"{cuda}{_MOONCAKE}{_driver('mooncake')}"),
    ]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _driver(package: str) -> str:
    return "; it is installed here, but this version has no driver for it" if importlib.util.find_spec(package) else ""
