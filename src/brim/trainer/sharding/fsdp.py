"""FSDP2: torch's own `fully_shard`, wrapped as accelerate wraps it, which is what the memory model counts.

Every layer is one unit, the embedding another, last norm and head together a third. Gradients are scattered after every micro-batch, so
that no rank ever holds whole ones; that is one more transfer for each micro-batch, and the reason why a large model fits at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from brim.trainer.sharding.shards import (
    MakeOptimizer,
    State,
    first_names,
    groups_by_number,
    in_host_memory,
    numbers_of,
    take_over_groups,
    tied,
)

if TYPE_CHECKING:
    from brim.records import RunCard

_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")
"""What the norm after the last layer is called."""


class FullyShards:
    """A model in pieces of DTensors, and an optimizer of those."""

    def __init__(self, model: nn.Module, card: RunCard, make: MakeOptimizer) -> None:
        self._card = card
        self._size = dist.get_world_size()
        self.model = model
        _shard(model, card, self._size)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.optimizer = make(model)
        self.norm: float | None = None
        self.has_skipped = False

    @property
    def whole_bytes(self) -> int:
        """A DTensor counts all that it is a piece of."""
        states = [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        saved = [tensor for name, tensor in self.model.state_dict().items() if self._is_saved(name)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*states, *saved))

    def begin_round(self, *, is_last: bool) -> None:
        """Every round is like the others: gradients are scattered after each."""

    def backward(self, loss: torch.Tensor) -> None:
        """The scatter takes the mean over ranks, and a sum is wanted."""
        (loss * self._size).backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float | None) -> float:
        """Over all pieces of all ranks."""
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.norm = float(_whole(norm))
        return self.norm

    def clear(self) -> None:
        """No gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """A forward without a backward leaves the last units gathered."""
        for unit in self._units:
            unit.reshard()

    def whole_weights(self, *, keeps: bool) -> dict[str, torch.Tensor] | None:
        """Gathered one by one."""
        self.settle()
        first = first_names(self.model)
        named = {first.get(name, name): tensor for name, tensor in self.model.state_dict().items() if self._is_saved(name)}
        kept: dict[str, torch.Tensor] = {}
        with in_host_memory(self._card):
            for name, tensor in named.items():
                whole = _whole(tensor.detach())
                if keeps:
                    kept[name] = whole.cpu()
        return tied(kept, first) if keeps else None

    def whole_optimizer(self, *, keeps: bool) -> State | None:
        """Gathered one by one."""
        numbers = numbers_of(self.optimizer.param_groups)
        kept: dict[int, Any] = {}
        with in_host_memory(self._card):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = {name: _whole(value) for name, value in self.optimizer.state.get(parameter, {}).items()}
                    if keeps and state:
                        kept[numbers[id(parameter)]] = {name: _on_host(value) for name, value in state.items()}
        if not keeps:
            return None
        return {"state": kept, "param_groups": groups_by_number(self.optimizer.param_groups, numbers)}

    def load_optimizer(self, saved: State) -> None:
        """Each rank takes its pieces."""
        numbers = numbers_of(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = saved["state"].get(numbers[id(parameter)], {})
                self.optimizer.state[parameter] = {name: _piece(value, parameter) for name, value in state.items()}
        take_over_groups(self.optimizer.param_groups, saved)

    def _is_saved(self, name: str) -> bool:
        """Of a model with adapters, these alone."""
        return not hasattr(self.model, "peft_config") or name in self._trained

    @property
    def _trained(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}


def _shard(model: nn.Module, card: RunCard, size: int) -> None:
    kind = torch.device(card.device).type
    mesh = init_device_mesh(kind, (size,))
    offload = CPUOffloadPolicy() if card.settings.offload != "none" and kind != "cpu" else OffloadPolicy()
    half = card.settings.precision == "amp-bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for layer in layers_of(model):
        if not _is_tied_outside(layer, model):
            fully_shard(layer, **shared, reshard_after_forward=True)
    entrance, tail = _ends(model)
    if entrance is not None:
        fully_shard(entrance, **shared, reshard_after_forward=True)
    if tail:
        fully_shard(tail, **shared, reshard_after_forward=False)
    fully_shard(model, **shared)


def _ends(model: nn.Module) -> tuple[nn.Module | None, list[nn.Module]]:
    """What is a unit of its own at the entrance, and what together is one at the end. A weight may be in one unit only: where modules that
    share one are in several places (T5's encoder, decoder and head), the root takes them.
    """
    entrance: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    ends = {id(module): module for module in (entrance, head) if module is not None}
    together = {owner for module in ends.values() for each in module.parameters() for owner in owners.get(id(each), ())}
    is_tied = len(ends) == 2 and entrance.weight is head.weight
    is_shared_elsewhere = not together <= {id(each) for module in ends.values() for each in module.modules()}
    norm = _last_norm(model)
    free = [norm] if norm is not None and not _is_cut(norm) else []
    if is_shared_elsewhere:
        return None, free
    if is_tied:
        return None, [*free, entrance, *([] if head is entrance else [head])]
    first = entrance if entrance is not None and not _is_cut(entrance) else None
    return first, [*free, *([head] if head is not None and head is not entrance and not _is_cut(head) else [])]


def _is_cut(module: nn.Module) -> bool:
    """Whether a unit around it has it already: BERT's embeddings are one with their norm."""
    return isinstance(module, FSDPModule) or any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _is_tied_outside(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a weight of it is also somewhere else (BERT's embeddings and its masked head): then the root takes it."""
    inside = {id(module) for module in layer.modules()}
    mine = {id(parameter) for parameter in layer.parameters()}
    others = (module for module in model.modules() if id(module) not in inside)
    return any(id(parameter) in mine for module in others for parameter in module.parameters(recurse=False))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: the blocks that the model itself names, else the members of its lists of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if found:
        inside = {id(module) for outer in found for module in outer.modules() if module is not outer}
        return [module for module in found if id(module) not in inside]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    outer = [one for one in lists if not any(one is not other and one in set(other.modules()) for other in lists)]
    return [member for one in outer for member in one if any(True for _each in member.parameters())]


def _last_norm(model: nn.Module) -> nn.Module | None:
    """The norm beside the layers, not one inside them."""
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    named = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NORMS and id(module) not in inside and any(True for _each in module.parameters())
    ]
    return named[-1] if len(named) == 1 else None


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _piece(value: Any, parameter: torch.Tensor) -> Any:
    """As the parameter is cut; what has another shape (a count of steps) is whole on every rank."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return _on_host(value)
    here = value.to(parameter.device)
    # Every rank has read the same file: nothing needs to be sent.
    return distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)
