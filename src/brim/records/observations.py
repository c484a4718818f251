"""What `brim observe` saw in somebody else's script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.findings import Finding, Value
from brim.workload.words import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

OBSERVATION_FILE: Final = "observation.json"
"""Its name in the folder of the run, beside the ledger."""
Reach = Literal["steps", "no-steps", "no-optimizer", "no-torch", "not-reached"]
"""How far the observer came: it saw optimizer steps; an optimizer but no step; torch but no optimizer; Python but no torch; nothing."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What the script was asked for."""

    __pydantic_config__ = STRICT

    effective_batch: PositiveInt
    """Sequences per optimizer step."""
    micro_batch: PositiveInt | None = None
    accumulation: PositiveInt | None = None
    ranks: PositiveInt | None = None
    source: str
    """Who says so: a flag of the command, a framework's arguments, the source."""
    where: str | None = None
    """`file:line`, where that is known."""


@dataclass(frozen=True, kw_only=True)
class BatchInForce:
    """The batch as it entered the model. The usual step: the one that was seen most often."""

    __pydantic_config__ = STRICT

    micro_batch: PositiveInt
    """Sequences of the largest micro-batch of a usual step, on one rank."""
    accumulation: PositiveInt
    """Micro-batches of a usual step, on one rank."""
    ranks: PositiveInt
    sequences: PositiveInt
    """Of a usual step, over all ranks."""
    least_sequences: PositiveInt
    most_sequences: PositiveInt
    """Over all steps."""
    usual_steps: PositiveInt
    """Steps that had exactly as many sequences as the usual one."""
    calls: PositiveInt = 1
    """The most calls of the model for one backward. Above 1, the rows are those of the last call, and no more is known of the batch."""

    @property
    def is_product(self) -> bool:
        """Whether the three factors make the number: they do not where micro-batches of one step differ."""
        return self.micro_batch * self.accumulation * self.ranks == self.sequences


@dataclass(frozen=True, kw_only=True)
class ShortWindow:
    """An optimizer step with fewer sequences than the usual one."""

    __pydantic_config__ = STRICT

    step: PositiveInt
    sequences: Count
    micro_batches: Count
    """Over all ranks."""
    ends_data: bool
    """Whether the data had come to its end: the last window of an epoch."""


@dataclass(frozen=True, kw_only=True)
class LoaderInForce:
    """One data loader that ran."""

    __pydantic_config__ = STRICT

    where: str | None
    """`file:line` of the script that made it."""
    trains: bool
    """Whether what it gave was trained on."""
    batch_size: Count | None
    num_workers: Count | None
    pin_memory: bool
    drop_last: bool
    shuffle: bool | None
    """Whether the order is random; None where the sampler does not show it."""
    prefetch_factor: Count | None
    persistent_workers: bool
    sequences: Count | None
    """Of the data set, where it has a length."""


@dataclass(frozen=True, kw_only=True)
class MemoryFailure:
    """An out-of-memory that passed through the script."""

    __pydantic_config__ = STRICT

    rank: Count
    after_step: Count
    phase: Phase
    sequences: PositiveInt | None
    """Rows of the micro-batch that failed."""
    survived: bool
    """Whether the script caught it and went on."""
    message: str


def is_in_other_rows(asked: Configured, batch: BatchInForce, fed: Sequence[int]) -> bool:
    """Whether what was asked for comes from the loader, whose batches (`fed`) hold as many, and only the model's rows are others."""
    return (
        asked.micro_batch is not None
        and asked.micro_batch in fed
        and asked.micro_batch != batch.micro_batch
        and asked.effective_batch == asked.micro_batch * batch.accumulation * batch.ranks
    )


@dataclass(frozen=True, kw_only=True)
class Observation(Record):
    """One command, watched from its start to its end."""

    schema: ClassVar[str] = "brim.observe/1"

    command: tuple[str, ...]
    started_at: str
    """ISO 8601, with the offset from UTC."""
    seconds: Seconds
    exit_code: Count
    """The command's own; 128 and the signal's number if a signal ended it."""
    reach: Reach
    script: str | None = None
    device: str | None = None
    versions: dict[str, str]
    world_size: PositiveInt = 1

    configured: Configured | None = None
    in_force: BatchInForce | None = None
    """None where no step was seen, or not how many rows entered the model."""
    steps: Count = 0
    """Optimizer steps, skipped ones included."""
    skipped: Count = 0
    """Steps that a gradient scaler left out."""
    short_windows: tuple[ShortWindow, ...] = ()
    """At most the first ten."""
    short_windows_count: Count = 0
    discarded_micro_batches: Count = 0
    """Micro-batches whose gradients were cleared before a step took them."""
    unstepped_micro_batches: Count = 0
    """Micro-batches at the end of the run that no step took."""
    sequences: Count = 0
    supervised_tokens: Count | None = None
    """Of all steps; None where they could not be counted."""
    evaluation_passes: Count = 0
    first_learning_rate: Annotated[float, Field(ge=0)] | None = None
    last_learning_rate: Annotated[float, Field(ge=0)] | None = None
    loaders: tuple[LoaderInForce, ...] = ()
    compute_seconds: Seconds = 0.0
    """Of one rank, between the first step's beginning and the last one's end: neither waiting nor evaluating."""
    wait_seconds: Seconds = 0.0
    """Of one rank: waiting for data to train on."""
    evaluation_seconds: Seconds = 0.0
    own_seconds: Seconds = 0.0
    """The observer's own, of one rank; part of compute_seconds."""
    peak_allocated_bytes: Bytes | None = None
    """The largest of all ranks; on the CPU the peak resident set."""
    peak_reserved_bytes: Bytes | None = None
    memory_failures: tuple[MemoryFailure, ...] = ()
    settings: dict[str, Value]
    """What frameworks were told: `transformers.TrainingArguments.gradient_accumulation_steps`."""
    blamed: tuple[Finding, ...] = ()
    """What the source audit knows of lines that change the batch."""
    notes: tuple[str, ...] = ()
    ledger: str | None = None
    """Where the ledger of the run lies."""

    @property
    def differs(self) -> bool:
        """Whether the batch in force is known not to be the one that was configured."""
        asked, batch = self.configured, self.in_force
        return asked is not None and batch is not None and (
            asked.effective_batch != batch.sequences and batch.calls == 1 and not self.is_in_other_rows
        )  # fmt: skip

    @property
    def is_in_other_rows(self) -> bool:
        """Whether the loader gives the batch that was configured, and the model gets it in another number of rows (pairs, packing)."""
        if self.configured is None or self.in_force is None:
            return False
        fed = [loader.batch_size for loader in self.loaders if loader.trains and loader.batch_size]
        return is_in_other_rows(self.configured, self.in_force, fed)

    @property
    def wait_share(self) -> float | None:
        """The share of training time that went to waiting for data; None where no loader fed the training."""
        if not any(loader.trains for loader in self.loaders):
            return None
        whole = self.compute_seconds + self.wait_seconds
        return self.wait_seconds / whole if whole > 0 else None
