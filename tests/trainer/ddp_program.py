"""What one of two ranks runs: `torchrun ... ddp_program.py FOLDER SCENARIO...`. Each leaves what it logged in the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from brim.errors import BrimError
from brim.step.budget import Budget
from tests.torchrun import leave
from tests.trainer.small import logged, pad, ragged, trainer_of, weights
from tests.trainer.test_sft import KINDS, BrimSFTTrainer, make, told

ROWS = ragged(20)
# Seven sequences one by one: two ranks cannot have the same number of micro-batches.
UNEQUAL: dict[str, Any] = {"effective_batch": 7, "budget": Budget.sequences(1)}


def plain(folder: Path) -> Any:
    """Two epochs, with evaluation and a checkpoint."""
    trainer = trainer_of(
        folder, ROWS, **UNEQUAL, num_train_epochs=2, eval_dataset=ROWS[:6],
        eval_strategy="epoch", save_strategy="epoch", include_num_input_tokens_seen="non_padding",
    )  # fmt: skip
    trainer.train()
    return {
        "loss": logged(trainer),
        "grad_norm": logged(trainer, "grad_norm"),
        "eval_loss": logged(trainer, "eval_loss"),
        "tokens": trainer.state.num_input_tokens_seen,
        "weights": float(weights(trainer.model).double().abs().sum()),
    }


def supervised(folder: Path) -> Any:
    """TRL gathers metrics in each micro-batch, which would wait for ever where ranks have unequal numbers of them."""
    trainer = make(folder, BrimSFTTrainer, KINDS["prompt-completion"], UNEQUAL)
    trainer.train()
    return told(trainer)


def failing(folder: Path) -> Any:
    """A row of the second step cannot be read; one rank has it."""

    def collate(rows: Any) -> Any:
        if trainer.state.global_step and any(row is ROWS[broken] for row in originals(rows)):
            raise ValueError("this row cannot be read")
        return pad(rows)

    def originals(rows: Any) -> list[Any]:
        return [next(row for row in ROWS if row["input_ids"] == given["input_ids"]) for given in rows]

    trainer = trainer_of(folder, ROWS, **UNEQUAL, data_collator=collate)
    broken = int(trainer.get_train_dataloader().dataset.plan.global_batch(1)[0])
    try:
        trainer.train()
    except (BrimError, ValueError) as error:
        return {"kind": type(error).__name__, "message": str(error), "steps": trainer.state.global_step}
    return None


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        found = globals()[name](folder / name)
        rank = torch.distributed.get_rank()
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
