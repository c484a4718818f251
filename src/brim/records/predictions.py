"""What is predicted: the bytes and seconds of a configuration, and the plan that is chosen by them."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from brim.locale import _
from brim.machine.records import Machine
from brim.printing import Printable
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.scaling import Scaling
from brim.workload.records import Configuration, Workload
from brim.workload.settings import Settings
from brim.workload.words import Kind, Loss, Phase

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Peak memory of one configuration on one device."""

    __pydantic_config__ = STRICT

    peak_allocated_bytes: Bytes
    """Largest sum of blocks that the allocator handed out."""
    peak_reserved_bytes: Bytes
    """Largest sum of segments that the allocator took from the device."""
    peak_device_bytes: Bytes
    """What nvidia-smi would show: reserved, context, workspaces outside the allocator, communication libraries."""
    smallest_surviving_limit_bytes: Bytes
    """The smallest device limit under which the step still runs, cached segments being given back when it is tight."""
    limit_bytes: Bytes
    fits: bool
    peak_phase: Phase
    by_phase: dict[Phase, Bytes] = field(default_factory=dict)
    """Largest sum of blocks in each phase of a step in steady state."""
    by_kind: dict[Kind, Bytes] = field(default_factory=dict)
    """At the peak of allocated bytes, block by block. All but the last two kinds add up to `peak_allocated_bytes`; `fragmentation` is what
    is reserved beyond that, `context` what the device holds beyond what is reserved."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One change, and what it would do."""

    __pydantic_config__ = STRICT

    change: dict[str, str]
    """Settings and their new values."""
    saved_bytes: Bytes
    """Of what the step needs."""
    smallest_surviving_limit_bytes: Bytes
    """What it would need then."""
    fits: bool
    same_step: bool
    """Whether the optimizer step stays the same: checkpointing or a smaller micro-batch change it by rounding only."""


@dataclass(frozen=True, kw_only=True)
class EmulatedCheck:
    """The same configuration, measured by torch on an emulated card without a memory limit."""

    __pydantic_config__ = STRICT

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    torch_version: str
    seconds: Seconds
    """Of the measurement, imports included."""


Source = Literal["given", "config", "default", "plan", "data"]
"""Where a value came from: the command line or a keyword, a config file, brim's default, the search of a plan, the lengths of the data."""


@dataclass(frozen=True, kw_only=True)
class Estimate(MemoryPrediction, Record):
    """The answer of `brim estimate`: the bytes of one step on one device."""

    schema: ClassVar[str] = "brim.estimate/1"

    model: str
    device: str
    """The GPU's catalogue name, `cpu`, or `gpu` where only the memory is known."""
    settings: Settings
    """What was estimated, with everything that was not said filled in."""
    attention_kernel: str
    """`flash`, `efficient`, `math`: what `sdpa` takes there; `flash2`; `eager`; several joined by `+`; `none`."""
    total_parameters: Count
    trainable_parameters: Count
    sources: dict[str, Source] = field(default_factory=dict)
    """Where each setting came from, by name."""
    retries: Count = 0
    """How often cached segments must be given back for the step to run under the limit: it then fits, and is slower."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    saving: Saving | None = None
    """The one change that would save most; None where it was not looked for, as with `--json`, or nothing is worth saying."""
    check: EmulatedCheck | None = None
    """With `--check`."""
    elapsed_seconds: Seconds = 0.0
    brim_version: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """Predicted time of one configuration on one machine."""

    __pydantic_config__ = STRICT

    step_seconds: Seconds
    """One optimizer step, accumulation included."""
    tokens_per_second: Annotated[float, Field(ge=0)]
    """Real tokens, padding not counted, over all ranks."""
    epoch_seconds: Seconds | None = None
    steps_per_epoch: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate(Configuration):
    """A configuration with what is predicted of it, and why it stands where it stands."""

    schema: ClassVar[str] = "brim.candidate/1"

    loss: Loss = "standard"
    memory: MemoryPrediction | None = None
    speed: SpeedPrediction | None = None
    reasons: tuple[str, ...] = ()


Strategy = Literal["shuffled", "grouped", "sliced"]
"""How sequences come into micro-batches: in random order; by `group_by_length`, across steps; by brim, sorted inside the step only."""


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What is known of the data's lengths, in tokens as the model sees them: cut at the longest that is allowed."""

    __pydantic_config__ = STRICT

    source: str
    """The file or folder; empty where only a length was given."""
    sequences: PositiveInt
    tokens: PositiveInt
    """Of all sequences, sources and targets."""
    counted_by: str
    """`tokenizer NAME`, or how tokens were guessed from characters."""
    exact: bool
    """Whether a tokenizer counted."""
    mean_tokens: Annotated[float, Field(gt=0)]
    median_tokens: PositiveInt
    p95_tokens: PositiveInt
    longest_tokens: PositiveInt
    """Before cutting."""
    cut: Count = 0
    """Sequences longer than allowed."""
    padding: dict[Strategy, Annotated[float, Field(ge=0, le=1)]] = field(default_factory=dict)
    """Share of the computed tokens that is padding, by strategy."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One setting of the recipe that should follow a change of the effective batch. Advice: nothing is applied unasked."""

    __pydantic_config__ = STRICT

    setting: str
    """`learning_rate`, `adam_beta2`, `warmup_steps`; `learning_rate_factor` where no rate was given."""
    now: float
    then: float
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Emitted(Printable):
    """A plan as files of other tools: what they hold, what could not be said, and what should be known."""

    texts: dict[str, str]
    """By file name."""
    paths: tuple[Path, ...] = ()
    """Where they were written; empty where they were not."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Formats that cannot say this plan, and why; with `all` only."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """The answer of `brim plan`: the workload, the machine, the configuration chosen, what else was considered, and why."""

    schema: ClassVar[str] = "brim.plan/1"

    workload: Workload
    machine: Machine
    fits: bool
    best: Candidate | None
    """None where nothing fits; `alternatives` then holds the nearest that would, on other terms."""
    alternatives: tuple[Candidate, ...] = ()
    considered: Count = 0
    """Configurations that were looked at: predicted, or ruled out by a bound."""
    elapsed_seconds: Seconds = 0.0
    margin_bytes: Bytes = 0
    """Kept free of the limit, on top of what is predicted."""
    missing_bytes: Bytes = 0
    """Where nothing fits: how much more the smallest configuration would need, margin included."""
    data: DataReport | None = None
    scaling: Scaling | None = None
    """What more or fewer GPUs would do; None for one device, and where nothing fits."""
    advice: tuple[Advice, ...] = ()
    hints: tuple[str, ...] = ()
    """What was not allowed, or not tried, and would help."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Where each setting of the configuration came from, by name."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    brim_version: str = ""

    def emit(
        self, *formats: str, output: str | os.PathLike[str] | None = None, data: str | os.PathLike[str] | None = None
    ) -> Emitted:
        """Files for other tools: transformers, accelerate, deepspeed, trl, axolotl, llama-factory, torchrun, slurm, or all.

        `texts` of the answer holds each file by its name. With `output`, a folder, they are written there too, as `brim plan --emit` does.
        """
        # By name: the planner is above the records.
        emit: Callable[..., Emitted] = importlib.import_module("brim.planner.emit.write").emit
        return emit(self, formats, Path(output) if output is not None else None, data=os.fspath(data) if data else None)

    def __post_init__(self) -> None:
        if self.fits and self.best is None:
            raise ValueError(_("a plan with fits = true must have best"))
        if self.best is not None and self.best.effective_batch != self.workload.effective_batch:
            text = _("the plan's effective batch is {found}, and the workload asked for {asked}")
            raise ValueError(text.format(found=self.best.effective_batch, asked=self.workload.effective_batch))
