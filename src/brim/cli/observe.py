"""`brim observe`: run any training script unchanged, and say what batch was in force."""

from __future__ import annotations

import click

from brim.cli._command import option, verb
from brim.cli._numbers import WholeNumber
from brim.cli._output import note, print_json, work_is_done
from brim.errors import UsageError
from brim.locale import N_, _


@verb(
    N_(
        "Run a training command unchanged, in its own interpreter, and say what batch was really in force.\n\nWrite the command after two "
        "dashes: brim observe -- python train.py --lr 1e-4. torchrun, accelerate launch, python -m and shell scripts work too. Its output "
        "and its exit code stay its own; what brim saw follows on stderr, and a ledger lies in the output folder."
    )
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
@option(
    "--effective-batch",
    "--batch-size",
    type=WholeNumber(1),
    metavar="N",
    help=N_("Sequences per optimizer step that you configured, where the script does not say it."),
)
@option("--no-source", is_flag=True, help=N_("Do not look for the lines that change the batch."))
@option("-o", "--output", metavar="DIR", help=N_("Folder for the ledger and the result. Default: brim-runs/SCRIPT-TIME."))
@click.pass_context
def command(
    ctx: click.Context, /, words: tuple[str, ...], as_json: bool, effective_batch: int | None, no_source: bool, output: str | None
) -> None:
    """Observe, and show what was seen."""
    if output is not None and not output.strip():
        raise UsageError(_("-o needs the name of a folder."))
    from brim.audit.observe import observe
    from brim.cli._observe_view import lines_of

    found = observe(words, output=output, effective_batch=effective_batch, source=not no_source)
    for line in lines_of(found):
        note(line)
    if as_json:
        with work_is_done():
            print_json(found.to_dict(), indent=None)
    ctx.exit(found.exit_code)


next(each for each in command.params if isinstance(each, click.Option) and each.name == "as_json").help = N_(
    "Print the record as one JSON line: the last line of stdout, below the output of the command."
)
# What follows the command's name is the command's, dashes or not.
command.context_settings = {**command.context_settings, "allow_interspersed_args": False}
