"""`--data` and `--columns` as a person types them: text, several files, columns of one's own, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from brim.records import Plan, RunCard
from brim.step.ledger import read_ledger
from brim.workload.embedded import write_model
from tests.conftest import Cli, once

QUICK = ("--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32")
PLAN = ("--device", "cpu", "--memory", "4GiB", "--json")


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    folder = shared / "embedded-model-for-data"
    once(folder, lambda: write_model(folder / "model"))
    return folder / "model"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of different kinds, with columns of their own."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.csv"
    first.write_text("".join(json.dumps({"q": f"What is {n} + 1?", "a": str(n + 1)}) + "\n" for n in range(6)))
    second.write_text("q,a\n" + "".join(f"What is {n} + 2?,{n + 2}\n" for n in range(6)))
    return first, second


def test_a_text_file_is_trained_on_whole_and_a_plan_counts_the_same_sequences(model: Path, tmp_path: Path, cli: Cli) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("".join(f"The river finds the stone and the lamp, {'and on ' * (n % 30)}{n}.\n" for n in range(400)))
    ended = cli(
        "train", str(model), "--data", str(notes), "--max-length", "48", *QUICK, "--dry-run", "--json", "-o", str(tmp_path / "r")
    )
    assert ended.code == 0, ended.err
    card = RunCard.from_json(ended.out)
    assert card.training_sequences > 400
    assert (card.data.cut, card.data.cut_tokens) == (0, 0)
    assert f"{notes}: each line is a document" in ended.err
    planned = cli("plan", str(model), "--data", str(notes), "--seq-len", "48", *PLAN)
    assert planned.code == 0, planned.err
    plan = Plan.from_json(planned.out)
    assert plan.workload.samples == card.training_sequences
    assert plan.workload.lengths == card.data.lengths


def test_texts_with_classes_are_asked_about_and_a_classifier_learns_the_classes(model: Path, tmp_path: Path, cli: Cli) -> None:
    data = tmp_path / "reviews.jsonl"
    data.write_text("".join(json.dumps({"text": f"review {n}", "label": "good" if n % 2 else "bad"}) + "\n" for n in range(8)))
    for words in (
        ("train", str(model), "--data", str(data), *QUICK, "--dry-run"),
        ("plan", str(model), "--data", str(data), *PLAN),
    ):
        ended = cli(*words)
        assert ended.code == 2
        assert "--task classification" in ended.err
        assert "--task causal-lm" in ended.err
        assert "Traceback" not in ended.err
    classifier = tmp_path / "classifier"
    shutil.copytree(model, classifier)
    config = json.loads((classifier / "config.json").read_text())
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    (classifier / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    for chosen, subject in (("classification", [str(classifier)]), ("causal-lm", [str(model), "--task", "causal-lm"])):
        ended = cli(
            "train", *subject, "--data", str(data), *QUICK, "--from-scratch", "--dry-run", "--json", "-o", str(tmp_path / "r")
        )
        assert ended.code == 0, ended.err
        assert RunCard.from_json(ended.out).data.task == chosen


@pytest.mark.long
def test_several_files_with_columns_of_ones_own_are_recorded_and_resumed(
    model: Path, pairs: tuple[Path, Path], tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "run"
    first, second = map(str, pairs)
    columns = ("--columns", "prompt=q,response=a")
    ended = cli(
        "train", str(model), "--data", first, "--data", second, *columns, *QUICK, "--effective-batch", "4", "--max-steps", "2", "-o",
        str(folder),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    card = RunCard.read(folder / "run.json")
    assert (card.training_sequences, card.data.columns) == (12, "q/a")
    assert card.asked["data"] == [first, second]
    assert card.asked["columns"] == {"prompt": "q", "response": "a"}
    assert " ".join(card.command).count("--data") == 2
    assert "--columns prompt=q,response=a" in " ".join(card.command)
    ended = cli("train", "--resume", str(folder), "--max-steps", "3")
    assert ended.code == 0, ended.err
    steps = read_ledger(folder / "ledger.jsonl").steps
    assert [entry.step for entry in steps] == [1, 2, 3]
    assert sorted(place for entry in steps for place in entry.sequence_ids) == list(range(12))
    ended = cli("train", "--resume", str(folder), "--columns", "prompt=a,response=q", "--max-steps", "4")
    assert ended.code == 2
    pairs[1].write_text(pairs[1].read_text() + "more,rows\n")
    ended = cli("train", "--resume", str(folder), "--max-steps", "4")
    assert ended.code == 2
    assert "is not what this run was started with" in ended.err


def test_a_config_file_may_list_data_and_map_columns(model: Path, pairs: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    first, second = map(str, pairs)
    (tmp_path / "c.yaml").write_text(
        json.dumps({"data": [first, second], "columns": {"question": "q", "answer": "a"}, "task": "causal-lm"})
    )
    words = ("--config", str(tmp_path / "c.yaml"))
    ended = cli("train", str(model), *words, *QUICK, "--dry-run", "--json", "-o", str(tmp_path / "r"))
    assert ended.code == 0, ended.err
    assert RunCard.from_json(ended.out).training_sequences == 12
    planned = cli("plan", str(model), *words, *PLAN)
    assert planned.code == 0, planned.err
    assert Plan.from_json(planned.out).workload.samples == 12


def test_a_wrong_column_lists_those_that_there_are(model: Path, pairs: tuple[Path, Path], cli: Cli) -> None:
    for verb, more in (("train", (*QUICK, "--dry-run")), ("plan", PLAN)):
        ended = cli(verb, str(model), "--data", str(pairs[0]), "--columns", "prompt=x,response=a", *more)
        assert ended.code == 2
        assert "no row has the column 'x'. There are the columns q, a." in ended.err


def test_nothing_a_pipe_and_a_device_are_usage_errors_for_every_verb(model: Path, tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for given, said in (("", "--data is empty"), (str(tmp_path / "a.jsonl"), "is a pipe"), ("/dev/zero", "is a device")):
        for verb in ("train", "plan", "probe"):
            ended = cli(verb, str(model), "--data", given, "--device", "cpu", "--memory", "4GiB")
            assert ended.code == 2
            assert said in ended.err
