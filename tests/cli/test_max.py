"""`brim max`: one number, what limits it, and a command that trains with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import brim
from brim.records import RunCard
from brim.workload.embedded import data_file, write_model
from tests.conftest import Cli, once

QUESTION = ("smollm2-135m", "--gpu", "t4", "--method", "lora", "--seq-len", "256")


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    folder = shared / "embedded-model"
    once(folder, lambda: write_model(folder / "model"))
    return folder / "model"


@pytest.mark.long
def test_the_number_stands_first_and_is_that_of_solve(cli: Cli) -> None:
    ended = cli("max", *QUESTION)
    solved = json.loads(cli("plan", *QUESTION, "--solve", "micro-batch", "--json").out)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == f"Largest micro-batch: {solved['answers'][0]['value']}"
    assert any(line.startswith("Limited by   memory: ") for line in lines)
    assert solved["others"][0]["value"] in ended.out
    command = lines[lines.index("Train with it") + 1]
    assert f"--micro-batch {solved['answers'][0]['value']}" in command


@pytest.mark.long
def test_the_document_and_the_function_say_the_same(cli: Cli) -> None:
    document = json.loads(cli("max", *QUESTION, "--json").out)
    found = brim.max("smollm2-135m", gpu="t4", method="lora", seq_len=256)
    assert document["schema"] == "brim.max/1"
    assert document | {"elapsed_seconds": 0} == found.to_dict() | {"elapsed_seconds": 0}
    assert type(found).from_json(found.to_json()) == found
    assert found.limited_by == "memory"
    assert found.best is not None
    assert found.best.micro_batch == found.micro_batch
    assert found.best.memory is not None
    assert found.best.memory.peak_device_bytes <= found.room_bytes < (found.next_bytes or 0)
    assert str(found).splitlines()[0] == f"Largest micro-batch: {found.micro_batch}"


def test_an_effective_batch_limits_it_too(cli: Cli) -> None:
    document = json.loads(cli("max", *QUESTION, "--effective-batch", "8", "--json").out)
    assert (document["micro_batch"], document["limited_by"], document["next_bytes"]) == (4, "effective-batch", None)
    assert "--effective-batch 8" in document["train_command"]


def test_where_nothing_fits_the_answer_says_what_would(cli: Cli) -> None:
    question = ("llama-3.2-1b", "--gpu", "gtx-1080-ti", "--method", "full", "--seq-len", "128", "--precision", "fp32")
    ended = cli("max", *question)
    assert ended.code == 1
    assert ended.out.splitlines()[0] == "Largest micro-batch: 0"
    assert "--method lora" in ended.out
    document = json.loads(cli("max", *question, "--json").out)
    assert (document["fits"], document["micro_batch"], document["best"]) == (False, 0, None)
    assert document["missing_bytes"] > 0
    assert document["alternatives"]


def test_a_loss_that_was_not_tried_is_named(cli: Cli) -> None:
    ended = cli("max", "smollm2-135m", "--device", "cpu", "--memory", "4GiB", "--method", "lora", "--seq-len", "256")
    assert "  - The logits of a micro-batch take about " in ended.out
    assert "--loss chunked" in ended.out


@pytest.mark.long
def test_a_chunked_loss_holds_more_and_the_command_asks_for_it(cli: Cli) -> None:
    asked = ("tinyllama-1.1b", "--gpu", "t4", "--method", "lora", "--seq-len", "1024", "--checkpointing", "full")
    standard = json.loads(cli("max", *asked, "--loss", "standard", "--json").out)
    document = json.loads(cli("max", *asked, "--json").out)
    assert document["best"]["loss"] == "chunked"
    assert document["micro_batch"] > standard["micro_batch"]
    assert [(each["micro_batch"], each["loss"]) for each in document["others"]] == [(standard["micro_batch"], "standard")]
    assert "--loss chunked" in document["train_command"]
    assert "--loss chunked" in document["plan_command"]
    assert f"{document['micro_batch']} " in cli("max", *asked).out


def test_python_keeps_its_own_max() -> None:
    names: dict[str, object] = {}
    exec("from brim import *", names)
    assert "max" not in names
    assert callable(names["plan"])
    assert callable(brim.max)


def test_what_is_asked_for_is_no_option(cli: Cli) -> None:
    assert cli("max", "smollm2-135m", "--gpu", "t4", "--micro-batch", "2").code == 2


@pytest.mark.long
def test_the_command_trains_with_it(cli: Cli, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = data_file().read_text(encoding="utf-8").splitlines(keepends=True)
    rows.write_text("".join(lines[:40]), encoding="utf-8")
    asked = (str(model), "--device", "cpu", "--memory", "300MiB", "--data", str(rows), "--precision", "fp32")
    document = json.loads(cli("max", *asked, "--json").out)
    words = shlex.split(document["train_command"])
    assert words[:2] == ["brim", "train"]
    folder = tmp_path / "run"
    more = ("--workers", "0", "--no-probe", "--no-verify", "--max-steps", "1", "-o", str(folder), "--json")
    ended = cli(*words[1:], *more)
    assert ended.code == 0, ended.err
    card = RunCard.read(folder / "run.json")
    assert card.effective_batch == document["micro_batch"]
    assert card.is_pinned
    assert json.loads(ended.out)["splits"] == 0
