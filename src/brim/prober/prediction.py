"""What the memory model says before anything runs: where to look, and later how far it was off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brim.errors import BrimError
from brim.memory.footprint import Footprint
from brim.prober.search import Aim, predicted_largest

if TYPE_CHECKING:
    from brim.memory.estimate import Question
    from brim.records import MemoryPrediction


@dataclass(frozen=True)
class Prediction:
    """Bytes of every size: the largest of the steps of a trial, with and without a mask, because attention may use a different kernel."""

    alone: tuple[Footprint, ...]
    among_others: tuple[Footprint, ...]
    """Where gradients of other micro-batches live through forward."""
    accumulates: Callable[[int], bool]

    @classmethod
    def of(cls, question: Question, accumulates: Callable[[int], bool]) -> Prediction | str:
        """Why not, where the model cannot be traced: the search then does without."""
        masks = dict.fromkeys((question.settings.padded, False))
        alone, among = (
            tuple(
                Footprint(
                    replace(question, settings=replace(question.settings, micro_batch=2, accumulation=count, padded=padded))
                )
                for padded in masks
            )
            for count in (1, 2)
        )
        made = cls(alone, among, accumulates)
        try:
            made.bytes_of(2)
        except BrimError as error:
            return error.message
        except Exception as error:  # noqa: BLE001 (a trace of somebody's own code may fail in any way; running it is the test)
            return f"{type(error).__name__}: {error}"
        return made

    def bytes_of(self, size: int) -> int:
        """What the device holds at the peak."""
        return max(footprint.device_bytes(size) for footprint in self._of(size))

    def bytes_within(self, size: int, limit_bytes: int) -> int:
        """What the device holds at the peak of a trial under a limit."""
        return max(footprint.device_bytes_within(size, limit_bytes) for footprint in self._of(size))

    def masks(self, size: int) -> tuple[bool, ...]:
        """Whether steps have a mask: the kind that takes more comes first."""
        by_need = sorted(self._of(size), key=lambda footprint: footprint.device_bytes(size), reverse=True)
        return tuple(footprint.question.settings.padded for footprint in by_need)

    def whole(self, size: int) -> MemoryPrediction:
        """As `brim estimate` gives it."""
        return max(self._of(size), key=lambda footprint: footprint.device_bytes(size)).prediction(size)

    def largest(self, limit_bytes: int, most: int) -> int:
        """What the prediction alone would call the largest size; 0: nothing fits."""
        found = predicted_largest(Aim(limit_bytes=limit_bytes, most=most, predicted=self.bytes_of), 1.0) or 0
        return found if self.bytes_of(max(1, found)) <= limit_bytes else 0

    def keep(self) -> None:
        """Write down what was traced."""
        for footprint in (*self.alone, *self.among_others):
            footprint.keep()

    def _of(self, size: int) -> tuple[Footprint, ...]:
        return self.among_others if self.accumulates(size) else self.alone
