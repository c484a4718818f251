"""What to train (`Workload`), and one way to slice and place it (`Configuration`).

A workload is the promise: the model, the data's lengths, the recipe and the effective batch. It says nothing of memory. A
configuration is one answer to the question how to keep the promise on a machine: everything in it may change from machine to
machine, and the optimizer step stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from brim.locale import _
from brim.record import STRICT, Count, PositiveInt, Record
from brim.workload.words import (
    Attention,
    Checkpointing,
    DType,
    Loss,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
    Task,
)


@dataclass(frozen=True, kw_only=True)
class LengthCount:
    """One bar of a length histogram: how many sequences have this many tokens."""

    __pydantic_config__ = STRICT

    tokens: PositiveInt
    """Tokens of the sequence; of the source, where there is a target."""
    sequences: PositiveInt
    target_tokens: Count = 0
    """Tokens of the target sequence (seq2seq); 0 for decoder-only models and classifiers."""


@dataclass(frozen=True, kw_only=True)
class Workload(Record):
    """What to train, as it was asked for: a function of model, data, seed and recipe, never of the hardware."""

    schema: ClassVar[str] = "brim.workload/1"

    model: Annotated[str, Field(min_length=1)]
    """Catalogue name, Hub id, folder, path of a `config.json`, or `module:function`."""
    task: Task
    effective_batch: PositiveInt
    """Sequences per optimizer step, over all micro-batches and all ranks. Exact, always."""

    max_length: PositiveInt
    """Longest sequence in tokens; of the source, where there is a target. Longer ones are cut."""
    target_length: PositiveInt | None = None
    """Longest target in tokens (seq2seq only)."""
    lengths: tuple[LengthCount, ...] = ()
    """Length histogram of the data; empty where only `max_length` is known."""
    samples: PositiveInt | None = None
    """Sequences in one epoch, where known."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    padded: bool = True
    """Whether batches hold padding, so that an attention mask with zeros reaches the kernels."""

    method: Method = "full"
    lora_rank: PositiveInt | None = None
    lora_targets: tuple[str, ...] = ()
    """Module names, or `all-linear`; empty means peft's own default for the model."""
    lora_alpha: PositiveInt | None = None
    """The adapters are scaled by alpha / rank. Records of LoRA methods without it were written when it was always 8."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lora_dtype: DType | None = None
    base_dtype: DType | None = None
    """Dtype of the frozen base under LoRA; None: half precision under amp, else as the precision says."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names that do not train."""
    optimizer: Optimizer = "adamw"
    loss: Loss = "standard"
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    warmup_steps: Count | None = None
    """Optimizer steps over which the learning rate rises; None: not said."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping; None: off."""
    seed: Count = 42

    def __post_init__(self) -> None:
        if self.target_length is not None and self.task != "seq2seq":
            raise ValueError(_("target_length belongs to seq2seq, and the task is {task}").format(task=self.task))
        if self.task == "seq2seq" and self.target_length is None:
            raise ValueError(_("a seq2seq workload needs target_length"))
        if self.method == "full" and (self.lora_rank or self.lora_targets or self.lora_alpha or self.lora_dropout):
            raise ValueError(
                _("lora_rank, lora_targets, lora_alpha and lora_dropout belong to LoRA methods, and the method is full")
            )


@dataclass(frozen=True, kw_only=True)
class Configuration(Record):
    """One way to slice a global batch and to place it on a machine."""

    schema: ClassVar[str] = "brim.configuration/1"

    micro_batch: PositiveInt
    """Sequences in the largest micro-batch of one rank."""
    accumulation: PositiveInt
    """Micro-batches per optimizer step on each rank."""
    world_size: PositiveInt = 1
    """Ranks: GPUs over all nodes."""
    effective_batch: PositiveInt
    """Sequences per optimizer step over all ranks; the sum of all slices."""
    slices: tuple[Count, ...] = ()
    """Where micro-batches differ: the size of every micro-batch of one optimizer step, `accumulation` of them for rank 0, then for
    rank 1, and so on. Empty where all are `micro_batch`. A rank without work in a round has a 0."""
    eval_batch: PositiveInt | None = None

    precision: Precision = "fp32"
    checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    optimizer: Optimizer = "adamw"
    method: Method = "full"
    sharding: Sharding = "none"
    offload: Offload = "none"

    num_workers: Count = 0
    """DataLoader worker processes per rank."""
    pin_memory: bool = False
    prefetch_factor: PositiveInt | None = None
    """Batches each worker prepares ahead; None without workers."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None

    def __post_init__(self) -> None:
        if not self.slices:
            product = self.micro_batch * self.accumulation * self.world_size
            if product != self.effective_batch:
                text = _(
                    "micro_batch {micro} x accumulation {accumulation} x world_size {world} = {product}, and effective_batch is "
                    "{effective}: unequal micro-batches need slices"
                )
                raise ValueError(
                    text.format(
                        micro=self.micro_batch,
                        accumulation=self.accumulation,
                        world=self.world_size,
                        product=product,
                        effective=self.effective_batch,
                    )
                )
            return
        if len(self.slices) != self.accumulation * self.world_size:
            text = _("{found} slices, and accumulation {accumulation} x world_size {world} needs {needed}")
            needed = self.accumulation * self.world_size
            found = len(self.slices)
            raise ValueError(text.format(found=found, accumulation=self.accumulation, world=self.world_size, needed=needed))
        if sum(self.slices) != self.effective_batch:
            text = _("the slices sum to {sum}, and effective_batch is {effective}")
            raise ValueError(text.format(sum=sum(self.slices), effective=self.effective_batch))
        if max(self.slices) != self.micro_batch:
            text = _("the largest slice is {largest}, and micro_batch is {micro}")
            raise ValueError(text.format(largest=max(self.slices), micro=self.micro_batch))

    def slices_of_rank(self, rank: int) -> tuple[int, ...]:
        """The micro-batches of one rank in one optimizer step, in order."""
        assert 0 <= rank < self.world_size
        if not self.slices:
            return (self.micro_batch,) * self.accumulation
        return self.slices[rank * self.accumulation : (rank + 1) * self.accumulation]
