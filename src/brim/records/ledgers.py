"""What was promised and what happened, step by step: the lines of `ledger.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from brim.locale import _
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.workload.words import Phase


def _from_word(value: object) -> object:
    return float(value) if isinstance(value, str) and value in {"NaN", "Infinity", "-Infinity"} else value


Real = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_from_word)]
"""A float that may be NaN or infinite: losses and gradient norms are, when a run diverges, and a ledger must be able to say so."""


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
