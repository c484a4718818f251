"""The guarantee on the CUDA path, with computed values: memory changes how a step is sliced, but not its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brim.records import LedgerEntry
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.workload.embedded import data_file, write_model

if TYPE_CHECKING:
    from tests.emulated.conftest import RunOnCard

SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-4
"""Relative difference of losses and gradient norms. Measured: 1e-7."""


def _trained(model: Path, folder: Path, **variables: str) -> list[LedgerEntry]:
    """The ledger of `brim train` on a card of 4 GiB, where a whole step fits in one micro-batch."""
    card = [sys.executable, "-m", "brim.emulator", "--gpu", "t4", "--memory", "4GiB", "--compute", "--"]
    arguments = [
        "train", str(model), "--data", str(data_file()), "--micro-batch", "32", "--accumulation", "1", "--max-steps", "3",
        "--learning-rate", "2e-3", "--workers", "0", "--precision", "fp32", "--checkpointing", "none", "--no-verify", "--no-probe", "--json",
        "-o", str(folder),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    done = subprocess.run(
        [*card, sys.executable, "-m", "brim", *arguments], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["promise_kept"]
    ledger = read_ledger(folder / "ledger.jsonl")
    assert not check_ledger(ledger)
    return list(ledger.steps)


def test_brim_train_with_and_without_out_of_memory_has_the_same_ledger(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    roomy = _trained(model, tmp_path / "roomy")
    # brim's plan does not know this limit: the allocator fails above 314 MiB.
    tight = _trained(model, tmp_path / "tight", PYTORCH_ALLOC_CONF=f"per_process_memory_fraction:{314 / 4096:.4f}")
    assert not any(step.splits for step in roomy)
    assert {split.phase for step in tight for split in step.splits} == {"forward", "backward"}
    for expected, step in zip(roomy, tight, strict=True):
        assert sorted(step.sequence_ids) == sorted(expected.sequence_ids)
        assert step.supervised_tokens == expected.supervised_tokens
        assert step.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    losses = [step.loss for step in roomy if step.loss is not None]
    assert losses == sorted(losses, reverse=True), "the loss decreases"


def test_steps_and_an_attached_trainer_with_and_without_out_of_memory_have_the_same_ledger(on_card: RunOnCard) -> None:
    ledgers: dict[str, list[dict[str, Any]]] = on_card(
        (SCRIPTS / "guarantee.py").read_text(), compute=True, args=("70", "50"), timeout=600
    ).result
    assert set(ledgers) == {"with_steps", "with_scaler", "with_trainer"}
    for loop, (roomy, *tight) in ledgers.items():
        assert roomy["phases"] == [], loop
        assert {phase for run in tight for phase in run["phases"]} == {"forward", "backward"}, loop
        for run in tight:
            assert run["ids"] == roomy["ids"], loop
            assert run["slices"] != roomy["slices"], loop
            assert run["losses"] == pytest.approx(roomy["losses"], rel=TOLERANCE), loop
            assert run["norms"] == pytest.approx(roomy["norms"], rel=TOLERANCE), loop
