"""The words of the command line, the config files and the records: one spelling each, everywhere.

Each type below is the complete list of what is understood; `typing.get_args` gives it to the command line and to messages.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field

Task = Literal["causal-lm", "seq2seq", "classification"]
"""What the model learns: next tokens; target from source; a label per sequence."""

Method = Literal["full", "lora", "qlora", "lora-8bit"]
"""Which weights train: all; adapters; adapters on a 4-bit base; adapters on an 8-bit base."""

Precision = Literal["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
"""`bf16` and `fp16` hold the weights themselves in half precision; `amp-*` keeps float32 weights and casts inside autocast."""

Optimizer = Literal[
    "adamw", "adamw-fused", "adamw-loop", "adamw-8bit", "paged-adamw-8bit", "adafactor", "sgd", "sgd-momentum", "lion"
]
"""`adamw` is what torch picks on the device: foreach on CUDA, the for-loop on the CPU."""

Attention = Literal["eager", "sdpa", "flash2"]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Offload = Literal["none", "optimizer", "parameters"]
Loss = Literal["standard", "chunked"]
"""`chunked` never holds the logits of all tokens at once (fused or chunked cross-entropy)."""

DType = Literal["float32", "bfloat16", "float16"]

CHECKPOINTING: Final = re.compile(r"none|full|every:[1-9][0-9]*")
Checkpointing = Annotated[str, Field(pattern=f"^(?:{CHECKPOINTING.pattern})$")]
"""Activation checkpointing: `none`, `full` (every layer), or `every:N` (every N-th layer)."""

Phase = Literal["forward", "backward", "optimizer", "evaluation", "saving"]
"""The parts of a training step, and what happens between steps, as memory and messages name them."""

Kind = Literal[
    "parameters", "gradients", "optimizer", "activations", "logits", "temporary",
    "buffers", "communication", "workspace", "context", "fragmentation",
]  # fmt: skip
"""What a byte on the device is used for."""
