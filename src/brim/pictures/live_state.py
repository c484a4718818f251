"""What a run does at this moment: all that the live view shows, and what `brim watch --json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.ledgers import Pulse, Real, Share, Split
from brim.workload.words import Kind

Status = Literal["waiting", "starting", "running", "stalled", "finished", "ended", "gone"]
"""`waiting`: there is no ledger yet. `starting`: no step yet. `stalled`: nothing has been written for longer than a step should take.
`ended`: it said why it ended before its planned end. `gone`: its process is not there any more, and it did not say why."""

BAD: tuple[Status, ...] = ("ended", "gone")
OVER: tuple[Status, ...] = ("finished", *BAD)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Per second of training: computing and waiting for data, not evaluating or saving. None: not known."""

    __pydantic_config__ = STRICT

    tokens_per_second: Share | None = None
    """Real tokens, padding not counted."""
    padded_tokens_per_second: Share | None = None
    """Tokens of the padded shapes: what the device computed."""
    step_seconds: Seconds | None = None
    wait_share: Share | None = None
    """Of the time of a step: waiting for data."""


@dataclass(frozen=True, kw_only=True)
class MemoryInUse:
    """Peaks as they were measured against the limit in force, and as they were predicted against the limit that was asked for."""

    __pydantic_config__ = STRICT

    peak_bytes: Bytes | None = None
    """Of the last steps."""
    highest_bytes: Bytes | None = None
    """Of all steps that were read."""
    limit_bytes: Bytes | None = None
    predicted_bytes: Bytes | None = None
    predicted_limit_bytes: Bytes | None = None
    by_kind: dict[Kind, Bytes] = field(default_factory=dict)
    """As predicted at the peak, the largest first."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Promise against fact, over the steps that were read."""

    __pydantic_config__ = STRICT

    steps: Count = 0
    """That were read and are in force."""
    promised: Count = 0
    """Of them, those for which a number of sequences was promised."""
    kept: Count = 0
    """Of those, the ones that held exactly these sequences, each once."""
    skipped: Count = 0
    splits: Count = 0
    """Times that memory ran out inside a step, and the step was finished all the same."""
    last_split_step: PositiveInt | None = None
    last_split: Split | None = None


@dataclass(frozen=True, kw_only=True)
class LastEvaluation:
    """The newest evaluation of the steps in force."""

    __pydantic_config__ = STRICT

    step: Count
    loss: Real | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Card:
    """The GPU of a run on this machine, as its driver tells it now."""

    __pydantic_config__ = STRICT

    name: str
    busy: Share | None = None
    watts: Share | None = None
    celsius: float | None = None
    used_bytes: Bytes | None = None
    """By all processes."""
    total_bytes: Bytes | None = None


@dataclass(frozen=True, kw_only=True)
class State(Record):
    """A run at one moment."""

    schema: ClassVar[str] = "brim.watch/1"

    name: str
    """Of the model or of the folder, for a person."""
    ledger: str
    status: Status
    reason: str = ""
    """Why it ended early, in the run's own words."""
    quiet_seconds: Seconds = 0.0
    """Since something was last written."""
    process: Count | None = None
    """The number of the process that writes the ledger, where it runs on this machine."""
    is_alive: bool | None = None
    """Whether a process has the ledger open to write. None: cannot be told here."""
    observed: bool = False
    device: str = ""
    effective_batch: PositiveInt | None = None
    world_size: PositiveInt = 1
    resumed_from_step: Count = 0
    step: Count = 0
    total_steps: PositiveInt | None = None
    epoch: Share | None = None
    elapsed_seconds: Seconds | None = None
    """Since it was started or resumed."""
    remaining_seconds: Seconds | None = None
    loss: Real | None = None
    curve: tuple[Real | None, ...] = ()
    """Mean losses of equal parts of the steps that were read, in their order."""
    evaluation: LastEvaluation | None = None
    grad_norm: Real | None = None
    learning_rate: Share | None = None
    now: Speed = field(default_factory=Speed)
    """Over the last steps."""
    mean: Speed = field(default_factory=Speed)
    """Over all steps that were read."""
    micro_batches: Count = 0
    """Of the last step, over all ranks."""
    micro_batch: PositiveInt | None = None
    """Sequences of its largest micro-batch."""
    memory: MemoryInUse = field(default_factory=MemoryInUse)
    promise: Promise = field(default_factory=Promise)
    pulse: Pulse | None = None
    card: Card | None = None
    read_share: Share = 1.0
    """Of the ledger's bytes: those that were read. A long one is read from its end."""
    unreadable_lines: Count = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in OVER

    @property
    def ended_badly(self) -> bool:
        """Whether it ended before its planned end."""
        return self.status in BAD
