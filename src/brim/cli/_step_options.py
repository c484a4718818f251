"""The options that describe one step: `estimate` has them, and so has every verb that chooses or runs a step.

Each is a field of `brim.workload.settings.Settings`, with the spelling of Transformers as a further name in config files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from brim.cli._aliases import DATA_NAMES, Refused
from brim.cli._command import Size, option
from brim.cli._numbers import POSITIVE, Number
from brim.locale import N_
from brim.workload.words import CHECKPOINTING, Attention, Loss, Method, Offload, Optimizer, Precision, Sharding, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from brim.records.predictions import Source

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
_YES_OR_NOTHING: dict[str, dict[Any, Any]] = {
    name: {True: method, False: None}
    for name, method in {
        "lora": "lora", "use_peft": "lora", "qlora": "qlora", "load_in_4bit": "qlora", "load_in_8bit": "lora-8bit",
    }.items()
}  # fmt: skip
_METHODS = {
    **_YES_OR_NOTHING,
    "finetuning_type": {"full": "full", "lora": "lora"},
    "adapter": {"lora": "lora", "qlora": "qlora"},
}
"""peft, TRL and transformers; LLaMA-Factory; axolotl."""
MICRO_BATCH_NAMES = (
    "per_device_train_batch_size", "per_device_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip
LENGTH_NAMES = ("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "model_max_length", "block_size")
EPOCHS_NAMES = ("num_train_epochs", "num_epochs", "max_epochs")
_FOUND_ANYWAY = N_("Leave it out: the micro-batch is chosen to fit, and split where memory runs out; the effective batch stays.")

MICRO_BATCH = option(
    "--micro-batch",
    **POSITIVE,
    config_names=MICRO_BATCH_NAMES,
    config_words={"auto_find_batch_size": {False: None, True: Refused(_FOUND_ANYWAY)}},
    help=N_("Sequences in one forward pass on one device. Default: 1."),
)


class Columns(click.ParamType[dict[str, str]]):
    """`source=question,target=answer`; a mapping in a config file."""

    name = "columns"
    takes_lists = True
    takes_mappings = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        """What each column means."""
        if isinstance(value, dict):
            return {str(role): str(column) for role, column in value.items()}
        from brim.locale import _

        pairs = [[half.strip() for half in part.partition("=")] for part in value.split(",")]
        for part in pairs:
            if not all(part):
                text = _("{given!r} is not MEANING=COLUMN. Example: prompt=question,response=answer.")
                self.fail(text.format(given="".join(part)), param, ctx)
        found = {role: column for role, _equals, column in pairs}
        if len(found) < len(pairs):
            self.fail(_("{given!r} gives a meaning twice.").format(given=value), param, ctx)
        return found


def _one_or_several(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    return (value if len(value) > 1 else value[0]) if value else None


def data_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--data`, once or several times; a list in a config file."""
    return option("--data", multiple=True, metavar="FILE", config_names=DATA_NAMES, callback=_one_or_several, help=help_text)


COLUMNS_OPTION = option(
    "--columns",
    type=Columns(),
    metavar="NAMES",
    help=N_(
        "What your columns are: prompt=q,response=a; any name that brim knows, before your own. Default: recognised by their names."
    ),
)

STEP_OPTIONS = (
    option("--task", type=click.Choice(get_args(Task)), help=N_("What the model learns. Default: the model's own task.")),
    option(
        "--method", type=click.Choice(get_args(Method)), config_words=_METHODS, help=N_("Which weights train. Default: full.")
    ),
    option("--lora-rank", **POSITIVE, config_names=("lora_r",), help=N_("Rank of the adapters. Default: 8, as in peft.")),
    option("--lora-alpha", **POSITIVE, help=N_("Adapters are scaled by alpha / rank. Default: twice the rank.")),
    option("--lora-dropout", type=Number(0, below=1), metavar="X", help=N_("Dropout before the adapters. Default: 0.")),
    option(
        "--lora-targets",
        type=Words(),
        metavar="NAMES",
        config_names=("lora_target_modules", "lora_target", "target_modules"),
        config_words={"lora_target_linear": {True: "all-linear", False: None}},
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
        "--max-length",
        **POSITIVE,
        config_names=LENGTH_NAMES,
        help=N_("Tokens of a sequence, padding included; longer ones are cut. Default: 2048, or what the model has."),
    ),
    option(
        "--target-len",
        **POSITIVE,
        config_names=("max_target_length",),
        help=N_("seq2seq: tokens of a target. Default: as --seq-len."),
    ),
    option(
        "--accumulation",
        "--grad-accum",
        **POSITIVE,
        config_names=("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps", "accumulation_steps"),
        help=N_("Micro-batches per optimizer step. Default: 1."),
    ),
    option(
        "--precision",
        type=click.Choice(get_args(Precision)),
        config_words={
            "bf16": {True: "amp-bf16", False: None},
            "fp16": {True: "amp-fp16", False: None},
            "mixed_precision": {"bf16": "amp-bf16", "fp16": "amp-fp16", "no": "fp32"},
        },
        help=N_(
            "bf16, fp16: weights in half precision; amp-*: autocast. Default: amp-bf16, amp-fp16 without bfloat16, fp32 on the CPU."
        ),
    ),
    option(
        "--optimizer",
        type=click.Choice(get_args(Optimizer)),
        config_words={"optim": _OPTIM},
        help=N_("Default: adamw-fused; adamw on the CPU."),
    ),
    option(
        "--checkpointing",
        type=Checkpoints(),
        config_words={name: {True: "full", False: "none"} for name in ("gradient_checkpointing", "grad_checkpointing")},
        metavar="none|full|every:N",
        help=N_("Activation checkpointing. Default: none."),
    ),
    option(
        "--attention",
        type=click.Choice(get_args(Attention)),
        config_words={"attn_implementation": _ATTENTION, "flash_attention": {True: "flash2", False: None}},
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
        config_names=("gradient_clipping", "grad_clip", "clip_grad_norm"),
        help=N_("Gradient clipping; 0 for none. Default: 1.0."),
    ),
    option(
        "--eval-batch",
        **POSITIVE,
        config_names=("per_device_eval_batch_size", "eval_batch_size"),
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
    option(
        "--gpus",
        **POSITIVE,
        config_names=("num_gpus", "nproc_per_node"),
        help=N_("GPUs in each node. Default: 1, or what --gpu says (t4*2)."),
    ),
    option("--nodes", **POSITIVE, config_names=("num_nodes", "nnodes", "num_machines"), help=N_("Default: 1.")),
)

DEVICE_OPTIONS = (
    option("--gpu", metavar="NAME", help=N_("A GPU of the catalogue: t4, rtx-3090, rtx-3080-20gb*2, 24GiB.")),
    option("--memory", type=Size(), config_names=("vram",), help=N_("Limit of the device's memory: 12GiB.")),
    option("--device", type=click.Choice(["cpu", "cuda"]), help=N_("cpu: train on the CPU. cuda: the GPU of this machine.")),
)


def with_options(*groups: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...]) -> Callable[..., Any]:
    """Decorate a command with options, in the order in which help shows them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed([single for group in groups for single in group]):
            function = each(function)
        return function

    return decorate


def from_config(ctx: click.Context, sources: Mapping[str, Source]) -> dict[str, Source]:
    """The same, with what a config file gave told from what was typed."""
    filed = {name for name in sources if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP}
    return {name: "config" if source == "given" and name in filed else source for name, source in sources.items()}


def source_rows(sources: Mapping[str, Source], values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where the settings of an answer came from, one row for each origin."""
    from brim.locale import _

    headings: dict[Source, str] = {
        "given": _("Given"), "config": _("Config file"), "data": _("From the data"), "plan": _("Chosen"), "default": _("Defaults"),
    }  # fmt: skip
    rows = []
    for source, heading in headings.items():
        names = [name for name, each in sources.items() if each == source and values.get(name) is not None]
        if names:
            rows.append((heading, ", ".join(f"{name.replace('_', '-')} {_in_words(values[name])}" for name in names)))
    return rows


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were really given, as `brim.estimate` takes them."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "max_grad_norm" in given and given["max_grad_norm"] == 0:
        given["max_grad_norm"] = None
    return given
