"""A run that goes on takes exactly the remaining steps, or says why it cannot."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from brim.errors import UsageError
from brim.step.budget import Budget
from brim.trainer.verifying import last_whole_checkpoint
from tests.trainer.small import ids_of, lines, llama, logged, near, ragged, trainer_of, weights

ROWS = ragged(20)
"""Three steps an epoch, the last of four sequences."""
WHOLE: dict[str, Any] = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "linear"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Nine steps without a break, each saved; with dropout, so that random numbers must come back too."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(folder, ROWS, llama(attention_dropout=0.2), **WHOLE)
    trainer.train()
    return folder, trainer


def cut(whole: tuple[Path, Trainer], folder: Path, step: int) -> None:
    """The folder as it was when the run died after that step."""
    shutil.copytree(whole[0] / f"checkpoint-{step}", folder / f"checkpoint-{step}")


@pytest.mark.parametrize("step", [1, 3, 5], ids=["within-the-first-epoch", "between-epochs", "within-a-later-epoch"])
def test_the_remaining_steps_are_those_of_the_run_without_a_break(whole: Any, tmp_path: Path, step: int) -> None:
    cut(whole, tmp_path, step)
    trainer = trainer_of(tmp_path, ROWS, llama(attention_dropout=0.2), **WHOLE)
    trainer.train(resume_from_checkpoint=True)
    assert ids_of(tmp_path) == ids_of(whole[0])[step:]
    assert logged(trainer) == near(logged(whole[1]))
    assert logged(trainer, "learning_rate") == near(logged(whole[1], "learning_rate"))
    assert torch.allclose(weights(trainer.model), weights(whole[1].model), atol=1e-6)
    assert lines(tmp_path, "header")[0]["resumed_from_step"] == step


@pytest.mark.parametrize(
    "changes",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        pytest.param({"budget": Budget.sequences(1)}, marks=pytest.mark.slow),
    ],
    ids=["another-batch-size", "another-budget"],
)
def test_memory_may_change_and_the_steps_stay(tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {**WHOLE, "num_train_epochs": 2}
    straight = trainer_of(tmp_path / "straight", ROWS, **options)
    straight.train()
    shutil.copytree(tmp_path / "straight" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    trainer = trainer_of(tmp_path / "again", ROWS, **{**options, **changes})
    trainer.train(resume_from_checkpoint=True)
    assert ids_of(tmp_path / "again") == ids_of(tmp_path / "straight")[2:]
    assert logged(trainer) == near(logged(straight))


def test_workers_go_on_in_the_middle_of_an_epoch(whole: Any, tmp_path: Path) -> None:
    cut(whole, tmp_path, 4)
    trainer = trainer_of(
        tmp_path, ROWS, **WHOLE, dataloader_num_workers=2, dataloader_persistent_workers=True, dataloader_prefetch_factor=2
    )
    trainer.train(resume_from_checkpoint=True)
    assert ids_of(tmp_path) == ids_of(whole[0])[4:]


@pytest.mark.parametrize(
    ("rows", "changes", "named"),
    [
        (ROWS, {"effective_batch": 10}, "effective_batch 8 -> 10"),
        (ROWS, {"seed": 4}, "seed 3 -> 4"),
        (ROWS[:-1], {}, "sequences 20 -> 19"),
        (ragged(20, 7), {}, "go on as promised: the lengths of the sequences are others\\."),
        (ROWS, {"dataloader_drop_last": True}, "drop_last False -> True"),
    ],
    ids=["effective-batch", "seed", "fewer-rows", "other-rows", "drop-last"],
)
def test_what_would_break_the_promise_is_refused(
    whole: Any, tmp_path: Path, rows: Any, changes: dict[str, Any], named: str
) -> None:
    trainer = trainer_of(tmp_path, rows, **WHOLE, **changes)
    with pytest.raises(UsageError, match=named):
        trainer.train(resume_from_checkpoint=str(whole[0] / "checkpoint-4"))


def test_a_checkpoint_made_without_brim_is_gone_on_from_with_a_warning(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, ROWS, kind=Trainer, max_steps=2, save_strategy="steps", save_steps=2)
    plain.train()
    trainer = trainer_of(tmp_path, ROWS, max_steps=4)
    with pytest.warns(UserWarning, match="made without brim: from step 3 on"):
        trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path)] == [3, 4]


def test_after_a_checkpoint_made_without_brim_the_next_ones_are_whole(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, ROWS, kind=Trainer, **{**options, "max_steps": 2}).train()
    with pytest.warns(UserWarning, match="made without brim"):
        trainer_of(tmp_path, ROWS, **options).train(resume_from_checkpoint=True)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    again = trainer_of(tmp_path / "again", ROWS, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This checkpoint was made without brim")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert ids_of(tmp_path / "again") == ids_of(tmp_path)[1:]


def test_a_checkpoint_that_is_written_over_is_not_whole_until_its_state_is_written_again(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(whole, tmp_path, 1)
    cut(whole, tmp_path, 2)
    trainer = trainer_of(tmp_path, ROWS, **WHOLE)
    seen = []

    def power_fails(folder: str) -> None:
        seen.append((Path(folder).name, last_whole_checkpoint(tmp_path)))
        raise OSError("the power is gone")

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", power_fails)
    with pytest.raises(OSError, match="the power is gone"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert seen == [("checkpoint-2", str(tmp_path / "checkpoint-1"))]
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    monkeypatch.undo()
    again = trainer_of(tmp_path, ROWS, llama(attention_dropout=0.2), **WHOLE)
    again.train(resume_from_checkpoint=True)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert ids_of(tmp_path)[-8:] == ids_of(whole[0])[1:]


def test_a_run_that_goes_on_says_so(whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(whole, tmp_path, 8)
    trainer_of(tmp_path, ROWS, **WHOLE).train(resume_from_checkpoint=True)
    first, last = (line for line in capsys.readouterr().err.splitlines() if line.startswith("brim: "))
    assert first.endswith(f"ledger: {tmp_path / 'ledger.jsonl'}. Resuming after step 8.")
    assert last.startswith("brim: the promise was kept. Steps: 1, sequences: 4, ")


def test_a_checkpoint_made_with_brim_can_be_gone_on_from_without_it(whole: Any, tmp_path: Path) -> None:
    cut(whole, tmp_path, 4)
    plain = trainer_of(tmp_path, ROWS, kind=Trainer, **WHOLE)
    plain.train(resume_from_checkpoint=True)
    assert plain.state.global_step == 9


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(whole: Any, tmp_path: Path) -> None:
    cut(whole, tmp_path, 4)
    cut(whole, tmp_path, 5)
    torn = tmp_path / "checkpoint-5" / "trainer_state.json"
    torn.write_text(torn.read_text(encoding="utf-8")[:100], encoding="utf-8")
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    trainer = trainer_of(tmp_path, ROWS, **WHOLE)
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path)] == [5, 6, 7, 8, 9]


def test_nothing_to_go_on_from_is_said(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ROWS)
    with pytest.raises(UsageError, match="no whole checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_a_finished_run_has_nothing_left_to_do(whole: Any, tmp_path: Path) -> None:
    cut(whole, tmp_path, 9)
    trainer = trainer_of(tmp_path, ROWS, **WHOLE)
    trainer.train(resume_from_checkpoint=True)
    assert lines(tmp_path) == []
    assert torch.allclose(weights(trainer.model), weights(whole[1].model))


def test_the_states_of_other_callbacks_come_back_too(whole: Any, tmp_path: Path) -> None:
    cut(whole, tmp_path, 4)
    trainer = trainer_of(tmp_path, ROWS, **WHOLE, restore_callback_states_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path)] == [5, 6, 7, 8, 9]
