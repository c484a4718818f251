"""`brim max`: one number, the largest micro-batch, and the command to train with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from brim.cli._command import verb
from brim.cli._output import grid, print_json, show
from brim.cli._progress import progress
from brim.cli._step_options import COLUMNS_OPTION, DEVICE_OPTIONS, MICRO_BATCH, STEP_OPTIONS, given_settings, with_options
from brim.cli.plan import DATA, EFFECTIVE_BATCH, MARGIN, PROBE, TOKENIZER, TRUST_REMOTE_CODE, check_device, command_line
from brim.locale import N_, _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from brim.planner.answers import Largest
    from brim.records import Candidate

_WORKLOAD_OPTIONS = (DATA, COLUMNS_OPTION, TOKENIZER, EFFECTIVE_BATCH)
_STEP_OPTIONS = tuple(each for each in STEP_OPTIONS if each is not MICRO_BATCH)


@verb(
    N_(
        "Find the largest micro-batch that fits, without a GPU: one number, what limits it, and the command to train with it.\n\nMODEL is "
        "a catalogue name, a Hub id, a folder, a config.json, or module:function. What you give is pinned; checkpointing and sharding are "
        "chosen. Exit code 1: not even one sequence fits; the answer then says what would."
    )
)
@click.argument("model")
@with_options(DEVICE_OPTIONS, _WORKLOAD_OPTIONS, _STEP_OPTIONS, (MARGIN, PROBE, TRUST_REMOTE_CODE))
@click.pass_context
def command(ctx: click.Context, /, model: str, as_json: bool, **options: Any) -> None:
    """Print the number and what belongs to it."""
    from brim.planner.largest import max as largest

    given = given_settings(options)
    check_device(given)
    if "margin" in given:
        given["margin"] = str(given["margin"])
    with progress(_("Looking for the largest micro-batch of {model} ...").format(model=model)):
        found = largest(model, **given)
    if as_json:
        print_json(found.to_dict())
    else:
        show(*largest_blocks(found, command_line(model)))
    ctx.exit(0 if found.fits else 1)


def largest_blocks(found: Largest, typed: str = "") -> Iterator[RenderableType]:
    """The number first."""
    from brim.cli._plan_view import assumed, headline, nothing_fits, predicted_memory, predicted_speed, structure

    yield from (
        _("Largest micro-batch: {count}").format(count=found.micro_batch),
        "",
        headline(found.workload, found.machine),
        "",
    )
    best = found.best
    if best is None:
        yield from nothing_fits(found, typed or found.plan_command.replace("brim plan", "brim max", 1))
        return
    rows = [(_("Limited by"), _limit(found)), (_("How"), structure(best))]
    rows += predicted_memory(best.memory, found.margin_bytes) if best.memory is not None else []
    rows += [(_("Speed"), predicted_speed(best.speed))] if best.speed is not None else []
    yield grid(rows, indent=0)
    if found.others:
        yield from ("", _("Otherwise"), *(f"  {_other(each)}" for each in found.others))
    yield from ("", _("Train with it"), f"  {found.train_command}")
    if found.hints:
        yield from ("", _("Would help"), *(f"  - {text}" for text in found.hints))
    yield from assumed(found.assumptions)


def _limit(found: Largest) -> str:
    if found.limited_by == "effective-batch":
        return _("the effective batch: a step has no more sequences for one micro-batch")
    if found.next_bytes is None:
        return _("the search: more was not tried")
    return _("memory: {next} would need {needed}, and {room} is there beside the margin").format(
        next=found.micro_batch + 1, needed=format_bytes(found.next_bytes), room=format_bytes(found.room_bytes)
    )


def _other(each: Candidate) -> str:
    words = [_("checkpointing {word}").format(word=each.checkpointing)]
    if each.world_size > 1:
        words.append(each.sharding)
    if each.loss == "chunked":
        words.append(_("chunked loss"))
    text = _("micro-batch {size} with {how}").format(size=each.micro_batch, how=", ".join(words))
    if each.memory is None or each.speed is None:
        return text
    return text + _(": {needed}, {tokens:,.0f} tokens/s").format(
        needed=format_bytes(each.memory.peak_device_bytes), tokens=each.speed.tokens_per_second
    )
