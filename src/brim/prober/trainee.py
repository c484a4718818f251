"""Somebody to train: a model with its optimizer, its precision and its batches, as a trial steps it.

`brim.prober.subjects` says what is tried and travels to the child process; there it becomes a `Trainee`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.machine import child
from brim.memory.tracing.building import HALVES, build_model, make_batch, refusals
from brim.memory.tracing.measured import PlainLion
from brim.prober.card import load_on_card
from brim.prober.quantized import quantize
from brim.prober.shapes import Shape
from brim.workload.words import Optimizer, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.setup import Setup
    from brim.prober.subjects import OwnModule


@dataclass
class Trainee:
    """A model, ready to be stepped: every part of a step is a call of its own, so that a failure has a phase."""

    model: nn.Module
    optimizer: Any
    make_batch: Callable[[Shape], Any]
    """A batch of this shape, on the device."""
    loss_of: Callable[[Any], torch.Tensor]
    device: str
    precision: Precision = "fp32"
    max_grad_norm: float | None = 1.0
    evaluation: Callable[[Any], object] | None = None
    """What an evaluation does with a batch; None: the same as training, without gradients."""

    def __post_init__(self) -> None:
        self._scaler: Any = None
        if self.precision == "amp-fp16":
            self._scaler = torch.amp.GradScaler(self._kind)

    @property
    def _kind(self) -> str:
        return torch.device(self.device).type

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss."""
        with self._autocast():
            loss = self.loss_of(batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(_("The step must return the loss: one number that depends on the parameters."))
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients."""
        (self._scaler.scale(loss) if self._scaler is not None else loss).backward()

    def update(self) -> None:
        """Clip, step, and drop the gradients."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            nn.utils.clip_grad_norm_(trained, self.max_grad_norm)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_bytes(self) -> int:
        """Of all parameters that have one."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return sum(gradient.numel() * gradient.element_size() for gradient in gradients)

    def forget_gradients(self) -> None:
        """After a failure: what was computed of a step is of no use."""
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, batch: Any) -> None:
        """One step of evaluation, and back to training."""
        modes = {name: module.training for name, module in self.model.named_modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self._autocast():
                (self.evaluation or self.loss_of)(batch)
        finally:
            for name, module in self.model.named_modules():
                module.training = modes[name]

    def save(self) -> None:
        """A checkpoint into nothing: what saving takes of the memory, without the disk."""
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, cast("Any", _Nowhere()))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = HALVES.get(self.precision)
        return torch.autocast(self._kind, dtype=half) if half is not None else contextlib.nullcontext()


class _Nowhere(io.RawIOBase):
    """Takes everything and keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def configured(setup: Setup, device: str) -> Trainee:
    """A model of transformers with fresh weights, prepared as it would be for training."""
    torch.manual_seed(0)
    if setup.attention == "flash2" and torch.device(device).type != "cuda":
        raise UnsupportedError(_("flash2 runs on CUDA cards alone, and this is {device}.").format(device=device))
    model = _built(setup, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    caller: Any = model

    def batch_of(shape: Shape) -> dict[str, Any]:
        asked = replace(
            setup,
            micro_batch=shape.sequences,
            length=shape.length,
            target_length=shape.target_length or None,
            padded=shape.padded,
        )
        return make_batch(asked, device=device)

    return Trainee(
        model, make_optimizer(setup.optimizer, trained), batch_of, lambda batch: caller(**batch).loss, device,
        setup.precision, setup.max_grad_norm,
    )  # fmt: skip


def _built(setup: Setup, device: str) -> nn.Module:
    """Build the model as training does: with the package flash-attn, for which a trace uses a stand-in."""
    attends = replace(setup, attention=None) if setup.attention == "flash2" else setup
    is_quantized = setup.method in {"qlora", "lora-8bit"}
    if torch.device(device).type == "cuda":
        if is_quantized:
            _bitsandbytes()
        model = load_on_card(attends, device)
    else:
        # Quantised on the host layer by layer, like weights that are read from a file: only the quantised weights count.
        with _without_limit() if is_quantized else contextlib.nullcontext():
            model = build_model(attends, device=device, quantizer=quantize if is_quantized else None)
    if setup.attention == "flash2":
        wrapped: Any = model
        base = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
        with refusals():
            base.set_attn_implementation("flash_attention_2")
    return model


@contextlib.contextmanager
def _without_limit() -> Iterator[None]:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    child.set_data_limit(None)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def vocabulary_of(model: nn.Module, *, has_step: bool) -> int | None:
    """How many tokens a model knows; an error where that is needed to call it, and not known."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None and not has_step:
        text = _("{name} is no model of transformers, so brim does not know how to call it.").format(name=type(model).__name__)
        raise UsageError(
            text, hint=_("In Python: brim.probe(module, step=...), or brim.BatchSizeOptimizer; docs/probe.md shows how.")
        )
    return vocabulary


def trainee_of(model: nn.Module, subject: OwnModule, device: str) -> Trainee:
    """A module of somebody's own."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    step, caller = subject.step, cast("Any", model)
    vocabulary = vocabulary_of(model, has_step=step is not None)

    def batch_of(shape: Shape) -> Any:
        if step is not None:
            return shape
        tokens = torch.randint(0, max(2, int(vocabulary or 2)), (shape.sequences, shape.length), device=device)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if shape.padded:
            mask = torch.ones_like(tokens)
            mask[:, -1] = 0
            batch["attention_mask"] = mask
        return batch

    def loss_of(batch: Any) -> Any:
        if step is None:
            return caller(**batch, use_cache=False).loss
        with torch.device(device):
            found = step(model, batch.sequences, batch.length)
        return getattr(found, "loss", found)

    optimizer = make_optimizer(subject.optimizer, trained)
    return Trainee(model, optimizer, batch_of, loss_of, device, subject.precision, subject.max_grad_norm)


def make_optimizer(word: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """The real optimizer of this name, with a rate that moves weights a little."""
    if word in {"adamw-8bit", "paged-adamw-8bit"}:
        optim = _bitsandbytes().optim
        made: Any = optim.PagedAdamW8bit if word.startswith("paged") else optim.AdamW8bit
        return made(parameters, lr=_RATE)
    if word == "adafactor":
        from transformers.optimization import Adafactor

        factored: Any = Adafactor
        return factored(parameters, lr=_RATE, scale_parameter=False, relative_step=False)
    makers: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=_RATE),
        "adamw-loop": lambda: torch.optim.AdamW(parameters, lr=_RATE, foreach=False),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, lr=_RATE, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=_RATE),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=_RATE, momentum=0.9),
        "lion": lambda: PlainLion(parameters, lr=_RATE),
    }
    return makers[word]()


_RATE = 1e-5


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        text = _("The 8-bit optimizers and the quantised methods are bitsandbytes', which cannot be imported: {why}.")
        raise RunError(text.format(why=error), hint=_("Install it: pip install bitsandbytes.")) from error
    return bitsandbytes
