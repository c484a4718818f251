"""How one step is to be run: every setting that `brim estimate` knows, in the words of the command line."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, TypeAdapter, ValidationError

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.record import STRICT, PositiveInt
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

if TYPE_CHECKING:
    from brim.workload.records import Workload

if TYPE_CHECKING:
    from collections.abc import Collection

DEFAULT_LENGTH = 2048
DEFAULT_RANK = 8
"""peft's own default."""
ALPHA_PER_RANK = 2
"""Default `lora_alpha` is twice the rank, so that the scale of the adapters (alpha / rank) does not depend on the rank."""
ALPHA_BEFORE_OPTION = 8
"""peft's default, which every run used before `lora_alpha` was a setting: what a record without the field means."""

Dropout = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One step, on each of `gpus * nodes` devices. None: not said, so the usual thing, which the answer states."""

    __pydantic_config__ = STRICT

    task: Task | None = None
    method: Method = "full"
    lora_rank: PositiveInt | None = None
    lora_targets: tuple[str, ...] = ()
    """Module names, or `all-linear`; empty: peft's default for the model."""
    lora_alpha: PositiveInt | None = None
    """Adapters are scaled by alpha / rank. In a record, None means `ALPHA_BEFORE_OPTION` (see `recorded_alpha`)."""
    lora_dropout: Dropout = 0.0
    lora_dtype: DType | None = None
    base_dtype: DType | None = None
    freeze: tuple[str, ...] = ()
    """Regular expressions; a parameter in whose name one is found does not train."""
    micro_batch: PositiveInt = 1
    seq_len: PositiveInt | None = None
    """Tokens of a sequence, padding included; of the source, where there is a target."""
    target_len: PositiveInt | None = None
    accumulation: PositiveInt = 1
    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    checkpointing: Checkpointing = "none"
    attention: Attention | None = None
    padded: bool = True
    loss: Loss = "standard"
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping; None: off."""
    eval_batch: PositiveInt | None = None
    """Sequences in a step of evaluation; None: no evaluation."""
    sharding: Sharding | None = None
    offload: Offload = "none"
    gradient_as_bucket_view: bool = False
    sync_each_batch: bool = False
    """FSDP2: gradients are scattered after every micro-batch, as `brim train` does; the Trainer keeps whole ones until the last."""
    gpus: PositiveInt = 1
    nodes: PositiveInt = 1

    @property
    def ranks(self) -> int:
        """Devices over all nodes."""
        return self.gpus * self.nodes


def recorded_alpha(record: Settings | Workload) -> int | None:
    """The alpha of a record that was filled in when it was written; None without adapters."""
    return (record.lora_alpha or ALPHA_BEFORE_OPTION) if record.method != "full" else None


def method_words(record: Settings | Workload) -> str:
    """`full`, or `lora r=8 alpha=16 dropout=0.05`."""
    if record.lora_rank is None:
        return record.method
    dropout = f" dropout={record.lora_dropout:g}" if record.lora_dropout else ""
    return f"{record.method} r={record.lora_rank} alpha={recorded_alpha(record)}{dropout}"


_ALWAYS_NAMED = (
    "method",
    "precision",
    "optimizer",
    "attention",
    "checkpointing",
    "loss",
    "seq_len",
    "micro_batch",
    "accumulation",
)


def settings_to_name(settings: Settings, given: Collection[str]) -> tuple[str, ...]:
    """What an answer names: the settings that decide most, those that were given, and how several GPUs share the work."""
    shared = ("sharding",) if settings.ranks > 1 else ()
    known = (field.name for field in fields(settings) if field.name in given)
    return tuple(dict.fromkeys((*_ALWAYS_NAMED, *shared, *known)))


def read_settings(given: dict[str, Any]) -> Settings:
    """Settings from keyword arguments, each checked; a word that nobody knows is answered with the nearest one."""
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            text = _("There is no setting {name!r}.").format(name=name)
            raise UsageError(sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else ""))
    given = given | {name: _DTYPES.get(str(given[name]), given[name]) for name in ("lora_dtype", "base_dtype") if name in given}
    tuples = {name: (value,) if isinstance(value, str) else value for name, value in given.items() if name in _MANY}
    try:
        return TypeAdapter(Settings).validate_python({**given, **tuples})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _wrong(str(first["loc"][0]), first["input"], first["msg"]) from error


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MANY = ("lora_targets", "freeze")
_WORDS = {
    "task": Task, "method": Method, "precision": Precision, "optimizer": Optimizer, "attention": Attention,
    "loss": Loss, "sharding": Sharding, "offload": Offload, "lora_dtype": DType, "base_dtype": DType,
}  # fmt: skip


def _wrong(name: str, value: object, why: str) -> UsageError:
    text = _("{name}: {value!r} is not possible.").format(name=name, value=value)
    if name in _WORDS:
        words = get_args(_WORDS[name])
        near = difflib.get_close_matches(str(value), words, n=1)
        choices = _("One of: {words}.").format(words=", ".join(words))
        return UsageError(sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else choices))
    if name == "checkpointing":
        return UsageError(sentences(text, _("Write none, full or every:N.")))
    return UsageError(sentences(text, why + "."))


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Refuse what is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            text = _("--freeze {pattern!r} is not a regular expression: {why}.")
            raise UsageError(text.format(pattern=pattern, why=error)) from error
