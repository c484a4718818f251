"""Metrics that a trainer takes of each micro-batch, made into one of each step.

TRL's trainers append a value for each call of `compute_loss` and average the list when they log, which would weigh a micro-batch of two
sequences like one of sixty, and count those that ran out of memory. Here each value is weighed by its items, over all ranks, once a step.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.step.engine import Mark, Total

_TOKENS = "num_tokens"
"""The one that is a running count, not a mean."""


class NoMetrics:
    """A trainer that takes none."""

    @contextmanager
    def of_one_micro_batch(self, _mark: Mark) -> Iterator[None]:
        """Nothing to do."""
        yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Nothing to keep."""
        yield

    def add(self, _total: Total) -> None:
        """Nothing to add."""


class TrlMetrics(NoMetrics):
    """The lists of a TRL trainer: `_metrics[mode][name]`, and its count of tokens."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _lists(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = self._trainer._metrics["train"]  # noqa: SLF001 (TRL has no other door)
        return found

    @contextmanager
    def of_one_micro_batch(self, mark: Mark) -> Iterator[None]:
        """What it appends goes to the mark instead, if the micro-batch goes through."""
        with self.kept():
            before = {name: len(values) for name, values in self._lists.items()}
            yield
            for name, values in self._lists.items():
                if name != _TOKENS and len(values) > before.get(name, 0):
                    mark.metrics[name] = float(values[-1])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens inside leaves no trace in the trainer's own lists."""
        trainer = self._trainer
        metrics, tokens = copy.deepcopy(trainer._metrics), getattr(trainer, "_total_train_tokens", None)  # noqa: SLF001
        try:
            yield
        finally:
            trainer._metrics = metrics  # noqa: SLF001
            if tokens is not None:
                trainer._total_train_tokens = tokens  # noqa: SLF001

    def add(self, total: Total) -> None:
        """One value of each for this step."""
        for name, value in total.metrics.items() if total.items else ():
            self._lists.setdefault(name, []).append(value)
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens += sum(tally.tokens for tally in total.tallies)  # noqa: SLF001
            self._lists[_TOKENS] = [self._trainer._total_train_tokens]  # noqa: SLF001


def metrics_of(trainer: Any) -> NoMetrics:
    """The lists of this trainer, if it has any."""
    lists = getattr(trainer, "_metrics", None)
    return TrlMetrics(trainer) if isinstance(lists, dict) and "train" in lists else NoMetrics()
