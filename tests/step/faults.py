"""Out of memory on demand: at the k-th allocation-heavy operation of a chosen phase of a chosen step; and small runs to have it in."""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

from brim.records import LedgerEntry
from brim.step.budget import Budget
from brim.step.ledger import read_ledger
from brim.step.loop import Steps
from brim.trainer.hf import attach
from tests.step import toys

Where = Literal["forward", "backward", "clip", "optimizer", "evaluation", "saving"]
ASKED_BYTES = 20 << 20
SEQUENCES, EFFECTIVE_BATCH, STEPS = 14, 5, 3
"""Small, and with a last global batch that is short: 5, 5 and 4 sequences."""
_LARGE = 64
"""Elements from which on a tensor counts: all activations and gradients of the toy do."""


@contextmanager
def swiftly() -> Iterator[None]:
    """One thread, and no walk through all imported modules for each of a hundred recoveries."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def out_of_memory(number: int) -> RuntimeError:
    """The words of CUDA's caching allocator and of torch's CPU allocator, in turn."""
    if number % 2:
        return RuntimeError(
            f"[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate {ASKED_BYTES} bytes."
        )
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.58 GiB of which 9.62 MiB is free."
    )


class Fault(TorchDispatchMode):
    """Fails at operation `at` (from 1) of a phase in optimizer step `step` (from 1); without `at` it only counts them.

    With `times` it fails again when the phase comes back to as many operations, which is what a second try meets.
    """

    def __init__(self, where: Where, step: int = 1, at: int | None = None, *, times: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.step, self.at, self.times = where, step, at, times
        self.seen = 0
        self.raised = 0
        self.steps_done = 0
        self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_heavy(func, args, self.where):
            self.reach(self.where)
        return func(*args, **(kwargs or {}))

    def reach(self, where: Where) -> None:
        """A point of this phase at which memory may be short."""
        if where != self.where or self.step != self.steps_done + 1:
            return
        self.seen += 1
        if self.seen == self.at and self.raised < self.times:
            self.raised += 1
            self.seen = 0
            raise out_of_memory(self.at)

    @contextmanager
    def around(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Watch a run."""
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for hook in (
                model.register_forward_pre_hook(self._forward_begins),
                model.register_forward_hook(self._ends, always_call=True),
                optimizer.register_step_pre_hook(self._update_begins),
                optimizer.register_step_post_hook(self._update_ends),
            ):
                stack.callback(hook.remove)
            patch.setattr(torch.Tensor, "backward", self._inside("backward", torch.Tensor.backward))
            patch.setattr(torch.nn.utils, "clip_grad_norm_", self._inside("clip", torch.nn.utils.clip_grad_norm_))
            for owner, name in (
                (torch, "save"),
                (transformers.modeling_utils, "safe_save_file"),
                (torch.nn.Module, "state_dict"),
                (torch.optim.Optimizer, "state_dict"),
            ):
                patch.setattr(owner, name, self._at_once("saving", getattr(owner, name)))
            stack.callback(self._ends)
            yield

    def _begins(self, where: Where) -> None:
        """Look at operations only where it matters: each costs some ten microseconds."""
        if where == self.where and self.step == self.steps_done + 1 and not self._is_on:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True

    def _ends(self, *_details: Any) -> None:
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _forward_begins(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._begins("forward" if module.training else "evaluation")

    def _update_begins(self, *_details: Any) -> None:
        self._begins("optimizer")

    def _update_ends(self, *_details: Any) -> None:
        self._ends()
        self.steps_done += 1

    def _inside(self, where: Where, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **keywords: Any) -> Any:
            self._begins(where)
            try:
                return function(*args, **keywords)
            finally:
                self._ends()

        return watched

    def _at_once(self, where: Where, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **keywords: Any) -> Any:
            self.reach(where)
            return function(*args, **keywords)

        return watched


def _is_heavy(func: Any, args: Any, where: Where) -> bool:
    """Takes memory for a result. Of the few operations that clip and update, also those in place: they are the places in between."""
    if where in {"clip", "optimizer"}:
        return not func.is_view
    large = any(isinstance(leaf, torch.Tensor) and leaf.numel() >= _LARGE for leaf in tree_leaves(args))
    return large and not func.is_view and not func._schema.is_mutable


@dataclass
class Ran:
    """What a run left behind."""

    entries: list[LedgerEntry] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    steps_taken: int = 0
    said: list[str] = field(default_factory=list)
    """Lines on the screen."""
    warned: list[str] = field(default_factory=list)

    def keep(self, model: torch.nn.Module) -> None:
        """The weights of now."""
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def farthest(self, other: Ran) -> float:
        """The largest difference of a weight, over the largest weight."""
        largest = max(float(weight.abs().max()) for weight in self.weights.values())
        return max(float((self.weights[name] - weight).abs().max()) for name, weight in other.weights.items()) / largest

    @property
    def ids(self) -> list[list[int]]:
        """Of each step, sorted."""
        return [sorted(entry.sequence_ids) for entry in self.entries]

    @property
    def splits(self) -> list[str]:
        """The phases in which memory ran out, in order."""
        return [split.phase for entry in self.entries for split in entry.splits]


@contextmanager
def listening(ran: Ran) -> Iterator[None]:
    """Keep what is said meanwhile, also when it ends in an error."""
    screen = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stderr(screen):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            ran.said = screen.getvalue().splitlines()
            ran.warned = [str(one.message) for one in caught]


def tiny(dropout: float = 0.0) -> Any:
    """As small as a Llama can be with everything in it."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return toys.model(dropout, vocab_size=48, **sizes)


def sequences(count: int = SEQUENCES, longest: int = 12) -> list[toys.Features]:
    """Ragged, and few."""
    return toys.data(count, longest=longest, vocabulary=48)


def adamw(model: torch.nn.Module, *, foreach: bool = False) -> torch.optim.Optimizer:
    """With a step that never divides by what is mere rounding, so that equal runs end in equal weights."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=foreach)


def own_loop(
    fault: Fault | None = None,
    *,
    dropout: float = 0.0,
    budget: Budget | None = None,
    foreach: bool = False,
    ran: Ran | None = None,
) -> Ran:
    """A run through `Steps`. `ran` is filled as far as it comes."""
    ran = Ran() if ran is None else ran
    model = tiny(dropout)
    optimizer = adamw(model, foreach=foreach)
    watching = fault or Fault("forward")
    torch.manual_seed(3)
    with listening(ran):
        try:
            with watching.around(model, optimizer):
                steps = Steps(
                    sequences(), model, optimizer,
                    effective_batch=EFFECTIVE_BATCH, budget=budget or Budget.sequences(3), collate=toys.collate, counting="next-token",
                )  # fmt: skip
                for step in steps:
                    ran.entries.append(step.run())
        finally:
            ran.keep(model)
            ran.steps_taken = watching.steps_done
    return ran


def a_trainer(
    folder: Path, *, dropout: float = 0.0, foreach: bool = False, budget: Budget | None = None, **arguments: Any
) -> Any:
    """A Trainer with brim in it, which evaluates and saves after every step."""
    model = tiny(dropout)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "num_train_epochs": 1,
        "per_device_train_batch_size": EFFECTIVE_BATCH, "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant", "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = Trainer(
        model,
        TrainingArguments(**{**settings, **arguments}),
        data_collator=toys.collate,
        train_dataset=sequences(),
        eval_dataset=sequences(6),
        optimizers=(adamw(model, foreach=foreach), None),
    )
    return attach(trainer, budget=budget or Budget.sequences(3))


def trainer_loop(trainer: Any, fault: Fault | None = None, *, resume: str | None = None, ran: Ran | None = None) -> Ran:
    """A run through the Trainer. `ran` is filled as far as it comes."""
    ran = Ran() if ran is None else ran
    watching = fault or Fault("forward")
    torch.manual_seed(3)
    with listening(ran):
        try:
            with watching.around(trainer.model, trainer.optimizer):
                trainer.train(resume_from_checkpoint=resume)
        finally:
            ran.keep(trainer.model)
            ran.steps_taken = watching.steps_done
            ran.entries = list(read_ledger(Path(trainer.args.output_dir) / "ledger.jsonl").steps)
    return ran


def place(share: int, shares: int, count: int) -> int:
    """The `share`-th of so many places that are spread evenly over `count` operations, first and last among them."""
    return 1 + share * (count - 1) // max(1, shares - 1)
