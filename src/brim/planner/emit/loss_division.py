"""Whether a model divides its loss by `num_items_in_batch`, as the Trainer expects of every model to which it passes that number.

The Trainer passes it to each model whose forward takes `**kwargs`, and then divides by nothing itself (transformers 5.23, trainer.py,
`model_accepts_loss_kwargs`). T5, BART and most classifiers ignore it (transformers#47688): their gradients are too large by accumulation
x ranks. With `accepts_loss_kwargs = False` on the model the Trainer divides. The model is traced on meta tensors, and autograd tells
whether its loss depends on the number.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import BrimError, UnsupportedError
from brim.locale import _
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from brim.planner.emit.recipe import Recipe
    from brim.workload.words import Task

_ROWS, _LENGTH = 2, 16


@dataclass(frozen=True)
class LossDivision:
    """What a model does with the Trainer's number."""

    kind: Literal["divides", "not passed", "ignores", "unknown"]
    class_name: str = ""

    @property
    def is_safe(self) -> bool:
        """Whether the plain Trainer's gradient is right with this model as it is."""
        return self.kind in {"divides", "not passed"}


def loss_division(recipe: Recipe) -> LossDivision:
    """Of the plan's model."""
    return _loss_division(recipe.plan.workload.model, recipe.plan.workload.task)


def check_loss_division(recipe: Recipe, tool: str) -> None:
    """Refuse a tool that runs the Trainer on a model that ignores the number: no setting of these tools changes that."""
    found = loss_division(recipe)
    if found.kind == "ignores" and _factor(recipe) > 1:
        text = _(
            "{tool} cannot set accepts_loss_kwargs = False, and {class_name} ignores num_items_in_batch: its gradients would be {factor} "
            "times too large (transformers#47688)."
        )
        raise UnsupportedError(
            text.format(tool=tool, class_name=found.class_name, factor=_factor(recipe)),
            hint=_("Take --emit transformers, whose load_model sets it."),
        )


def loss_division_notes(recipe: Recipe, *, sets_it: bool) -> list[str]:
    """What must be said of a model that is not known to divide; `sets_it`: the format's own `load_model` sets the attribute."""
    found = loss_division(recipe)
    if found.is_safe:
        return []
    if found.kind == "ignores":
        text = _(
            "{class_name} ignores num_items_in_batch: the Trainer's gradients would be too large by accumulation x ranks, here {factor} "
            "(transformers#47688)."
        )
        why = text.format(class_name=found.class_name, factor=_factor(recipe))
    else:
        why = _("Whether this model divides its loss by num_items_in_batch could not be checked.")
    if sets_it:
        text = _("load_model sets accepts_loss_kwargs = False: gradients are right, and each micro-batch has the same weight.")
    else:
        text = _(
            "Set model.accepts_loss_kwargs = False before you build the Trainer, as load_model in training_arguments.py does."
        )
    return [why, text]


def _factor(recipe: Recipe) -> int:
    return recipe.cut.accumulation * recipe.best.world_size


@cache
def _loss_division(name: str, task: Task) -> LossDivision:
    # torch and transformers: heavy, and needed by this check only.
    from brim.memory.obtain import quiet, traceable

    try:
        with quiet(), traceable():
            return _trace(name, task)
    except BrimError:
        return LossDivision("unknown")


def _trace(name: str, task: Task) -> LossDivision:
    import torch

    from brim.memory.setup import Setup, Target
    from brim.memory.tracing.building import build_model, make_batch
    from brim.memory.tracing.depth import shallow
    from brim.memory.tracing.reference import Stage

    found = find_model(name)
    setup = Setup(
        config=found.config or {}, task=task, micro_batch=_ROWS, length=_LENGTH, padded=False, attention=None,
        num_labels=_labels(found.config or {}),
    )  # fmt: skip
    model: Any
    if found.config is None:
        model = found.build("meta").train()
        setup = replace(setup, config={"vocab_size": getattr(getattr(model, "config", None), "vocab_size", None)})
    else:
        setup, _removed = shallow(setup)
        model = build_model(setup)
    if not _is_passed(model):
        return LossDivision("not passed", type(model).__name__)
    batch = make_batch(setup)
    items = torch.ones((), device="meta", requires_grad=True)
    depends: list[bool] = []

    def forward() -> torch.Tensor:
        outputs = model(**batch, num_items_in_batch=items)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        (gradient,) = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)
        depends.append(gradient is not None)
        return loss

    stage = Stage(model, Target("cpu"), "fp32", scalar=True)
    stage.run(setup, forward, prepare=lambda _tracer: None, evaluate=lambda _tracer, _round: None, whole=False)
    return LossDivision("divides" if all(depends) else "ignores", type(model).__name__)


def _labels(config: Mapping[str, Any]) -> int:
    return int(config.get("num_labels") or len(config.get("id2label") or "01"))


def _is_passed(model: nn.Module) -> bool:
    """The Trainer's own rule."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
