"""Other tools' names, as flags and in config files; `docs/names.md` lists them."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from brim.cli._aliases import Refused, in_our_spelling
from brim.cli._verbs import VERBS
from brim.cli.train import command
from brim.errors import UsageError
from tests.conftest import Cli

NAMES = (Path(__file__).parents[2] / "docs" / "names.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--per_device_train_batch_size", "4"], ["--micro-batch", "4"]),
        (["--per-device-train-batch-size=4"], ["--micro-batch", "4"]),
        (["--gradient_accumulation_steps", "8"], ["--accumulation", "8"]),
        (["--num_train_epochs", "2"], ["--epochs", "2"]),
        (["--output_dir", "x"], ["--output", "x"]),
        (["--optim", "adamw_torch_fused"], ["--optimizer", "adamw-fused"]),
        (["--lr_scheduler_type", "constant_with_warmup"], ["--schedule", "constant-with-warmup"]),
        (["--bf16"], ["--precision", "amp-bf16"]),
        (["--bf16", "True", "--seed", "1"], ["--precision", "amp-bf16", "--seed", "1"]),
        (["--fp16", "false"], []),
        (["--gradient_checkpointing", "--epochs", "1"], ["--checkpointing", "full", "--epochs", "1"]),
        (["--attn_implementation", "flash_attention_2"], ["--attention", "flash2"]),
        (["--save_total_limit=3"], ["--keep", "3"]),
        (["--epochs", "3", "model"], ["--epochs", "3", "model"]),
        (["--offload", "optimizer", "lr", "output"], ["--offload", "optimizer", "lr", "output"]),
        (["--", "--bf16"], ["--", "--bf16"]),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_an_alias_means_an_option(given: list[str], meant: list[str]) -> None:
    ours = in_our_spelling(given, command.params)
    assert [word for word in ours if word != "-o"] == meant


def command_of(verb: str) -> click.Command:
    found: click.Command = importlib.import_module(VERBS[verb].module).command
    return found


def rows(heading: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """The rows of a table of docs/names.md: the code spans of the first column, the second column, the verbs."""
    section = NAMES.partition(f"## {heading}")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield re.findall(r"`([^`]+)`", cells[0]), cells[1], cells[2].split(", ")


ALSO = [
    (flag, alias, verb)
    for (flag,), cell, verbs in rows("One option, several names")
    for alias in re.findall(r"`([^`]+)`", cell)
    for verb in verbs
]
WORDS = [(words, meant.strip("`"), verb) for (words,), meant, verbs in rows("Values with words of their own") for verb in verbs]
REFUSED = [(words, verb) for spans, _why, verbs in rows("Refused, with the reason") for words in spans for verb in verbs]


def key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize(("flag", "alias", "verb"), ALSO)
def test_every_name_of_the_page_is_its_option(flag: str, alias: str, verb: str) -> None:
    parameters = command_of(verb).params
    assert any(flag in parameter.opts for parameter in parameters)
    for spelled in (alias, alias.replace("_", "-"), alias.replace("-", "_").replace("__", "--", 1)):
        assert in_our_spelling([spelled, "3"], parameters) == [flag, "3"]
        assert in_our_spelling([f"{spelled}=3"], parameters) == [flag, "3"]


@pytest.mark.parametrize(("words", "meant", "verb"), WORDS)
def test_every_value_of_the_page_means_what_it_says(words: str, meant: str, verb: str) -> None:
    expected = [] if meant == "-" else meant.split()
    parameters = command_of(verb).params
    assert in_our_spelling(words.split(), parameters) == expected
    if words.endswith(" true"):
        assert in_our_spelling(words.split()[:1], parameters) == expected


@pytest.mark.parametrize(("words", "verb"), REFUSED)
def test_every_refused_value_of_the_page_is_an_error_with_what_to_do(words: str, verb: str) -> None:
    with pytest.raises(UsageError) as told:
        in_our_spelling(words.split(), command_of(verb).params)
    assert words.split()[0] in told.value.message
    assert told.value.hint


def test_the_page_lists_every_name_that_is_accepted() -> None:
    listed = {(verb, key(alias)) for _flag, alias, verb in ALSO}
    valued = {(verb, *words.removeprefix("--").split()) for words, _meant, verb in WORDS}
    refused = {(verb, *words.removeprefix("--").split()) for words, verb in REFUSED}
    first = {(verb, name) for verb, name, _value in valued}
    for verb in VERBS:
        for parameter in command_of(verb).params:
            flags = [flag for flag in parameter.opts if flag.startswith("--")]
            names = {key(flag) for flag in flags[1:]} | set(getattr(parameter, "config_names", ()))
            known_names = first if getattr(parameter, "is_flag", False) else listed
            assert {(verb, name) for name in names} <= known_names
            for name, table in getattr(parameter, "config_words", {}).items():
                for value, meant in table.items():
                    shown = str(value).lower() if isinstance(value, bool) else value
                    is_schedule = name in {"lr_scheduler", "scheduler"} and (verb, name) in first
                    known = refused if isinstance(meant, Refused) else valued
                    assert (verb, name, shown) in known or is_schedule, (verb, name, value)
    assert len({alias for _flag, alias, _verb in ALSO} | {words.split()[0] for words, _meant, _verb in WORDS}) >= 25


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        (["--batch-size", "32", "--effective-batch", "64"], "--batch-size 32", "--effective-batch 64"),
        (["--bs=32", "--train_batch_size=64"], "--bs 32", "--train_batch_size 64"),
        (["--max-length", "512", "--seq-len", "1024"], "--max-length 512", "--seq-len 1024"),
        (["--bf16", "--precision", "fp32"], "--bf16 and", "--precision fp32"),
        (["--lora", "--qlora"], "--lora and", "--qlora set"),
        (["-o", "a", "--output_dir", "b"], "-o a", "--output_dir b"),
    ],
)
def test_two_names_with_different_values_are_an_error(given: list[str], first: str, second: str) -> None:
    with pytest.raises(UsageError) as told:
        in_our_spelling(given, command.params)
    assert first in told.value.message
    assert second in told.value.message


def test_two_names_with_one_value_are_none_and_the_last_of_one_name_counts() -> None:
    assert in_our_spelling(["--lr", "2e-4", "--learning-rate", "0.0002"], command.params)[-2:] == ["--learning-rate", "0.0002"]
    assert in_our_spelling(["--lr", "1", "--lr", "2"], command.params)[-2:] == ["--learning-rate", "2"]


@pytest.mark.parametrize("verb", ["estimate", "stitch"])
@pytest.mark.parametrize("name", ["--batch-size", "--bs", "--train_batch_size"])
def test_a_batch_size_is_never_a_micro_batch(verb: str, name: str) -> None:
    with pytest.raises(UsageError, match="no effective batch") as told:
        in_our_spelling([name, "8"], command_of(verb).params)
    assert "--micro-batch N" in str(told.value.hint)


def test_the_model_may_be_an_option(cli: Cli) -> None:
    words = ("--gpu", "t4", "--max-length", "128", "--json")
    named = cli("estimate", "--model", "gpt2", *words)
    assert named.code == 0, named.err
    found, same = (json.loads(ended.out) for ended in (named, cli("estimate", "gpt2", *words)))
    assert (found["model"], found["peak_allocated_bytes"]) == (same["model"], same["peak_allocated_bytes"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--eval-strategy", "steps"), "needs --eval-steps N"),
        (("--eval-strategy", "epoch", "--eval-steps", "5"), "contradict each other"),
        (("--eval-strategy", "no", "--eval-split", "8"), "rows to evaluate on are given"),
        (("--warmup-ratio", "0.1", "--warmup", "5"), "give one"),
        (("--warmup-ratio", "1"), "is not below 1"),
        (("--adam-beta2", "1"), "is not below 1"),
        (("--save-strategy", "epoch"), "Write --save-steps N"),
        (("--optim", "muon"), "supported: adamw_torch"),
    ],
    ids=" ".join,
)
def test_what_would_be_ignored_is_an_error_with_the_right_word(given: tuple[str, ...], says: str, cli: Cli) -> None:
    ended = cli("train", "gpt2", "--data", "rows.jsonl", *given)
    assert ended.code == 2
    assert says in ended.err


def test_names_of_other_tools_in_a_file_are_those_of_the_flags(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "run.yaml"
    text = "model_name_or_path: smollm2-135m\nuse_peft: true\nlora_r: 4\nlora_alpha: 12\nlora_dropout: 0.1\nmax_length: 128\nbatch_size: 6\n"
    file.write_text(
        text + "per_device_train_batch_size: 3\ngradient_accumulation_steps: 2\nmicro_batch: 3\nsave_strategy: steps\n"
    )
    ended = cli("plan", "--config", str(file), "--gpu", "t4", "--json")
    assert ended.code == 0, ended.err
    assert "not used by `brim plan`: save_strategy" in ended.err
    found = json.loads(ended.out)
    workload, best = found["workload"], found["best"]
    assert (workload["model"], workload["method"], workload["max_length"]) == ("smollm2-135m", "lora", 128)
    assert (workload["lora_rank"], workload["lora_alpha"], workload["lora_dropout"]) == (4, 12, 0.1)
    assert (workload["effective_batch"], best["micro_batch"], best["accumulation"]) == (6, 3, 2)
    file.write_text("save_strategy: epoch\n")
    refused = cli("train", "gpt2", "--config", str(file))
    assert refused.code == 2
    assert "save_strategy: epoch is not supported" in refused.err
    assert "Write --save-steps N" in refused.err
    file.write_text("batch_size: 6\nglobal_batch_size: 8\n")
    assert "set the same thing to different values" in cli("plan", "gpt2", "--gpu", "t4", "--config", str(file)).err


def test_a_word_without_counterpart_is_refused() -> None:
    with pytest.raises(UsageError, match="adamw_torch"):
        in_our_spelling(["--optim", "muon"], command.params)
