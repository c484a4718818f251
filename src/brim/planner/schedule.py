"""What the recipe should follow when the effective batch changes. Advice: nothing here changes a run.

A step over more sequences has less noise, so it may be longer; and there are fewer such steps in the same data, so whatever is counted in
steps has to be counted again. Three settings follow from that:

- the learning rate, with the square root of the batch where the update is normalised by the gradient's own size (Adam and its kin,
  Adafactor, and Lion, which takes only the sign), and with the batch itself for SGD;
- Adam's beta2, so that the second moment forgets half after as many *tokens* as before;
- warm-up, which should see as many tokens as before.

Adafactor has no constant beta2 (its decay grows with the step) and Lion's averages a momentum: the half-life rule was shown for Adam's
second moment, so neither gets advice on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.records import Advice

if TYPE_CHECKING:
    from brim.workload.words import Optimizer

ADAM_LIKE: Final = frozenset({"adamw", "adamw-fused", "adamw-loop", "adamw-8bit", "paged-adamw-8bit"})
SGD: Final = frozenset({"sgd", "sgd-momentum"})

SQUARE_ROOT_SOURCE: Final = "Malladi et al. 2022, arXiv 2205.10287"
SIGN_SOURCE: Final = "Li et al. 2024, arXiv 2405.14578"
LINEAR_SOURCE: Final = "Goyal et al. 2017, arXiv 1706.02677"
HALF_LIFE_SOURCE: Final = "Marek et al. 2025, arXiv 2507.07101"
WARMUP_SOURCE: Final = "Brown et al. 2020, arXiv 2005.14165"
"""Models with batches of 0.5 to 3.2 million tokens, all warmed up over the same 375 million tokens."""

LOWEST_BETA2: Final = 0.9
"""Where beta2 is lowered at all, it is not lowered below this: torch's beta1 is 0.9, and a second moment that forgets faster than the first
divides by the very gradient it scales."""


def follow_up(
    *,
    from_batch: int,
    to_batch: int,
    optimizer: Optimizer,
    learning_rate: float | None = None,
    beta2: float = 0.999,
    warmup_steps: int | None = None,
    tokens_per_sequence: float | None = None,
) -> tuple[Advice, ...]:
    """What to change in a recipe that was tuned at `from_batch` sequences a step, for `to_batch`. Nothing where they are equal.

    Without a learning rate the advice is a factor for it, under the name `learning_rate_factor`.
    """
    _check(from_batch, to_batch, learning_rate, beta2, warmup_steps)
    if from_batch == to_batch:
        return ()
    found = [_rate_advice(from_batch, to_batch, optimizer, learning_rate)]
    if optimizer in ADAM_LIKE:
        found.append(_beta2_advice(from_batch, to_batch, beta2))
    if warmup_steps:
        found.append(_warmup_advice(from_batch, to_batch, warmup_steps, tokens_per_sequence))
    return tuple(advice for advice in found if advice.now != advice.then)


def learning_rate_factor(from_batch: int, to_batch: int, optimizer: Optimizer) -> float:
    """What the learning rate is multiplied by: the ratio of the batches for SGD, its square root for the rest."""
    ratio = to_batch / from_batch
    return ratio if optimizer in SGD else math.sqrt(ratio)


def format_setting(value: float) -> str:
    """A setting of a recipe as people write it: `5e-5`, `7.07e-5`, `0.999`, `250`."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, _e, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _rate_advice(from_batch: int, to_batch: int, optimizer: Optimizer, learning_rate: float | None) -> Advice:
    factor = learning_rate_factor(from_batch, to_batch, optimizer)
    now = 1.0 if learning_rate is None else learning_rate
    return Advice(
        setting="learning_rate_factor" if learning_rate is None else "learning_rate",
        now=now,
        then=now * factor,
        reason=sentences(
            _rate_rule(optimizer, from_batch, to_batch, factor), _rate_limit(optimizer) if to_batch > from_batch else ""
        ),
        source=_rate_source(optimizer),
    )


def _rate_rule(optimizer: Optimizer, from_batch: int, to_batch: int, factor: float) -> str:
    if optimizer in SGD:
        text = _("The batch goes from {before} to {after}: with SGD the learning rate goes with the batch, x {factor}.")
    else:
        text = _(
            "The batch goes from {before} to {after}: with {optimizer} the learning rate goes with its square root, x {factor}."
        )
    return text.format(before=from_batch, after=to_batch, optimizer=optimizer, factor=f"{factor:.3g}")


def _rate_limit(optimizer: Optimizer) -> str:
    """Every such rule ends where a larger batch no longer makes the gradient better."""
    if optimizer in SGD:
        return _("Past the critical batch the best rate hardly rises any more, and this is then too high.")
    return _("Past the critical batch the best rate falls again ({source}), and this is then too high.").format(
        source=SIGN_SOURCE
    )


def _rate_source(optimizer: Optimizer) -> str:
    if optimizer in SGD:
        return LINEAR_SOURCE
    return SQUARE_ROOT_SOURCE if optimizer in ADAM_LIKE else SIGN_SOURCE


def _beta2_advice(from_batch: int, to_batch: int, beta2: float) -> Advice:
    exact = beta2 ** (to_batch / from_batch)
    # The largest float below 1: a batch that shrinks by many orders must not round to a second moment that never forgets.
    then = min(max(exact, min(beta2, LOWEST_BETA2)), math.nextafter(1.0, 0.0))
    text = _("The second moment then forgets half after as many tokens as before: {now} ^ ({after} / {before}) = {exact}.")
    reason = text.format(now=format_setting(beta2), after=to_batch, before=from_batch, exact=format_setting(exact))
    if then > exact:
        text = _("Below {lowest} it would forget faster than the first moment, so it stays there.")
        reason = sentences(reason, text.format(lowest=format_setting(then)))
    return Advice(setting="adam_beta2", now=beta2, then=then, reason=reason, source=HALF_LIFE_SOURCE)


def _warmup_advice(from_batch: int, to_batch: int, steps: int, tokens_per_sequence: float | None) -> Advice:
    then = max(1, round(steps * from_batch / to_batch))
    if tokens_per_sequence is None:
        text = _("Warm-up should see as many sequences as before, {sequences}, and a step now holds {after}.")
        reason = text.format(sequences=steps * from_batch, after=to_batch)
    else:
        text = _("Warm-up should see as many tokens as before, about {tokens}, and a step now holds about {each}.")
        tokens, each = round(steps * from_batch * tokens_per_sequence), round(to_batch * tokens_per_sequence)
        reason = text.format(tokens=f"{tokens:,}", each=f"{each:,}")
    return Advice(setting="warmup_steps", now=float(steps), then=float(then), reason=reason, source=WARMUP_SOURCE)


def _check(from_batch: int, to_batch: int, learning_rate: float | None, beta2: float, warmup_steps: int | None) -> None:
    if from_batch < 1 or to_batch < 1:
        text = _("A batch goes from {before} to {after} sequences, and both must be at least 1.")
        raise UsageError(text.format(before=from_batch, after=to_batch), hint=_("Write --from-batch 64."))
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise UsageError(
            _("The learning rate {rate} is not above 0.").format(rate=learning_rate), hint=_("Write --learning-rate 5e-5.")
        )
    if not 0 < beta2 < 1:
        raise UsageError(
            _("beta2 is {beta2}, and must lie between 0 and 1.").format(beta2=beta2), hint=_("Adam's default is 0.999.")
        )
    if warmup_steps is not None and warmup_steps < 0:
        raise UsageError(
            _("{steps} steps of warm-up are fewer than none.").format(steps=warmup_steps), hint=_("Write 0 or more.")
        )
