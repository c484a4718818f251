"""What was promised and what happened, step by step: the lines of `ledger.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from brim.locale import _
from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.workload.words import Phase


def _from_word(value: object) -> object:
    return float(value) if isinstance(value, str) and value in {"NaN", "Infinity", "-Infinity"} else value


Real = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_from_word)]
"""A float that may be NaN or infinite: losses and gradient norms are, when a run diverges, and a ledger must be able to say so."""

Share = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One micro-batch as it ran: its padded shape."""

    __pydantic_config__ = STRICT

    rank: Count
    sequences: PositiveInt
    length: PositiveInt | None
    """Tokens per row, padding included. None only in an observed ledger, where rows are not made of tokens."""
    target_length: Count = 0
    """Tokens per row of the targets, for seq2seq."""
    items: Count | None = None
    """What its loss is the mean of: its supervised tokens. None where that was not written down, as in an observed ledger."""
    gradient_square: Real | None = None
    """Squared norm of the gradient of its mean loss, alone: the noise scale is told from these. None where it was not asked for."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What the machine did since it was last looked at, which is at most once a second. None: not known.

    The fields are those of `brim.machine.pulse.PulseMeter`.
    """

    __pydantic_config__ = STRICT

    seconds: Seconds
    """The time that this covers: a step, or several short ones."""
    device_utilisation: Share | None = None
    """Share of time in which the device computed."""
    workers: Count | None = None
    """Processes that load data; 0 where the training process loads by itself."""
    worker_cpu: Share | None = None
    """Busy share of one core, the mean over the loader's workers."""
    main_cpu: Share | None = None
    """Busy share of one core, of the training process; above 1 where several threads compute."""
    read_bytes: Bytes | None = None
    """Read from the disk, not from the system's cache, by the training process and its workers."""
    blocked_seconds: Seconds | None = None
    """Waiting for the disk, summed over the training process and its workers."""
    retries: Count | None = None
    """How often the device's allocator had to give its cache back before it could serve a request."""
    swapped_bytes: Bytes | None = None
    """Written to the host's swap while part of the training process lay there."""


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


_OF_A_PLAN = ("seed", "effective_batch", "sequences_in_data", "steps_per_epoch", "drop_last", "budget", "data_fingerprint")


@dataclass(frozen=True, kw_only=True)
class LedgerHeader(Record):
    """What a run promises: the first line of `ledger.jsonl`, and one more line at each continuation."""

    schema: ClassVar[str] = "brim.ledger/1"

    kind: Literal["header"] = "header"
    started_at: str
    """ISO 8601, with the offset from UTC."""
    resumed_from_step: Count = 0
    """Steps that were already done. Lines of later steps that stand above this header are superseded by the lines below it."""
    unrecorded_steps: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """First and last of steps that were taken and have no line: their lines were damaged and removed, or the ledger was lost."""
    observed: bool = False
    """Written by `brim observe`, which watches a script that is not brim's: how many sequences a step took is known, and not which."""
    seed: Count | None
    """None only in an observed ledger, as with the other settings that decide which sequences a step takes."""
    effective_batch: PositiveInt | None
    """None where an observed script does not say what it was asked for."""
    sequences_in_data: PositiveInt | None = None
    steps_per_epoch: PositiveInt | None = None
    drop_last: bool | None = False
    world_size: PositiveInt = 1
    budget: BudgetLimit | None = None
    """None only in an observed ledger."""
    device: str
    memory_limit_bytes: Bytes | None = None
    """What the device can hold, of the allocator's reserved bytes."""
    data_fingerprint: str | None = ""
    configuration: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """The settings of the run: names and plain values. `cores`, where it is there, are the processor cores that the run could use."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in _OF_A_PLAN if getattr(self, name) is None]
        if missing and not self.observed:
            raise ValueError(_("{names} may be left out only where a run is observed").format(names=", ".join(missing)))
        if self.sequences_in_data is None or self.effective_batch is None or self.steps_per_epoch is None:
            return
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
    promised_sequences: PositiveInt | None
    """None where an observed script does not say."""
    sequence_ids: tuple[Count, ...]
    """In the order of `slices`: the first micro-batch's sequences, then the second's. Empty in an observed ledger."""
    sequences: Count
    tokens: Count | None
    """Real tokens, padding not counted. None only in an observed ledger, where they could not be counted, as with the next two."""
    padded_tokens: Count | None
    """Tokens of the padded shapes: what the device computed."""
    supervised_tokens: Count | None
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
    """Mean over the supervised tokens. In an observed ledger the sum of what `backward` was called on, mean over the ranks."""
    grad_norm: Real | None = None
    """Before clipping. None in an observed ledger."""
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    pulse: Pulse | None = None
    """None between two looks at the machine."""

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
    tokens: Count | None
    padded_tokens: Count | None
    supervised_tokens: Count | None
    """None where a step did not count them."""
    splits: Count
    skipped: Count
    seconds: Seconds
    """From the header's `started_at` to this line; what is not compute or waiting went to evaluation, saving and the like."""
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
    """None while the run goes on, and after one that was killed; of a killed script that was observed, brim wrote it."""
    superseded: int = 0
    torn: bool = False
    lines: Sequence[int] = ()
    """Of each step: its line in the file, from 1."""


_TOKENS: Final = ("tokens", "padded_tokens", "supervised_tokens")


class Totals:
    """The sums over the steps of one run, as its summary tells them."""

    def __init__(self, last_step: int = 0) -> None:
        self._last_step = last_step
        self._counts: Counter[str] = Counter()
        self._uncounted: set[str] = set()
        """Sums that are not known, because a step that was only watched did not tell its part."""
        self._compute_seconds = self._wait_seconds = 0.0
        self._peak_allocated: int | None = None
        self._peak_reserved: int | None = None
        self._last_loss: float | None = None

    def add(self, entry: LedgerEntry) -> None:
        """Count one step."""
        self._last_step = entry.step
        self._counts["steps"] += 1
        for name in ("sequences", *_TOKENS):
            count = getattr(entry, name)
            if count is None:
                self._uncounted.add(name)
            else:
                self._counts[name] += count
        self._counts["splits"] += len(entry.splits)
        self._counts["skipped"] += entry.skipped
        self._compute_seconds += entry.compute_seconds
        self._wait_seconds += entry.wait_seconds
        self._peak_allocated = _larger(self._peak_allocated, entry.peak_allocated_bytes)
        self._peak_reserved = _larger(self._peak_reserved, entry.peak_reserved_bytes)
        self._last_loss = self._last_loss if entry.loss is None else entry.loss

    def summary(self, *, seconds: float, finished: bool, reason: str) -> LedgerSummary:
        """The sums, and how the run ended."""
        tokens, padded, supervised = (None if name in self._uncounted else self._counts[name] for name in _TOKENS)
        return LedgerSummary(
            last_step=self._last_step, steps=self._counts["steps"], sequences=self._counts["sequences"], tokens=tokens,
            padded_tokens=padded, supervised_tokens=supervised,
            splits=self._counts["splits"], skipped=self._counts["skipped"], seconds=seconds, compute_seconds=self._compute_seconds,
            wait_seconds=self._wait_seconds, peak_allocated_bytes=self._peak_allocated, peak_reserved_bytes=self._peak_reserved,
            last_loss=self._last_loss, finished=finished, reason=reason,
        )  # fmt: skip


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)
