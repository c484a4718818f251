"""The config file: default < file < flag, and a key that nobody knows is never passed over."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from brim import ConfigError
from brim.cli._command import Command, Option
from brim.cli._config import defaults_from, read_config
from tests.conftest import Cli


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "brim.yaml"


def _names(out: str) -> set[str]:
    return {gpu["name"] for gpu in json.loads(out)["gpus"]}


def test_the_file_stands_between_default_and_flag(cli: Cli, config: Path) -> None:
    config.write_text("vendor: amd\nmin_memory: 100GiB\njson: true\n")
    from_file = _names(cli("gpus", "--config", str(config)).out)
    assert from_file == {"mi250", "mi250x", "mi300x"} & from_file != set()
    over = _names(cli("gpus", "--config", str(config), "--vendor", "nvidia").out)
    assert over
    assert not over & from_file


def test_hyphens_and_underscores_are_one(cli: Cli, config: Path) -> None:
    config.write_text("min-memory: 100GiB\n")
    hyphens = cli("gpus", "--config", str(config), "--json").out
    config.write_text("min_memory: 100GiB\n")
    assert cli("gpus", f"--config={config}", "--json").out == hyphens


def test_the_environment_may_name_the_file(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("vendor: apple\n")
    monkeypatch.setenv("BRIM_CONFIG", str(config))
    found = json.loads(cli("gpus", "--json").out)["gpus"]
    assert {gpu["vendor"] for gpu in found} == {"apple"}


def test_a_key_of_another_verb_is_said_and_passed_over(cli: Cli, config: Path) -> None:
    config.write_text("search: llama\nvendor: amd\n")
    ended = cli("gpus", "--config", str(config), "--json")
    assert ended.code == 0
    assert "not used by `brim gpus`: search" in ended.err


def test_the_language_may_stand_in_the_file(cli: Cli, config: Path) -> None:
    config.write_text("lang: zh_CN\n")
    assert "显存" in cli("gpus", "t4", "--config", str(config)).out
    assert "GPU memory" in cli("gpus", "t4", "--config", str(config), "--lang", "en").out
    config.write_text("lang: tlh\n")
    assert "brim does not speak 'tlh'" in cli("gpus", "t4", "--config", str(config)).err


def test_an_empty_file_and_an_empty_value_change_nothing(cli: Cli, config: Path) -> None:
    config.write_text("")
    plain = cli("gpus", "--json").out
    assert cli("gpus", "--json", "--config", str(config)).out == plain
    config.write_text("vendor:\n")
    assert cli("gpus", "--json", "--config", str(config)).out == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vendr: amd", "there is no setting 'vendr'. Did you mean 'vendor'?"),
        ("per_device_batch: 8", "there is no setting 'per_device_batch'."),
        ("config: other.yaml", "there is no setting 'config'."),
        ("vendor: voodoo", "vendor: 'voodoo' is not one of"),
        ("vendor: [amd, nvidia]", "vendor takes one value, and the file gives a list"),
        ("vendor: {a: 1}", "vendor takes one value, and the file gives a mapping"),
        ("min_memory: 24G", "min_memory: '24G' is not a size."),
        ("bf16: perhaps", "bf16: 'perhaps' is not a valid boolean"),
        ("vendor: amd\nvendor: nvidia", "the key 'vendor' appears twice"),
        ("vendor: amd\nmin_memory: 1GiB\nmin-memory: 2GiB", "min_memory and min-memory set the same thing"),
        ("vendor: [amd", "is not valid YAML in line"),
        ("a: b: c", "is not valid YAML in line 1"),
        ("\tvendor: amd", "is not valid YAML"),
        ("- vendor", "should hold lines of `key: value`"),
        ("just words", "should hold lines of `key: value`"),
        ("1: 2", "should hold lines of `key: value`"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("vendor: !!int abc", "is not valid YAML"),
        ("vendor: 2024-99-99", "is not valid YAML"),
        ("vendor: " + "[" * 20_000, "is not valid YAML"),
        ("min_memory: 1.5", "is not a size"),
        ("min_memory: yes", "is not a size"),
    ],
)
def test_a_broken_file_exits_with_2_and_names_itself(cli: Cli, config: Path, text: str, says: str) -> None:
    config.write_text(text)
    ended = cli("gpus", "--config", str(config))
    assert ended.code == 2
    assert says in ended.err
    assert str(config) in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err


def test_a_merge_key_is_understood(cli: Cli, config: Path) -> None:
    config.write_text("<<: &base {vendor: amd, bf16: true}\nvendor: apple\n")
    ended = cli("gpus", "--config", str(config), "--json")
    assert {gpu["vendor"] for gpu in json.loads(ended.out)["gpus"]} == {"apple"}


def test_a_file_that_is_not_text_or_is_a_folder_is_refused(cli: Cli, config: Path, tmp_path: Path) -> None:
    config.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in cli("gpus", "--config", str(config)).err
    assert "Cannot read the config file" in cli("gpus", "--config", str(tmp_path)).err


def test_names_of_transformers_and_numbers_of_yaml_are_understood(config: Path) -> None:
    """PyYAML reads 1e-4 as a string; the option's own type makes it a number."""
    command = Command(
        "train",
        params=[
            Option(["--micro-batch"], type=int, config_names=("per_device_train_batch_size",)),
            Option(["--learning-rate"], type=float),
            Option(["--freeze"], multiple=True),
        ],
    )
    config.write_text("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfreeze: [encoder, shared]\n")
    context = click.Context(command)
    context.default_map = defaults_from(str(config), command, context)
    command.parse_args(context, [])
    assert context.params["micro_batch"] == 8
    assert context.params["learning_rate"] == 1e-4
    assert context.params["freeze"] == ("encoder", "shared")
    config.write_text("per_device_train_batch_size: 8\nmicro_batch: 9\n")
    with pytest.raises(ConfigError, match="set the same thing"):
        defaults_from(str(config), command, context)


def test_reading_never_executes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / "evil.yaml").write_text(f"x: !!python/object/apply:pathlib.Path.touch [{marker}]")
    with pytest.raises(ConfigError):
        read_config(str(tmp_path / "evil.yaml"))
    assert not marker.exists()


@pytest.mark.parametrize("words", ["models --config /dev/zero", "stitch /dev/zero -o out"])
def test_a_file_without_an_end_is_refused_at_once(words: str, cli: Cli) -> None:
    ended = cli(*words.split())
    assert ended.code == 2, ended.err
    assert "larger than 1.00 MiB" in ended.err
