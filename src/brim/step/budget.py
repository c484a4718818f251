"""What one micro-batch may cost and how long it takes: all that memory and speed decide about a step.

A budget is two functions of a padded shape and one limit. The memory and speed models give them (`brim.budget`), or a probe that has
measured, or the simplest idea of cost there is: so many padded tokens, so many sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from brim.errors import UsageError
from brim.locale import _
from brim.sizes import format_bytes
from brim.step.exchange import travels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.records import Measurement
    from brim.step.slicing import IntArray

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Cost = Callable[..., FloatArray]
"""`cost(count, length)`, or `cost(count, length, target_length)` for seq2seq: the cost of micro-batches of `count` sequences that are
padded to `length`. Arrays that broadcast go in, an array comes out. It may not fall when there are more sequences or longer ones."""

FIXED_TOKENS: Final = 64.0
"""What a micro-batch costs besides its tokens, in tokens: some 10 ms to start its kernels, on a card that trains 6,000 tokens a second."""

_NO_MORE_THAN_NEEDED: Final = 1e12
"""In tokens: more than any padding could cost."""

Unit = Literal["bytes", "tokens", "sequences"]


@travels
@dataclass(frozen=True, kw_only=True)
class ShapeCost:
    """A cost that is a polynomial of the padded shape, which is what memory and time of transformers are.

    Attention adds the squares; where the kernel never holds its scores, they are zero for bytes and not for seconds.
    """

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_squared_length: float = 0.0
    """For each sequence and each pair of its tokens."""
    per_target: float = 0.0
    per_squared_target: float = 0.0
    per_token_and_target: float = 0.0
    """Cross-attention: for each pair of a source and a target token."""

    def __call__(self, count: Any, length: Any, target: Any = 0) -> FloatArray:
        """The cost of `count` sequences padded to `length`."""
        each = self.per_sequence + length * (self.per_token + self.per_squared_length * length)
        if self.per_target or self.per_squared_target or self.per_token_and_target:
            each = each + target * (self.per_target + self.per_squared_target * target + self.per_token_and_target * length)
        return np.asarray(self.fixed + count * each, np.float64)


@travels
@dataclass(frozen=True)
class ScaledCost:
    """Seconds on a device that is `factor` times as fast."""

    at_one: Cost
    factor: float

    def __call__(self, count: Any, *lengths: Any) -> FloatArray:
        """The cost of `count` sequences padded to these lengths."""
        return np.asarray(self.at_one(count, *lengths), np.float64) / self.factor


@travels
@dataclass(frozen=True)
class Budget:
    """The limit of one micro-batch, in the unit of `cost`; among the cuts within it, the fewest `seconds` win."""

    cost: Cost
    limit: float
    seconds: Cost
    unit: Unit = "bytes"
    because: str = ""
    """How it came about, for the ledger."""
    is_pinned: bool = False
    """Whether the limit was asked for as it is: what runs out of memory is split, and the limit stays."""

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int | float | np.number):
            raise UsageError(_("{name} is {value!r}, and must be a number.").format(name="limit", value=self.limit))
        if not self.limit > 0:
            raise UsageError(_("A budget of {limit:g} {unit} holds nothing.").format(limit=self.limit, unit=self.unit))
        for name, cost in (("cost", self.cost), ("seconds", self.seconds)):
            _check(name, cost)

    @classmethod
    def tokens(cls, limit: int, *, fixed_tokens: float = FIXED_TOKENS) -> Self:
        """At most `limit` tokens in a micro-batch, padding included (source and target together)."""
        padded = ShapeCost(per_token=1.0, per_target=1.0)
        return cls(padded, limit, replace(padded, fixed=fixed_tokens), "tokens")

    @classmethod
    def sequences(cls, limit: int, *, fixed_tokens: float = FIXED_TOKENS) -> Self:
        """At most `limit` sequences in a micro-batch, as a fixed micro-batch size has it."""
        return cls(ShapeCost(per_sequence=1.0), limit, ShapeCost(fixed=fixed_tokens, per_token=1.0, per_target=1.0), "sequences")

    @classmethod
    def pinned(cls, micro_batch: int, *, because: str = "") -> Self:
        """Exactly `micro_batch` sequences in a micro-batch; fewer only in the last, where the batch does not divide.

        The fewest micro-batches win, whatever their padding costs, because that is what was asked for.
        """
        seconds = ShapeCost(fixed=_NO_MORE_THAN_NEEDED, per_token=1.0, per_target=1.0)
        return cls(ShapeCost(per_sequence=1.0), micro_batch, seconds, "sequences", because, is_pinned=True)

    @staticmethod
    def measured(measurement: Measurement, *, margin: int | None = None) -> Budget:
        """What a probe has measured: its limit, less the margin; bytes and seconds by the shapes that ran there.

        `margin` are bytes that stay free of the limit; None: as many as in the probe. Shapes that a trial ran are allowed, shapes beyond a
        trial that failed are not, and the rest is decided by a polynomial that understates no shape that ran. A micro-batch is one of
        several in its step: what ran as the only one counts with the gradients of all that trains added.
        """
        from brim.step.measured import measured_budget

        return measured_budget(measurement, margin_bytes=margin)

    def with_limit(self, limit: float) -> Budget:
        """The same costs under another limit."""
        return replace(self, limit=limit)

    def at_speed(self, factor: float) -> Budget:
        """The same for a device that is `factor` times as fast: 0.5 takes twice the seconds."""
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.number) or not 0 < factor < np.inf:
            raise UsageError(
                _("A speed is {value!r}, and must be a number above 0.").format(value=factor),
                hint=_("1.0 is as fast as the budget says, 0.5 half as fast."),
            )
        if factor == 1:
            return self
        seconds = self.seconds.at_one if isinstance(self.seconds, ScaledCost) else self.seconds
        times = self.seconds.factor * factor if isinstance(self.seconds, ScaledCost) else float(factor)
        return replace(self, seconds=seconds if times == 1 else ScaledCost(seconds, times))

    def cost_of(self, count: int, *lengths: int) -> float:
        """The cost of one micro-batch."""
        return float(self.cost(np.array([count]), *(np.array([length]) for length in lengths))[0])

    def format(self, amount: float) -> str:
        """An amount of this budget's unit, for a person."""
        if self.unit == "bytes":
            return format_bytes(round(amount))
        if self.unit == "tokens":
            return _("{count:,} tokens").format(count=round(amount))
        return _("{count} sequences").format(count=round(amount))


def who_can_hold(columns: Sequence[IntArray], budgets: Sequence[Budget]) -> BoolArray:
    """`[rank, sequence]`: whether a sequence alone is within the rank's limit. Where it is within none's, the ranks that come nearest."""
    shape = columns[0].shape
    costs = [np.broadcast_to(budget.cost(np.ones(1, np.int64), *columns), shape) for budget in budgets]
    fits = np.stack([cost <= budget.limit for cost, budget in zip(costs, budgets, strict=True)])
    used = np.stack([cost / budget.limit for cost, budget in zip(costs, budgets, strict=True)])
    return np.asarray(fits | (~fits.any(axis=0) & (used == used.min(axis=0))))


def _check(name: str, cost: Cost) -> None:
    """Two shapes at once must give two costs, and more of the same must not cost less."""
    try:
        found = np.asarray(cost(np.array([1, 2]), np.array([8, 8])), np.float64)
    except TypeError:  # it wants the targets' lengths too
        found = np.asarray(cost(np.array([1, 2]), np.array([8, 8]), np.array([8, 8])), np.float64)
    if found.shape != (2,) or not np.isfinite(found).all() or found[0] < 0 or found[1] < found[0]:
        raise UsageError(
            _("{name} of the budget gives {found} for 1 and for 2 sequences of 8 tokens.").format(
                name=name, found=found.tolist()
            ),
            hint=_("It must take arrays, and give an array of numbers that do not fall with more sequences."),
        )
