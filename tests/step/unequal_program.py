"""What three unequal ranks do: torchrun starts this file, and each rank writes what it found.

    torchrun --nproc-per-node=3 -m tests.step.unequal_program FOLDER SCENARIO...

Memory and speed of the ranks are as 1 : 2 : 4. Everything is in float64, so that only a wrong weight could show.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from brim.errors import BrimError
from brim.machine.catalogue import find_gpu
from brim.step.agreement import agree_on_budgets
from brim.step.batch import BatchPlan
from brim.step.budget import Budget
from brim.step.loading import StepDataset
from brim.step.loop import Steps
from brim.step.oom import Guard
from brim.step.ranks import Ranks
from tests.step.ranks_program import Gradients, kept
from tests.torchrun import leave

RANKS = 3
FACTORS = (1.0, 2.0, 4.0)
SEQUENCES, EFFECTIVE_BATCH = 107, 50
"""Two whole steps that three ranks cannot halve, and one with fewer sequences than most ranks would like."""
LIMIT = 120
VOCABULARY, IGNORED = 97, -100


class Decoder(torch.nn.Module):
    """Each token's successor from the mean of what came before it, all in float64; those of transformers compute some of it in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(VOCABULARY, 24)
        self.hidden = torch.nn.Linear(24, 48)
        self.head = torch.nn.Linear(48, VOCABULARY)
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        places = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)
        means = self.words(input_ids).cumsum(dim=1) / places[:, None]
        logits = self.head(torch.tanh(self.hidden(means)))[:, :-1]
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)}


def data() -> list[dict[str, list[int]]]:
    """Sequences of 4 to 60 tokens, of which the first ones are not learnt."""
    random = np.random.default_rng(0)
    rows = [random.integers(1, VOCABULARY, random.integers(4, 61)).tolist() for _row in range(SEQUENCES)]
    prompts = [int(random.integers(1, len(row) - 1)) for row in rows]
    return [{"input_ids": row, "labels": [IGNORED] * prompt + row[prompt:]} for row, prompt in zip(rows, prompts, strict=True)]


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, padding: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=padding)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED)}


def own_budget(rank: int) -> Budget:
    return Budget.tokens(int(LIMIT * FACTORS[rank]), fixed_tokens=16).at_speed(FACTORS[rank])


def trained(model: Any, budget: Budget | Sequence[Budget], **options: Any) -> dict[str, Any]:
    """One epoch in a loop of one's own: each step's gradient, the weights at the end, and who ran what."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    gradients: list[Gradients] = kept(optimizer, model)
    loop = Steps(
        data(), model, optimizer,
        effective_batch=EFFECTIVE_BATCH, budget=budget, collate=collate, max_norm=None, **options,
    )  # fmt: skip
    entries = [step.run() for step in loop]
    return {
        "gradients": gradients,
        "weights": {name: value.detach().clone() for name, value in bare.named_parameters()},
        "losses": [entry.loss for entry in entries],
        "ids": [sorted(entry.sequence_ids) for entry in entries],
        "slices": [[(one.rank, one.sequences, one.length) for one in entry.slices] for entry in entries],
    }


def own_budgets(rank: int) -> Any:
    """Each rank knows only its own."""
    return trained(DistributedDataParallel(Decoder()), own_budget(rank))


def memory_only(rank: int) -> Any:
    """The costs are lambdas, which cannot travel, and need not: only limits differ. Speeds are given as a list."""
    budget = Budget(
        lambda count, length: 1.0 * count * length, LIMIT * FACTORS[rank], lambda count, length: 16.0 + count * length
    )
    return trained(Decoder(), budget, speeds=list(FACTORS))


def trainer(rank: int) -> Any:
    """The same in transformers' Trainer, through `brim.attach`."""
    from transformers import Trainer, TrainingArguments

    import brim

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = Path(sys.argv[1]) / "trainer"
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, ddp_backend="gloo", seed=0, num_train_epochs=1, lr_scheduler_type="constant",
        max_grad_norm=0.0, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    found = Trainer(
        model, arguments,
        data_collator=collate, train_dataset=data(), optimizers=(optimizer, None),
    )  # fmt: skip
    brim.attach(found, effective_batch=EFFECTIVE_BATCH, budget=own_budget(rank))
    found.train()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def message_of(work: Any) -> str:
    try:
        work()
    except BrimError as error:
        return error.message
    return "no error"


def agreed(rank: int) -> Any:
    """Limits and seconds of all ranks, as this rank has heard them; None where they are alike."""
    talk = Ranks([])

    def told(budgets: Sequence[Budget] | None) -> Any:
        return budgets and [(budget.limit, float(budget.seconds(1, 100))) for budget in budgets]

    one, gpus = Budget.tokens(100), [find_gpu(name).gpu for name in ("t4", "a100", "t4")]
    other = Budget.tokens(100, fixed_tokens=64.0 * (1 + rank))
    return {
        "alike": told(agree_on_budgets(one, talk)),
        "limits": told(agree_on_budgets(Budget.tokens(100 + rank), talk)),
        "speeds": told(agree_on_budgets(one, talk, speeds=[1.0, 0.5, 1.0])),
        "gpus": told(agree_on_budgets(one, talk, gpu=gpus[rank])),
        "one gpu is unknown": told(agree_on_budgets(one, talk, gpu=gpus[rank] if rank else None)),
        "seconds that know the gpu": told(agree_on_budgets(other, talk, gpu=gpus[rank])),
        "list": told(agree_on_budgets([one, one, one.with_limit(7)], talk, gpu=gpus[rank])),
    }


def refused(rank: int) -> Any:
    """What all ranks must hear, though only some are at fault."""
    talk = Ranks([])
    one = Budget.tokens(100)

    def slow(count: Any, length: Any) -> Any:
        return 1.0 * count * length + rank

    return [
        message_of(lambda: agree_on_budgets(one if rank else [one] * RANKS, talk)),
        message_of(lambda: agree_on_budgets(one, talk, speeds=[1.0, 2.0, 3.0 + rank])),
        message_of(lambda: agree_on_budgets([one] * 2, talk)),
        message_of(lambda: agree_on_budgets(one, talk, speeds=[1.0])),
        message_of(lambda: agree_on_budgets(Budget(slow, 100, slow), talk)),
    ]


def rounds(rank: int) -> Any:
    """What this rank loads for a collective engine, each step: the ids of every round, and whether it is a filler."""
    budgets = agree_on_budgets(own_budget(rank), Ranks([]))
    rows = data()
    plan = BatchPlan(
        [len(row["input_ids"]) for row in rows], effective_batch=EFFECTIVE_BATCH, ranks=RANKS, together=True
    )  # fmt: skip
    guard = Guard(own_budget(rank))
    steps = StepDataset(rows, collate, plan, guard, rank, budgets=budgets)
    guard.learn(steps.micro_batch(np.arange(4)))  # it has run out of memory here, and slices stay as they were agreed
    return [[(micro.ids.tolist(), micro.is_filler) for micro in steps[step].micro] for step in range(plan.steps_per_epoch)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[2:]:
        print(f"rank {rank}: {name}", flush=True)
        torch.manual_seed(0)
        torch.save(globals()[name](rank), Path(sys.argv[1]) / f"{name}-{rank}.pt")
    leave()


if __name__ == "__main__":
    main()
