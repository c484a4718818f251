"""DeepSpeed's ZeRO 1, 2 and 3 under brim's step.

DeepSpeed counts micro-batches by itself; here it is told which one is the last, and neither its own accumulation nor its scaling by it is
used. It clips inside its step. At half precision it keeps a float32 copy of what trains, made from weights that are already
rounded; so the copy gets the weights as they were before.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from brim.errors import UnsupportedError
from brim.locale import _
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
    from pathlib import Path

    from brim.records import RunCard

CONFIG_FILE = "deepspeed.json"
"""In the run's folder, as the planner writes it."""
_SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""Sums through shared memory on the CPU; it would be compiled at the first start, and gloo does the same."""


class ZeroOptimizer(torch.optim.Optimizer):
    """What the Trainer and its schedules take for the optimizer: the rates are the real one's, and a step is the engine's."""

    def __init__(self, engine: Any, base: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in base.param_groups], dict(base.defaults))
        self._engine = engine
        self.has_gradients = False
        self.param_groups = base.param_groups
        self.state = base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sum, clip and step, in all ranks. Without a backward before it, there is nothing to step with."""
        assert closure is None
        if self.has_gradients:
            self._engine.step()
        self.has_gradients = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's step does it."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is in pieces is saved whole, by `ZeroShards`. accelerate asks when it wraps an optimizer."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing, as above: else the rates here would no longer be the real optimizer's."""


class ZeroShards:
    """A model in an engine of DeepSpeed."""

    def __init__(self, model: nn.Module, card: RunCard, folder: Path, make: MakeOptimizer) -> None:
        deepspeed = imported(card)
        self._card = card
        self._deepspeed = deepspeed
        self._stage = int(str(card.settings.sharding)[-1])
        self._inner = model
        self._is_half = card.settings.precision != "fp32"
        base = make(model)
        self._groups = [{**group, "params": list(group["params"])} for group in base.param_groups]
        before = {id(each): each.detach().clone() for each in self._trained()} if self._is_half else {}
        engine, _optimizer, _loader, _schedule = deepspeed.initialize(
            model=model, optimizer=base, config=config_of(card, folder), dist_init_required=False
        )
        self._engine: Any = engine
        self._base = base
        self.model: nn.Module = engine
        self.optimizer = ZeroOptimizer(engine, base)
        for parameter in self._trained():
            if id(parameter) in before:
                self._set(parameter, before.pop(id(parameter)), None)

    @property
    def whole_bytes(self) -> int:
        """The weights that are saved, and all ranks' pieces of the optimizer's state."""
        saved = [parameter for name, parameter in self._inner.named_parameters() if self._is_saved(name)]
        states = [each for state in self._base.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
        weights = sum(getattr(each, "ds_numel", each.numel()) * 4 for each in saved)
        return weights + dist.get_world_size() * sum(each.numel() * each.element_size() for each in states)

    @property
    def norm(self) -> float | None:
        """Found inside the engine's step."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def has_skipped(self) -> bool:
        """The engine scales fp16 by itself, and leaves steps out that overflow."""
        return not self._engine.was_step_applied()

    def begin_round(self, *, is_last: bool) -> None:
        """Gradients are kept until the last round's backward."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor) -> None:
        """The engine takes the mean over ranks, and a sum is wanted."""
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        self.optimizer.has_gradients = True

    def clip(self, max_norm: float | None) -> None:
        """Inside the engine's step, by its config."""

    def clear(self) -> None:
        """The engine's step leaves nothing."""

    def settle(self) -> None:
        """The engine gives parameters back by itself."""

    def whole_weights(self, *, keeps: bool) -> dict[str, torch.Tensor] | None:
        """Gathered one by one: what trains as exact as the optimizer holds it."""
        kept: dict[str, torch.Tensor] = {}
        with in_host_memory(self._card):
            for name, parameter in self._inner.named_parameters():
                if self._is_saved(name):
                    whole = self._get(parameter, None) if parameter.requires_grad else self._frozen(parameter)
                    if keeps:
                        kept[name] = whole.detach().to("cpu", copy=True)
            if keeps and not hasattr(self._inner, "peft_config"):
                persistent = set(self._inner.state_dict())
                named = self._inner.named_buffers()
                kept |= {name: buffer.detach().cpu() for name, buffer in named if name in persistent}
        return tied(kept, first_names(self._inner)) if keeps else None

    def whole_optimizer(self, *, keeps: bool) -> State | None:
        """Gathered one by one."""
        numbers = numbers_of(self._groups)
        kept: dict[int, Any] = {}
        with in_host_memory(self._card):
            names, counts = self._state_names()
            self._renew_mappings()
            for parameter in self._trained():
                state = {name: self._get(parameter, name) for name in names}
                if keeps and (names or counts):
                    moved = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
                    kept[numbers[id(parameter)]] = {**{name: _copied(value) for name, value in counts.items()}, **moved}
        if not keeps:
            return None
        rates = [{**now, "params": was["params"]} for now, was in zip(self._base.param_groups, self._groups, strict=True)]
        return {"state": kept, "param_groups": groups_by_number(rates, numbers)}

    def load_optimizer(self, saved: State) -> None:
        """Each rank takes its pieces."""
        numbers = numbers_of(self._groups)
        states = saved["state"]
        some: dict[str, Any] = next(iter(states.values()), {})
        parameters = self._trained()
        first = numbers[id(parameters[0])]
        shape = _shape(parameters[0])
        names = [name for name, value in some.items() if isinstance(value, torch.Tensor) and states[first][name].shape == shape]
        for flat in self._flat():
            self._base.state[flat] = {
                name: torch.zeros_like(flat) if name in names else _copied(value) for name, value in some.items()
            }
        self._renew_mappings()
        for parameter in parameters:
            for name in names:
                self._set(parameter, states[numbers[id(parameter)]][name], name)
        take_over_groups(self._base.param_groups, saved)

    # One parameter, or one of its states, whole.

    def _get(self, parameter: Any, state: str | None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = safe_get_full_fp32_param(parameter) if state is None else safe_get_full_optimizer_state(parameter, state)
        assert whole is not None
        found: torch.Tensor = whole.reshape(_shape(parameter))
        return found

    def _set(self, parameter: Any, whole: torch.Tensor, state: str | None) -> None:
        if self._stage < 3:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

            value = whole.to(parameter.device, torch.float32)
            if state is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, state)
            return
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        # The last rank's piece is filled up with zeros.
        size = parameter.ds_tensor.ds_numel
        flat = torch.zeros(size * dist.get_world_size(), dtype=torch.float32)
        flat[: whole.numel()] = whole.detach().reshape(-1).to("cpu", torch.float32)
        mine = flat[size * dist.get_rank() : size * (dist.get_rank() + 1)].to(parameter.ds_tensor.device)
        if state is None:
            safe_set_local_fp32_param(parameter, mine)
        else:
            safe_set_local_optimizer_state(parameter, mine, state)

    def _frozen(self, parameter: Any) -> torch.Tensor:
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()  # type: ignore[no-any-return]
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()  # type: ignore[no-any-return]

    # Where DeepSpeed keeps things.

    def _flat(self) -> list[torch.Tensor]:
        """The float32 pieces that the real optimizer steps."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _state_names(self) -> tuple[list[str], dict[str, Any]]:
        """States that are as large as their piece, and those that are one number."""
        for flat in self._flat():
            state = self._base.state.get(flat, {})
            large = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == flat.shape]
            if state:
                return large, {name: value for name, value in state.items() if name not in large}
        return [], {}

    def _renew_mappings(self) -> None:
        """Below stage 3, DeepSpeed remembers for each parameter where its state lies; of two groups it looks when the first has stepped."""
        optimizer = self._engine.optimizer
        if self._stage < 3:
            optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 (so that it looks again)
            optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001

    def _trained(self) -> list[Any]:
        return [parameter for group in self._groups for parameter in group["params"]]

    def _is_saved(self, name: str) -> bool:
        """Of a model with adapters, these alone."""
        return not hasattr(self._inner, "peft_config") or self._inner.get_parameter(name).requires_grad


def config_of(card: RunCard, folder: Path) -> dict[str, Any]:
    """What DeepSpeed is told: the planner's file of this run, with the micro-batches and the optimizer left to brim."""
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    for name in ("optimizer", "train_batch_size", "scheduler"):
        config.pop(name, None)
    return config | {
        # Whatever a rank runs in a step is brim's to say.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": card.recipe.max_grad_norm or 0.0,
        "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def imported(card: RunCard) -> Any:
    """DeepSpeed, quiet and with nothing to compile."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UnsupportedError(
            _("--sharding {sharding} is DeepSpeed's, which is not installed.").format(sharding=card.settings.sharding),
            hint=_("Install it: pip install deepspeed. Or take --sharding fsdp."),
        )
    on_cpu = torch.device(card.device).type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    import deepspeed
    from deepspeed.utils.logging import logger

    logger.setLevel(logging.ERROR)
    # It calls what torch has given other names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if on_cpu:
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
    return deepspeed


def _shape(parameter: Any) -> torch.Size:
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
