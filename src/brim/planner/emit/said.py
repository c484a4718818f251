"""The sentences that stand at the head of every emitted file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.extras import INSTALL
from brim.locale import _
from brim.version import __version__

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe


def head(recipe: Recipe, how: str, *notes: str) -> list[str]:
    """Where the file comes from, how it is run, the promise, and what must be known."""
    product = _(
        "{effective} sequences per optimizer step = {micro} (micro-batch) x {accumulation} (accumulation) x {ranks} (ranks)."
    )
    return [
        _("Written by brim {version} from a plan for {model}. It runs without brim; to plan again: {command}").format(
            version=recipe.plan.brim_version or __version__, model=recipe.model, command=INSTALL
        ),
        how,
        product.format(
            effective=recipe.best.effective_batch, micro=recipe.cut.micro_batch,
            accumulation=recipe.cut.accumulation, ranks=recipe.best.world_size,
        ),
        *last_window(recipe),
        *_advice(recipe),
        *_guessed(recipe),
        *recipe.notes,
        *notes,
    ]  # fmt: skip


def _advice(recipe: Recipe) -> list[str]:
    """What the plan advises and nobody applied."""
    applied = {"learning_rate": recipe.learning_rate}
    text = _("Advised, not applied: {setting} {then:g} instead of {now:g} ({source}).")
    return [
        text.format(setting=each.setting, then=each.then, now=each.now, source=each.source)
        for each in recipe.plan.advice
        if applied.get(each.setting) != each.then
    ]


def _guessed(recipe: Recipe) -> list[str]:
    data = recipe.plan.data
    if data is None or data.exact or not data.source:
        return []
    return [
        _("The longest length is guessed from characters: count with the real tokenizer before you trust that nothing is cut.")
    ]


def last_window(recipe: Recipe) -> list[str]:
    """What the Trainer does where the data does not divide."""
    effective, samples = recipe.best.effective_batch, recipe.plan.workload.samples
    said = []
    if samples is None:
        said.append(_("The last step of an epoch may hold fewer sequences: the Trainer steps what is left."))
    elif samples % effective:
        text = _("The last step of an epoch holds {rest} sequences, not {effective}: the Trainer steps what is left.")
        said.append(text.format(rest=samples % effective, effective=effective))
    a_round = recipe.cut.micro_batch * recipe.best.world_size
    if recipe.best.world_size > 1 and (samples is None or samples % a_round):
        said.append(_("Ranks that run out of data are given sequences from its start, which then count twice in that epoch."))
    return said
