"""`brim estimate`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import Cli

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_one_card_is_one_document(cli: Cli, model: str) -> None:
    ended = cli("estimate", model, "--gpu", "t4", "--seq-len", "256", "--micro-batch", "2", "--json")
    document = json.loads(ended.out)
    assert ended.code == 0
    assert document["schema"] == "brim.estimate/1"
    assert document["fits"] is True
    assert document["settings"]["micro_batch"] == 2
    assert ended.err == ""


def test_without_a_card_there_is_a_row_for_each_of_four(cli: Cli, model: str) -> None:
    ended = cli("estimate", model)
    assert ended.code == 0
    for name in ("T4", "RTX 3090", "RTX 4090", "A100"):
        assert name in ended.out
    first, *others = ended.out.splitlines()
    assert first.endswith("2048 tokens, on NVIDIA T4")
    assert "No GPU was given and none is found here" in "\n".join(others)
    document = json.loads(cli("estimate", model, "--json").out)
    assert document["schema"] == "brim.estimates/1"
    assert [each["device"] for each in document["estimates"]] == ["t4", "rtx-3090", "rtx-4090-24gb", "a100-80gb"]


def test_the_table_shows_kinds_phases_assumptions_and_the_best_saving(cli: Cli, model: str) -> None:
    out = cli("estimate", model, "--gpu", "t4", "--seq-len", "1024", "--micro-batch", "32").out
    for words in ("activations", "optimizer", "By phase", "Verdict", "fits", "Assumed", "Saves most"):
        assert words in out
    assert "█" in out


def test_what_does_not_fit_ends_with_one(cli: Cli, model: str) -> None:
    ended = cli("estimate", model, "--memory", "500MiB", "--seq-len", "1024", "--micro-batch", "64")
    assert ended.code == 1
    assert "does not fit" in ended.out
    assert (
        json.loads(cli("estimate", model, "--device", "cpu", "--memory", "1MiB", "--seq-len", "64", "--json").out)["fits"]
        is False
    )


@pytest.mark.long
def test_a_model_too_large_for_the_card_ends_with_the_first_recipe_that_fits_as_a_command(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("estimate", "qwen2.5-7b", "--gpu", "t4")
    monkeypatch.setattr("sys.argv", ["brim", *asked])
    ended = cli(*asked)
    assert ended.code == 1
    *_, saving, suggested = ended.out.splitlines()
    assert saving.startswith("Fits with another recipe: --method qlora ")
    command = shlex.split(suggested)
    assert command[:5] == ["brim", "estimate", "qwen2.5-7b", "--gpu", "t4"]
    assert json.loads(cli(*command[1:], "--json").out)["fits"]


def test_one_job_has_one_name_in_every_command(cli: Cli) -> None:
    for words in (["estimate"], ["plan", "--sweep", "1"]):
        ended = cli(*words, "tinyllama-1.1b", "--gpu", "t4", "--method", "lora", "--seq-len", "128")
        assert "\ntinyllama-1.1b" in f"\n{ended.out}"


def test_a_timeline_is_written_in_three_formats(cli: Cli, model: str, tmp_path: Path) -> None:
    base = ("estimate", model, "--gpu", "t4", "--seq-len", "256", "--timeline")
    for suffix in ("json", "csv", "svg"):
        assert cli(*base, str(tmp_path / f"step.{suffix}")).code == 0
    document = json.loads((tmp_path / "step.json").read_text())
    assert document["schema"] == "brim.timeline/1"
    kinds = [sum(column) for column in zip(*document["kind_bytes"].values(), strict=True)]
    assert kinds == document["allocated_bytes"]
    assert (
        max(kinds) == json.loads(cli("estimate", model, "--gpu", "t4", "--seq-len", "256", "--json").out)["peak_allocated_bytes"]
    )
    rows = list(csv.DictReader((tmp_path / "step.csv").open()))
    assert [int(row["allocated_bytes"]) for row in rows] == document["allocated_bytes"]
    assert ET.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--attention", "flash2", "--precision", "amp-fp16"), "--attention sdpa"),
        (("--method", "loar"), "loar"),
        (("--checkpointing", "some"), "every:N"),
        (("--timeline", "step.pdf"), ".svg"),
        (("--micro-batch", "0"), "0"),
        (("--device", "cpu"), "contradict"),
        (("--gpus", "2", "--sharding", "none"), "ddp"),
        (("--freeze", "nowhere"), "matches no parameter"),
        (("--offload", "optimizer"), "zero2"),
        (("--lora-rank", "4"), "--method lora"),
        (("--max-grad-norm", "-1"), "-1"),
    ],
)
def test_a_wrong_wish_is_one_message_and_code_two(cli: Cli, model: str, arguments: tuple[str, ...], said: str) -> None:
    ended = cli("estimate", model, "--gpu", "t4", "--seq-len", "64", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err


def test_a_config_file_may_use_the_names_of_transformers(cli: Cli, model: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nmax_length: 128\nlora_target_modules: [q_proj, v_proj]\nmethod: lora\n"
    )
    ended = cli("estimate", model, "--gpu", "t4", "--config", str(tmp_path / "run.yaml"), "--json")
    settings = json.loads(ended.out)["settings"]
    assert (settings["micro_batch"], settings["accumulation"], settings["seq_len"]) == (4, 2, 128)
    assert settings["lora_targets"] == ["q_proj", "v_proj"]


def test_a_config_file_may_use_the_words_of_transformers(cli: Cli, model: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "bf16: true\nfp16: false\noptim: adamw_torch_fused\ngradient_checkpointing: true\nattn_implementation: eager\nmax_length: 64\n"
    )
    settings = json.loads(cli("estimate", model, "--gpu", "a100", "--config", str(path), "--json").out)["settings"]
    assert (settings["precision"], settings["optimizer"]) == ("amp-bf16", "adamw-fused")
    assert (settings["checkpointing"], settings["attention"]) == ("full", "eager")
    path.write_text("optim: galore_adamw\n")
    ended = cli("estimate", model, "--gpu", "a100", "--config", str(path))
    assert ended.code == 2
    assert "adamw_torch_fused" in ended.err
    path.write_text("freeze: embed\nseq_len: 64\n")
    assert json.loads(cli("estimate", model, "--gpu", "a100", "--config", str(path), "--json").out)["settings"]["freeze"] == [
        "embed"
    ]


def test_the_other_side_of_a_pair_of_flags_may_stand_in_a_file(cli: Cli, model: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("unpadded: true\nseq_len: 64\n")
    ended = cli("estimate", model, "--gpu", "t4", "--config", str(tmp_path / "run.yaml"), "--json")
    assert json.loads(ended.out)["settings"]["padded"] is False


def test_it_speaks_chinese(cli: Cli, model: str) -> None:
    out = cli("estimate", model, "--gpu", "t4", "--seq-len", "64", "--lang", "zh_CN").out
    assert "放得下" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "t4*2"), "--check covers one GPU; this estimate is for 2."),
        (("--gpu", "24GiB"), "--check needs a card of the catalogue"),
        (("--gpu", "t4", "--optimizer", "lion"), "--check does not cover --optimizer lion."),
        (("--gpu", "a100-40gb", "--attention", "flash2", "--precision", "bf16"), "--check covers attention sdpa and eager"),
        (("--device", "cpu"), "--check needs an NVIDIA card"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(cli: Cli, model: str, options: tuple[str, ...], message: str) -> None:
    ended = cli("estimate", model, *options, "--seq-len", "64", "--micro-batch", "1", "--check")
    assert ended.code == 2
    assert message in ended.err


def test_every_setting_says_where_it_came_from(cli: Cli, model: str, tmp_path: Path) -> None:
    (tmp_path / "brim.yaml").write_text("method: lora\n", encoding="utf-8")
    ended = cli("estimate", model, "--gpu", "t4", "--seq-len", "64", "--config", str(tmp_path / "brim.yaml"))
    rows = dict(
        re.split(r"  +", line, maxsplit=1) for line in ended.out.splitlines() if re.match("Given|Config file|Defaults", line)
    )
    assert rows["Given"] == "seq-len 64"
    assert rows["Config file"] == "method lora"
    assert rows["Defaults"].startswith("precision amp-fp16, optimizer adamw-fused")
