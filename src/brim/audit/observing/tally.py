"""What the steps of a run had in common, and which were different. Nothing grows with the number of steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from brim.records.observations import BatchInForce, ShortWindow

SHOWN_WINDOWS = 10
Event = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One optimizer step of all ranks."""

    number: int
    by_rank: dict[int, Event]
    ends_data: bool = False
    """Whether the data came to its end with this step."""

    @property
    def micros(self) -> list[tuple[int, int | None, int | None]]:
        """Rank, rows and length of each micro-batch."""
        return [(rank, rows, length) for rank, event in sorted(self.by_rank.items()) for rows, length in event["micros"]]

    @property
    def sequences(self) -> int | None:
        """Over all ranks; None where rows could not be seen."""
        rows = [each for _rank, each, _length in self.micros]
        return None if not rows or any(not each for each in rows) else sum(each for each in rows if each)

    @property
    def calls(self) -> int:
        """The most calls of the model for one backward."""
        return int(self.largest("calls") or 1)

    @property
    def padded_tokens(self) -> int | None:
        """Of all shapes; None where rows are not made of tokens."""
        shapes = [(rows, length) for _rank, rows, length in self.micros if rows and length]
        return sum(rows * length for rows, length in shapes) if len(shapes) == len(self.micros) > 0 else None

    @property
    def skipped(self) -> bool:
        """Whether a scaler left it out."""
        return any(event["skipped"] for event in self.by_rank.values())

    def total(self, name: str) -> int | None:
        """The sum over the ranks; None where one does not know."""
        values = [event.get(name) for event in self.by_rank.values()]
        return None if any(value is None for value in values) else sum(int(value) for value in values if value is not None)

    def largest(self, name: str) -> Any:
        """The largest of the ranks that know."""
        return max((event[name] for event in self.by_rank.values() if event.get(name) is not None), default=None)

    @property
    def compute_seconds(self) -> float:
        """Of the rank that took longest: neither waiting nor evaluating."""
        return max(max(0.0, float(event["seconds"] - event["wait"] - event["evaluation"])) for event in self.by_rank.values())


@dataclass
class Tally:
    """The sums of a run."""

    steps: int = 0
    skipped: int = 0
    sequences: int = 0
    supervised: int | None = 0
    discarded: int = 0
    evaluations: int = 0
    rates: list[float] = field(default_factory=list)
    """The first and the last."""
    seconds: Counter[str] = field(default_factory=Counter)
    calls: int = 1
    """The most calls of the model for one backward."""
    allocated: int | None = None
    reserved: int | None = None
    _patterns: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _windows: dict[int, list[ShortWindow]] = field(default_factory=dict)
    _optimizers: Counter[int] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        """Count one step."""
        self.steps += 1
        self.skipped += step.skipped
        self.discarded += step.total("discarded") or 0
        self.evaluations += step.total("evaluations") or 0
        targets = step.total("targets")
        self.supervised = None if self.supervised is None or targets is None else self.supervised + targets
        self.calls = max(self.calls, step.calls)
        self._add_seconds(step)
        self.allocated = _larger(self.allocated, step.largest("allocated"))
        self.reserved = _larger(self.reserved, step.largest("reserved"))
        rate = step.largest("rate")
        if rate is not None:
            self.rates = [*self.rates[:1], float(rate)]
        self._optimizers[int(step.largest("optimizer") or 0)] += 1
        if step.sequences is not None:
            self._add_sequences(step, step.sequences)

    @property
    def optimizers(self) -> int:
        """How many optimizers step each for itself."""
        return len(self._optimizers)

    def _add_seconds(self, step: Step) -> None:
        first = step.by_rank[min(step.by_rank)]
        for name in ("wait", "evaluation", "own"):
            self.seconds[name] += first[name]
        self.seconds["compute"] += max(0.0, first["seconds"] - first["wait"] - first["evaluation"])

    def _add_sequences(self, step: Step, sequences: int) -> None:
        micros = step.micros
        rows = [each for _rank, each, _length in micros if each]
        deepest = max(Counter(rank for rank, _rows, _length in micros).values())
        self.sequences += sequences
        self._patterns[sequences, max(rows), deepest] += 1
        window = ShortWindow(step=step.number, sequences=sequences, micro_batches=len(micros), ends_data=step.ends_data)
        kept = self._windows.setdefault(sequences, [])
        if len(kept) < SHOWN_WINDOWS:
            kept.append(window)

    def in_force(self, ranks: int, machines: int = 1) -> BatchInForce | None:
        """The batch of the usual step."""
        if not self._patterns:
            return None
        by_sequences: Counter[int] = Counter()
        for (sequences, _micro, _deep), count in self._patterns.items():
            by_sequences[sequences] += count
        # Of equally frequent ones the larger: a short window is not the rule.
        usual, often = max(by_sequences.items(), key=lambda each: (each[1], each[0]))
        patterns = {(micro, deep): count for (sequences, micro, deep), count in self._patterns.items() if sequences == usual}
        micro, accumulation = max(patterns, key=lambda each: (patterns[each], each))
        return BatchInForce(
            micro_batch=micro, accumulation=accumulation, ranks=ranks * machines, sequences=usual * machines, usual_steps=often,
            calls=self.calls, least_sequences=min(by_sequences) * machines, most_sequences=max(by_sequences) * machines,
        )  # fmt: skip

    def short_windows(self, usual: int) -> tuple[list[ShortWindow], int]:
        """The first steps with fewer sequences than the usual one, and how many they were."""
        count = sum(count for (sequences, _micro, _deep), count in self._patterns.items() if sequences < usual)
        found = [window for sequences, windows in self._windows.items() if sequences < usual for window in windows]
        return sorted(found, key=lambda window: window.step)[:SHOWN_WINDOWS], count


def _larger(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)
