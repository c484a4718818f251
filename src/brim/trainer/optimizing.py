"""The optimizer of a training, by the word that the estimate knows it by."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, get_args

import torch
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.memory.tracing.measured import PlainLion
from brim.workload.words import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_DECAYED: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""transformers/trainer.py, `get_decay_parameter_names`: biases and norms keep their size."""
_EIGHT_BIT: Final = {"adamw-8bit": "AdamW8bit", "paged-adamw-8bit": "PagedAdamW8bit"}
_MOMENTUM: Final = 0.9


def make_optimizer(
    word: Optimizer,
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> torch.optim.Optimizer:
    """Of what trains in the model; matrices decay, as the Trainer has it. `betas` and `epsilon` are AdamW's."""
    groups = grouped(model, weight_decay)
    device = groups[0]["params"][0].device.type
    adam: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": epsilon}
    makers: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(groups, **adam),
        "adamw-fused": lambda: torch.optim.AdamW(groups, **adam, fused=True),
        "adamw-loop": lambda: torch.optim.AdamW(groups, **adam, foreach=False),
        "adamw-8bit": lambda: _eight_bit(word, groups, adam),
        "paged-adamw-8bit": lambda: _eight_bit(word, groups, adam),
        "adafactor": lambda: _adafactor(groups, learning_rate),
        "sgd": lambda: torch.optim.SGD(groups, lr=learning_rate),
        "sgd-momentum": lambda: torch.optim.SGD(groups, lr=learning_rate, momentum=_MOMENTUM),
        "lion": lambda: PlainLion(groups, lr=learning_rate),  # type: ignore[arg-type]
    }
    assert set(makers) == set(get_args(Optimizer))
    if word == "paged-adamw-8bit" and device == "cpu":
        raise UnsupportedError(
            _("A paged optimizer pages between GPU and host; on the CPU there is nothing to page."),
            hint=_("Take --optimizer adamw-8bit."),
        )
    made: torch.optim.Optimizer = makers[word]()
    return made


def grouped(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What trains, in a group that decays and one that does not; a group without parameters is left out."""
    norms = {id(one) for module in model.modules() if isinstance(module, nn.LayerNorm) for one in module.parameters()}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            keeps = id(parameter) in norms or _NOT_DECAYED.search(name.lower()) is not None
            (kept if keeps else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    found = [group for group in groups if group["params"]]
    if not found:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    return found


def _adafactor(groups: list[dict[str, Any]], learning_rate: float) -> Any:
    """With the settings of the Trainer's: the rate is the schedule's, and not its own."""
    from transformers.optimization import Adafactor

    made: Any = Adafactor
    return made(groups, lr=learning_rate, scale_parameter=False, relative_step=False)


def _eight_bit(word: Optimizer, groups: list[dict[str, Any]], adam: dict[str, Any]) -> Any:
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        text = _("--optimizer {word} is bitsandbytes', which cannot be imported: {why}.").format(word=word, why=error)
        raise UnsupportedError(text, hint=_("Install it (pip install bitsandbytes), or take --optimizer adamw.")) from error
    made: Any = getattr(bitsandbytes.optim, _EIGHT_BIT[word])
    return made(groups, **adam)
