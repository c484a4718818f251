"""`brim.train`: one call from a model and a data file to a fine-tuned model, at the batch that was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from brim.errors import BrimError, RecordError, RunError, UsageError
from brim.locale import _
from brim.machine.host import cache_folder
from brim.machine.screen import say as say_on_screen, without_hangup
from brim.records import Launcher, Ledger, RunCard, TrainingResult
from brim.trainer.ranks import World
from brim.trainer.request import LEDGER_FILE, PREPARED_FILES, RUN_FILE, TrainRequest, read_request
from brim.trainer.run_records import copied_to_cache
from brim.workload.reading import sources_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.trainer.doorway import Door
    from brim.trainer.group import Group
    from brim.workload.reading import Given

RUNS_FOLDER = "brim-runs"
_LOCK_SECONDS = 10.0
Say = Callable[[str], None]
Tell = Callable[[RunCard], None]


@without_hangup()
def train(
    model: str | os.PathLike[str] | None = None,
    *,
    data: Given | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    say: Say | None = None,
    progress: Callable[[int, int], None] | None = None,
    before: Tell | None = None,
    worker: str = "brim.trainer.worker",
    **given: Any,
) -> TrainingResult:
    """Fine-tune `model` on the rows of `data`, at exactly the effective batch that is asked for, within the memory that there is.

    `data` is a file or folder, or a list of these.
    `given` is everything that `brim train --help` shows, with `_` for `-`: the settings of `brim.estimate`, and `effective_batch`,
    `epochs`, `max_steps`, `seed`, `learning_rate`, `schedule`, `warmup`, `eval_data`, `eval_split`, `save_steps`, `memory`, `device`, ...
    Training runs in a process of its own, whose `main` is in the module `worker`. `resume` is the folder of a run that is to go on. `say`
    gets the remarks on the way, `before` the card of what is in force, before the first step.
    """
    from brim.trainer.crew import as_planned, crew_of, group_of
    from brim.trainer.doorway import door_of
    from brim.trainer.verifying import repair_records

    world = World.of_environment()
    if resume is None and world.starts_before and output is not None and (Path(output) / RUN_FILE).is_file():
        # The launcher starts its processes anew, after one has failed: they go on.
        resume = output
    request = as_planned(read_request(model, {**given, "data": data, "output": output}, resume))
    group = group_of(request, world)
    request, world = crew_of(request, world, group)
    is_joiner = group is not None and group.node_rank > 0
    # The first machine may have made it already, for all of them.
    folder = request.output if is_joiner and request.output is not None else run_folder(request)
    if not world.is_alone and group is None:
        from brim.trainer.together import train_together

        return train_together(request, folder, say or _silence, before)
    if group is not None and is_joiner:
        return _join(request, folder, group, worker, say or _silence)
    with only_one(folder), door_of(group, say or _silence) as door:
        if request.resumes is not None and not request.dry_run:
            repair_records(folder, say or _silence)
        done = done_already(request, folder)
        if done is not None:
            (say or _silence)(nothing_left(folder))
            return done
        launch = group.launcher if group is not None else None
        prepared = prepare(request, world, say or _silence, progress, launch)
        if before is not None:
            before(prepared.card)
        if request.dry_run:
            if door is not None:
                door.refuse(UsageError(_("The first machine was given --dry-run: nothing is trained.")))
            return _nothing_yet(folder, prepared.card)
        if group is not None:
            return _train_group(folder, prepared, group, worker, say or _silence, door)
        return _train_alone(folder, prepared, worker)


def prepare(
    request: TrainRequest,
    world: World,
    say: Say,
    progress: Callable[[int, int], None] | None = None,
    launch: Launcher | None = None,
) -> Any:
    """Plan, prove, probe: everything up to the first step, with nothing written but brim's cache."""
    from brim.trainer.preparing import Preparation

    return Preparation(request, world, say, progress, launch).run()


def _train_alone(folder: Path, prepared: Any, worker: str) -> TrainingResult:
    from brim.trainer.launching import launch

    with written(folder, prepared):
        ended = launch(folder, module=worker, device=prepared.card.device)
    return result_of(folder, stopped_by=ended.stopped_by, finished=ended.finished)


def _train_group(folder: Path, prepared: Any, group: Group, worker: str, say: Say, door: Door | None) -> TrainingResult:
    from brim.trainer.group import JOIN_SECONDS, train_in_group

    with written(folder, prepared):
        if door is not None:
            door.open()
            text = _("Waiting for the other machines at {where}, for up to {minutes:.0f} minutes.")
            say(text.format(where=group.rendezvous, minutes=JOIN_SECONDS / 60))
        ended = train_in_group(folder, group, module=worker, say=say)
    return result_of(folder, stopped_by=ended.stopped_by, finished=ended.finished)


def _join(request: TrainRequest, folder: Path, group: Group, worker: str, say: Say) -> TrainingResult:
    """Another machine of a run: the first one prepares it, and ranks meet when that is done."""
    from brim.trainer.doorway import knock
    from brim.trainer.group import train_in_group

    if request.dry_run:
        raise UsageError(_("--dry-run is for the first machine: the others do as it does."))
    # The first machine may have seen that nothing is left, and be gone.
    if done_already(request, folder) is not None or not knock(group, say):
        say(nothing_left(folder))
        return result_of(folder, stopped_by=None, finished=True)
    ended = train_in_group(folder, group, module=worker, say=say)
    if ended.stopped_by is not None and not (folder / RUN_FILE).is_file():
        # Before the first step; the first machine has taken its folder away.
        raise KeyboardInterrupt
    return result_of(folder, stopped_by=ended.stopped_by, finished=ended.finished)


@contextlib.contextmanager
def written(folder: Path, prepared: Any) -> Iterator[None]:
    """The run's files, for what follows. Where they cannot be written, or the run is refused, the folder is as it was before."""
    existed, card = folder.exists(), folder / RUN_FILE
    before = card.read_bytes() if card.is_file() else None
    try:
        make_folder(folder)
        prepared.write(folder)
        with copied_to_cache(folder):
            yield
    except BrimError as error:
        is_new = before is None and not (folder / LEDGER_FILE).exists()
        if is_new and not any(folder.glob("checkpoint-*")):
            for name in PREPARED_FILES:
                (folder / name).unlink(missing_ok=True)
            if not existed:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        elif before is not None and isinstance(error, UsageError):
            card.write_bytes(before)
        raise


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Two trainings in one folder would write over each other. The lock lies in brim's cache, so that nothing is written too early."""
    try:
        import fcntl
    except ImportError:  # Windows: the ledger has a lock of its own
        yield
        return
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    with _lock_file(name) as file:
        # One that was killed a moment ago may still be on its way out.
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise UsageError(
                        _("Another `brim train` is at work in {folder}.").format(folder=folder),
                        hint=_("Look at it: brim watch {folder}.").format(folder=folder),
                    ) from error
            time.sleep(0.1)
        yield


def _lock_file(name: str) -> IO[str]:
    locks = cache_folder() / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        return (locks / name).open("w", encoding="utf-8")
    except OSError as error:
        text = _("brim's cache folder {folder} cannot be written to: {why}.")
        raise UsageError(
            text.format(folder=cache_folder(), why=error.strerror or error),
            hint=_("Set another folder: BRIM_CACHE=/path/to/folder."),
        ) from error


def done_already(request: TrainRequest, folder: Path) -> TrainingResult | None:
    """The result of a run that has nothing left to do; None where there is something. Fewer steps than were taken are an error."""
    card = request.resumes
    if card is None or _is_other_data(request, card):
        return None
    from brim.trainer.evaluations import read_evaluations
    from brim.trainer.manifest import last_checkpoint, step_of
    from brim.trainer.verifying import model_damage

    # By sizes: whoever trains on reads all of it, and one that is damaged leaves something to do.
    found = last_checkpoint(folder, say=_silence, none_is_error=False, with_sums=False)
    taken = (step_of(found) or 0) if found is not None else 0
    total = request.max_steps or max(1, math.ceil(request.epochs * card.steps_per_epoch))
    if taken > total:
        text = _("This run has taken {taken} steps already, and {total} were asked for.")
        raise UsageError(text.format(taken=taken, total=total), hint=_("Give more steps, or leave --max-steps and --epochs out."))
    is_saved = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    if taken < total or not is_saved or card.total_steps != total:
        return None
    if card.evaluation_sequences and not any(entry.step == total for entry in read_evaluations(folder)):
        return None
    if model_damage(folder) is not None:
        return None
    return result_of(folder, stopped_by=None, finished=True)


def nothing_left(folder: Path) -> str:
    """Of a run that has taken all its steps."""
    return _("This run is finished: there is nothing left to train. For more: brim train --resume {folder} --max-steps N").format(
        folder=folder
    )


def _is_other_data(request: TrainRequest, card: RunCard) -> bool:
    """Whether another file is named than the run began with: whether its rows are the same is seen when it is prepared."""
    was = card.asked.get("data")
    if was is None:
        return False
    return [Path(source).resolve() for source in sources_of(request.data)] != [
        Path(source).resolve() for source in sources_of(was)
    ]


def run_folder(request: TrainRequest) -> Path:
    """Where the run goes; an error where something else is already there."""
    if request.output is None:
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        name = Path(request.model.name.rstrip("/")).name.replace(":", "-") or "model"
        return Path(RUNS_FOLDER) / f"{name}-{stamp}"
    folder = request.output
    if request.resumes is not None:
        return folder
    if (folder / RUN_FILE).is_file():
        raise UsageError(
            _("{folder} holds a run already.").format(folder=folder),
            hint=_("Go on with it: brim train --resume {folder}. Or give another folder with -o.").format(folder=folder),
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(_("{folder} is a file, and a folder is needed.").format(folder=folder))
    _check_place(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            _("{folder} is not empty, and what is in it is no run of brim.").format(folder=folder),
            hint=_("Give another folder with -o."),
        )
    return folder


def _check_place(folder: Path) -> None:
    """Before minutes are spent: a folder that cannot be made is told now."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    if there is not None and (not there.is_dir() or not os.access(there, os.W_OK)):
        raise UsageError(
            _("The folder {folder} cannot be made: {there} cannot be written to.").format(folder=folder, there=there),
            hint=_("Give another folder with -o."),
        )


def make_folder(folder: Path) -> None:
    """The run's folder; the folder of all runs keeps itself out of git."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.parent.name == RUNS_FOLDER and not (folder.parent / ".gitignore").exists():
            (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            _("The folder {folder} cannot be made: {why}.").format(folder=folder, why=error.strerror or error)
        ) from error


def result_of(folder: Path, *, stopped_by: int | None, finished: bool) -> TrainingResult:
    """Promise against fact, from the files of a run."""
    from signal import Signals

    from brim.step.checker import check_ledger
    from brim.step.ledger import read_ledger
    from brim.step.ledger_repair import lost_steps, repair_ledger
    from brim.trainer.evaluations import read_evaluations

    card = RunCard.read(folder / RUN_FILE)
    if not (folder / LEDGER_FILE).is_file():
        if stopped_by is None:
            raise RunError(_("The run has left no ledger in {folder}.").format(folder=folder))
        return _nothing_yet(folder, card, stopped_by=Signals(stopped_by).name)
    try:
        ledger = read_ledger(folder / LEDGER_FILE)
    except RecordError:
        # Damaged while the run went on. What it still holds is worth more than no result.
        repair_ledger(folder / LEDGER_FILE, say_on_screen)
        ledger = read_ledger(folder / LEDGER_FILE)
    broken = tuple(check_ledger(ledger))
    evaluations = read_evaluations(folder)
    sums = _sums(ledger, card.effective_batch)
    return TrainingResult(
        folder=str(folder),
        finished=finished,
        stopped_by=Signals(stopped_by).name if stopped_by is not None else "",
        steps=len(ledger.steps),
        total_steps=card.total_steps,
        effective_batch=card.effective_batch,
        promise_kept=not broken,
        broken=broken,
        lost_steps=tuple(lost_steps(ledger)),
        evaluation=evaluations[-1] if evaluations else None,
        **_predicted(card),
        memory_limit_bytes=card.memory_limit_bytes,
        **sums,
    )


def _sums(ledger: Ledger, effective_batch: int) -> Mapping[str, Any]:
    splits = skipped = tokens = padded = short = 0
    seconds, peak = 0.0, None
    # The prediction is of the steps since the run was last resumed. Steps before may have had larger slices.
    resumed = ledger.headers[-1].resumed_from_step
    first = last = None
    for entry in ledger.steps:
        splits += len(entry.splits)
        skipped += entry.skipped
        short += entry.sequences < effective_batch
        tokens += entry.tokens or 0
        padded += entry.padded_tokens or 0
        seconds += entry.compute_seconds + entry.wait_seconds
        last = entry.loss if entry.loss is not None else last
        first = last if first is None else first
        if entry.peak_reserved_bytes is not None and entry.step > resumed:
            peak = max(peak or 0, entry.peak_reserved_bytes)
    return {
        "seconds": seconds,
        "splits": splits,
        "skipped": skipped,
        "short_steps": short,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "padding": 1 - tokens / padded if padded else 0.0,
        "first_loss": first,
        "last_loss": last,
        "peak_bytes": peak,
    }


def _predicted(card: RunCard) -> dict[str, Any]:
    if card.predicted is None:
        return {}
    found = {"predicted_bytes": card.predicted.peak_device_bytes}
    return found if card.device == "cpu" else found | {"predicted_reserved_bytes": card.predicted.peak_reserved_bytes}


def _nothing_yet(folder: Path, card: RunCard, *, stopped_by: str = "") -> TrainingResult:
    return TrainingResult(
        folder=str(folder),
        finished=False,
        stopped_by=stopped_by,
        steps=0,
        total_steps=card.total_steps,
        effective_batch=card.effective_batch,
        promise_kept=True,
        **_predicted(card),
        memory_limit_bytes=card.memory_limit_bytes,
    )


def _silence(_sentence: str) -> None: ...
