"""A ledger as columns, read once and no further than a picture needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brim.records import Ledger, LedgerEntry

MOST_READ: Final = 20_000
"""Steps of a longer run are looked at one in so many: a page must not take minutes."""

Column = list[float | None]


@dataclass(frozen=True)
class Steps:
    """One entry a step that was looked at; None: not known."""

    total: int
    """Steps of the run."""
    stride: int
    """1: every step was looked at."""
    step: list[float] = field(default_factory=list)
    loss: Column = field(default_factory=list)
    grad_norm: Column = field(default_factory=list)
    learning_rate: Column = field(default_factory=list)
    compute_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    tokens: Column = field(default_factory=list)
    padded_tokens: Column = field(default_factory=list)
    sequences: list[float] = field(default_factory=list)
    micro_batches: list[float] = field(default_factory=list)
    """Over all ranks."""
    largest: Column = field(default_factory=list)
    """Sequences of the largest micro-batch."""
    peak_bytes: Column = field(default_factory=list)
    """Reserved where that is known, else allocated."""
    split_steps: list[float] = field(default_factory=list)
    splits: list[tuple[float, str, int, int, int | None]] = field(default_factory=list)
    """Step, phase, sequences of what failed, into how many, tokens per row."""
    is_kept: list[bool | None] = field(default_factory=list)
    """Whether the step took exactly what was promised; None where nothing was."""
    is_skipped: list[bool] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def seconds(self) -> list[float]:
        """Of the whole step."""
        return [one + other for one, other in zip(self.compute_seconds, self.wait_seconds, strict=True)]

    @property
    def wait_share(self) -> float | None:
        """Waiting for data, as a share of the time in steps."""
        whole = sum(self.seconds)
        return sum(self.wait_seconds) / whole if whole > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens, over the time in steps."""
        counted = [(tokens, seconds) for tokens, seconds in zip(self.tokens, self.seconds, strict=True) if tokens is not None]
        whole = sum(seconds for _tokens, seconds in counted)
        return sum(tokens for tokens, _seconds in counted) / whole if whole > 0 else None

    @property
    def padding(self) -> float | None:
        """Share of what was computed that is padding."""
        counted = [(real, all_) for real, all_ in zip(self.tokens, self.padded_tokens, strict=True) if real is not None and all_]
        whole = sum(all_ for _real, all_ in counted)
        return 1 - sum(real for real, _all in counted) / whole if whole > 0 else None

    @property
    def highest_peak(self) -> int | None:
        """The most memory that a step held; None where nobody measured. A device that always says 0 measures nothing."""
        peak = max((peak for peak in self.peak_bytes if peak), default=None)
        return None if peak is None else int(peak)


def is_long(ledger: Ledger) -> bool:
    """Whether there are too many steps for all of them to be read."""
    return len(ledger.steps) > MOST_READ


def look(ledger: Ledger) -> Steps:
    """Go through the steps once; of a long run through one in `stride`, and the last."""
    total = len(ledger.steps)
    stride = max(1, -(-total // MOST_READ))
    found = Steps(total=total, stride=stride)
    for entry in ledger.steps if stride == 1 else ledger.steps[::stride]:
        _add(found, entry)
    if stride > 1 and (total - 1) % stride:
        _add(found, ledger.steps[total - 1])
    return found


def _is_kept(entry: LedgerEntry) -> bool | None:
    """None where nothing was promised, as in many a script that is only watched."""
    if entry.promised_sequences is None:
        return None
    return entry.promised_sequences == entry.sequences if not entry.sequence_ids else entry.kept()


def _add(found: Steps, entry: LedgerEntry) -> None:
    found.step.append(entry.step)
    found.is_kept.append(_is_kept(entry))
    found.is_skipped.append(entry.skipped)
    found.loss.append(entry.loss)
    found.grad_norm.append(entry.grad_norm)
    found.learning_rate.append(entry.learning_rate)
    found.compute_seconds.append(entry.compute_seconds)
    found.wait_seconds.append(entry.wait_seconds)
    found.tokens.append(entry.tokens)
    found.padded_tokens.append(entry.padded_tokens)
    found.sequences.append(entry.sequences)
    found.micro_batches.append(len(entry.slices))
    found.largest.append(max((one.sequences for one in entry.slices), default=None))
    found.peak_bytes.append(entry.peak_reserved_bytes or entry.peak_allocated_bytes)
    if entry.splits:
        found.split_steps.append(entry.step)
        found.splits.extend((entry.step, one.phase, one.sequences, one.into, one.length) for one in entry.splits)
    if entry.pulse is not None and entry.pulse.device_utilisation is not None:
        found.utilisation.append(entry.pulse.device_utilisation)
