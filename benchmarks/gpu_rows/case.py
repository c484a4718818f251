"""What a measured row is as an estimate: the reference step with the source's own ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

import brim
from brim.memory.setup import Setup, Target
from brim.memory.sharding.shard import Parallel

if TYPE_CHECKING:
    import torch

Change = Callable[[Any], None]
Row = Mapping[str, str]
UNITS = {"GB": 10**9, "GiB": 1 << 30, "unknown": 1 << 30}
"""An unknown unit counts as GiB, which is what nvidia-smi's MiB and torch's summaries are usually divided into."""


class OutOfScopeError(Exception):
    """Why a row is not judged."""


@dataclass(frozen=True)
class Case:
    """One row as an estimate."""

    setup: Setup
    target: Target
    metric: str
    """`allocated`, `reserved`, `nvidia-smi`; `unknown`: the nearer of reserved and what nvidia-smi shows."""
    optimizer_steps: bool = True
    loss: Literal["labels", "shifted", "mean", "hidden"] = "labels"
    """`shifted`: transformers' loss until late 2024, which copies all logits but the last; `mean` of them; `hidden`: no logits are made."""
    upcasts_logits: bool = True
    """`shifted` and `mean`: the head's output is made float32 first, as transformers' models did then."""
    converts_logits: bool = False
    """Accelerate's `convert_outputs_to_fp32`: after the loss, the logits are made float32."""
    keeps: Literal["nothing", "step", "always"] = "nothing"
    """How long the loop holds the model's outputs: until loss.backward(), to the end of the step, or until the next forward returns."""
    caches: bool = False
    """Whether the outputs hold keys and values (`use_cache`, transformers' default where nobody says otherwise)."""
    old_torch: Literal["", "2.0", "2.1"] = ""
    """What that release held longer than today's: see `gpu_rows.eras`."""
    repeats_heads: bool = False
    """transformers before 4.48: grouped keys and values are repeated before `scaled_dot_product_attention`, mask or not."""
    sampled: bool = False
    """The figure was read after forward and after backward, not at the peak."""
    change: Change = field(default=lambda _model: None)
    """What the source does with the model after peft."""
    parallel: Parallel | None = None
    empties: bool = False
    """Cached memory was given back (`empty_cache`) before the step that counts: the second, when the optimizer's state exists."""
    card: str | None = None
    """The GPU's name, where the source gives it: its memory is the allocator's limit, beyond which cached segments are given back."""


def find_config(name: str) -> Mapping[str, Any]:
    """The config of a model of the catalogue."""
    try:
        config = brim.find_model(name).config
    except brim.BrimError:
        raise OutOfScopeError(f"missing field: config of {name}") from None
    assert config is not None
    return config


def measured_bytes(row: Row) -> float:
    """The row's own figure."""
    return float(row["peak_gb"]) * UNITS[row["unit"]]


def adapters_to(dtype: torch.dtype, model: nn.Module) -> None:
    """Cast what trains."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def set_dropout(p: float, model: nn.Module) -> None:
    """peft's `lora_dropout`."""
    for module in model.modules():
        found = getattr(module, "lora_dropout", None)
        if isinstance(found, nn.ModuleDict):
            for name in found:
                found[name] = nn.Dropout(p)


def in_order(*changes: Change) -> Change:
    """One change after the other."""

    def change(model: Any) -> None:
        for each in changes:
            each(model)

    return change
