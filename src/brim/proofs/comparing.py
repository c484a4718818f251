"""When two results are the same: differences in units of how logits vary from token to token, and what rounding may do to them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from brim.errors import BrimError
from brim.locale import _
from brim.proofs.sights import Sight

if TYPE_CHECKING:
    from brim.proofs.subject import Batch, Subject

EXACT = 1e-4
"""In float32: rounding is a tenth of it or less, and the smallest fault seen is a thousand times as much."""
_LEAST = {"fp32": EXACT, "bf16": 2e-2, "fp16": 4e-3, "amp-bf16": 2e-2, "amp-fp16": 4e-3}
_TIMES_ROUNDING = 3.0
"""Two results that each differ from the truth by rounding differ from each other by up to twice that."""
_ROWS_OF_SPREAD = 6


def tolerance_of(subject: Subject, batch: Batch) -> float:
    """What may differ at this precision: at half precision, what the precision itself costs this model on this batch, measured."""
    least = _LEAST[subject.precision]
    if subject.precision == "fp32":
        return least
    whole = copy.copy(subject)
    whole.model, whole.precision = _in_float32(subject), "fp32"
    return max(least, _TIMES_ROUNDING * change(subject, subject.logits(batch), whole.logits(batch)))


def _in_float32(subject: Subject) -> torch.nn.Module:
    return subject.model if subject.precision.startswith("amp") else copy.deepcopy(subject.model).float()


def change(subject: Subject, found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest change of a logit, in units of the spread. Infinite where a number is none, or is infinite on one side only."""
    if found.shape != wanted.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    difference = torch.where(found == wanted, torch.zeros_like(found), (found - wanted).abs())
    value = float(difference.max() / max(subject.spread, 1e-12))
    return value if math.isfinite(value) else math.inf


def measure_spread(subject: Subject) -> float:
    """The standard deviation of a logit from token to token, of the logit in the middle; 0 if they are always the same.

    Of each logit on its own: a model that puts unused words at -1e9 would else look as if nothing else mattered.
    """
    rows = [
        attempt(subject, {"input_ids": row[None], **subject.required(row[None])})
        for row in subject.ids(_ROWS_OF_SPREAD, subject.length)
    ]
    if subject.kind == "seq2seq":
        ids = subject.ids(_ROWS_OF_SPREAD, subject.length)
        rows = [attempt(subject, {"input_ids": row[None], "decoder_input_ids": row[None]}) for row in ids]
    logits = [each.flatten(0, -2) for each in rows if isinstance(each, torch.Tensor) and each.dim() >= 2]
    if not logits:
        return 1.0
    table = torch.cat(logits)
    deviations = table[:, table.isfinite().all(dim=0)].std(dim=0)
    deviations = deviations[deviations > 0]
    return float(deviations.median()) if len(deviations) else 0.0


@dataclass(frozen=True)
class Failed:
    """A call that raised, and what the layers had been handed until then."""

    error: BaseException
    sights: tuple[Sight, ...] = field(default=(), repr=False)

    @property
    def words(self) -> str:
        """The first line of what it said."""
        return (str(self.error).strip().splitlines() or [type(self.error).__name__])[0][:300]


def attempt(subject: Subject, batch: Batch) -> torch.Tensor | Failed:
    """Logits, or how the model failed."""
    try:
        return subject.logits(batch)
    except BrimError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the model is anybody's code, and its failure is the finding)
        return Failed(error, tuple(subject.sights))


def measure_of_logits() -> str:
    """What the number of most proofs is."""
    return _("largest change of a logit, in standard deviations of a logit from token to token")


def is_repeatable(subject: Subject, batch: Batch) -> bool:
    """Whether the same input gives the same twice, whatever numbers are drawn; not where it is no number or no result at all."""
    first = attempt(subject, batch)
    seed = subject.seed
    subject.seed = seed + 1
    try:
        second = attempt(subject, batch)
    finally:
        subject.seed = seed
    if isinstance(first, Failed) or isinstance(second, Failed):
        return False
    return change(subject, second, first) <= EXACT / 10
