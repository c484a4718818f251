"""The three records that pass between rooms: Plan, Measurement, and the entries of a Ledger.

Every picture and every audit is a pure view of these, so it can be redrawn later, elsewhere, without the hardware. Bytes are
integers, seconds are floats, tokens count what the loss or the padding really held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from brim.locale import _
from brim.machine.records import Machine
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.workload.records import Configuration, Workload
from brim.workload.settings import Settings
from brim.workload.words import Kind, Phase


def _from_word(value: object) -> object:
    return float(value) if isinstance(value, str) and value in {"NaN", "Infinity", "-Infinity"} else value


Real = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_from_word)]
"""A float that may be NaN or infinite: losses and gradient norms are, when a run diverges, and a ledger must be able to say so."""


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
    retries: Count = 0
    """How often cached segments must be given back for the step to run under the limit: it then fits, and is slower."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    saving: Saving | None = None
    """The one change that would save most; None where it was not looked for, as with `--json`, or nothing is worth saying."""
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
    advice: tuple[Advice, ...] = ()
    hints: tuple[str, ...] = ()
    """What was not allowed, or not tried, and would help."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    brim_version: str = ""

    def __post_init__(self) -> None:
        if self.fits and self.best is None:
            raise ValueError(_("a plan with fits = true must have best"))
        if self.best is not None and self.best.effective_batch != self.workload.effective_batch:
            text = _("the plan's effective batch is {found}, and the workload asked for {asked}")
            raise ValueError(text.format(found=self.best.effective_batch, asked=self.workload.effective_batch))


TrialVerdict = Literal["ok", "out-of-memory", "thrashing", "crash", "killed", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One child process that really ran one size."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    max_length: PositiveInt
    verdict: TrialVerdict
    phase: Phase | None = None
    """Where it failed; None if it did not."""
    steps: Count = 0
    """Optimizer steps that completed."""
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    step_seconds: Seconds | None = None
    """Median of the synchronised steps after warm-up."""
    wait_seconds: Seconds | None = None
    """Of that, waiting for data."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    allocator_retries: Count = 0
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class AffineFit:
    """Measured peak bytes as a function of the micro-batch: `base_bytes + bytes_per_sequence * micro_batch`."""

    __pydantic_config__ = STRICT

    base_bytes: float
    bytes_per_sequence: float
    residual_bytes: float
    """Largest distance of a measured point from the line."""


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A size that was run, and what it did."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    tokens_per_second: Annotated[float, Field(ge=0)]
    peak_bytes: Bytes


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """DataLoader settings that were measured, and the share of time that the step still waits for data."""

    __pydantic_config__ = STRICT

    num_workers: Count
    prefetch_factor: PositiveInt | None = None
    pin_memory: bool = False
    wait_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The answer of `brim probe`: what was run, trial by trial, what it used and took."""

    schema: ClassVar[str] = "brim.probe/1"

    workload: Workload
    machine: Machine
    trials: tuple[Trial, ...]
    largest: Proven | None = None
    fastest: Proven | None = None
    fit: AffineFit | None = None
    predicted: MemoryPrediction | None = None
    """What `brim estimate` said of the largest size, to be held against what was measured."""
    loader: LoaderSettings | None = None
    complete: bool = True
    """False after an interruption or a limit on trials or time: the trials stand, the search did not finish."""
    elapsed_seconds: Seconds = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ran = {trial.micro_batch for trial in self.trials if trial.verdict == "ok"}
        for name, proven in (("largest", self.largest), ("fastest", self.fastest)):
            if proven is not None and proven.micro_batch not in ran:
                text = _("{name} is {size}, a size that no trial ran")
                raise ValueError(text.format(name=name, size=proven.micro_batch))


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One micro-batch as it ran: its padded shape."""

    __pydantic_config__ = STRICT

    rank: Count
    sequences: PositiveInt
    length: PositiveInt
    """Tokens per row, padding included."""
    target_length: Count = 0
    """Tokens per row of the targets, for seq2seq."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One out-of-memory that was survived inside a step."""

    __pydantic_config__ = STRICT

    rank: Count
    phase: Phase
    sequences: PositiveInt
    """Size of the micro-batch that failed."""
    into: PositiveInt
    """Number of micro-batches that took its place."""
    length: PositiveInt | None = None
    """Tokens per row of the micro-batch that failed."""
    requested_bytes: Bytes | None = None
    """What the allocator was asked for when it failed, where its message says so."""


@dataclass(frozen=True, kw_only=True)
class BudgetLimit:
    """What one micro-batch may cost."""

    __pydantic_config__ = STRICT

    unit: Literal["bytes", "tokens", "sequences"]
    limit: Real


@dataclass(frozen=True, kw_only=True)
class LedgerHeader(Record):
    """What a run promises: the first line of `ledger.jsonl`, and one more line at each continuation."""

    schema: ClassVar[str] = "brim.ledger/1"

    kind: Literal["header"] = "header"
    started_at: str
    """ISO 8601, with the offset from UTC."""
    resumed_from_step: Count = 0
    """Steps that were already done. Lines of later steps that stand above this header are superseded by the lines below it."""
    seed: Count
    effective_batch: PositiveInt
    sequences_in_data: PositiveInt
    steps_per_epoch: PositiveInt
    drop_last: bool = False
    world_size: PositiveInt = 1
    budget: BudgetLimit
    device: str
    data_fingerprint: str = ""
    configuration: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """The settings of the run: names and plain values."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        full, short = divmod(self.sequences_in_data, self.effective_batch)
        steps = full + (short > 0 and not self.drop_last)
        if self.steps_per_epoch != steps:
            text = _("steps_per_epoch is {found}, and {sequences} sequences at an effective batch of {batch} make {steps}")
            raise ValueError(
                text.format(found=self.steps_per_epoch, sequences=self.sequences_in_data, batch=self.effective_batch, steps=steps)
            )


@dataclass(frozen=True, kw_only=True)
class LedgerEntry(Record):
    """One optimizer step: what was promised and what happened. One JSON line of `ledger.jsonl`."""

    schema: ClassVar[str] = "brim.ledger/1"

    kind: Literal["step"] = "step"
    step: PositiveInt
    """Global batches since the start of training, this one and skipped ones included."""
    epoch: Annotated[float, Field(ge=0)]
    promised_sequences: PositiveInt
    sequence_ids: tuple[Count, ...]
    """In the order of `slices`: the first micro-batch's sequences, then the second's."""
    sequences: Count
    tokens: Count
    """Real tokens, padding not counted."""
    padded_tokens: Count
    """Tokens of the padded shapes: what the device computed."""
    supervised_tokens: Count
    """Target tokens that the loss counted, over all micro-batches and ranks: the one divisor of the step."""
    slices: tuple[Slice, ...] = ()
    """The micro-batches whose gradients count, rank by rank, in the order in which they ran."""
    splits: tuple[Split, ...] = ()
    limit: Real | None = None
    """The limit of a micro-batch that was in force, in the unit of the header's budget."""
    skipped: bool = False
    """The optimizer did not step: a gradient was not finite under fp16's scaler, or no token was supervised."""
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    compute_seconds: Seconds
    wait_seconds: Seconds
    loss: Real | None = None
    grad_norm: Real | None = None
    learning_rate: Annotated[float, Field(ge=0)] | None = None

    def kept(self) -> bool:
        """Whether the step held exactly the sequences that were promised, each once."""
        return self.promised_sequences == self.sequences == len(set(self.sequence_ids)) == len(self.sequence_ids)


@dataclass(frozen=True, kw_only=True)
class LedgerSummary(Record):
    """How a run ended, and the sums of its steps since its header: the last line, where the run could still write it."""

    schema: ClassVar[str] = "brim.ledger/1"

    kind: Literal["summary"] = "summary"
    last_step: Count
    steps: Count
    sequences: Count
    tokens: Count
    padded_tokens: Count
    supervised_tokens: Count
    splits: Count
    skipped: Count
    seconds: Seconds
    """From the header to this line; what is not compute or waiting went to evaluation, saving and the like."""
    compute_seconds: Seconds
    wait_seconds: Seconds
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    last_loss: Real | None = None
    finished: bool
    """Whether the run came to its planned end."""
    reason: str = ""


@dataclass(frozen=True)
class Ledger:
    """A whole `ledger.jsonl`, as `brim.step.ledger.read_ledger` finds it."""

    headers: tuple[LedgerHeader, ...]
    steps: Sequence[LedgerEntry]
    """The steps in force, in their order. Each is read from the file when it is looked at: long runs do not fit into memory."""
    summary: LedgerSummary | None = None
    """None while the run goes on, and after one that was killed."""
    superseded: int = 0
    torn: bool = False
