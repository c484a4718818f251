"""The reference step that an estimate describes, run on no memory.

Forward with labels (and an attention mask where the batch is padded) and no key-value cache, backward, clipping, optimizer step,
`zero_grad(set_to_none=True)`; twice, because the optimizer's state exists from the second step on; with accumulation, two micro-batches
a step, because gradients live through the second one's forward.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import UsageError
from brim.locale import _
from brim.memory.autocast import Autocast
from brim.memory.kernels import Kernels, scratch_bytes
from brim.memory.losses import use_chunked_loss
from brim.memory.optimizers import make_optimizer
from brim.memory.quantized import BITS, follow_peft, prepare, quantize, true_numel
from brim.memory.stream import Trace
from brim.memory.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.setup import Setup, Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What autocast casts to."""


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
    model = build_model(setup, backend=target.backend)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    optimizer = make_optimizer(setup.optimizer, trainable, target)
    batch = make_batch(setup)
    # The truth value that transformers asks of tensors is whether a mask or the positions are trivial: they are, but for the batch's mask.
    tracer = Tracer(scalar=True, scratch=partial(scratch_bytes, target), vocabulary=_vocabulary(model))
    autocast = Autocast(target.backend, HALVES[setup.precision]) if setup.precision in HALVES else None
    kernels = Kernels(target, tracer, autocast)
    blocks = find_layers(model)
    ready = autocast.around(model) if autocast else contextlib.nullcontext()
    with tracer, kernels, ready, tracer.layers(blocks):  # kernels in backward too: checkpointing runs forward again there
        tracer.adopt_model(model, blocks)
        tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
        if setup.padded:
            tracer.values.deny(batch["attention_mask"])
        rounds = 0
        for _step in range(2):
            for _micro in range(min(2, setup.accumulation)):
                tracer.go("forward", rounds, None)
                with autocast.region() if autocast else contextlib.nullcontext():
                    loss = model(**batch).loss
                if setup.precision == "amp-fp16":
                    loss = loss * torch.ones_like(loss)  # GradScaler: all that it adds are scalars; unscaling works in place
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
        del batch
        if setup.evaluation_batch is not None:
            tracer.go("evaluation", rounds - 1, None)
            with autocast.region() if autocast else contextlib.nullcontext():
                _evaluate(model, replace(setup, micro_batch=setup.evaluation_batch), tracer)
    tracer.trace.label_activations()
    return Traced(
        trace=tracer.trace,
        kernels=frozenset(kernels.chosen),
        total_parameters=true_numel(model),
        trainable_parameters=sum(parameter.numel() for parameter in trainable),
        layers=len(blocks),
    )


def _evaluate(model: nn.Module, setup: Setup, tracer: Tracer) -> None:
    """The Trainer's step of evaluation where no metrics are computed: forward without gradients; the logits die with it."""
    batch = make_batch(setup)
    tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
    if setup.padded:
        tracer.values.deny(batch["attention_mask"])
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()


def _backward(loss: torch.Tensor) -> None:
    """`loss.backward()` without its Python front: a function mode is off while it handles a call, and `Tensor.backward` is one.

    Checkpointing runs forward again inside backward, and must meet the target's kernels there too.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def build_model(setup: Setup, device: str = "meta", backend: str = "cuda") -> nn.Module:
    """The model of the task, prepared as it would be for training; on the meta device it takes no memory."""
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
    # Autocast keeps what trains in float32; a frozen base is held in the half dtype, and peft's adapters are float32.
    dtype = DTYPES.get(setup.precision) or (torch.float32 if setup.method == "full" else HALVES[setup.precision])
    with torch.device(device):
        model: Any = automatic.from_config(config, attn_implementation=setup.attention, dtype=dtype)
    model.train()
    if setup.method in BITS:
        quantize(model, BITS[setup.method], dtype, backend)
        if setup.prepared:
            prepare(model)
    if setup.checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.checkpointing != "full":
            _checkpoint_every(model, int(setup.checkpointing.partition(":")[2]))
    if setup.method != "full":
        model = _with_lora(model, setup, device)
        follow_peft(model)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in setup.freeze):
            parameter.requires_grad_(False)
    if setup.loss == "chunked":
        assert setup.task == "causal-lm", "the chunked loss is one of causal language models"
        use_chunked_loss(model)
    built: nn.Module = model
    return built


def _with_lora(model: Any, setup: Setup, device: str) -> Any:
    import peft

    targets: Any = setup.lora_targets or None
    if targets == ("all-linear",):
        targets = "all-linear"
    task = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}[setup.task]
    if setup.checkpointing != "none":
        model.enable_input_require_grads()
    with torch.device(device):
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


def make_batch(setup: Setup, device: str = "meta") -> dict[str, Any]:
    """Token ids, labels, and a mask where there is padding (its last tokens); on the meta device shapes only."""

    def tokens(length: int) -> torch.Tensor:
        # Above the special tokens, of which some models count the occurrences.
        return torch.randint(3, int(setup.config.get("vocab_size", 4)), (setup.micro_batch, length), device=device)

    batch: dict[str, Any] = {"input_ids": tokens(setup.length)}
    if setup.padded:
        batch["attention_mask"] = torch.ones(setup.micro_batch, setup.length, dtype=torch.long, device=device)
        batch["attention_mask"][:, -1:] = 0
    if setup.task == "classification":
        batch["labels"] = torch.randint(setup.num_labels, (setup.micro_batch,), device=device)
        batch["input_ids"][:, -1] = setup.config.get("eos_token_id") or 0
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


def _vocabulary(model: nn.Module) -> int | None:
    """The size of the last dimension of the logits; None where the task has no vocabulary to predict."""
    outputs: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return int(outputs.weight.shape[0]) if outputs is not None else None


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        for value in entry.values():
            with contextlib.suppress(AttributeError):
                if value.is_meta:
                    yield value
