"""`brim probe`: what this machine really does, found in a handful of runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli._aliases import BATCH_NAMES, TOKENIZER_NAMES
from brim.cli._command import Size, option, verb
from brim.cli._numbers import POSITIVE, Number, WholeNumber
from brim.cli._output import note, print_json, show
from brim.cli._step_options import COLUMNS_OPTION, STEP_OPTIONS, data_option, given_settings, with_options
from brim.errors import EXIT_INTERRUPTED, UsageError
from brim.locale import N_, _
from brim.machine.screen import redraw

if TYPE_CHECKING:
    from brim.records import Measurement


PROBE_OPTIONS = (
    data_option(N_("jsonl, json, parquet, csv, text or a datasets folder: its real lengths are run; again for more files.")),
    COLUMNS_OPTION,
    option(
        "--tokenizer",
        metavar="NAME",
        config_names=TOKENIZER_NAMES,
        help=N_(
            "Folder, tokenizer.json or Hub id. Default: the one in the model's folder; else tokens are guessed from characters."
        ),
    ),
    option("--device", type=click.Choice(["cpu", "cuda"]), help=N_("cpu: train on the CPU. cuda: the GPU of this machine.")),
    option("--memory", type=Size(), config_names=("vram",), help=N_("Hard limit of what the step may take: 2GiB.")),
    option("--gpu-index", type=WholeNumber(0), metavar="I", help=N_("Which GPU of this machine. Default: 0.")),
    option(
        "--effective-batch",
        "--batch-size",
        **POSITIVE,
        config_names=BATCH_NAMES,
        help=N_("Sequences per optimizer step: sizes are compared at it, and none is larger. Default: one micro-batch a step."),
    ),
    option(
        "--objective",
        type=click.Choice(["fastest", "largest"]),
        default="fastest",
        help=N_("largest: stop when the largest size is found. fastest: time smaller ones too. Default: fastest."),
    ),
    option(
        "--margin",
        metavar="X",
        help=N_("Memory that stays free in every trial: 256MiB or 2%. Default: on the CPU 0.5%, else 2%."),
    ),
    option("--max-trials", **POSITIVE, help=N_("Stop after so many trials. Default: 12.")),
    option(
        "--time-limit",
        type=Number(above=0),
        metavar="S",
        help=N_("Stop after so many seconds. Default: none."),
    ),
    option("--fresh", is_flag=True, default=None, help=N_("Measure again, even if the same was measured before.")),
    option("-o", "--output", metavar="FILE", help=N_("Write the result there, for brim plan --probe and brim train.")),
    option("--trust-remote-code", is_flag=True, help=N_("Let a model's own Python code run. Read it first.")),
)


@verb(
    N_(
        "Find the largest micro-batch that really trains here, and the fastest, by running them.\n\nMODEL is a catalogue name, a Hub id, "
        "a folder, a config.json, or module:function. Every trial is a process of its own: two optimizer steps of the longest sequences, "
        "mixed lengths, an evaluation (as large as the micro-batch unless --eval-batch says otherwise), a save. Only the batch is varied; "
        "--micro-batch is the first size to try. Exit code 1: not even one sequence trains, or time ended before one did."
    )
)
@click.argument("model")
@with_options(PROBE_OPTIONS, STEP_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, model: str, as_json: bool, fresh: bool | None, output: str | None, **options: Any) -> None:
    """Probe, and show what was found; after an interruption, as far as it came."""
    from brim.prober.probe import Prober
    from brim.prober.request import read_request

    if output is not None:
        _check_output(output)
    given = given_settings(options)
    named = (
        "data", "tokenizer", "columns", "device", "memory", "gpu_index", "effective_batch", "objective", "margin", "max_trials",
        "time_limit", "trust_remote_code",
    )  # fmt: skip
    asked = {name: given.pop(name) for name in named if name in given}
    if "margin" in asked:
        asked["margin"] = str(asked["margin"])
    request = read_request(model, settings=given, cache=True, **asked)
    progress = _Progress()
    prober = Prober(request, say=progress.say, watch=progress.watch if sys.stderr.isatty() else None, is_fresh=bool(fresh))
    interrupted = False
    try:
        found = prober.run()
    except KeyboardInterrupt:
        progress.clear()
        if not any(trial.verdict == "ok" for trial in prober.trials):
            raise
        interrupted, found = True, prober.measurement(complete=False)
    progress.clear()
    if prober.was_known:
        note(_("Measured before; --fresh measures again."))
    _give(found, output, as_json=as_json)
    if interrupted:
        note(_("Interrupted: what had been found is shown, and the search is not complete."))
        ctx.exit(EXIT_INTERRUPTED)
    ctx.exit(0 if found.largest is not None else 1)


def _give(found: Measurement, output: str | None, *, as_json: bool) -> None:
    if output is not None:
        found.write(Path(output))
        note(_("Written: {paths}").format(paths=output))
    if as_json:
        print_json(found.to_dict())
        return
    from brim.cli._probe_view import probe_blocks

    show(*probe_blocks(found))


def _check_output(output: str) -> None:
    """Before minutes are spent: a file that cannot be written is told now."""
    path = Path(output)
    if not output.strip() or path.is_dir():
        raise UsageError(_("-o needs the name of a file, and {path!r} is none.").format(path=output))
    if not path.parent.is_dir():
        raise UsageError(_("There is no folder {path}.").format(path=path.parent))


class _Progress:
    """A line a trial; on a terminal, one more that lives while it runs."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        self.clear()
        note(text)

    def watch(self, size: int, phase: str | None, seconds: float) -> None:
        text = _("Running {size} sequences: {phase}, {seconds:.0f} s").format(
            size=size, phase=phase or _("starting"), seconds=seconds
        )
        redraw(text)

    def clear(self) -> None:
        if self._is_live:
            redraw()
