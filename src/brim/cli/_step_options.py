"""The options that describe one step: `estimate` has them, and so has every verb that chooses or runs a step.

Each is a field of `brim.workload.settings.Settings`, with the spelling of Transformers as a further name in config files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from brim.cli._command import Size, option
from brim.cli._numbers import POSITIVE, Number
from brim.locale import N_
from brim.workload.words import CHECKPOINTING, Attention, Loss, Method, Offload, Optimizer, Precision, Sharding, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DTYPES = ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16")


class Checkpoints(click.ParamType[str]):
    """`none`, `full` or `every:N`."""

    name = "checkpointing"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        from brim.locale import _

        if not isinstance(value, str) or CHECKPOINTING.fullmatch(value) is None:
            self.fail(_("{value!r} is not possible; write none, full or every:N.").format(value=value), param, ctx)
        return value


class Words(click.ParamType[tuple[str, ...]]):
    """Names with commas between them; a list in a config file."""

    name = "names"
    takes_lists = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names."""
        from brim.locale import _

        parts = value.split(",") if isinstance(value, str) else [str(part) for part in value]
        if not parts or not all(part.strip() for part in parts):
            self.fail(_("a name is empty."), param, ctx)
        return tuple(part.strip() for part in parts)


_OPTIM = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw-fused", "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "paged-adamw-8bit", "adafactor": "adafactor", "sgd": "sgd", "lion_32bit": "lion",
}  # fmt: skip
"""`optim` of Transformers' TrainingArguments."""
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash2"}

MICRO_BATCH = option(
    "--micro-batch",
    **POSITIVE,
    config_names=("per_device_train_batch_size", "micro_batch_size"),
    help=N_("Sequences in one forward pass on one device. Default: 1."),
)
STEP_OPTIONS = (
    option("--task", type=click.Choice(get_args(Task)), help=N_("What the model learns. Default: the model's own task.")),
    option("--method", type=click.Choice(get_args(Method)), help=N_("Which weights train. Default: full.")),
    option("--lora-rank", **POSITIVE, config_names=("lora_r",), help=N_("Rank of the adapters. Default: 8, as in peft.")),
    option("--lora-alpha", **POSITIVE, help=N_("Adapters are scaled by alpha / rank. Default: twice the rank.")),
    option("--lora-dropout", type=Number(0, below=1), metavar="X", help=N_("Dropout before the adapters. Default: 0.")),
    option(
        "--lora-targets",
        type=Words(),
        metavar="NAMES",
        config_names=("lora_target_modules", "lora_target"),
        help=N_("Modules that get adapters: q_proj,v_proj or all-linear. Default: peft's choice for the model."),
    ),
    option("--lora-dtype", type=click.Choice(_DTYPES), help=N_("Dtype of the adapters. Default: as peft makes them.")),
    option(
        "--base-dtype",
        type=click.Choice(_DTYPES),
        help=N_("LoRA: dtype of the frozen base. Default: half precision under amp-*."),
    ),
    option(
        "--freeze",
        multiple=True,
        metavar="PATTERN",
        help=N_("Regular expression: parameters in whose name it is found do not train."),
    ),
    MICRO_BATCH,
    option(
        "--seq-len",
        **POSITIVE,
        config_names=("max_length", "max_seq_length", "cutoff_len", "sequence_len"),
        help=N_("Tokens of a sequence, padding included. Default: 2048."),
    ),
    option(
        "--target-len",
        **POSITIVE,
        config_names=("max_target_length",),
        help=N_("seq2seq: tokens of a target. Default: as --seq-len."),
    ),
    option(
        "--accumulation",
        **POSITIVE,
        config_names=("gradient_accumulation_steps",),
        help=N_("Micro-batches per optimizer step. Default: 1."),
    ),
    option(
        "--precision",
        type=click.Choice(get_args(Precision)),
        config_words={"bf16": {True: "amp-bf16", False: None}, "fp16": {True: "amp-fp16", False: None}},
        help=N_("bf16, fp16: weights in half precision; amp-*: autocast. Default: fp32."),
    ),
    option(
        "--optimizer",
        type=click.Choice(get_args(Optimizer)),
        config_words={"optim": _OPTIM},
        help=N_("Default: adamw, as torch picks it on the device."),
    ),
    option(
        "--checkpointing",
        type=Checkpoints(),
        config_words={"gradient_checkpointing": {True: "full", False: "none"}},
        metavar="none|full|every:N",
        help=N_("Activation checkpointing. Default: none."),
    ),
    option(
        "--attention",
        type=click.Choice(get_args(Attention)),
        config_words={"attn_implementation": _ATTENTION},
        help=N_("Default: sdpa, or eager where the model has no sdpa."),
    ),
    option(
        "--padded/--unpadded", default=None, help=N_("Whether a mask with zeros reaches the attention kernels. Default: padded.")
    ),
    option(
        "--loss", type=click.Choice(get_args(Loss)), help=N_("chunked never holds the logits of all tokens. Default: standard.")
    ),
    option(
        "--max-grad-norm",
        type=Number(0),
        metavar="X",
        config_names=("max_grad_norm",),
        help=N_("Gradient clipping; 0 for none. Default: 1.0."),
    ),
    option(
        "--eval-batch",
        **POSITIVE,
        config_names=("per_device_eval_batch_size",),
        help=N_(
            "Sequences in a step of evaluation. Default: the micro-batch in `brim train`; predictions then count no evaluation."
        ),
    ),
    option(
        "--sharding",
        type=click.Choice(get_args(Sharding)),
        help=N_("How several GPUs share the work. Default: none, or ddp with several GPUs."),
    ),
    option("--offload", type=click.Choice(get_args(Offload)), help=N_("What lives in the host's memory. Default: none.")),
    option("--gradient-as-bucket-view", is_flag=True, default=None, help=N_("DDP: gradients are views of its buckets.")),
    option("--gpus", **POSITIVE, help=N_("GPUs in each node. Default: 1, or what --gpu says (t4*2).")),
    option("--nodes", **POSITIVE, help=N_("Default: 1.")),
)

DEVICE_OPTIONS = (
    option("--gpu", metavar="NAME", help=N_("A GPU of the catalogue: t4, rtx-3090, rtx-3080-20gb*2, 24GiB.")),
    option("--memory", type=Size(), help=N_("Limit of the device's memory: 12GiB.")),
    option("--device", type=click.Choice(["cpu", "cuda"]), help=N_("cpu: train on the CPU. cuda: the GPU of this machine.")),
)


def with_options(*groups: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...]) -> Callable[..., Any]:
    """Decorate a command with options, in the order in which help shows them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed([single for group in groups for single in group]):
            function = each(function)
        return function

    return decorate


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were really given, as `brim.estimate` takes them."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "max_grad_norm" in given and given["max_grad_norm"] == 0:
        given["max_grad_norm"] = None
    return given
