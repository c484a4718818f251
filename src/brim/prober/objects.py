"""Live Python objects as a subject: a module, some items of its data, a loss; and trials of them in this very process.

In a process of one's own nothing can happen to the user's objects. What no other process can receive (a class of a notebook, a model
that lies on a card already) is tried here: under a hard limit where the device is the CPU, and between two copies of every bit.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from brim.errors import UsageError, out_of_memory_family
from brim.locale import _
from brim.machine import child
from brim.prober.snapshot import unchanged
from brim.prober.trainee import Trainee
from brim.prober.trial import device_of, examine, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.prober.runner import Runner
    from brim.prober.shapes import Shape
    from brim.prober.subjects import Live, Subject
    from brim.prober.trial import Exam
    from brim.records import Trial

MOST_ITEMS: Final = 32
"""That travel to a child: larger batches repeat them."""
MOST_SCANNED: Final = 1024

MakeOptimizer = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True)
class Objects:
    """A module, the largest items of its data, and how they become a loss."""

    model: nn.Module
    items: tuple[Any, ...]
    loss_fn: Callable[..., Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    make_optimizer: MakeOptimizer | None = None

    def build(self, device: str) -> Trainee:
        """On a device of torch."""
        model = self.model.to(device).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise UsageError(_("Nothing trains: every parameter is frozen."))
        optimizer = self.make_optimizer(trained) if self.make_optimizer is not None else torch.optim.AdamW(trained, lr=1e-5)
        return Trainee(model, optimizer, lambda shape: self._batch(shape, device), self._loss, device, max_grad_norm=None)

    def _batch(self, shape: Shape, device: str) -> Any:
        chosen = [self.items[index % len(self.items)] for index in range(shape.sequences)]
        return to_device((self.collate_fn or collate)(chosen), device)

    def _loss(self, batch: Any) -> Any:
        caller = cast("Any", self.model)
        if isinstance(batch, dict):
            if self.loss_fn is None:
                found = caller(**batch)
                return found["loss"] if isinstance(found, dict) else getattr(found, "loss", found)
            targets = batch.get("labels")
            return self.loss_fn(caller(**batch), targets)
        inputs, *targets = batch if isinstance(batch, list | tuple) else (batch,)
        output = caller(inputs)
        if not targets:
            found = getattr(output, "loss", output)
            return self.loss_fn(output) if self.loss_fn is not None else found
        return (self.loss_fn or cross_entropy)(output, targets[0])


def cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Of logits with the classes last, whatever comes before; of an output of transformers too."""
    logits: torch.Tensor = getattr(output, "logits", output)
    if logits.dim() == targets.dim() and targets.is_floating_point():
        return nn.functional.cross_entropy(logits, targets)  # shares of classes
    if logits.dim() == targets.dim() + 1 and logits.shape[:-1] == targets.shape:
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long())
    return nn.functional.cross_entropy(logits, targets.long() if not targets.is_floating_point() else targets)


def collate(items: list[Any]) -> Any:
    """As torch's loader does; sequences of different lengths are padded."""
    from torch.utils.data import default_collate

    try:
        return default_collate(items)
    except (RuntimeError, TypeError):
        return _padded(items)


def _padded(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, dict):
        return {name: _padded([item[name] for item in items]) for name in first}
    if isinstance(first, list | tuple) and not _is_numbers(first):
        return type(first)(_padded([item[index] for item in items]) for index in range(len(first)))
    tensors = [torch.as_tensor(item) for item in items]
    if tensors[0].dim() == 0 or len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _is_numbers(value: Any) -> bool:
    return bool(value) and all(isinstance(item, int | float) for item in value)


def to_device(batch: Any, device: str) -> Any:
    """Every tensor of a batch, as deep as it lies."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def largest_items(dataset: Sequence[Any]) -> tuple[list[Any], int]:
    """The items with the most numbers among the first thousand, and how many numbers the largest has."""
    sizes = [(_numbers(dataset[index]), index) for index in range(min(len(dataset), MOST_SCANNED))]
    largest = sorted(sizes, reverse=True)[:MOST_ITEMS]
    return [dataset[index] for _size, index in largest], largest[0][0]


def _numbers(item: Any) -> int:
    if isinstance(item, torch.Tensor):
        return max(1, item.numel())
    if isinstance(item, dict):
        return sum(map(_numbers, item.values()))
    if isinstance(item, list | tuple):
        return len(item) if _is_numbers(item) else sum(map(_numbers, item))
    return int(getattr(item, "size", 1)) if hasattr(item, "dtype") else 1


def can_travel(subject: Subject) -> bool:
    """Whether a child can receive it: a script's own classes would mean to run the script again."""
    try:
        return b"__main__" not in pickle.dumps(subject)
    except Exception:  # noqa: BLE001 (whatever a class raises when it is asked to pickle itself)
        return False


def try_here(runner: Runner, exam: Exam) -> Trial:
    """One trial in this process. Everything is as before afterwards, whatever happened."""
    began, size = time.monotonic(), exam.longest.sequences
    base: dict[str, Any] = {"micro_batch": size, "max_length": exam.longest.length, "accumulates": exam.accumulates}
    subject = cast("Objects | Live", runner.subject)
    device = device_of(runner.device)
    warm_up()
    report, crash = None, ""
    with unchanged(subject.model, device=device), _limited(runner):
        try:
            report = examine(subject, exam, runner.device, None, runner.recorded, is_fresh=False)
        except Exception as error:
            if out_of_memory_family(error) is not None:
                raise
            crash = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    base["elapsed_seconds"] = round(time.monotonic() - began, 3)
    if report is None:
        from brim.records import Trial

        return Trial(verdict="crash", message=crash, **base)
    return runner.judge(report, base)


@contextlib.contextmanager
def _limited(runner: Runner) -> Iterator[None]:
    """The CPU's budget, for as long as a trial takes; above what the process held before the first, or kept heap would be room for free."""
    if runner.room_bytes is None or runner.device != "cpu" or not child.HAS_DATA_LIMIT:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    child.give_back_memory()
    if runner.base_bytes is None:
        runner.base_bytes = child.data_bytes()
    child.set_data_limit(runner.base_bytes + runner.room_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
