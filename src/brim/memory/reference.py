"""The reference step that an estimate describes, run on no memory.

Forward with labels (and an attention mask where the batch is padded) and no key-value cache, backward, clipping, optimizer step,
`zero_grad(set_to_none=True)`; twice, because the optimizer's state exists from the second step on; with accumulation, two micro-batches
a step, because gradients live through the second one's forward.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import UsageError
from brim.locale import _
from brim.memory.kernels import Kernels, Target, scratch_bytes
from brim.memory.optimizers import make_optimizer
from brim.memory.trace import Trace, Tracer
from brim.workload.words import Attention, Method, Optimizer, Precision, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that shapes the step on one device."""

    config: Mapping[str, Any]
    """The model's config.json."""
    task: Task
    micro_batch: int
    length: int
    target_length: int | None = None
    accumulation: int = 1
    padded: bool = True
    method: Method = "full"
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    checkpointing: str = "none"
    attention: Attention = "sdpa"
    max_grad_norm: float | None = 1.0
    num_labels: int = 2


@dataclass(frozen=True)
class Traced:
    """A step that was traced."""

    trace: Trace
    kernels: frozenset[str]
    total_parameters: int
    trainable_parameters: int
    layers: int


def trace_step(setup: Setup, target: Target) -> Traced:
    """Build the model on no memory and run two steps of it."""
    model = build_model(setup)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    optimizer = make_optimizer(setup.optimizer, trainable, target)
    batch = make_batch(setup)
    # The one truth value that transformers asks of a tensor is whether a mask or the positions are trivial; padded ones are not.
    tracer = Tracer(scalar=not setup.padded, scratch=partial(scratch_bytes, target))
    kernels = Kernels(target, tracer)
    blocks = find_layers(model)
    with tracer, kernels, tracer.layers(blocks):  # kernels in backward too: checkpointing runs forward again there
        tracer.adopt(model.parameters(), "parameters")
        tracer.adopt(model.buffers(), "buffers")
        tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
        rounds = 0
        for _step in range(2):
            for _micro in range(min(2, setup.accumulation)):
                tracer.go("forward", rounds, None)
                loss = model(**batch).loss
                if setup.accumulation > 1:
                    loss = loss / setup.accumulation
                tracer.go("backward", rounds, None)
                _backward(loss)
                del loss
                rounds += 1
            tracer.adopt((parameter.grad for parameter in trainable if parameter.grad is not None), "gradients")
            tracer.go("clip", rounds - 1, None)
            if setup.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(trainable, setup.max_grad_norm)
            tracer.go("optimizer", rounds - 1, None)
            optimizer.step()
            tracer.adopt(_state_tensors(optimizer.state), "optimizer")
            optimizer.zero_grad(set_to_none=True)
    return Traced(
        trace=tracer.trace,
        kernels=frozenset(kernels.chosen),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameters=sum(parameter.numel() for parameter in trainable),
        layers=len(blocks),
    )


def _backward(loss: torch.Tensor) -> None:
    """`loss.backward()` without its Python front: a function mode is off while it handles a call, and `Tensor.backward` is one.

    Checkpointing runs forward again inside backward, and must meet the target's kernels there too.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def build_model(setup: Setup) -> nn.Module:
    """The model of the task, prepared as it would be for training, on the meta device."""
    import transformers

    facts = {key: value for key, value in setup.config.items() if key not in {"architectures", "torch_dtype", "dtype"}}
    if setup.task == "classification":
        facts["num_labels"] = setup.num_labels
        facts.setdefault("pad_token_id", 0)
    config = transformers.AutoConfig.for_model(**facts)
    automatic: Any = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "classification": transformers.AutoModelForSequenceClassification,
    }[setup.task]
    dtype = DTYPES.get(setup.precision, torch.float32)
    with torch.device("meta"):
        model: Any = automatic.from_config(config, attn_implementation=setup.attention, dtype=dtype)
    model.train()
    if setup.checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.checkpointing != "full":
            _checkpoint_every(model, int(setup.checkpointing.partition(":")[2]))
    if setup.method != "full":
        model = _with_lora(model, setup)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in setup.freeze):
            parameter.requires_grad_(False)
    built: nn.Module = model
    return built


def _with_lora(model: Any, setup: Setup) -> Any:
    import peft

    targets: Any = setup.lora_targets or None
    if targets == ("all-linear",):
        targets = "all-linear"
    task = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}[setup.task]
    if setup.checkpointing != "none":
        model.enable_input_require_grads()
    with torch.device("meta"):
        return peft.get_peft_model(model, peft.LoraConfig(r=setup.lora_rank, target_modules=targets, task_type=task))


def _checkpoint_every(model: nn.Module, every: int) -> None:
    """Keep checkpointing on every `every`-th layer only."""
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True and _is_layer(module)
    ]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]


def _is_layer(module: nn.Module) -> bool:
    import transformers

    layer = getattr(transformers.modeling_layers, "GradientCheckpointingLayer", None)
    return layer is not None and isinstance(module, layer)


def make_batch(setup: Setup) -> dict[str, Any]:
    """Token ids, labels, and a mask where there is padding: shapes only."""

    def tokens(length: int) -> torch.Tensor:
        return torch.empty(setup.micro_batch, length, dtype=torch.long, device="meta")

    batch: dict[str, Any] = {"input_ids": tokens(setup.length)}
    if setup.padded:
        batch["attention_mask"] = tokens(setup.length)
    if setup.task == "classification":
        batch["labels"] = torch.empty(setup.micro_batch, dtype=torch.long, device="meta")
    else:
        batch["labels"] = tokens(setup.target_length or setup.length)
    if setup.task != "classification":
        batch["use_cache"] = False
    return batch


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in the order in which they run: every list of modules that are all of one class."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = Counter(type(block) for block in module)
            if len(kinds) == 1 and any(True for _parameter in module[0].parameters()) and not _is_inside(module, found):
                found.extend(module)
    return found


def _is_inside(candidate: nn.Module, found: list[nn.Module]) -> bool:
    return any(candidate is inner for outer in found for inner in outer.modules())


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        for value in entry.values():
            with contextlib.suppress(AttributeError):
                if value.is_meta:
                    yield value
