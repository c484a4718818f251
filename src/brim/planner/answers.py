"""The answers of `--sweep`, `--solve` and `brim max`: small tables, each row a prediction, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from brim.machine.records import Machine
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records import Candidate
from brim.workload.records import Workload

Swept = Literal["micro-batch", "seq-len", "gpu"]
Solved = Literal["micro-batch", "seq-len", "gpu", "model"]
Verdict = Literal["conservative", "balanced", "recommended", "aggressive", "limit", "does-not-fit"]
"""By the share of the card that is predicted: below 50 %, below 80 %, below 95 %, below 98 %, up to 100 %, more."""

Ratio = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One value of a sweep, and what is predicted of it."""

    __pydantic_config__ = STRICT

    value: str
    """As it was asked: `48`, `1024`, `rtx-3090`."""
    micro_batch: PositiveInt
    """Sequences in the largest micro-batch of one rank."""
    accumulation: PositiveInt
    effective_batch: PositiveInt
    memory_bytes: Bytes
    """What nvidia-smi would show at the peak, whether it is there or not."""
    limit_bytes: Bytes
    share: Ratio
    """Of the limit: `memory_bytes / limit_bytes`."""
    verdict: Verdict
    reason: str
    fits_with: str = ""
    """Of a row that does not fit: the flags of the simplest structure under which it does; empty where none does."""
    fits_with_bytes: Bytes | None = None
    """What it then needs; None where no structure fits."""
    fits_with_margin: bool = True
    """Whether it then leaves the margin free too."""
    keeps_margin: bool
    """Whether what is predicted leaves the margin free, as a plan demands."""
    steps_per_epoch: PositiveInt | None = None
    """None where the number of samples is not known."""
    step_seconds: Seconds | None = None
    """None where it does not fit, as the other times."""
    epoch_seconds: Seconds | None = None
    tokens_per_second: Ratio | None = None
    speed: Ratio | None = None
    """Tokens per second against the first row that fits."""
    learning_rate_factor: Ratio = 1.0
    """What the learning rate should be multiplied by, against `Sweep.from_batch`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The rate itself, where one was given."""

    @property
    def fits(self) -> bool:
        """Whether the card holds it, margin or not."""
        return self.verdict != "does-not-fit"


@dataclass(frozen=True, kw_only=True)
class Sweep(Record):
    """The answer of `brim plan --sweep`: the same structure at several micro-batches or lengths, or on several GPUs."""

    schema: ClassVar[str] = "brim.sweep/1"

    model: str
    device: str
    """`gpu` where GPUs are compared."""
    what: Swept
    fits: bool
    """Whether any row does."""
    rows: tuple[SweepRow, ...]
    structure: dict[str, str] = field(default_factory=dict)
    """What all rows share: method with the rank and alpha of its adapters, precision, checkpointing, attention, optimizer, loss, sharding,
    offload, and the length unless that is swept."""
    from_batch: PositiveInt
    """The effective batch that the learning rate belongs to: as said, else that of the first row."""
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    elapsed_seconds: Seconds = 0.0
    brim_version: str = ""


@dataclass(frozen=True, kw_only=True)
class SolveRow:
    """One possible answer, tried."""

    __pydantic_config__ = STRICT

    value: str
    """What was asked for: `24`, `3072`, `rtx-3090`, `llama-3.1-8b`."""
    kind: str = ""
    """What it is the answer for, where there are several: `lora`, `checkpointing full`."""
    fits: bool
    memory_bytes: Bytes
    """What nvidia-smi would show at the peak."""
    limit_bytes: Bytes
    micro_batch: PositiveInt
    seq_len: PositiveInt
    effective_batch: PositiveInt | None = None
    step_seconds: Seconds | None = None
    epoch_seconds: Seconds | None = None
    tokens_per_second: Ratio | None = None
    price_per_hour: Ratio | None = None
    """Of all GPUs together."""
    price_per_epoch: Ratio | None = None
    price_per_million_tokens: Ratio | None = None
    reason: str = ""
    command: str = ""
    """What to type to plan it."""


@dataclass(frozen=True, kw_only=True)
class Solution(Record):
    """The answer of `brim plan --solve`."""

    schema: ClassVar[str] = "brim.solve/1"

    what: Solved
    model: str = ""
    """Empty where a model is looked for."""
    device: str = ""
    """Empty where a GPU is looked for."""
    fits: bool
    """Whether there is an answer."""
    answers: tuple[SolveRow, ...] = ()
    """The answer; one for each method where a model is looked for."""
    others: tuple[SolveRow, ...] = ()
    """Runners-up, and the next that does not do it."""
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    command: str = ""
    """What to type to ask again."""
    elapsed_seconds: Seconds = 0.0
    brim_version: str = ""


@dataclass(frozen=True, kw_only=True)
class Largest(Record):
    """The answer of `brim max`: the largest micro-batch."""

    schema: ClassVar[str] = "brim.max/1"

    workload: Workload
    machine: Machine
    fits: bool
    micro_batch: Count
    """Sequences; 0 where not even one fits."""
    limited_by: Literal["memory", "effective-batch", "search"]
    """`effective-batch`: a step has no more. `search`: more was not tried."""
    next_bytes: Bytes | None = None
    """What one sequence more would need on the device; None where it was not tried."""
    room_bytes: Bytes
    """What the device has beside the margin."""
    margin_bytes: Bytes
    best: Candidate | None
    """The configuration that holds it; None where nothing fits."""
    others: tuple[Candidate, ...] = ()
    """With other checkpointing or sharding, each with its own largest micro-batch."""
    alternatives: tuple[Candidate, ...] = ()
    """Where nothing fits: what would, on other terms."""
    missing_bytes: Bytes = 0
    train_command: str = ""
    """What to type to train with it; empty where nothing fits."""
    plan_command: str = ""
    """What to type to see the whole plan."""
    hints: tuple[str, ...] = ()
    """What was not tried, and would help."""
    assumptions: tuple[str, ...] = ()
    elapsed_seconds: Seconds = 0.0
    brim_version: str = ""
