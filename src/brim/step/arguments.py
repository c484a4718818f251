"""What users give to the step, checked where they give it: each error says what was given and what would be right."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from brim.errors import UsageError
from brim.locale import _
from brim.step.budget import Budget
from brim.step.ledger import LEDGER

if TYPE_CHECKING:
    import torch


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number: 3.0 and "3" are not taken for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(_("{name} is {value!r}, and must be a whole number.").format(name=name, value=value))
    if value < least:
        raise UsageError(_("{name} must be at least {least}, and is {size}.").format(name=name, least=least, size=value))
    return int(value)


def word(name: str, value: Any, words: Any) -> None:
    """One of the words of a Literal."""
    known = get_args(words)
    if value not in known:
        text = _("{name} is {value!r}; {known} are known.")
        raise UsageError(text.format(name=name, value=value, known=", ".join(repr(each) for each in known)))


def budget_of(value: Any) -> Budget:
    """A Budget: a bare number has no unit."""
    if not isinstance(value, Budget):
        raise UsageError(
            _("budget is {value!r}, and a number alone does not say of what.").format(value=value),
            hint=_("Give brim.Budget.tokens(8192), brim.Budget.sequences(8), or brim.budget(model, gpu=...)."),
        )
    return value


def budgets_of(value: Any) -> tuple[Budget, ...] | Budget:
    """A Budget for all ranks, or one for each in a sequence."""
    if isinstance(value, list | tuple) and value:
        return tuple(budget_of(each) for each in value)
    return budget_of(value)


def speeds_of(value: Any) -> None:
    """One number above 0 for each rank, or None."""
    if value is None:
        return
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        raise UsageError(
            _("speeds is {value!r}, and must be a list with one number for each rank.").format(value=value),
            hint=_("speeds=[1.0, 0.5] says that the second rank is half as fast."),
        )
    for each in value:
        Budget.tokens(1).at_speed(each)


def function(name: str, value: Any) -> None:
    """Something that can be called."""
    if not callable(value):
        raise UsageError(_("{name} is {value!r}, and must be a function.").format(name=name, value=value))


def norm_to_clip_at(value: Any) -> None:
    """Above 0, or None: a negative limit would turn the gradient round."""
    if value is not None and not (isinstance(value, float | int) and value > 0):
        raise UsageError(
            _("max_norm is {value!r}, and must be above 0.").format(value=value), hint=_("Give None to clip nothing.")
        )


def lengths_for(lengths: Any, data: Any) -> None:
    """One number for each sequence."""
    if not isinstance(lengths, Sequence) and not hasattr(lengths, "__array__"):
        raise UsageError(_("lengths is {value!r}, and must be a list of numbers.").format(value=lengths))
    if len(lengths) != len(data):
        text = _("There are {lengths} lengths for {sequences} sequences.")
        raise UsageError(text.format(lengths=len(lengths), sequences=len(data)))


def ledger_file(ledger: Any, folder: str | Path | None = None) -> Path | None:
    """The file of the ledger: given itself, or by its folder. True is the folder of the run, None and False are no ledger."""
    if ledger is None or ledger is False:
        return None
    if ledger is True and folder is not None:
        ledger = folder
    if not isinstance(ledger, str | Path):
        text = _("ledger is {value!r}, and must be a file, a folder or False.")
        raise UsageError(text.format(value=ledger))
    path = Path(ledger)
    return path if path.suffix == ".jsonl" else path / LEDGER


def state_to_resume(state: Any) -> None:
    """What `state()` gave."""
    if state is not None and not (isinstance(state, Mapping) and {"step", "fingerprint", "guard"} <= state.keys()):
        raise UsageError(
            _("resume is {value!r}, and must be what state() gave.").format(value=state),
            hint=_("Save loop.state() beside the weights, and give it back."),
        )


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All of the model's, for frozen ones may be unfrozen later, and what the optimizer holds besides (a loss with weights of its own).

    The optimizer must hold some that train, or nothing would ever move.
    """
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise UsageError(_("The model has no parameter that trains."))
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in found):
        raise UsageError(
            _("The optimizer holds none of the model's parameters that train."),
            hint=_("Make the optimizer after the model has its final shape (adapters added, layers replaced)."),
        )
    return list({**{id(parameter): parameter for parameter in model.parameters()}, **held}.values())
