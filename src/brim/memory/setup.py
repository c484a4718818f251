"""What is to be traced (`Setup`) and for which device (`Target`). No torch here: a cached answer is found without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from brim.workload.words import Attention, DType, Loss, Method, Optimizer, Precision, Task

if TYPE_CHECKING:
    from brim.machine.records import GPU


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
    lora_alpha: int = 16
    """A factor: the bytes and the time of a step do not depend on it."""
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    lora_dtype: DType | None = None
    """None: as peft makes them, float32 beside a base in half precision."""
    base_dtype: DType | None = None
    """LoRA methods: dtype of what is frozen and not quantised; None: the half of `amp-*`, else what the precision says."""
    prepared: bool = True
    """Quantised base: whether `prepare_model_for_kbit_training` holds what is not quantised in float32."""
    freeze: tuple[str, ...] = ()
    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    checkpointing: str = "none"
    attention: Attention | None = "sdpa"
    """None: what transformers takes by itself, `sdpa` where the model has it, else `eager`."""
    max_grad_norm: float | None = 1.0
    num_labels: int = 2
    evaluation_batch: int | None = None
    """Sequences in a step of evaluation, which comes after training; None for none."""
    loss: Loss = "standard"
    """`chunked`, for causal language models only, is described in `brim.memory.tracing.losses`."""


@dataclass(frozen=True)
class Target:
    """The device that an estimate is for."""

    backend: Literal["cpu", "cuda"]
    compute_capability: tuple[int, int] | None = None
    threads: int = 1
    """CPU: OpenMP threads, each of which has a scratch buffer in attention."""
    multiplies_bf16: bool = True
    """CPU: it has instructions for bfloat16 products. Without them, oneDNN adds a product up in a float32 buffer of the result's size."""

    @classmethod
    def of_gpu(cls, gpu: GPU) -> Target:
        """The target that a catalogue entry describes; an unknown card counts as a current one."""
        return cls("cuda", gpu.sm or (8, 0))
