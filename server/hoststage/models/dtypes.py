"""Bytes of one cached element, from the engine's flag and the model's own dtype."""

from __future__ import annotations

from collections.abc import Mapping

from hoststage.models.errors import BadField
from hoststage.models.fields import Fields

PLAIN_BYTES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8": 1,
}
"""Element types whose cache is elements and nothing else. Those with scales beside them need a stack file."""


def kv_dtype(f: Fields, asked: str) -> tuple[str, int]:
    """Return the name and the bytes of a cached element.

    `asked` is the engine's flag; "auto" takes the checkpoint's own KV quantization, else the model's dtype, else bfloat16
    (listed). Raises `BadField` for types that keep scales beside the elements.
    """
    if asked not in ("", "auto"):
        if asked not in PLAIN_BYTES:
            raise BadField(
                "kv_cache_dtype", asked, f"one of {', '.join(PLAIN_BYTES)}: others keep scales beside the elements, "
                "so their pools belong in a stack file (--stack)"
            )  # fmt: skip
        return asked, PLAIN_BYTES[asked]
    if _checkpoint_is_fp8(f):
        f.assume("kv_cache_dtype", "fp8_e4m3, from the checkpoint's KV quantization", "--kv-cache-dtype")
        return "fp8_e4m3", 1
    name = f.text("dtype") or f.text("torch_dtype")
    if not name:
        f.assume("kv_cache_dtype", "bfloat16: the config names no dtype", "--kv-cache-dtype")
        return "bfloat16", 2
    if name == "float32":
        f.assume(
            "kv_cache_dtype",
            "two bytes an element: engines serve float32 weights in half precision",
            "--kv-cache-dtype",
        )
        return "float16", 2
    if name not in PLAIN_BYTES:
        raise BadField("dtype", name, f"float32 or one of {', '.join(PLAIN_BYTES)}")
    return name, PLAIN_BYTES[name]


def _checkpoint_is_fp8(f: Fields) -> bool:
    quantization = f.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return False
    algorithm = quantization.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return algorithm.upper() == "FP8"
    scheme = quantization.get("kv_cache_scheme")
    return isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8


def quantization_name(f: Fields) -> str:
    """Return the checkpoint's quantization method, or the empty string."""
    quantization = f.get("quantization_config")
    if isinstance(quantization, Mapping) and isinstance(quantization.get("quant_method"), str):
        return str(quantization["quant_method"])
    return ""
