"""Settings: where they come from, which wins, and what is said about wrong ones."""

from pathlib import Path

import pytest

from hoststage.cli.plan_config import render_config
from hoststage.server.config import ConfigError, as_markdown, as_toml, load_settings

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def problems(**given):
    with pytest.raises(ConfigError) as caught:
        load_settings(given.get("config"), given.get("flags", {}), given.get("environ", {}))
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "bytes_"), [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 MiB", 3 << 19), ("4096", 4096), (7, 7)]
)
def test_sizes_are_written_as_people_write_them(text, bytes_):
    assert load_settings(flags={"store.limit": text}, environ={}).store.limit == bytes_


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("10s", 10.0), ("2m", 120.0), ("7", 7.0), (1.5, 1.5)])
def test_durations_are_written_as_people_write_them(text, seconds):
    assert load_settings(flags={"shutdown.grace": text}, environ={}).shutdown.grace == seconds


def test_a_flag_wins_over_the_environment_the_environment_over_the_file_and_sections_mix(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[memory]\nbudget = "1GiB"\nchunk = "2MiB"\nkeep_idle = "3MiB"\n')
    environ = {"HOSTSTAGE_MEMORY_BUDGET": "2GiB", "HOSTSTAGE_MEMORY__CHUNK": "4MiB", "HOSTSTAGE_CONFIG": str(file)}
    memory = load_settings(None, {"memory.budget": "3GiB"}, environ).memory
    assert (memory.budget, memory.chunk, memory.keep_idle) == (3 << 30, 4 << 20, 3 << 20)


def test_toml_and_yaml_say_the_same(tmp_path):
    toml, yaml = tmp_path / "c.toml", tmp_path / "c.yml"
    toml.write_text('[auth]\nallow_uids = [1, 2]\n[log]\nlevel = "debug"\n')
    yaml.write_text("auth: {allow_uids: [1, 2]}\nlog: {level: debug}\n")
    assert load_settings(str(toml), environ={}).model_dump() == load_settings(str(yaml), environ={}).model_dump()


def test_lists_in_flags_and_environment_are_separated_by_commas():
    auth = load_settings(None, {"auth.allow_uids": "1, 2"}, {"HOSTSTAGE_AUTH_ALLOW_GIDS": "3"}).auth
    assert (auth.allow_uids, auth.allow_gids) == ([1, 2], [3])


def test_everything_that_is_wrong_is_said_at_once_with_its_source(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[store]\nlimt = 1\nurl = 7\n[stor]\nx = 1\n[http]\nlisten = "nowhere"\n')
    found = problems(
        config=str(file),
        flags={"memory.budgt": "1GiB", "log.level": "loud"},
        environ={"HOSTSTAGE_STORE_LIMIT": "much", "HOSTSTAGE_NOSUCH_KEY": "1"},
    )
    by_key = {p.key: p for p in found}
    assert by_key.keys() == {
        *("store.limt", "store.url", "stor", "http.listen", "memory.budgt", "log.level", "store.limit", "nosuch.key")
    }
    assert "store.limit" in by_key["store.limt"].remedy
    assert by_key["store.limt"].source == f"file {file}"
    assert by_key["memory.budgt"].source == "a flag"
    assert by_key["store.limit"].source == "the environment"
    assert by_key["store.limit"].value == "much"
    assert "8GiB" in by_key["store.limit"].remedy
    assert "host:port" in by_key["http.listen"].remedy
    assert all(p.remedy.endswith((".", "?")) and "\n" not in str(p) for p in found)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"memory.chunk": "3MiB"}, ["memory.chunk", "3MiB", "2 MiB"]),
        ({"store.low_watermark": "0.99"}, ["store", "low_watermark", "high_watermark"]),
        ({"auth.token": "a", "auth.token_file": "/x"}, ["auth", "token_file"]),
        ({"listen.tcp": "0.0.0.0:9000"}, ["listen.tcp = 0.0.0.0:9000 (from a flag): ", "Set auth.token_file."]),
        ({"listen.data_tcp": "127.0.0.1:9001"}, ["listen.data_tcp = 127.0.0.1:9001", "listen.tcp, which is empty"]),
        ({"staging.max_message": "5"}, ["staging.max_message = 5", 'its default is "64MiB"']),
        ({"listen.socket_mode": "rw"}, ["listen.socket_mode", "rw"]),
        ({"memory.budget": "-1"}, ["memory.budget", "-1"]),
        ({"staging.io": "1"}, ["staging.io", "no such setting"]),
        ({"nonsense": "1"}, ["nonsense", "no such setting"]),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(flags, words):
    text = "\n".join(str(p) for p in problems(flags=flags))
    for word in words:
        assert word in text


def test_a_secret_is_neither_printed_nor_quoted_in_an_error():
    settings = load_settings(flags={"auth.token": "sesame"}, environ={})
    assert "sesame" not in as_toml(settings)
    text = "\n".join(str(p) for p in problems(flags={"auth.token": "sesame", "auth.token_file": "/x"}))
    assert "sesame" not in text


def test_what_is_printed_can_be_read_again(tmp_path):
    settings = load_settings(
        flags={"memory.budget": "3GiB", "auth.allow_uids": "5", "listen.socket": "/a b"}, environ={}
    )
    file = tmp_path / "printed.toml"
    file.write_text(as_toml(settings))
    assert load_settings(str(file), environ={}).model_dump() == settings.model_dump()


def test_a_plans_file_can_be_served(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        render_config(title="a model", budget_bytes=5 << 30, huge_pages=True, store_url="file:///var/lib/x")
    )
    settings = load_settings(str(file), environ={})
    assert settings.memory.budget == 5 << 30
    assert settings.store.url == "file:///var/lib/x"


def test_the_documentation_lists_all_settings_as_they_are():
    assert as_markdown() in DOCS.read_text()


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path):
    assert "No such file" in str(problems(config="/nonexistent.toml")[0])
    broken = tmp_path / "b.toml"
    broken.write_text("[store\n")
    assert str(broken) in str(problems(config=str(broken))[0])
    listed = tmp_path / "b.yaml"
    listed.write_text("- a\n- b\n")
    assert str(listed) in str(problems(config=str(listed))[0])
