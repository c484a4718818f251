"""`brim train`: a model and a data file in, a fine-tuned model out, at exactly the batch that was asked for."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli._aliases import in_our_spelling
from brim.cli._command import Command, Size, option
from brim.cli._numbers import ABOVE_ZERO, COUNT, POSITIVE, Number
from brim.cli._output import note, print_json, quiet_libraries, work_is_done
from brim.cli._step_options import STEP_OPTIONS, Words, given_settings, with_options
from brim.errors import EXIT_FAILED, EXIT_INTERRUPTED, BrimError, UsageError
from brim.locale import N_, _
from brim.machine.screen import redraw

if TYPE_CHECKING:
    from brim.records import RunCard, TrainingResult

_SCHEDULES = ("linear", "cosine", "constant", "constant-with-warmup", "inverse-sqrt", "polynomial")


class Columns(click.ParamType[dict[str, str]]):
    """`source=question,target=answer`; a mapping in a config file."""

    name = "columns"
    takes_lists = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        """What each column means."""
        if isinstance(value, dict):
            return {str(role): str(column) for role, column in value.items()}
        pairs = [part.partition("=") for part in value.split(",")]
        if not all(role.strip() and equals and column.strip() for role, equals, column in pairs):
            self.fail(_("write source=COLUMN,target=COLUMN."), param, ctx)
        return {role.strip(): column.strip() for role, _equals, column in pairs}


class Several(click.ParamType[Any]):
    """One value, or one for each process: `8GiB`, `6GiB,8GiB`; a list in a config file."""

    name = "several"
    takes_lists = True

    def __init__(self, each: click.ParamType[Any]) -> None:
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A single value stays one."""
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        found = [self._each.convert(part, param, ctx) for part in parts]
        return found[0] if len(found) == 1 else found


DATA_OPTIONS = (
    option("--data", metavar="FILE", help=N_("jsonl, json, parquet, csv, text, a datasets folder, or a folder of such files.")),
    option(
        "--columns",
        type=Columns(),
        metavar="NAMES",
        help=N_(
            "What columns mean: source=question,target=answer; also text, label, messages. Default: recognised by their names."
        ),
    ),
    option("--tokenizer", metavar="NAME", help=N_("Folder or Hub id. Default: the model's own.")),
    option(
        "--max-length",
        **POSITIVE,
        config_names=("max_seq_length", "cutoff_len", "sequence_len", "model_max_length"),
        help=N_("Tokens of a sequence; longer ones are cut, and counted. Default: 2048, or what the model has."),
    ),
    option(
        "--loss-on",
        type=click.Choice(["answer", "all"]),
        help=N_("Which tokens are learnt. Default: those of the answer, where rows tell it apart."),
    ),
    option("--max-bad", **COUNT, help=N_("Bad rows that may be left out. Default: 0, so that the first one is an error.")),
    option("--eval-data", metavar="FILE", config_names=("validation_file",), help=N_("Rows to evaluate on.")),
    option(
        "--eval-split",
        **ABOVE_ZERO,
        config_names=("val_size", "val_set_size"),
        help=N_("Hold rows of --data out to evaluate on: a share below 1, or a number. The seed chooses them."),
    ),
)

RECIPE_OPTIONS = (
    option(
        "--effective-batch",
        **POSITIVE,
        config_names=("global_batch_size", "train_batch_size"),
        help=N_("Sequences per optimizer step, kept exactly. Default: micro-batch x accumulation x processes if given, else 32."),
    ),
    option("--epochs", **ABOVE_ZERO, config_names=("num_train_epochs", "num_epochs"), help=N_("Default: 1.")),
    option("--max-steps", **POSITIVE, help=N_("Stop after so many optimizer steps, whatever --epochs says.")),
    option(
        "--seed", **COUNT, config_names=("data_seed",), help=N_("Decides the order of the data and new weights. Default: 42.")
    ),
    option("--learning-rate", **ABOVE_ZERO, config_names=("lr",), help=N_("Default: 5e-5, and 2e-4 for adapters.")),
    option(
        "--schedule",
        type=click.Choice(_SCHEDULES),
        config_words={"lr_scheduler_type": {name.replace("-", "_"): name for name in _SCHEDULES}},
        help=N_("How the learning rate falls. Default: linear."),
    ),
    option(
        "--warmup",
        type=Number(0),
        metavar="X",
        config_names=("warmup_steps", "warmup_ratio"),
        help=N_("Steps over which the learning rate rises; below 1, a share of all steps. Default: 0."),
    ),
    option("--weight-decay", type=Number(0), metavar="X", help=N_("On matrices. Default: 0.")),
    option("--from-scratch", is_flag=True, default=None, help=N_("Draw fresh weights by the seed: config.json is then enough.")),
)

RUN_OPTIONS = (
    option("-o", "--output", metavar="DIR", config_names=("output_dir",), help=N_("Default: ./brim-runs/MODEL-TIME.")),
    option(
        "--resume",
        metavar="DIR",
        config_names=("resume_from_checkpoint",),
        help=N_("Go on with the run in this folder, exactly; --memory, --device, --workers and the like may be new."),
    ),
    option("--plan", metavar="FILE", help=N_("Train as this plan says (plan.json of brim plan -o).")),
    option("--probe", metavar="FILE", help=N_("Result of brim probe: slices follow what was measured there.")),
    option("--no-probe", is_flag=True, default=None, help=N_("Do not try sizes before the first step; follow the prediction.")),
    option("--no-verify", is_flag=True, default=None, help=N_("Do not prove the model before the first step; it is said.")),
    option("--device", type=click.Choice(["cpu", "cuda"]), help=N_("Default: the GPU of this machine, else the CPU.")),
    option(
        "--memory",
        type=Several(Size()),
        metavar="SIZE",
        help=N_(
            "Limit of the device's memory; on the CPU a hard one, beyond the process itself: 2GiB. With several processes also one for "
            "each: 6GiB,8GiB."
        ),
    ),
    option("--gpu-index", **COUNT, help=N_("Which GPU of this machine. Default: 0.")),
    option("--margin", metavar="X", help=N_("Memory that stays free beside a prediction: 1GiB or 5%.")),
    option(
        "--workers",
        **COUNT,
        config_names=("dataloader_num_workers",),
        help=N_("Processes that load data. Default: as measured."),
    ),
    option("--save-steps", **POSITIVE, help=N_("Steps between checkpoints. Default: ten in a run, at most 500 apart.")),
    option("--keep", **POSITIVE, config_names=("save_total_limit",), help=N_("Checkpoints that are kept. Default: 2.")),
    option(
        "--logging-steps", **POSITIVE, help=N_("Steps between lines on the screen. Default: fifty in a run, at most 10 apart.")
    ),
    option("--eval-steps", **POSITIVE, help=N_("Steps between evaluations. Default: after each epoch, and at the end.")),
    option(
        "--report-to",
        type=Words(),
        metavar="NAMES",
        help=N_("Trackers of the Trainer: tensorboard, wandb, mlflow. Default: none."),
    ),
    option(
        "--launch",
        type=click.Choice(["torchrun", "accelerate"]),
        help=N_("Who starts the processes of --gpus N [--nodes M]. Default: torchrun; none, where a launcher has started brim."),
    ),
    option("--rendezvous", metavar="HOST:PORT", help=N_("With --nodes: where the machines meet, the first one's address.")),
    option(
        "--rendezvous-secret-file",
        metavar="FILE",
        help=N_(
            "With --nodes: file with the secret that the machines share, readable by you alone. Default: the variable "
            "BRIM_RENDEZVOUS_SECRET."
        ),
    ),
    option("--node-rank", **COUNT, help=N_("With --nodes: which machine this is. Default: as Slurm says.")),
    option(
        "--speeds",
        type=Several(click.FLOAT),
        metavar="X,X",
        help=N_("How fast each process is, where they differ: 1,1,0.5. Default: by the GPUs' names, else equal."),
    ),
    option("--dry-run", is_flag=True, default=None, help=N_("Show all that would happen, and do nothing.")),
    option("--trust-remote-code", is_flag=True, default=None, help=N_("Let a model's own Python code run. Read it first.")),
)


class TrainCommand(Command):
    """Takes Transformers' spellings as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """In our spelling, then as ever."""
        return super().parse_args(ctx, in_our_spelling(args, self.params))


@click.command(
    cls=TrainCommand,
    help=N_(
        "Fine-tune MODEL on a data file, at exactly the effective batch you ask for, within the memory that there is.\n\nMODEL is a "
        "folder, a Hub id, a catalogue name, or module:function. The way: tokens, plan, proofs, a short probe, training, evaluation, the "
        "saved model, a report. What you give is pinned; the rest is chosen, whatever default is named below. --micro-batch is used as "
        "given or refused. Ctrl-C ends after the step and keeps it; `--resume DIR` goes on. Transformers' names of options are understood "
        "too. Exit code 1: it does not fit, or it failed."
    ),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "max_content_width": 120,
    },
)
@click.argument("model", required=False)
@with_options(DATA_OPTIONS, RECIPE_OPTIONS, RUN_OPTIONS, STEP_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, model: str | None, as_json: bool, **options: Any) -> None:
    """Train, and say how it went."""
    from brim.trainer.train import train

    given = _given(options)
    is_dry = bool(given.get("dry_run"))
    shown = _Shown(as_json=as_json, is_dry=is_dry)
    try:
        with quiet_libraries():
            progress = shown.progress if sys.stderr.isatty() else None
            result = train(model, **given, say=note, progress=progress, before=shown.banner)
    except BrimError as error:
        if _is_first_rank():
            raise
        ctx.exit(error.exit_code)
    if not _is_first_rank():
        ctx.exit(0)
    if is_dry:
        shown.dry(result)
        ctx.exit(0)
    if result.steps:
        result = _with_page(result)
    with work_is_done():
        if as_json:
            print_json(result.to_dict())
        else:
            from brim.cli._train_view import show_result

            show_result(result)
    ctx.exit(_exit_code(result))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """As `brim.train` takes it."""
    given = given_settings(options)
    if "max_length" in given:
        if "seq_len" in given:
            raise UsageError(_("--max-length and --seq-len are the same thing: give one."))
        given["seq_len"] = given.pop("max_length")
    for name in ("probe", "verify"):
        if given.pop(f"no_{name}", None):
            if name in given:
                raise UsageError(_("--probe and --no-probe contradict each other."))
            given[name] = False
    return given


def _is_first_rank() -> bool:
    from brim.trainer.ranks import World

    return World.of_environment().is_first


def _exit_code(result: TrainingResult) -> int:
    if result.stopped_by:
        return EXIT_INTERRUPTED if result.stopped_by == "SIGINT" else 128 + signal.Signals[result.stopped_by]
    return 0 if result.finished and result.promise_kept else EXIT_FAILED


def _with_page(result: TrainingResult) -> TrainingResult:
    """The report beside the run; a page that cannot be drawn is no reason to call a training failed."""
    from dataclasses import replace

    from brim.cli.report import report

    try:
        return replace(result, report=str(report(Path(result.folder))))
    except (BrimError, OSError) as error:
        note(_("The report could not be written: {why}").format(why=error))
        return result


class _Shown:
    """What a person sees before the first step."""

    def __init__(self, *, as_json: bool, is_dry: bool) -> None:
        self._as_json, self._is_dry = as_json, is_dry
        self._card: RunCard | None = None

    def banner(self, card: RunCard) -> None:
        self._card = card
        if not self._is_dry:
            from brim.cli._train_view import tell_banner

            tell_banner(card)

    def dry(self, result: TrainingResult) -> None:
        assert self._card is not None
        if self._as_json:
            print_json(self._card.to_dict())
            return
        from brim.cli._train_view import show_dry_run

        show_dry_run(self._card, result.folder)

    def progress(self, done: int, total: int) -> None:
        redraw(_("Reading the data: {share:.0%}").format(share=done / max(1, total)) if done < total else "")
