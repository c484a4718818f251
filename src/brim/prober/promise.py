"""What a step is, however it is sliced: its seconds and its tokens from those of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """The step that is kept while the size of the micro-batch varies."""

    effective_batch: int | None
    """None: as many micro-batches as `accumulation` says, whatever their size."""
    accumulation: int
    tokens_per_sequence: int

    def micro_batches(self, size: int) -> float:
        """In one step; a last, smaller one counts in proportion."""
        return self.accumulation if self.effective_batch is None else self.effective_batch / size

    def step_seconds(self, size: int, micro_batch_seconds: float, update_seconds: float) -> float:
        """Of one optimizer step."""
        return micro_batch_seconds * self.micro_batches(size) + update_seconds

    def tokens_per_second(self, size: int, micro_batch_seconds: float, update_seconds: float) -> float:
        """Of sequences as long as the longest, none of them padding."""
        seconds = self.step_seconds(size, micro_batch_seconds, update_seconds)
        return size * self.micro_batches(size) * self.tokens_per_sequence / seconds if seconds > 0 else 0.0
