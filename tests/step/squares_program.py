"""What two ranks do in the test of gradient squares: one run with a ledger, and weights that stay as they are.

torchrun --nproc-per-node=2 -m tests.step.squares_program FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from brim.step.budget import Budget
from brim.step.loop import Steps
from tests.step import toys
from tests.step.faults import sequences, tiny
from tests.torchrun import leave


def main(folder: str) -> None:
    """The optimizer's rate is 0, so that every step can be computed again from the first weights."""
    dist.init_process_group("gloo")
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loop = Steps(
        sequences(), model, optimizer,
        effective_batch=7, budget=Budget.sequences(2), collate=toys.collate, counting="next-token", ledger=folder, max_norm=None, noise_scale=True,
    )  # fmt: skip
    for step in loop:
        step.run()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
