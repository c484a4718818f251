"""`brim emulate`: run a CUDA training command on an emulated card."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from brim.cli._command import Size, option, verb
from brim.cli._numbers import WholeNumber
from brim.cli._output import note, print_json, show, work_is_done
from brim.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from brim.locale import N_, _


@verb(
    N_(
        "Run a CUDA training command, unchanged, on an emulated card: does it fit, and where is its peak?\n\nWrite the command after two "
        "dashes: brim emulate --gpu t4 -- python train.py. It runs with its own CUDA build of torch, so kernels are chosen, memory is "
        "allocated and out-of-memory errors are raised as on that card. Values are not computed: losses mean nothing. The command is "
        "stopped after 3 optimizer steps, and what it writes goes to a temporary folder. Exit code 1: it does not fit, it "
        "failed, or it did not use CUDA."
    )
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
@option(
    "--gpu",
    metavar="GPU",
    help=N_("The card to emulate: t4, 'rtx-3080*2' for two, 24GiB for a card of that size with compute capability 8.6."),
)
@option("--memory", type=Size(), metavar="SIZE", help=N_("Capacity of each card, instead of the catalogue's."))
@option("--steps", type=WholeNumber(1), metavar="N", help=N_("Stop after this many optimizer steps. Default: 3."))
@option("--full", is_flag=True, help=N_("Run the command to its end."))
@option(
    "--longest",
    is_flag=True,
    help=N_("Put the longest rows of Hugging Face datasets first, in DataLoaders that shuffle or have a sampler."),
)
@option("--compute", is_flag=True, help=N_("Also compute floating-point operators, on the host: real losses, for small models."))
@option("--allow-writes", is_flag=True, help=N_("Let the command write to its files. What it saves is not a trained model."))
@option(
    "--python",
    metavar="FILE",
    help=N_(
        "The interpreter that the command uses, if brim cannot read it from the command (a shell script, uv run, conda run)."
    ),
)
@option("-o", "--output", metavar="FILE", help=N_("Write the record to a JSON file. `brim report FILE` draws it."))
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    as_json: bool,
    gpu: str | None,
    memory: int | None,
    steps: int | None,
    full: bool,
    longest: bool,
    compute: bool,
    allow_writes: bool,
    python: str | None,
    output: str | None,
) -> None:
    """Run the emulation and print its result."""
    if gpu is None:
        raise UsageError(_("--gpu is missing: the card to emulate."), hint="brim emulate --gpu t4 -- python train.py")
    if output is not None and not output.strip():
        raise UsageError(_("-o needs the name of a file."))
    if output is not None and Path(output).is_dir():
        raise UsageError(_("-o {path} is a folder; give the name of a file.").format(path=output))
    if full and steps is not None:
        raise UsageError(_("--steps and --full cannot be combined."))
    from brim.cli._emulate_view import blocks_of
    from brim.emulator.run import DEFAULT_STEPS, emulate

    emulation = emulate(
        words,
        gpu=gpu,
        memory=memory,
        steps=steps or DEFAULT_STEPS,
        full=full,
        longest=longest,
        compute=compute,
        allow_writes=allow_writes,
        python=python,
        stdout=sys.stderr if as_json else None,
    )
    if output is not None:
        note(_("Wrote {path}.").format(path=emulation.write(output)))
    with work_is_done() if output is not None else contextlib.nullcontext():
        if as_json:
            print_json(emulation.to_dict())
        else:
            show(*blocks_of(emulation))
    fits = emulation.verdict in {"fits", "no-steps"}
    ctx.exit(EXIT_OK if fits else EXIT_INTERRUPTED if emulation.verdict == "interrupted" else EXIT_FAILED)


# All words after the command's name belong to it, also those that look like options of brim.
command.context_settings = {**command.context_settings, "allow_interspersed_args": False}
