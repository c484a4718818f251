"""`brim verify`: is a model right at every batch size? Five proofs, on the CPU, in seconds. With `--run`: are a run's files whole?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from brim.cli._command import option, verb
from brim.cli._numbers import WholeNumber
from brim.cli._output import note, print_json, quiet_libraries, show, working
from brim.cli._step_options import Words
from brim.errors import UsageError
from brim.locale import N_, _
from brim.workload.words import Precision

if TYPE_CHECKING:
    from brim.records import Verification

SEVERAL = "brim.verifications/1"
"""Of the document for several models, which holds one `brim.verify/1` for each."""
_TASKS = ("causal-lm", "masked-lm", "seq2seq", "classification")


@verb(
    N_(
        "Prove that a model is right at batch sizes above 1, on the CPU and without a tokenizer.\n\nMODEL is a catalogue name, a Hub id, "
        "a folder (of a model or of a PEFT adapter), a config.json, or module:function. Large models are proven on a shrunk copy: the "
        "same code and head ratios, fewer layers, fresh weights. Exit code 1: a proof failed, or could not be run.\n\nWith --run DIR, the "
        "files of a run are compared with the checksums that were taken when they were written. Exit code 1: a file is damaged."
    )
)
@click.argument("models", metavar="MODEL...", nargs=-1)
@option(
    "--run", metavar="DIR", help=N_("Check the model, the checkpoints and the ledger of this run instead of a model's proofs.")
)
@option(
    "--attention",
    type=click.Choice(["eager", "sdpa", "flash2", "all"]),
    config_words={"attn_implementation": {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash2"}},
    help=N_("Under which attention; all: every one that runs here. Default: the model's own."),
)
@option(
    "--precision", type=click.Choice(get_args(Precision)), default="fp32", help=N_("fp32, or what you train in. Default: fp32.")
)
@option(
    "--task",
    type=click.Choice(_TASKS),
    help=N_("What the model is for. Default: what its class says; a function's is causal-lm."),
)
@option("--full", is_flag=True, default=None, help=N_("Run the model itself, however large, with its own weights if it has any."))
@option("--shrunk", is_flag=True, default=None, help=N_("Run a shrunk copy, however small the model is."))
@option("--proofs", type=Words(), metavar="NAMES", help=N_("Only these: causality,batch,pad,pack,accumulation."))
@option("--seq-len", "--max-length", type=WholeNumber(12), metavar="N", help=N_("Tokens in the rows that are run. Default: 24."))
@option("--seed", type=WholeNumber(0), metavar="N", default=0, help=N_("Of the tokens and of fresh weights. Default: 0."))
@option("-o", "--output", metavar="FILE", help=N_("Write the result there."))
@option("--trust-remote-code", is_flag=True, help=N_("Let a model's own Python code run. Read it first."))
@click.pass_context
def command(
    ctx: click.Context, /, models: tuple[str, ...], run: str | None, as_json: bool, full: bool | None, shrunk: bool | None,
    seq_len: int | None, output: str | None, **options: Any,
) -> None:  # fmt: skip
    """Verify, and show what was found."""
    if (run is None) == (not models):
        raise UsageError(_("Give a MODEL, or --run DIR."), hint=_("brim verify MODEL; brim verify --run DIR"))
    if full and shrunk:
        raise UsageError(_("--full and --shrunk exclude each other."))
    if output is not None and not (output.strip() and Path(output).parent.is_dir() and not Path(output).is_dir()):
        raise UsageError(_("-o needs the name of a file in a folder that exists, and {path!r} is none.").format(path=output))
    if run is not None:
        ctx.exit(_verify_run(run, output, as_json=as_json))
    from brim.cli._verify_view import show_line
    from brim.proofs.subject import LENGTH
    from brim.proofs.verify import verify

    options["size"] = "full" if full else "shrunk" if shrunk else "auto"
    options["length"] = seq_len or LENGTH
    if output is not None and len(models) > 1:
        raise UsageError(_("-o holds one result, and {count} models were named.").format(count=len(models)))
    found: list[Verification] = []
    for model in models:
        with quiet_libraries(), working(_("Verifying {model} ...").format(model=model)):
            found.append(verify(model, **options))
        if len(models) > 1 and not as_json:
            show_line(found[-1])
    _give(found, output, as_json=as_json)
    ctx.exit(0 if all(each.is_proven for each in found) else 1)


def _verify_run(folder: str, output: str | None, *, as_json: bool) -> int:
    from brim.cli._verify_view import show_run
    from brim.trainer.verifying import TellReading, verify_run

    found = verify_run(folder, progress=TellReading())
    if output is not None:
        found.write(Path(output))
        note(_("Written: {paths}").format(paths=output))
    if as_json:
        print_json(found.to_dict())
    else:
        show_run(found)
    return 1 if found.verdict == "damaged" else 0


def _give(found: list[Verification], output: str | None, *, as_json: bool) -> None:
    if output is not None:
        found[0].write(Path(output))
        note(_("Written: {paths}").format(paths=output))
    from brim.cli._verify_view import show_failures, verification_blocks

    if as_json:
        whole = found[0].to_dict() if len(found) == 1 else {"schema": SEVERAL, "models": [each.to_dict() for each in found]}
        print_json(whole)
    elif len(found) == 1:
        show(*verification_blocks(found[0]))
    else:
        show_failures(found)
