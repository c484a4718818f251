"""`brim train`: a model and a data file in, a fine-tuned model out, at exactly the batch that was asked for."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli._aliases import BATCH_NAMES, TOKENIZER_NAMES, Refused
from brim.cli._command import Size, option, verb
from brim.cli._numbers import ABOVE_ZERO, COUNT, POSITIVE, Number
from brim.cli._output import note, print_json, quiet_libraries, work_is_done
from brim.cli._step_options import COLUMNS_OPTION, EPOCHS_NAMES, STEP_OPTIONS, Words, data_option, given_settings, with_options
from brim.errors import EXIT_FAILED, EXIT_INTERRUPTED, BrimError, UsageError
from brim.locale import N_, _
from brim.machine.screen import redraw

if TYPE_CHECKING:
    from brim.records import RunCard, TrainingResult

_SCHEDULES = ("linear", "cosine", "constant", "constant-with-warmup", "inverse-sqrt", "polynomial")
_SCHEDULE_WORDS = {name.replace("-", "_"): name for name in _SCHEDULES}

_ALL_ROWS = N_("Leave it out: every row is trained on, and the last step of an epoch may have fewer sequences.")
_LAST_MODEL = N_("Leave it out: the model of the last step is saved; earlier ones are in RUN/checkpoint-N.")
_LOGGED_BY_STEPS = N_("Write --logging-steps N.")
_NO_OVERWRITING = N_("Remove the folder, choose another with -o, or resume the run in it with --resume.")
_NO_UPLOAD = N_("Leave it out: brim uploads nothing. The folder of the run can be uploaded with `hf upload`.")
_SAVED_BY_STEPS = N_("Write --save-steps N; --keep 1 keeps one checkpoint only.")
_SORTED = N_("Leave it out: brim sorts by length inside each optimizer step, and never across steps.")


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
    data_option(N_("jsonl, json, parquet, csv, text, a datasets folder, or a folder of such files; again for more of them.")),
    COLUMNS_OPTION,
    option(
        "--tokenizer",
        metavar="NAME",
        config_names=TOKENIZER_NAMES,
        help=N_("Folder or Hub id. Default: the model's own."),
    ),
    option(
        "--loss-on",
        type=click.Choice(["answer", "all"]),
        help=N_("Which tokens are learnt. Default: those of the answer, where rows tell it apart."),
    ),
    option("--max-bad", **COUNT, help=N_("Bad rows that may be left out. Default: 0, so that the first one is an error.")),
    option(
        "--eval-data",
        metavar="FILE",
        config_names=("validation_file", "eval_file", "eval_dataset"),
        config_words={"load_best_model_at_end": {False: None, True: Refused(_LAST_MODEL)}},
        help=N_("Rows to evaluate on."),
    ),
    option(
        "--eval-split",
        **ABOVE_ZERO,
        config_names=("val_size", "val_set_size", "test_size"),
        help=N_("Hold rows of --data out to evaluate on: a share below 1, or a number. The seed chooses them."),
    ),
)

RECIPE_OPTIONS = (
    option(
        "--effective-batch",
        "--batch-size",
        **POSITIVE,
        config_names=BATCH_NAMES,
        config_words={"group_by_length": {False: None, True: Refused(_SORTED)}},
        help=N_("Sequences per optimizer step, kept exactly. Default: micro-batch x accumulation x processes if given, else 32."),
    ),
    option(
        "--epochs",
        **ABOVE_ZERO,
        config_names=EPOCHS_NAMES,
        config_words={"dataloader_drop_last": {False: None, True: Refused(_ALL_ROWS)}},
        help=N_("Default: 1."),
    ),
    option(
        "--max-steps",
        **POSITIVE,
        config_names=("max_train_steps", "steps"),
        help=N_("Stop after so many optimizer steps, whatever --epochs says."),
    ),
    option(
        "--seed", **COUNT, config_names=("data_seed",), help=N_("Decides the order of the data and new weights. Default: 42.")
    ),
    option("--learning-rate", "--lr", **ABOVE_ZERO, help=N_("Default: 5e-5, and 2e-4 for adapters.")),
    option(
        "--schedule",
        type=click.Choice(_SCHEDULES),
        config_words=dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), _SCHEDULE_WORDS),
        help=N_("How the learning rate falls. Default: linear."),
    ),
    option(
        "--warmup",
        type=Number(0),
        metavar="X",
        config_names=("warmup_steps", "num_warmup_steps"),
        help=N_("Steps over which the learning rate rises; below 1, a share of all steps. Default: 0."),
    ),
    option("--warmup-ratio", type=Number(0, below=1), metavar="X", hidden=True),
    option("--weight-decay", type=Number(0), metavar="X", config_names=("wd",), help=N_("On matrices. Default: 0.")),
    option("--adam-beta1", type=Number(0, below=1), metavar="X", help=N_("AdamW. Default: 0.9.")),
    option("--adam-beta2", type=Number(0, below=1), metavar="X", help=N_("AdamW. Default: 0.999.")),
    option("--adam-epsilon", type=Number(0), metavar="X", help=N_("AdamW. Default: 1e-8.")),
    option("--from-scratch", is_flag=True, default=None, help=N_("Draw fresh weights by the seed: config.json is then enough.")),
)

RUN_OPTIONS = (
    option(
        "-o",
        "--output",
        metavar="DIR",
        config_names=("output_dir",),
        config_words={
            "push_to_hub": {False: None, True: Refused(_NO_UPLOAD)},
            "overwrite_output_dir": {False: None, True: Refused(_NO_OVERWRITING)},
        },
        help=N_("Default: ./brim-runs/MODEL-TIME."),
    ),
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
        config_names=("vram",),
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
        config_names=("dataloader_num_workers", "num_workers"),
        help=N_("Processes that load data. Default: as measured."),
    ),
    option(
        "--save-steps",
        **POSITIVE,
        config_words={"save_strategy": {"steps": None, **dict.fromkeys(("no", "epoch", "best"), Refused(_SAVED_BY_STEPS))}},
        help=N_("Steps between checkpoints. Default: ten in a run, at most 500 apart."),
    ),
    option("--keep", **POSITIVE, config_names=("save_total_limit",), help=N_("Checkpoints that are kept. Default: 2.")),
    option(
        "--logging-steps",
        **POSITIVE,
        config_words={"logging_strategy": {"steps": None, **dict.fromkeys(("no", "epoch"), Refused(_LOGGED_BY_STEPS))}},
        help=N_("Steps between lines on the screen. Default: fifty in a run, at most 10 apart."),
    ),
    option("--eval-strategy", type=click.Choice(["no", "epoch", "steps"]), config_names=("evaluation_strategy",), hidden=True),
    option("--eval-steps", **POSITIVE, help=N_("Steps between evaluations. Default: after each epoch, and at the end.")),
    option(
        "--report-to",
        type=Words(),
        metavar="NAMES",
        help=N_("Trackers of the Trainer: tensorboard, wandb, mlflow. Default: none."),
    ),
    option("--run-name", metavar="NAME", help=N_("Name of the run in the trackers of --report-to.")),
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
    option(
        "--node-rank",
        **COUNT,
        config_names=("machine_rank",),
        help=N_("With --nodes: which machine this is. Default: as Slurm says."),
    ),
    option(
        "--speeds",
        type=Several(click.FLOAT),
        metavar="X,X",
        help=N_("How fast each process is, where they differ: 1,1,0.5. Default: by the GPUs' names, else equal."),
    ),
    option("--dry-run", is_flag=True, default=None, help=N_("Show all that would happen, and do nothing.")),
    option("--trust-remote-code", is_flag=True, default=None, help=N_("Let a model's own Python code run. Read it first.")),
)


@verb(
    N_(
        "Fine-tune MODEL on a data file, at exactly the effective batch you ask for, within the memory that there is.\n\nMODEL is a "
        "folder, a Hub id, a catalogue name, or module:function. The way: tokens, plan, proofs, a short probe, training, evaluation, the "
        "saved model, a report. What you give is pinned; the rest is chosen, whatever default is named below. --micro-batch is used as "
        "given or refused. Ctrl-C ends after the step and keeps it; `--resume DIR` goes on. Many names of Transformers, TRL and "
        "peft are understood too (docs/names.md). Exit code 1: it does not fit, or it failed."
    )
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
    _check_evaluation(given, given.pop("eval_strategy", None))
    if "warmup_ratio" in given:
        if "warmup" in given:
            raise UsageError(_("--warmup-ratio and --warmup both say how long the learning rate rises: give one."))
        given["warmup"] = given.pop("warmup_ratio")
    for name in ("probe", "verify"):
        if given.pop(f"no_{name}", None):
            if name in given:
                raise UsageError(_("--probe and --no-probe contradict each other."))
            given[name] = False
    return given


def _check_evaluation(given: dict[str, Any], strategy: str | None) -> None:
    """`eval_strategy` of Transformers against what decides here: whether there are rows to evaluate on, and `--eval-steps`."""
    if strategy == "steps" and "eval_steps" not in given:
        raise UsageError(_("--eval-strategy steps needs --eval-steps N."))
    if strategy == "epoch" and "eval_steps" in given:
        raise UsageError(_("--eval-strategy epoch and --eval-steps contradict each other: give one."))
    if strategy == "no" and {"eval_data", "eval_split", "eval_steps"} & given.keys():
        raise UsageError(
            _("--eval-strategy no, and rows to evaluate on are given."),
            hint=_("Leave --eval-data, --eval-split and --eval-steps out."),
        )


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
