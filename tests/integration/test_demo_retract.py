"""`hoststage demo --retract`: a request that was parked in the middle of decoding goes on as if nothing had been."""

import json
import subprocess
import sys

import pytest

from hoststage.cli.demo.models import DemoModel, ModelUnavailableError, locate
from tests.integration.daemon import environment


def demo(*args, timeout=540):
    command = [sys.executable, "-m", "hoststage.cli.main", "demo", "--retract", "--json", *args]
    # Two processes with a model each share the machine with other tests: threads that wait must not spin.
    here = environment() | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, env=here, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "mode", "prompt", "pages"),
    [
        # 300 tokens and 3 of the 4 decoded ones: 19 pages, the last one partly filled.
        ("smollm2", "cache", 300, {"kv": 19}),
        # Of sliding layers the trailing window of 512 tokens: it begins and ends inside a page, and touches one more than it has.
        ("gemma", "buffer_only", 707, {"kv": 45, "swa": 33}),
    ],
)
def test_a_retracted_request_decodes_the_same_tokens_from_the_same_pages(model, mode, prompt, pages):
    try:
        locate(DemoModel(model))
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    result = demo(
        "--model", model, "--mode", mode, "--path", "shm", "--prompt-tokens", str(prompt), "--new-tokens", "8"
    )
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    report = json.loads(line)
    assert (report["retract"], report["model"], report["mode"], report["path"]) == (True, model, mode, "shm")
    assert report["tokens_identical"] is True
    assert report["pages_identical"] is True
    assert {name: pool["pages"] for name, pool in report["pools"].items()} == pages
    assert report["hold_bytes"] == sum(pool["bytes"] for pool in report["pools"].values())
    assert report["retracted_after"] == 4
    assert report["other_pages"] > 0
    assert report["hold_seconds"] > 0
    assert report["restore_seconds"] > 0


def test_over_the_inline_path_it_says_why_there_are_no_holds():
    result = demo("--path", "inline", timeout=60)
    assert result.returncode == 2
    assert "RETRACTION_PATH" in result.stderr
    assert "--path shm" in result.stderr
