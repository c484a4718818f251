"""`brim plan` as a person types it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import brim
from brim.audit.rules import RULES
from brim.cli.plan import with_flags
from brim.sizes import MIB
from tests.planner.measurements import measurement

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Cli

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 344, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(folder)


def test_the_answer_is_one_document(cli: Cli, tiny: str) -> None:
    ended = cli("plan", tiny, "--gpu", "t4", "--seq-len", "256", "--effective-batch", "50", "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["schema"] == "brim.plan/1"
    assert document["fits"] is True
    assert document["considered"] > 50
    assert set(document["best"]) >= {
        "micro_batch", "accumulation", "world_size", "effective_batch", "eval_batch", "precision", "checkpointing", "attention",
        "optimizer", "method", "sharding", "offload", "num_workers", "pin_memory", "prefetch_factor", "learning_rate", "memory",
        "speed", "slices", "reasons",
    }  # fmt: skip
    assert set(document["best"]["speed"]) == {"step_seconds", "tokens_per_second", "epoch_seconds", "steps_per_epoch"}
    assert brim.Plan.from_json(ended.out).best is not None


def test_a_person_reads_what_was_chosen_and_why(cli: Cli, tiny: str) -> None:
    ended = cli(
        "plan", tiny, "--gpu", "t4*2", "--sharding", "ddp", "--seq-len", "256", "--effective-batch", "7", "--samples", "100"
    )
    assert ended.code == 0
    assert "effective batch 7, micro-batch " in ended.out
    assert "in all 7" in ended.out
    assert "Because" in ended.out
    assert "Memory against time" in ended.out
    assert "15 steps" in ended.out
    assert "configurations considered" in ended.out


MANY = ("--gpu", "h100", "--gpus", "8", "--nodes", "4", "--sharding", "ddp", "--seq-len", "256", "--effective-batch", "64")
PINNED = ("--attention", "sdpa", "--precision", "amp-bf16", "--checkpointing", "none")


def test_many_gpus_get_a_curve_and_one_sentence(cli: Cli, tiny: str) -> None:
    ended = cli("plan", tiny, *MANY, *PINNED, "--link", "infiniband-hdr", "--noise-scale", "40")
    assert ended.code == 0
    assert "The same batch on other numbers of GPUs (nvlink in a node, infiniband-hdr between nodes; > the plan)" in ended.out
    assert "Adding GPUs beyond" in ended.out
    assert "Other batches on 32 GPUs" in ended.out
    assert "With a noise scale of 40 sequences" in ended.out
    document = json.loads(cli("plan", tiny, *MANY, *PINNED, "--json").out)
    assert [point["gpus"] for point in document["scaling"]["points"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert document["scaling"]["batches"]["noise_scale"] is None
    assert any("100Gbit between nodes" in text for text in document["assumptions"])


def test_a_run_tells_the_noise_scale(cli: Cli, tiny: str, tmp_path: Path) -> None:
    ledger = RULES["batch-beyond-noise"].bad["ledger.jsonl"]
    (tmp_path / "ledger.jsonl").write_text(ledger, encoding="utf-8")
    for given in (tmp_path, tmp_path / "ledger.jsonl"):
        ended = cli("plan", tiny, *MANY, *PINNED, "--noise-scale", str(given), "--json")
        assert ended.code == 0
        assert "sequences." in ended.err
        # 100 tokens of noise scale, in a run with 125 supervised tokens a sequence.
        assert json.loads(ended.out)["scaling"]["batches"]["noise_scale"] == pytest.approx(100 / 125, rel=0.05)


@pytest.mark.parametrize(
    "wrong", [("--noise-scale", "no-such-run"), ("--noise-scale", "0"), ("--noise-scale", "nan"), ("--link", "fast")]
)
def test_what_is_no_link_and_no_noise_scale_is_refused(cli: Cli, tiny: str, wrong: tuple[str, str]) -> None:
    ended = cli("plan", tiny, *MANY, *wrong)
    assert ended.code == 2
    assert wrong[0] in ended.err
    assert "Traceback" not in ended.err


def test_nothing_fits_says_how_much_is_missing_and_what_would_do(cli: Cli, tiny: str) -> None:
    ended = cli(
        "plan", tiny, "--gpu", "t4", "--memory", "600MiB", "--seq-len", "2048", "--micro-batch", "8", "--effective-batch", "8"
    )
    assert ended.code == 1
    assert "needs" in ended.out
    assert "What would fit" in ended.out
    command = next(line for line in ended.out.splitlines() if line.startswith("  brim plan "))
    assert command.split()[2] == tiny
    assert "tokens/s" in ended.out


def test_files_are_written_and_named(cli: Cli, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    ended = cli(
        "plan", tiny, "--gpu", "t4*2", "--sharding", "ddp", "--seq-len", "256", "--effective-batch", "8",
        "--emit", "transformers,torchrun", "-o", str(folder),
    )  # fmt: skip
    assert ended.code == 0
    assert (folder / "plan.json").exists()
    assert (folder / "training_arguments.py").exists()
    assert (folder / "torchrun.sh").exists()
    assert "Written" in ended.err
    assert brim.Plan.read(folder / "plan.json").best is not None


def test_a_format_that_cannot_say_it_is_refused_and_nothing_is_written(cli: Cli, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    ended = cli(
        "plan", tiny, "--gpu", "t4*2", "--sharding", "ddp", "--seq-len", "256", "--effective-batch", "7", "--emit", "deepspeed",
        "-o", str(folder),
    )  # fmt: skip
    assert ended.code == 2
    assert "6" in ended.err
    assert "8" in ended.err
    assert not folder.exists()


def test_all_formats_refusing_still_leaves_the_plan(cli: Cli, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    ended = cli(
        "plan", tiny, "--gpu", "t4*2", "--sharding", "ddp", "--seq-len", "256", "--effective-batch", "7", "--emit", "all",
        "-o", str(folder),
    )  # fmt: skip
    assert ended.code == 0
    assert "in all 7" in ended.out
    assert (folder / "plan.json").exists()
    assert "Not written, deepspeed" in ended.err


def test_a_sweep_prints_one_row_each(cli: Cli, tiny: str) -> None:
    arguments = ("plan", tiny, "--gpu", "t4", "--seq-len", "256", "--accumulation", "2", "--samples", "100", "--sweep", "1,2,4")
    ended = cli(*arguments)
    assert ended.code == 0
    assert "Verdict" in ended.out
    document = json.loads(cli(*arguments, "--json").out)
    assert [row["effective_batch"] for row in document["rows"]] == [2, 4, 8]
    assert [row["steps_per_epoch"] for row in document["rows"]] == [50, 25, 13]


def test_the_longest_sequence_is_found(cli: Cli, tiny: str) -> None:
    ended = cli("plan", tiny, "--gpu", "t4", "--memory", "1GiB", "--solve", "seq-len", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["answers"]


def test_the_recipe_advice_is_shown(cli: Cli, tiny: str) -> None:
    ended = cli(
        "plan", tiny, "--gpu", "t4", "--seq-len", "256", "--effective-batch", "64", "--from-batch", "16", "--learning-rate", "1e-4",
        "--checkpointing", "none",
    )  # fmt: skip
    assert "learning_rate: 1e-4 -> 2e-4" in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "A model is needed"),
        (("tinyllama-1.1b", "--gpu", "t4", "--solve", "model"), "--solve model"),
        (("tinyllama-1.1b", "--gpu", "t4", "--solve", "gpu"), "leave --gpu"),
        (("tinyllama-1.1b", "--gpu", "t4", "--price", "t4=1"), "--price"),
        (("tinyllama-1.1b", "--gpu", "t4", "--sweep", "1,2", "--solve", "seq-len"), "two questions"),
        (("tinyllama-1.1b", "--gpu", "t4", "--sweep", "1,2", "--emit", "all"), "--emit"),
        (("tinyllama-1.1b", "--gpu", "t4", "--vary", "colour"), "--vary"),
        (("tinyllama-1.1b", "--gpu", "t4", "--margin", "much"), "--margin"),
        (("tinyllama-1.1b", "--gpu", "t4", "--margin", "100%"), "--margin"),
        (("tinyllama-1.1b", "--gpu", "t4", "--emit", "keras"), "keras"),
        (("tinyllama-1.1b", "--gpu", "t4", "--effective-batch", "0"), "effective-batch"),
        (("tinyllama-1.1b", "--gpu", "t4", "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("tinyllama-1.1b", "--gpu", "t4", "--tokenizer", "somewhere"), "--data"),
        (("tinyllama-1.1b", "--gpu", "t4", "--apply"), "--apply"),
        (("tinyllama-1.1b", "--gpu", "t4", "-o", ""), "-o"),
        (("tinyllama-1.1b", "--gpu", "t4", "--host-cores", "inf"), "--host-cores"),
        (("tinyllama-1.1b", "--gpu", "t4", "--samples", "5", "--drop-last"), "--drop-last"),
        (("tinyllama-1.1b",), "No GPU is found here"),
    ],
)
def test_wrong_wishes_end_with_one_message_and_code_2(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    ended = cli("plan", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not ended.out


def test_a_plan_on_a_probe_needs_no_other_device_and_says_what_was_measured(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = measurement(model=tiny, length=256).write(tmp_path / "probe.json")
    arguments = ("plan", tiny, "--probe", str(path), "--checkpointing", "none", "--effective-batch", "32")
    ended = cli(*arguments)
    assert ended.code == 0
    assert "Measured: 3 trials on cpu ran up to 16 x 256 tokens" in ended.out
    assert "by what was measured" in " ".join(ended.out.split())
    document = json.loads(cli(*arguments, "--json").out)
    assert document["best"]["memory"]["limit_bytes"] == 600 * MIB
    assert document["margin_bytes"] == 20 * MIB


def test_a_probe_of_something_else_ends_with_one_message_and_code_2(cli: Cli, tiny: str, tmp_path: Path) -> None:
    probe = measurement(model=tiny, length=256)
    path, torn = probe.write(tmp_path / "probe.json"), tmp_path / "torn.json"
    torn.write_text(probe.to_json()[:300], encoding="utf-8")
    for arguments, said in (
        (("--probe", str(path), "--gpu", "t4"), "The probe ran on the CPU"),
        (("--probe", str(path), "--method", "lora"), "--method full"),
        (("--probe", str(path), "--seq-len", "512"), "up to 256 tokens"),
        (("--probe", str(path), "--solve", "gpu"), "--probe measured one model"),
        (("--probe", str(path), "--sweep", "gpu:t4,l4"), "--probe measured one device"),
        (("--probe", str(torn)), "not valid JSON"),
        (("--probe", str(tmp_path / "nowhere.json")), "nowhere.json"),
    ):
        ended = cli("plan", tiny, *arguments)
        assert ended.code == 2
        assert said in " ".join(ended.err.split())
        assert "Traceback" not in ended.err
        assert not ended.out


@pytest.mark.parametrize(
    ("typed", "flags", "suggested"),
    [
        ("--gpu t4", "--gpu t4 --gpus 32 --sharding fsdp", "--gpu t4 --gpus 32 --sharding fsdp"),
        ("--gpu 2*t4 --seq-len 512", "--gpu b200", "--seq-len 512 --gpu b200"),
        ("--gpu=t4 --memory 10GiB", "--gpu b200", "--gpu b200"),
        ("--gpu t4 --memory 10GiB", "--gpu t4 --gpus 4", "--memory 10GiB --gpu t4 --gpus 4"),
        (
            "--micro-batch 64 --effective-batch 64 --gpu t4",
            "--micro-batch 16 --accumulation 4 --effective-batch 64",
            "--gpu t4 --micro-batch 16 --accumulation 4 --effective-batch 64",
        ),
        ("--batch-size 64", "--effective-batch 64 --micro-batch 4", "--effective-batch 64 --micro-batch 4"),
        ("--per-device-train-batch-size 64", "--micro-batch 4", "--micro-batch 4"),
    ],
)
def test_a_suggested_command_names_each_option_once(typed: str, flags: str, suggested: str) -> None:
    assert with_flags(f"brim plan model {typed}", flags) == f"brim plan model {suggested}"
