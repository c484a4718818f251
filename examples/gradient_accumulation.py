"""One batch of 32, 8 micro-batches of 4, 4 of 8: the same loss, the same gradient, the same weights.

Look at the first three rows: only rounding differs, although the sequences have different lengths. The rows below are 8 x 4 as loops
get it wrong. The last column is a window of 20 sequences, as it is left over at the end of an epoch: 5 micro-batches where 8 are due.
With plain SGD at rate 1 the weights move by exactly the gradient, so that is how it is read off here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import brim

WINDOW = 32
"""Sequences of one optimizer step: the effective batch."""
ROWS = [torch.arange(length) % (1 + length % 5) * 3 + 1 + length % 40 for length in (3 + place * 17 % 53 for place in range(116))]
"""Three windows, and 20 sequences that are left over. Long sequences say other things than short ones, as in life."""


class Model(nn.Module):
    """The mean loss of the next token, and how many tokens it is the mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.reader, self.head = nn.Embedding(64, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        targets = ids[:, 1:].flatten()
        logits = self.head(self.reader(self.embedding(ids[:, :-1]))[0]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets, ignore_index=0), int((targets > 0).sum())


MicroBatches = list[list[torch.Tensor]]
Loop = Callable[[Model, torch.optim.Optimizer, MicroBatches, int], float]
"""A training loop: model, optimizer, micro-batches, micro-batches a step. It returns the loss that it would print for its last step."""


def right(model: Model, optimizer: torch.optim.Optimizer, batches: MicroBatches, steps: int) -> float:
    """Each micro-batch weighs by its tokens, and what is left over at the end is a step too."""
    accumulator, said = brim.GradientAccumulator(model, optimizer, steps, max_norm=None), 0.0
    for batch in batches:
        loss, tokens = model(batch)
        _updated, said = accumulator.step(loss, num_items=tokens)
    accumulator.finalize()
    return said


def mean_of_means(model: Model, optimizer: torch.optim.Optimizer, batches: MicroBatches, steps: int) -> float:
    """`loss / steps`: a token of a short micro-batch weighs more than one of a long micro-batch."""
    losses = []
    for number, batch in enumerate(batches, 1):
        loss, _tokens = model(batch)
        (loss / steps).backward()
        losses.append(float(loss.detach()))
        if number % steps == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return sum(losses[-steps:]) / steps


def never_divided(model: Model, optimizer: torch.optim.Optimizer, batches: MicroBatches, steps: int) -> float:
    """The gradient is `steps` times too large: a learning rate that nobody asked for."""
    losses = []
    for number, batch in enumerate(batches, 1):
        loss, _tokens = model(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        if number % steps == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return sum(losses[-steps:])


def cleared_too_often(model: Model, optimizer: torch.optim.Optimizer, batches: MicroBatches, steps: int) -> float:
    """`zero_grad` in every micro-batch: of 32 sequences the step sees the last 4, and an eighth of their gradient."""
    losses = []
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss, _tokens = model(batch)
        (loss / steps).backward()
        losses.append(float(loss.detach()))
        if number % steps == 0 or number == len(batches):
            optimizer.step()
    return sum(losses[-steps:]) / steps


LOOPS: dict[str, tuple[Loop, int, int]] = {
    "batch 32": (right, 32, 1),
    "8 x 4": (right, 4, 8),
    "4 x 8": (right, 8, 4),
    "mean of means": (mean_of_means, 4, 8),
    "never divided": (never_divided, 4, 8),
    "cleared too often": (cleared_too_often, 4, 8),
}


class Outcome(NamedTuple):
    """What a loop did: the loss that it prints, and what really happened to the weights."""

    loss: float
    gradient: torch.Tensor
    """Of the first window."""
    short: torch.Tensor
    """Gradient of the window that is left over."""
    weights: torch.Tensor
    """After three full windows."""


def run(loop: Loop, size: int, steps: int) -> Outcome:
    """Three times from the same weights: the first window alone, the short one alone, and three windows in a row."""

    def trained(rows: list[torch.Tensor]) -> tuple[float, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        before = flat(model)
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        said = loop(model, torch.optim.SGD(model.parameters(), lr=1.0), batches, steps)
        return said, before, flat(model)

    said, before, after = trained(ROWS[:WINDOW])
    _said, _before, after_short = trained(ROWS[3 * WINDOW :])
    return Outcome(said, before - after, before - after_short, trained(ROWS[: 3 * WINDOW])[2])


def flat(model: Model) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def main() -> dict[str, Outcome]:
    """Run every loop, print one line for each, and return what they did."""
    found = {name: run(*how) for name, how in LOOPS.items()}
    truth = found["batch 32"]
    print("loop                loss   gradient: cosine   norm ratio   weights off by   short window: ratio")
    for name, one in found.items():
        cosine = torch.cosine_similarity(one.gradient, truth.gradient, dim=0)
        ratio, short = one.gradient.norm() / truth.gradient.norm(), one.short.norm() / truth.short.norm()
        off = (one.weights - truth.weights).abs().max()
        print(f"{name:18} {one.loss:7.4f} {cosine:15.6f} {ratio:15.4f} {off:16.6f} {short:17.4f}")
    return found


if __name__ == "__main__":
    main()
