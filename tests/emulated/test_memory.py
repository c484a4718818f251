"""Predicted peaks against plain training steps on the emulated card: a few cases of `benchmarks/memory_emulated.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.memory.estimate import Question
from brim.memory.where import find_where
from brim.workload.resolve import find_model
from brim.workload.settings import read_settings

_TRAINING = Path(__file__).parents[2] / "src" / "brim" / "emulator" / "training.py"
_DEFAULTS: dict[str, Any] = {
    "method": "full", "precision": "fp32", "micro_batch": 2, "seq_len": 256, "checkpointing": "none", "optimizer": "adamw",
    "attention": "sdpa", "padded": False, "accumulation": 1, "max_grad_norm": 1.0,
}  # fmt: skip
_LORA: dict[str, Any] = {"method": "lora", "lora_rank": 8, "lora_targets": []}
CASES: dict[str, dict[str, Any]] = {
    "autocast and dropout": {"model": "gpt2", "gpu": "t4", "precision": "amp-fp16", "micro_batch": 4, "seq_len": 512},
    "biases": {"model": "pythia-160m", "gpu": "rtx-3080", "precision": "amp-bf16", "micro_batch": 4, "seq_len": 512},
    "trainable attention bias": {"model": "t5-small", "gpu": "rtx-3090", "precision": "amp-bf16", "micro_batch": 8},
    "padding and accumulation": {"model": "bert-base-uncased", "gpu": "t4", "padded": True, "micro_batch": 8, "accumulation": 2},
    "checkpointing": {
        "model": "smollm2-135m",
        "gpu": "a100-80gb",
        "precision": "bf16",
        "micro_batch": 4,
        "checkpointing": "full",
    },
    "paged optimizer": {"model": "opt-125m", "gpu": "rtx-3090", "precision": "bf16", "optimizer": "paged-adamw-8bit"},
    "adapters": {"model": "gpt2", "gpu": "a100-80gb", "precision": "bf16", **_LORA},
    "adapters with dropout": {"model": "gpt2", "gpu": "t4", "precision": "amp-fp16", **_LORA, "lora_dropout": 0.1},
    "adapters with dropout and checkpointing": {
        "model": "smollm2-135m",
        "gpu": "a100-80gb",
        "precision": "bf16",
        **_LORA,
        "lora_targets": ["all-linear"],
        "lora_dropout": 0.05,
        "checkpointing": "full",
    },
    "adapters with dropout on a 4-bit base": {
        "model": "smollm2-135m",
        "gpu": "rtx-3090",
        "precision": "amp-bf16",
        **_LORA,
        "method": "qlora",
        "lora_dropout": 0.1,
    },
    "adapters on a 4-bit base": {"model": "smollm2-135m", "gpu": "rtx-3090", "precision": "amp-bf16", **_LORA, "method": "qlora"},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Torch's own peaks of every case. The cases of a card run in one process."""
    by_card: dict[str, list[str]] = defaultdict(list)
    for name, case in CASES.items():
        by_card[case["gpu"]].append(name)
    rows: dict[str, dict[str, Any]] = {}
    for gpu, names in by_card.items():
        requests = [
            {"case": complete(CASES[name]), "config": dict(find_model(CASES[name]["model"]).config or {})} for name in names
        ]
        path = tmp_path_factory.mktemp("cases") / "cases.jsonl"
        path.write_text("\n".join(json.dumps(request) for request in requests))
        with path.open() as cases:
            done = subprocess.run(
                [sys.executable, "-m", "brim.emulator", "--gpu", gpu, "--memory", "1024GiB", "--", sys.executable, str(_TRAINING)],
                stdin=cases, capture_output=True, text=True, check=False,
            )  # fmt: skip
        lines = done.stdout.splitlines()
        assert len(lines) == len(names), done.stderr[-2000:]
        rows.update(zip(names, map(json.loads, lines), strict=True))
    return rows


def complete(case: dict[str, Any]) -> dict[str, Any]:
    case = {**_DEFAULTS, **case}
    where = find_where(case["gpu"], None, None)
    assert where is not None
    settings = {name: value for name, value in case.items() if name not in {"model", "gpu"}}
    return {**case, "task": Question.ask(case["model"], read_settings(settings), where).settings.task}


@pytest.mark.parametrize("name", list(CASES))
def test_prediction_equals_training_on_the_card(name: str, measured: dict[str, dict[str, Any]]) -> None:
    row = measured[name]
    assert "error" not in row, row
    case = complete(CASES[name])
    answer = brim.estimate(case.pop("model"), **case)
    assert answer.peak_allocated_bytes == pytest.approx(row["allocated"], rel=0.001)
    assert answer.peak_reserved_bytes == pytest.approx(row["reserved"], rel=0.005)


def test_a_check_shows_prediction_and_emulation_side_by_side() -> None:
    words = ["estimate", "gpt2", "--gpu", "t4", "--micro-batch", "2", "--seq-len", "128", "--precision", "amp-fp16", "--check"]
    done = subprocess.run([sys.executable, "-m", "brim", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith(("Allocated", "Reserved"))}
    assert {name: row[-1].lstrip("+-") for name, row in rows.items()} == {"Allocated": "0.00%", "Reserved": "0.00%"}
