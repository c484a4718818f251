"""What ranks that cannot try again by themselves have learned: shapes that ran out of memory, kept in the run's folder.

Whoever starts the ranks anew cuts below them. The global batches stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from brim.locale import _
from brim.record import STRICT, Bytes, Count, PositiveInt, Record

if TYPE_CHECKING:
    from pathlib import Path

    from brim.records import RunCard
    from brim.step.budget import Budget
    from brim.step.together import TooLargeError

FILE = "lessons.json"
_SHARES = (0.9, 0.7, 0.5)
"""Of the cost of what failed: a prediction that is a little off needs little, one that is off again needs more. A start costs minutes."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One micro-batch that did not fit."""

    __pydantic_config__ = STRICT

    step: PositiveInt
    rank: Count
    phase: str
    shape: tuple[PositiveInt, ...]
    """Sequences, their padded length, and that of their targets."""
    sharding: str
    world_size: PositiveInt
    limit_bytes: Bytes | None = None
    """Where it failed. Another engine, another number of ranks or more memory are another matter."""

    def holds_for(self, card: RunCard) -> bool:
        """Whether a run as it is now would fail there again."""
        if (self.sharding, self.world_size) != (card.settings.sharding, card.world_size):
            return False
        limit = card.limit_of(min(self.rank, card.world_size - 1))
        return self.limit_bytes is None or limit is None or limit <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Lessons(Record):
    """All of a run."""

    schema: ClassVar[str] = "brim.lessons/1"

    lessons: tuple[Lesson, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Lessons:
        """Those of this run so far."""
        return cls.read(folder / FILE) if (folder / FILE).is_file() else cls()

    def taught(self, budget: Budget, card: RunCard) -> Budget:
        """The budget below all that failed. A pinned one stays: it is what was asked for."""
        # Of one sequence alone a limit learns nothing.
        several = [lesson for lesson in self.lessons if lesson.shape[0] > 1 and lesson.holds_for(card)]
        if not several or budget.is_pinned:
            return budget
        shares = [*_SHARES, *[_SHARES[-1]] * len(several)]
        limits = [share * budget.cost_of(*lesson.shape) for share, lesson in zip(shares, several, strict=False)]
        return budget.with_limit(min(budget.limit, *limits))


def learn(folder: Path, error: TooLargeError, card: RunCard) -> bool:
    """Keep what failed; whether it is worth to start anew. One sequence alone is tried once more, in processes that are fresh."""
    before = Lessons.of(folder)
    if error.shape[0] == 1 and any(lesson.shape == error.shape and lesson.holds_for(card) for lesson in before.lessons):
        return False
    lesson = Lesson(
        step=max(1, error.step), rank=error.rank, phase=error.phase, shape=error.shape,
        sharding=str(card.settings.sharding), world_size=card.world_size, limit_bytes=card.limit_of(error.rank),
    )  # fmt: skip
    Lessons(lessons=(*before.lessons, lesson)).write(folder / FILE)
    return True


def told(lesson: Lesson) -> str:
    """For a person, when the ranks are started anew."""
    count, *lengths = lesson.shape
    tokens = " + ".join(str(each) for each in lengths)
    if count == 1:
        text = _(
            "Out of memory in {phase} on rank {rank} at step {step}, with one sequence of {tokens} tokens: all ranks left. They start "
            "again from the last checkpoint, once."
        )
        return text.format(phase=lesson.phase, rank=lesson.rank, step=lesson.step, tokens=tokens)
    return _(
        "Out of memory in {phase} on rank {rank} at step {step}, with {count} x {tokens} tokens: all ranks left. They start again from the "
        "last checkpoint with smaller slices, and the same sequences in every step."
    ).format(phase=lesson.phase, rank=lesson.rank, step=lesson.step, count=count, tokens=tokens)
