"""How deep a model is, and which of its layers need not be traced.

A config names the depth of its stacks of layers. Four layers a stack are traced, and `brim.memory.layers` inserts the others; unless the
layers are known to differ, by what the config lists layer by layer, or by a pattern that freezes some of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from brim.memory.layers import NotRepeatedError, deepen
from brim.memory.setup import Setup, Target
from brim.memory.tracing.building import build_model, find_layers, read_config
from brim.memory.tracing.reference import Traced, trace_step, with_work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from brim.workload.words import Task

# How config files call the depth of a stack of layers; an encoder-decoder has one name of each kind.
_ONE_STACK = ("num_hidden_layers", "n_layer", "n_layers")
_TWO_STACKS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))
SHALLOW = 4
_TEMPLATE = 1


def trace_deep(setup: Setup, target: Target) -> Traced:
    """Trace a model by a few of its layers, and repeat them; whole, where its layers do not all do the same."""
    reduced, removed = shallow(setup)
    shape = setup.micro_batch, setup.length
    if not any(removed):
        return with_work(trace_step(setup, target), shape)
    traced = trace_step(reduced, target)
    trace = traced.trace
    try:
        inserted = inserted_layers(reduced, removed, traced)
        for template, extra in inserted:
            trace = deepen(trace, template, extra)
    except NotRepeatedError:
        return with_work(trace_step(setup, target), shape)
    total, trainable, layers = deep_facts(traced, inserted)
    traced = with_work(traced, shape, inserted, trainable / traced.trainable_parameters)
    return replace(
        traced, trace=trace, total_parameters=total, trainable_parameters=trainable, layers=layers, layer_parameters=()
    )


def shallow(setup: Setup) -> tuple[Setup, tuple[int, ...]]:
    """The setup with at most four layers a stack, and how many were taken out of each.

    It stays as it is where it has no more, or where its layers are known to differ.
    """
    keys = _depth_keys(setup.config)
    depths = [int(setup.config[key]) for key in keys]
    if max(depths, default=0) <= SHALLOW or not _are_alike(setup, depths):
        return setup, (0,) * len(keys)
    config: dict[str, Any] = dict(setup.config)
    for key, depth in zip(keys, depths, strict=True):
        config[key] = min(depth, SHALLOW)
    # What is listed layer by layer is cut with them.
    for key, value in setup.config.items():
        if isinstance(value, list | tuple) and len(keys) == 1 and len(value) == depths[0]:
            config[key] = list(value[:SHALLOW])
    return replace(setup, config=config), tuple(max(0, depth - SHALLOW) for depth in depths)


def inserted_layers(reduced: Setup, removed: tuple[int, ...], traced: Traced) -> tuple[tuple[int, int], ...]:
    """What makes the reduced model deep again, stack by stack: a layer, and how many more like it."""
    if not any(removed):
        return ()
    left = [int(reduced.config[key]) for key in _depth_keys(reduced.config)]
    if traced.layers != sum(left):
        raise NotRepeatedError  # the layers that were found are not those that the config counts
    starts = [sum(left[:stack]) + sum(removed[:stack]) for stack in range(len(left))]
    return tuple((start + _TEMPLATE, extra) for start, extra in zip(starts, removed, strict=True) if extra)


def deep_facts(traced: Traced, inserted: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """Parameters of the deep model, all and trainable, and its layers."""
    total, trainable, layers = traced.total_parameters, traced.trainable_parameters, traced.layers
    before = 0
    for template, extra in inserted:
        more, trains = traced.layer_parameters[template - before]
        total, trainable, layers, before = total + extra * more, trainable + extra * trains, layers + extra, before + extra
    return total, trainable, layers


def _depth_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    for pair in _TWO_STACKS:
        if all(isinstance(config.get(key), int) for key in pair):
            return pair
    return next(((key,) for key in _ONE_STACK if isinstance(config.get(key), int)), ())


def _are_alike(setup: Setup, depths: list[int]) -> bool:
    """Whether nothing tells one layer of a stack from another.

    Not a list of the config, as transformers completes it; not a class or a shape of the model as it is built (mixtures whose first layers
    are dense); not what is asked of single layers: checkpointing, freezing, adapters by number.
    """
    if setup.checkpointing not in {"none", "full", "every:1"} or any(
        re.search(r"[0-9]|\\|\*", name) for name in setup.lora_targets
    ):
        return False
    if not _are_built_alike(json.dumps(dict(setup.config), sort_keys=True, default=str), setup.task, tuple(depths)):
        return False
    lists = [value for value in vars(read_config(setup)).values() if isinstance(value, list | tuple) and len(value) in depths]
    if any(str(item) != str(value[0]) for value in lists for item in value):
        return False
    if not setup.freeze:
        return True
    blocks = find_layers(build_model(setup))
    return _stacks_repeat([[parameter.requires_grad for parameter in block.parameters()] for block in blocks], depths)


@cache
def _are_built_alike(config: str, task: Task, depths: tuple[int, ...]) -> bool:
    """Whether the layers of each stack have one class, and parameters of the same names, shapes and dtypes."""
    model = build_model(Setup(config=json.loads(config), task=task, micro_batch=1, length=1, attention=None))
    blocks = find_layers(model)
    looks = [
        [type(block).__name__, *((name, tuple(each.shape), each.dtype) for name, each in block.named_parameters())]
        for block in blocks
    ]
    return len(blocks) == sum(depths) and _stacks_repeat(looks, list(depths))


def _stacks_repeat(looks: Sequence[object], depths: list[int]) -> bool:
    ends = [sum(depths[: stack + 1]) for stack in range(len(depths))]
    return all(looks[index] == looks[index - 1] for index in range(1, len(looks)) if index not in ends)
