"""The plug-in with SGLang's real HookRegistry, plug-in loader and ServerArgs: the handshake before anything is loaded.

Resolution runs whole on a CPU (`device="cpu"`). Run it with `"$(tools/engine_env.sh sglang)" -m pytest -m engines tests/engines`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

server_args = pytest.importorskip("sglang.srt.server_args", exc_type=ImportError)

from sglang.srt import plugins as sglang_plugins  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from hoststage.cli.sglang_args import SglangFlags  # noqa: E402
from hoststage.client import StackError  # noqa: E402
from hoststage.client.engines.sglang import plugin  # noqa: E402
from tests.engines import sglang_support as sg  # noqa: E402
from tests.integration.daemon import ROOT, Daemon, environment  # noqa: E402

MODELS = ROOT / "tests" / "fixtures" / "models"


@pytest.fixture(scope="module")
def storeless() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        daemon = Daemon(Path(folder), budget="512MiB", store="none").start()
        yield daemon
        daemon.kill()


@pytest.fixture(autouse=True)
def hooked() -> Iterator[None]:
    """The hook as SGLang's loader applies it, taken off again afterwards."""
    original = server_args.ServerArgs.resolve_once
    unhook = sg.hook_host_pools()
    assert server_args.ServerArgs.resolve_once is not original
    yield
    unhook()
    assert server_args.ServerArgs.resolve_once is original


def _extra(address: str, **section: Any) -> str:
    return json.dumps(
        {
            "backend_name": "hoststage",
            "module_path": plugin.MODULE,
            "class_name": "HostStageStorage",
            "interface_v1": 1,
            "hoststage": {"address": address, **section},
        }
    )


def _args(extra: str | None, *, model: str = "llama-3.1-8b", **given: Any) -> Any:
    values: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "tp_size": 2, **given}
    if extra is not None:
        values |= {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": extra,
        }
    return server_args.ServerArgs(model_path=str(MODELS / model), **values)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v2-lite", "gemma-3-27b"])
def test_the_verdict_is_said_before_anything_is_loaded(
    node: Daemon, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    caplog.set_level(logging.INFO, logger=plugin.__name__)
    args = _args(_extra(node.address, required=True), model=model)
    args.resolve_once()
    said = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert len(said) == 1
    assert "would grant buffer_only" in said[0]
    # Resolved arguments, as children get them, ask nothing again.
    args.resolve_once()
    assert len([r for r in caplog.records if r.name == plugin.__name__]) == 1


def test_a_refusal_stops_the_launch_with_all_findings_and_remedies(storeless: Daemon) -> None:
    extra = _extra(storeless.address, required=True, modes=["buffer_only"])
    with pytest.raises(plugin.LaunchRefused, match="STORE_REQUIRED") as refused:
        _args(extra).resolve_once()
    assert "Remedy: " in str(refused.value)


def test_a_refusal_that_is_not_fatal_is_said_and_the_launch_goes_on(
    storeless: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    args = _args(_extra(storeless.address, modes=["buffer_only"]))
    args.resolve_once()
    said = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert len(said) == 1
    assert "STORE_REQUIRED" in said[0]
    assert "runs without it" in said[0]


def test_a_later_mode_that_is_granted_is_no_refusal(storeless: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=plugin.__name__)
    _args(_extra(storeless.address, required=True, modes=["buffer_only", "cache"])).resolve_once()
    [said] = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert "would grant cache" in said
    assert "STORE_REQUIRED" in said


def test_an_absent_daemon_stops_the_launch_only_where_it_is_required(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(plugin.LaunchRefused, match="nowhere"):
        _args(_extra("unix:///nowhere/h.sock", required=True, connect_timeout=1)).resolve_once()
    _args(_extra("unix:///nowhere/h.sock", connect_timeout=1)).resolve_once()
    assert any("runs without it" in r.getMessage() for r in caplog.records)


def test_a_model_that_cannot_be_described_is_left_to_the_pools(
    node: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = _args(_extra(node.address))
    view.model_path = str(tmp_path)
    settings = plugin.Settings.of(json.loads(_extra(node.address, required=True)))
    answer = plugin.shake_hands(view, settings, lambda: {"architectures": ["Unheard"], "model_type": "unheard"})
    assert answer.granted is None
    assert not answer.away
    assert any("cannot judge" in r.getMessage() for r in caplog.records)


def test_a_model_of_the_hub_is_described_by_what_sglang_has_read(node: Daemon) -> None:
    view = _args(_extra(node.address))
    view.model_path = "some/model"
    config = json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text())
    settings = plugin.Settings.of(json.loads(_extra(node.address)))
    assert plugin.shake_hands(view, settings, lambda: config).granted == "buffer_only"


def test_a_launch_without_hoststage_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "ask", lambda *_: pytest.fail("it asked"))
    _args(None).resolve_once()
    other = {"backend_name": "x", "module_path": "other.module", "class_name": "X"}
    _args(json.dumps(other)).resolve_once()


def _linked(address: str, *, role: str = "null", **section: Any) -> Any:
    config = {
        "linker": "HostStageLinker",
        "linker_module_path": plugin.LINKER_MODULE,
        "linker_extra_config": {"hoststage": {"address": address, **section}},
    }
    return _args(
        None,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=config,
        disaggregation_mode=role,
        disaggregation_decode_enable_radix_cache=role == "decode",
    )


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_a_launch_with_the_linker_is_judged_before_anything_is_loaded(
    node: Daemon, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    caplog.set_level(logging.INFO, logger=plugin.__name__)
    _linked(node.address, role=role, required=True, token="a secret").resolve_once()
    [said] = [r.getMessage() for r in caplog.records if r.name == plugin.__name__]
    assert "would grant buffer_only" in said
    assert "DECODE_ROLE" not in said
    assert "RETRACTION" not in said
    assert "a secret" not in " ".join(plugin.flags_of(_linked(node.address, token="a secret")))


def test_a_refusal_or_an_absent_daemon_stops_a_launch_with_the_linker_only_where_it_is_required(
    storeless: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(plugin.LaunchRefused, match="STORE_REQUIRED"):
        _linked(storeless.address, required=True, modes=["buffer_only"]).resolve_once()
    with pytest.raises(plugin.LaunchRefused, match="nowhere"):
        _linked("unix:///nowhere/h.sock", required=True, connect_timeout=1).resolve_once()
    _linked("unix:///nowhere/h.sock", connect_timeout=1).resolve_once()
    assert any("runs without it" in r.getMessage() for r in caplog.records)


def test_another_linker_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "ask", lambda *_: pytest.fail("it asked"))
    args = _linked("unix:///nowhere/h.sock")
    args.unified_cache_external_linker_config["linker_module_path"] = "other.module"
    args.resolve_once()


def test_settings_that_mean_nothing_stop_the_launch(node: Daemon) -> None:
    with pytest.raises(StackError, match="requird"):
        _args(_extra(node.address, requird=True)).resolve_once()


def test_slots_of_a_pool_that_the_model_lacks_stop_the_launch_before_anything_is_loaded(node: Daemon) -> None:
    with pytest.raises(StackError, match=r"hoststage\.slots is 'swa': name one of kv$"):
        _args(_extra(node.address, slots={"swa": 64})).resolve_once()
    with pytest.raises(StackError, match=r"hoststage\.slots is 'swa': name one of kv$"):
        _linked(node.address, slots={"swa": 64}).resolve_once()
    _args(_extra(node.address, slots={"kv": 64})).resolve_once()


@pytest.mark.parametrize("ending", ["json", "toml", "yaml"])
def test_the_extra_configuration_may_be_a_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"extra.{ending}"
    if ending == "toml":
        path.write_text(f'module_path = "{plugin.MODULE}"\n[hoststage]\ntenant = "t"\n')
    else:
        path.write_text(json.dumps({"module_path": plugin.MODULE, "hoststage": {"tenant": "t"}}))
    found = plugin.extra_config_of(_args(f"@{path}"))
    assert found is not None
    assert plugin.Settings.of(found).tenant == "t"
    assert plugin.extra_config_of(_args(f"@{tmp_path}/missing.{ending}")) is None


def test_every_flag_that_is_passed_on_is_one_that_check_reads() -> None:
    known = {f.name for f in fields(SglangFlags)}
    assert set(plugin.FLAGS) <= known


def _install(folder: Path) -> None:
    """Leave what an installation leaves: the entry points that the wheel is built with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = project["project"]["entry-points"][sglang_plugins.GENERAL_PLUGINS_GROUP]["hoststage"]
    info = folder / "hoststage-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hoststage\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{sglang_plugins.GENERAL_PLUGINS_GROUP}]\nhoststage = {target}\n")


SCHEDULER = """
import importlib, sys, types
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "scheduler":
    # Importing the real one needs more than a CPU.
    sys.modules["sglang.srt.managers.scheduler"] = types.ModuleType("scheduler")
from sglang.srt.plugins import load_plugins
load_plugins()
print("sglang.srt.mem_cache.pool_host.common" in sys.modules)
mha = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
print([hasattr(getattr(mha, name), "__wrapped__") for name in ("get_allocator_from_storage", "host_memory_budget_bytes")])
"""


@pytest.mark.parametrize("process", ["scheduler", "other"])
def test_processes_that_make_host_pools_are_hooked_by_sglangs_loader_and_others_spared(
    tmp_path: Path, process: str
) -> None:
    _install(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", SCHEDULER, str(tmp_path), process]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=True)
    hooked = process == "scheduler"
    assert done.stdout.splitlines()[-2:] == [str(hooked), str([hooked, hooked])], done.stderr


def test_sglangs_own_loader_finds_the_plugin_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sglang_plugins, "_plugins_loaded", False)
    HookRegistry.reset()
    sglang_plugins.load_plugins()
    assert [hook for _, hook, _ in HookRegistry._hooks[plugin.TARGET]] == [plugin.around_resolution]
