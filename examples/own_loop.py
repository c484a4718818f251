"""A loop of one's own: `brim.steps` makes each optimizer step exact, and everything between two steps stays yours.

Run it twice: the second run goes on where the first was stopped (`--stop 4`), with exactly the sequences that are left.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import brim

SENTENCES = [
    f"{who} {what}" for who in ("Snow", "The night train", "An answer") for what in ("comes.", "is late again, as ever.")
]
ROWS = [{"input_ids": list(sentence.encode())} for sentence in SENTENCES * 5]


class Model(nn.Module):
    """The next byte from the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.reader, self.head = nn.Embedding(128, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean loss over all labels but the first and -100."""
        logits = self.head(self.reader(self.embedding(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def main(words: list[str] | None = None) -> list[float | None]:
    """Train, and return the loss of each step that was taken."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("build/own_loop"), help="where the run goes")
    options.add_argument("--stop", type=int, help="stop after this step, as if the power failed")
    choice = options.parse_args(words)
    choice.output.mkdir(parents=True, exist_ok=True)
    checkpoint, unfinished = choice.output / "checkpoint.pt", choice.output / "checkpoint.unfinished"

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    saved = torch.load(checkpoint) if checkpoint.exists() else None
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    steps = brim.steps(
        ROWS, model, optimizer, effective_batch=8, budget=brim.Budget.tokens(128), collate=collate, epochs=3,
        ledger=choice.output, resume=saved["steps"] if saved else None,
    )  # fmt: skip
    losses = []
    for step in steps:
        entry = step.run()
        scheduler.step()
        losses.append(entry.loss)
        print(f"step {entry.step:2}  loss {entry.loss:.4f}  {entry.sequences} sequences in {len(entry.slices)} slices")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        # A whole checkpoint takes the place of the last one, or none does.
        torch.save({**state, "steps": steps.state()}, unfinished)
        unfinished.replace(checkpoint)
        if entry.step == choice.stop:
            break
    return losses


if __name__ == "__main__":
    main()
