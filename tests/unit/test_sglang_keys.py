"""SGLang's page hashes as keys, one by one and packed: the same bytes, whatever the hashes look like."""

import hashlib

import pytest

from hoststage.client.engines.sglang.keys import keys_of, packed_keys_of

DIGEST = hashlib.sha256(b"page").hexdigest()


@pytest.mark.parametrize(
    "hashes",
    [
        [DIGEST] * 3,
        [DIGEST.upper(), DIGEST],
        ["short", DIGEST],
        [DIGEST[:-1], DIGEST + "0"],
        [DIGEST[:-1] + " ", DIGEST],
        [" " * 64, DIGEST],
        ["x" * 64],
        [f"{DIGEST}-suffix"],
    ],
)
def test_packed_keys_are_the_keys_one_after_the_other(hashes: list[str]) -> None:
    assert packed_keys_of(hashes) == b"".join(keys_of(hashes))
    assert len(packed_keys_of(hashes)) == 32 * len(hashes)
