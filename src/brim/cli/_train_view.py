"""How a training looks: what is in force before it, promise against fact after it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli._output import console, grid, note, plain_text, show
from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from brim.records import RunCard, TrainingResult

_PLAIN_COLUMNS = 160


def tell_banner(card: RunCard) -> None:
    """On stderr: it is no answer, but what the answer will rest on."""
    from brim.trainer.words import banner

    _print(grid(banner(card)))


def show_dry_run(card: RunCard, folder: str) -> None:
    """All that would happen."""
    from brim.trainer.words import banner, format_seconds

    rows = banner(card)
    if card.predicted_step_seconds is not None:
        total = card.predicted_step_seconds * card.total_steps
        text = _("{step:.2g} s a step, {total} in all, as predicted")
        rows.append((_("Time"), text.format(step=card.predicted_step_seconds, total=format_seconds(total))))
    if card.predicted is not None:
        kinds = sorted(card.predicted.by_kind.items(), key=lambda pair: -pair[1])
        said = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size)
        rows.append((_("At the peak"), said))
    rows.append((_("Folder"), folder))
    show(_("Nothing was started. This is what would happen:"), grid(rows))


def show_result(result: TrainingResult) -> None:
    """Promise against fact; after a signal, how to go on."""
    show(*result_blocks(result))
    if result.stopped_by:
        _tell_how_to_go_on(result)


def result_blocks(result: TrainingResult) -> list[Table]:
    """Promise against fact."""
    from brim.trainer.words import closing

    rows = closing(result) if result.steps else []
    if result.finished:
        rows.append((_("Model"), result.folder))
    if result.report:
        rows.append((_("Report"), result.report))
    return [grid(rows, indent=0)]


def _tell_how_to_go_on(result: TrainingResult) -> None:
    from brim.trainer.manifest import last_checkpoint, step_of

    kept = last_checkpoint(result.folder, say=lambda _sentence: None, none_is_error=False)
    if kept is None:
        text = _("Stopped by {signal} before a checkpoint was saved. Start over with: brim train --resume {folder}")
    else:
        text = _("Stopped by {signal}. The checkpoint of step {step} is kept. Go on with: brim train --resume {folder}")
    note(text.format(signal=result.stopped_by, step=step_of(kept) if kept is not None else 0, folder=result.folder))
    if kept is not None and any((Path(result.folder) / name).is_file() for name in ("config.json", "adapter_config.json")):
        text = _("The model in {folder} itself is still that of the last time this run ended; the newest weights are in {kept}.")
        note(text.format(folder=result.folder, kept=kept))


def _print(table: Table) -> None:
    if sys.stderr.isatty():
        console(sys.stderr).print(table)
        return
    for line in plain_text(table, width=_PLAIN_COLUMNS).splitlines():
        note(line)
