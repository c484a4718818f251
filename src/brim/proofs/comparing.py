"""When two results are the same: differences in units of the logits' own spread, and what rounding may do to them."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError
from brim.locale import _
from brim.proofs.subject import Batch, Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from brim.workload.words import Precision

EXACT = 1e-4
"""In float32: rounding is a tenth of it or less, and the smallest fault seen is a hundred times as much."""
_LEAST = {"fp32": EXACT, "bf16": 2e-2, "fp16": 4e-3, "amp-bf16": 2e-2, "amp-fp16": 4e-3}
_TIMES_ROUNDING = 3.0
"""Two results that each differ from the truth by rounding differ from each other by up to twice that."""


def tolerance_of(subject: Subject, batch: Batch) -> float:
    """What may differ at this precision: at half precision, what the precision itself costs this model on this batch, measured."""
    least = _LEAST[subject.precision]
    if subject.precision == "fp32":
        return least
    whole = Subject(_in_float32(subject), kind=subject.kind, seed=subject.seed, precision="fp32")
    whole.model.eval()
    exact = whole.logits(batch)
    return max(least, _TIMES_ROUNDING * change(subject.logits(batch), exact))


def _in_float32(subject: Subject) -> torch.nn.Module:
    return subject.model if subject.precision.startswith("amp") else copy.deepcopy(subject.model).float()


def change(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest change of a logit, in standard deviations of the logits. Infinite where a number is not finite."""
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    difference = (found - wanted).abs().max()
    return float(difference / wanted.std().clamp(min=1e-12)) if bool(found.isfinite().all()) else float("inf")


@dataclass(frozen=True)
class Failed:
    """A call that raised."""

    error: Exception

    @property
    def words(self) -> str:
        """The first line of what it said."""
        return (str(self.error).strip().splitlines() or [type(self.error).__name__])[0][:300]


def attempt(subject: Subject, batch: Batch) -> torch.Tensor | Failed:
    """Logits, or how the model failed."""
    try:
        return subject.logits(batch)
    except BrimError:
        raise
    except Exception as error:  # noqa: BLE001 (the model is anybody's code, and its failure is the finding)
        return Failed(error)


def measure_of_logits() -> str:
    """What the number of most proofs is."""
    return _("largest change of a logit, in standard deviations of the logits")


@contextmanager
def training(subject: Subject) -> Iterator[None]:
    """Training mode without noise: every rate of dropout that is a number on a module is zero meanwhile."""
    rates: list[tuple[Any, str, float]] = []
    for module in subject.model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and 0 < value < 1 and _is_rate(name, type(module).__name__):
                rates.append((module, name, value))
                setattr(module, name, 0.0)
    modes = [(module, module.training) for module in subject.model.modules()]
    subject.model.train()
    try:
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)
        for module, mode in modes:
            module.training = mode


def _is_rate(name: str, kind: str) -> bool:
    return "drop" in name.lower() or (name == "p" and "drop" in kind.lower())


def is_repeatable(subject: Subject, batch: Batch) -> bool:
    """Whether the same input gives the same twice, whatever numbers are drawn."""
    first = subject.logits(batch)
    seed = subject.seed
    subject.seed = seed + 1
    try:
        return change(subject.logits(batch), first) <= EXACT / 10
    finally:
        subject.seed = seed


def precision_words(precision: Precision) -> str:
    """For `tested`."""
    return "float32" if precision == "fp32" else precision
