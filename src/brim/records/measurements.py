"""What was measured on a machine: trials, the shapes that were timed, the loader, and what became of the prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from brim.locale import _
from brim.machine.records import Machine
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.predictions import DataReport, MemoryPrediction
from brim.workload.records import Workload
from brim.workload.settings import Settings
from brim.workload.words import Phase

TrialVerdict = Literal["ok", "out-of-memory", "thrashing", "crash", "killed", "timeout"]
Objective = Literal["fastest", "largest"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One process that really ran one size: the longest batch, two optimizer steps, mixed lengths, evaluation, a save."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    max_length: PositiveInt
    verdict: TrialVerdict
    accumulates: bool = False
    """Whether gradients of another micro-batch of the step were alive."""
    phase: Phase | None = None
    """Where it failed; None if it did not."""
    steps: Count = 0
    """Optimizer steps of the full size that completed."""
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    """What counts against the limit. On the CPU, as the two above, all that the process took beyond its footprint after imports."""
    one_sequence_bytes: Bytes | None = None
    """The same after the trial's first step, which had one of the longest sequences: with the peak, a line."""
    step_seconds: Seconds | None = None
    """One optimizer step at the effective batch, synchronised and after warm-up: its micro-batches and the update."""
    micro_batch_seconds: Seconds | None = None
    """Forward and backward of one micro-batch of this size, after one that was not counted."""
    update_seconds: Seconds | None = None
    """Clipping and the optimizer's step."""
    wait_seconds: Seconds | None = None
    """Waiting for the data of one optimizer step."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """Useful tokens: padding not counted."""
    allocator_retries: Count = 0
    elapsed_seconds: Seconds = 0.0
    """The whole trial, from the start of its process."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ShapePoint:
    """What micro-batches of one padded shape took: the points that a cost model for the slicer is laid through."""

    __pydantic_config__ = STRICT

    sequences: PositiveInt
    length: PositiveInt
    target_length: Count = 0
    padded: bool = True
    """Whether a mask with zeros reached the attention kernels; the peak and the time are those of this kind."""
    peak_bytes: Bytes
    """Counted as `Trial.peak_device_bytes`."""
    seconds: Seconds
    """Forward and backward."""
    accumulates: bool = False
    """As `Trial.accumulates`."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """As `Trial.tokens_per_second`."""


@dataclass(frozen=True, kw_only=True)
class AffineFit:
    """Measured peak bytes as a function of the micro-batch: `base_bytes + bytes_per_sequence * micro_batch`."""

    __pydantic_config__ = STRICT

    base_bytes: float
    bytes_per_sequence: float
    residual_bytes: float
    """Largest distance of a measured point from the line."""

    def bytes_of(self, micro_batch: int) -> float:
        """The line at this size."""
        return self.base_bytes + self.bytes_per_sequence * micro_batch


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A size that was run, and what it did."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    tokens_per_second: Annotated[float, Field(ge=0)]
    peak_bytes: Bytes


@dataclass(frozen=True, kw_only=True)
class Versus:
    """How far the prediction was off, at a size that was run."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    predicted_bytes: Bytes
    measured_bytes: Bytes
    error: float
    """Predicted over measured, minus one: below zero, the prediction was too low."""
    predicted_largest: Count
    """What the prediction alone would have called the largest size; 0: nothing fits."""


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
    settings: Settings | None = None
    """How the step was run; `micro_batch` is the largest that ran, and None stands in measurements of a module of one's own."""
    device: str = ""
    """As torch names it: `cpu`, `cuda:0`."""
    objective: Objective = "fastest"
    limit_bytes: Bytes | None = None
    """What the step may take, the margin included; None: not known."""
    margin_bytes: Bytes = 0
    """Every trial ran with this much less than the limit."""
    gradient_bytes: Bytes | None = None
    """Gradients of all that trains: what a micro-batch needs more that does not come alone. None: not known."""
    data: DataReport | None = None
    """What is known of the data's lengths; None where only a length was given."""
    trials: tuple[Trial, ...]
    points: tuple[ShapePoint, ...] = ()
    """Smaller shapes, run one after the other in one further process: for the cost model, and for the curve of the throughput."""
    largest: Proven | None = None
    fastest: Proven | None = None
    fit: AffineFit | None = None
    predicted: MemoryPrediction | None = None
    """What `brim estimate` said of the largest size, to be held against what was measured."""
    versus: Versus | None = None
    loader: LoaderSettings | None = None
    complete: bool = True
    """False after an interruption or a limit on trials or time: the trials stand, the search did not finish."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    elapsed_seconds: Seconds = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = self.workload.max_length
        ran = {trial.micro_batch for trial in self.trials if trial.verdict == "ok"}
        timed = {point.sequences for point in self.points if point.length == longest}
        for name, proven, sizes in (("largest", self.largest, ran), ("fastest", self.fastest, ran | timed)):
            if proven is not None and proven.micro_batch not in sizes:
                text = _("{name} is {size}, a size that no trial ran")
                raise ValueError(text.format(name=name, size=proven.micro_batch))
