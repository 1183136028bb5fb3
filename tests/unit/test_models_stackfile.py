"""Stack files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoststage.core.stack import Mode, ModeWish, PoolKind, Retraction
from hoststage.models import (
    EngineSettings,
    StackFileError,
    describe,
    load_preset,
    preset_names,
    read_stack,
    stack_from_mapping,
    stack_to_mapping,
)

TOML = """
model = "acme/novel"
modes = ["buffer_only!", "cache"]
retraction = "host_pool"
role = "decode"
largest_request_tokens = 4096

[parallel]
tp_rank = 1
tp_size = 2

[[pools]]
name = "kv"
kind = "kv"
page_bytes = 65536
page_tokens = 64

[[pools]]
name = "draft"
kind = "sidecar"
page_bytes = 4096
page_tokens = 64
indices_from_pool = "kv"
"""


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stack.toml"
    path.write_text(TOML)
    stack = read_stack(path)
    assert stack.identity.model == "acme/novel"
    assert stack.modes == (ModeWish(Mode.BUFFER_ONLY, required=True), ModeWish(Mode.CACHE))
    assert stack.retraction.retraction is Retraction.HOST_POOL
    assert [(p.name, p.kind, p.indices_from_pool) for p in stack.pools] == [
        ("kv", PoolKind.KV, ""),
        ("draft", PoolKind.SIDECAR, "kv"),
    ]
    assert stack.parallel.tp_rank == 1


@pytest.mark.parametrize("name", preset_names())
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    settings = EngineSettings(page_tokens=128, tp_size=2, mem_layout="layer_first", host_gb=1.0)
    for stack in describe(load_preset(name).config, settings).stacks():
        path = tmp_path / "stack.json"
        path.write_text(json.dumps(stack_to_mapping(stack)))
        assert read_stack(path) == stack


POOL: dict[str, object] = {"name": "kv", "kind": "kv", "page_bytes": 1, "page_tokens": 1}


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"model": "m"}, "pools"),
        ({"model": "m", "pools": []}, "pools"),
        ({"model": "m", "pools": ["kv"]}, "pools[0]"),
        ({"pools": [POOL]}, "identity.model"),
        ({"model": "m", "pools": [{**POOL, "kind": "warm"}]}, "pools[0].kind"),
        ({"model": "m", "pools": [{**POOL, "page_bytes": "1"}]}, "pools[0].page_bytes"),
        ({"model": "m", "pools": [{**POOL, "page_bytes": True}]}, "pools[0].page_bytes"),
        ({"model": "m", "pools": [{**POOL, "pages": 1}]}, "pools[0].pages"),
        ({"model": "m", "pools": [{**POOL, "replicated": 1}]}, "pools[0].replicated"),
        ({"model": "m", "pools": [{**POOL, "pieces": [1, "2"]}]}, "pools[0].pieces"),
        ({"model": "m", "pools": [POOL], "modes": ["warm"]}, "modes[0]"),
        ({"model": "m", "pools": [POOL], "modes": "cache"}, "modes"),
        ({"model": "m", "pools": [POOL], "role": 1}, "role"),
        ({"model": "m", "pools": [POOL], "parallel": []}, "parallel"),
        ({"model": "m", "pools": [POOL], "retraction": {"kind": "none"}}, "retraction.kind"),
        ({"model": "m", "pools": [POOL], "colour": "blue"}, "colour"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, object], field: str) -> None:
    with pytest.raises(StackFileError) as error:
        stack_from_mapping(data)
    assert error.value.field == field
    assert error.value.remedy


@pytest.mark.parametrize(("name", "text"), [("s.toml", "= 1"), ("s.json", "{"), ("s.json", "[]"), ("s.yaml", "a: 1")])
def test_a_file_that_cannot_be_parsed_is_named(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(StackFileError, match=name):
        read_stack(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackFileError, match="cannot be read"):
        read_stack(tmp_path / "none.toml")
