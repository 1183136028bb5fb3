"""Settings under `"hoststage"` in a launch line: `check` judges what the launch would ask, and refuses what would stop it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hoststage.cli.inputs import Request, Subject, parse_size, resolve
from hoststage.cli.judge import NodeVerdict, judge
from hoststage.cli.options import node_facts
from hoststage.cli.plan import room_findings
from hoststage.cli.plan_report import plan_modes
from hoststage.cli.sglang_args import CommandLineError
from hoststage.client import StackError
from hoststage.client.engines.sglang.settings import Settings
from hoststage.core.stack import Mode
from hoststage.models import stack_to_mapping

BACKEND = {
    "backend_name": "hoststage",
    "module_path": "hoststage.client.engines.sglang.backend",
    "class_name": "HostStageStorage",
    "interface_v1": 1,
}
LINKER = {"linker": "HostStageLinker", "linker_module_path": "hoststage.client.engines.sglang.linker"}
HICACHE = ("--enable-hierarchical-cache", "--page-size=64", "--hicache-size=100")


def backend(settings: dict[str, Any], *flags: str, backend_name: str = "dynamic", **extra: Any) -> tuple[str, ...]:
    text = json.dumps({**BACKEND, **extra, "hoststage": settings})
    options = ("--hicache-storage-backend", backend_name, "--hicache-storage-backend-extra-config", text)
    return (*HICACHE, *options, *flags)


def linker(settings: dict[str, Any]) -> tuple[str, ...]:
    text = json.dumps({**LINKER, "linker_extra_config": {"hoststage": settings}})
    options = ("--unified-cache-external-linker-backend", "dynamic", "--unified-cache-external-linker-config", text)
    return ("--enable-unified-cache-external-linker", "--page-size=64", *options)


def judged(command: tuple[str, ...], *modes: str, preset: str = "llama-3.1-8b") -> Subject:
    return resolve(Request(preset=preset, modes=modes, command=command))


def asked(subject: Subject) -> list[Mode]:
    return [wish.mode for wish in subject.stacks[0].modes]


def test_the_backend_asks_for_its_own_modes_and_not_for_those_of_sglangs_host_memory() -> None:
    assert asked(judged(backend({}))) == [Mode.BUFFER_ONLY, Mode.CACHE]
    assert asked(judged(backend({"modes": ["cache"]}, "--hicache-host-memory-mode=buffer_only"))) == [Mode.CACHE]
    assert asked(judged(backend({}), "cache")) == [Mode.CACHE]
    assert asked(judged(linker({"modes": "cache"}))) == [Mode.CACHE]


def test_the_size_of_sglangs_host_pools_is_not_asked_of_the_daemon() -> None:
    subject = judged(backend({}))
    verdict = judge(subject.stacks, node_facts(parse_size("64GiB"), store=True))
    assert verdict.mode is Mode.BUFFER_ONLY  # of host pools with 93 GiB, which are SGLang's own
    (note,) = [note for note in subject.notes if note.subject == "host_slots"]
    assert "kv" in note.message
    assert "slots" in note.remedy


@pytest.mark.parametrize("command", [backend({"slots": {"kv": 512}}), linker({"slots": {"kv": 512}})])
def test_slots_are_what_is_asked(command: tuple[str, ...]) -> None:
    subject = judged(command)
    assert [pool.host_slots for pool in subject.stacks[0].pools] == [512]
    assert not [note for note in subject.notes if note.subject == "host_slots"]


SWA = {"slots": {"kv": 64, "swa": 64}}
DRAFT = {"slots": {"draft": 64}}
EAGLE = "--speculative-algorithm=EAGLE"


@pytest.mark.parametrize(
    ("command", "preset", "said"),
    [
        (backend(SWA), "llama-3.1-8b", "'swa'. Name one of kv"),
        (linker(SWA), "llama-3.1-8b", "'swa'. Name one of kv"),
        (backend(SWA), "gpt-oss-20b", ""),
        (linker(SWA), "gpt-oss-20b", ""),
        (backend(DRAFT), "llama-3.1-8b", "'draft'. Name one of kv"),
        # A draft model is not described: whether it has such a pool is seen when there is one.
        (backend(DRAFT, EAGLE), "llama-3.1-8b", ""),
        # Its anchor has no bytes in the engine.
        (backend({"slots": {"kv": 64}}), "deepseek-v4-flash", "'kv'. Name one of swa, deepseek_v4_c4, "),
        (linker({"slots": {"deepseek_v4_c4": 64}}), "deepseek-v4-flash", ""),
    ],
)
def test_slots_of_a_pool_that_the_model_lacks_are_an_error(command: tuple[str, ...], preset: str, said: str) -> None:
    if not said:
        judged(command, preset=preset)
        return
    with pytest.raises(CommandLineError) as caught:
        judged(command, preset=preset)
    assert caught.value.flag in command
    assert f"hoststage.slots is {said}" in str(caught.value)


def test_slots_are_held_against_the_pools_of_a_stack_file_too(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    path.write_text(json.dumps(stack_to_mapping(judged(backend({})).stacks[0])))
    with pytest.raises(CommandLineError, match="Name one of kv"):
        resolve(Request(stack=path, command=backend(SWA)))


def test_rules_of_sglang_still_see_the_sizes_of_its_own_pools() -> None:
    command = backend({}, "--hicache-host-memory-mode=buffer_only", "--swa-full-tokens-ratio=0.5")
    small = tuple(flag for flag in command if not flag.startswith("--hicache-size"))
    subject = judged((*small, "--max-total-tokens=319"), preset="gpt-oss-20b")
    assert "SGLANG_SWA_POOL_TOO_SMALL" in {finding.rule for finding in subject.engine}


@pytest.mark.parametrize(
    ("command", "flag", "said"),
    [
        (
            backend({"adress": "x"}),
            "--hicache-storage-backend-extra-config",
            "hoststage.adress is 'unknown'. Use one of address",
        ),
        (
            linker({"adress": "x"}),
            "--unified-cache-external-linker-config",
            "hoststage.adress is 'unknown'. Use one of address",
        ),
        (backend({"required": "yes"}), "--hicache-storage-backend-extra-config", "hoststage.required is 'yes'"),
        (
            backend({"host_pools": "daemon"}, allocator="shm"),
            "--hicache-storage-backend-extra-config",
            "allocator is 'shm'. Choose: shm brings",
        ),
        (
            backend({"host_pools": "daemon"}, backend_name="mooncake"),
            "--hicache-storage-backend-extra-config",
            "hicache_storage_backend is 'mooncake'. Choose: mooncake brings",
        ),
    ],
)
def test_what_would_stop_the_launch_is_unusable_here(command: tuple[str, ...], flag: str, said: str) -> None:
    with pytest.raises(CommandLineError) as caught:
        judged(command)
    assert caught.value.flag == flag
    assert said in str(caught.value)


def test_a_file_of_settings_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hoststage.json"
    path.write_text(json.dumps({**BACKEND, "hoststage": {"modes": ["cache"]}}))
    options = ("--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", f"@{path}")
    assert asked(judged((*HICACHE, *options))) == [Mode.CACHE]


def test_other_backends_are_judged_by_sglangs_own_mode() -> None:
    assert asked(judged((*HICACHE, "--hicache-storage-backend", "file"))) == [Mode.CACHE]


def test_host_pools_in_the_daemons_memory_are_counted_in_its_budget() -> None:
    subject = judged(backend({"host_pools": "daemon"}, "--tp-size=2"))
    # 100 GB a rank: 100e9 / 65536 bytes a token / 64 tokens + 1 = 23842 pages of 4 MiB, for 2 ranks.
    leased = 2 * 23842 * (4 << 20)
    assert [holder.bytes for holder in subject.holders] == [leased]
    (least, _) = plan_modes(subject.stacks, 1, 1 << 40, subject.holders)
    enough = leased + least.least.total

    def verdict(budget: int) -> NodeVerdict:
        return judge(subject.stacks, node_facts(budget, store=True, holders=subject.holders))

    assert verdict(enough).mode is Mode.BUFFER_ONLY
    short = verdict(enough - 1)
    assert short.mode is None
    assert {finding.rule for finding in short.findings} == {"BUDGET"}
    assert judged(backend({}, "--tp-size=2")).holders == ()


def test_host_pools_of_a_size_that_nobody_gave_are_not_counted() -> None:
    command = tuple(flag for flag in backend({"host_pools": "daemon"}) if not flag.startswith("--hicache-size"))
    assert judged(command).holders == ()


@pytest.mark.parametrize("storage", [("--hicache-storage-backend", "file"), ()], ids=["file", "none"])
def test_host_pools_alone_are_judged_by_the_sessions_that_lease_them(storage: tuple[str, ...]) -> None:
    text = json.dumps({"hoststage": {"host_pools": "daemon", "tenant": "t"}})
    options = (*storage, "--hicache-storage-backend-extra-config", text, "--tp-size=2")
    subject = judged((*HICACHE, "--hicache-host-memory-mode=buffer_only", *options))
    assert [[(pool.name, pool.host_slots) for pool in stack.pools] for stack in subject.stacks] == [[("none", 3)]] * 2
    assert subject.stacks[0].identity.tenant == "t"
    leased = 2 * 23842 * (4 << 20)
    assert [holder.bytes for holder in subject.holders] == [leased]
    [note] = [note for note in subject.notes if note.subject == "session"]
    assert (storage[1] if storage else "no storage backend") in note.message
    # Nothing passes through the session, so that no store is missed, whatever SGLang's own mode.
    assert (
        judge(subject.stacks, node_facts(leased + (1 << 20), store=False, holders=subject.holders)).mode is Mode.CACHE
    )
    short = judge(subject.stacks, node_facts(leased, store=True, holders=subject.holders))
    assert (short.mode, {finding.rule for finding in short.findings}) == (None, {"BUDGET"})


def test_the_plan_says_what_the_host_pools_take_and_that_they_do_not_fit() -> None:
    subject = judged(backend({"host_pools": "daemon"}))
    found = room_findings(subject, 1, parse_size("64GiB"))
    for finding in found:
        assert finding.message.endswith("has 0 bytes for it, of 64.0 GiB, beside SGLang's host pools (93.1 GiB).")
    # 11921 pages of 8 MiB, and arenas of 64 MiB in buffer_only, of 96 in cache.
    assert [(finding.mode, finding.remedy) for finding in found] == [
        (Mode.BUFFER_ONLY, "Raise the budget to 93.2 GiB or more."),
        (Mode.CACHE, "Raise the budget to 93.3 GiB or more."),
    ]


@pytest.mark.parametrize("given", [{"tokn": "s3cret"}, {"token": ["s3cret"]}])
def test_what_may_be_a_token_is_not_repeated_in_an_error(given):
    with pytest.raises(StackError) as refused:
        Settings.of({"hoststage": given})
    assert "s3cret" not in str(refused.value)
