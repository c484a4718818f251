"""One training after another in one process, each with its own habit. The test knows what each step must hold."""

# mypy: ignore-errors

import io
import sys
from collections.abc import Callable

import torch
from parts import VOCABULARY, Tiny, loss_of, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIX = rows(6)


def accumulates() -> None:
    model, optimizer = made()
    for _step in range(2):
        for batch in SIX.split(2):
            loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaler_skips() -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf")):
        scaler.scale(loss_of(model(SIX), SIX) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def two_optimizers() -> None:
    model = Tiny()
    optimizers = [torch.optim.SGD(model.head.parameters(), lr=0.1), torch.optim.AdamW(model.embedding.parameters())]
    for _step in range(2):
        for batch in SIX.split(3):
            loss_of(model(batch), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def is_compiled() -> None:
    model = torch.compile(Tiny(), backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(3):
        loss_of(model(SIX), SIX).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiles_the_loss() -> None:
    model, optimizer = made()

    @torch.compile(backend="eager", fullgraph=True)
    def objective(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), input_ids[:, 1:].reshape(-1))

    objective(model(SIX), SIX).backward()
    optimizer.step()


def is_compiled_in_place() -> None:
    model, optimizer = made()
    model.compile(backend="eager")
    for _step in range(3):
        loss_of(model(SIX), SIX).backward()
        optimizer.step()
        optimizer.zero_grad()


def encoder_and_head() -> None:
    """Called one after the other, the head on every token."""
    encoder, head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    logits = head(encoder(SIX).reshape(-1, 8))
    F.cross_entropy(logits, SIX.reshape(-1)).backward()
    optimizer.step()


def rows_twice() -> None:
    """Each row goes through the model twice, for two drops of dropout."""
    model, optimizer = made()
    (loss_of(model(SIX), SIX) + loss_of(model(SIX), SIX)).backward()
    optimizer.step()


def computes_again() -> None:
    """Gradient checkpointing calls layers inside backward."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Tiny(), nn.Linear(VOCABULARY, VOCABULARY)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.first, input_ids, use_reentrant=False)
            return checkpoint(self.second, hidden, use_reentrant=False)

    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(2):
        loss_of(model(SIX), SIX).backward()
        optimizer.step()


def evaluates_with_gradients() -> None:
    model, optimizer = made()
    model.eval()
    for batch in SIX.split(1):
        model(batch)
    model.train()
    loss_of(model(SIX[:4]), SIX[:4]).backward()
    optimizer.step()


def clears_too_often() -> None:
    """Cleared on every micro-batch: only the last one is in the step."""
    model, optimizer = made()
    for batch in SIX.split(2):
        optimizer.zero_grad()
        loss_of(model(batch), batch).backward()
    optimizer.step()


def runs_out_of_memory() -> None:
    model, optimizer = made()

    class Full(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if len(hidden) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return hidden

    model.dropout = Full()
    size = 6
    while True:
        try:
            for batch in SIX.split(size):
                loss_of(model(batch), batch).backward()
            break
        except torch.OutOfMemoryError:
            size //= 2
    optimizer.step()


def steps_in_backward() -> None:
    model = Tiny()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def take(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(take)
    for _step in range(2):
        loss_of(model(SIX), SIX).backward()


def closure_steps() -> None:
    """As Lightning does it: forward and backward inside the optimizer's step."""
    model, optimizer = made()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(SIX), SIX)
        loss.backward()
        return loss

    optimizer.step(closure)


def is_scripted() -> None:
    """TorchScript compiles functions from their source."""

    def objective(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets)

    model, optimizer = made()
    scripted = torch.jit.script(objective)
    scripted(model(SIX).reshape(-1, VOCABULARY), SIX.reshape(-1)).backward()
    optimizer.step()


def is_pickled() -> None:
    """A whole model that is saved knows nothing of who watches."""
    model, optimizer = made()
    loss_of(model(input_ids=SIX), SIX).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    torch.save(optimizer, file)
    assert b"brim" not in file.getvalue()


def made() -> tuple[Tiny, torch.optim.Optimizer]:
    model = Tiny()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


ALL: tuple[Callable[[], None], ...] = (
    accumulates, scaler_skips, two_optimizers, is_compiled, compiles_the_loss, is_compiled_in_place, encoder_and_head, rows_twice,
    computes_again, evaluates_with_gradients, clears_too_often, runs_out_of_memory, steps_in_backward, closure_steps, is_scripted,
    is_pickled,
)  # fmt: skip

if __name__ == "__main__":
    for habit in ALL:
        if sys.argv[1:] and habit.__name__ not in sys.argv[1:]:
            continue
        habit()
        print(habit.__name__, flush=True)
