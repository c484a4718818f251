"""What a training was asked for: read, checked and kept, before anything heavy is imported.

A request says nothing of what is in force; that is `brim.records.RunCard`, which is made of it (`preparing.py`).
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from brim.errors import RecordError, UsageError
from brim.locale import _, sentences
from brim.records import Launcher, LossOn, RunCard, Schedule
from brim.sizes import parse_size
from brim.workload.reading import sources_of
from brim.workload.resolve import Model, find_model
from brim.workload.settings import Settings, read_settings, recorded_alpha

DeviceWord = Literal["cpu", "cuda"]
RUN_FILE = "run.json"
LEDGER_FILE = "ledger.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
PROBE_FILE = "probe.json"
PREPARED_FILES = (RUN_FILE, "plan.json", PROBE_FILE, "verify.json", "timeline.json", "deepspeed.json", "accelerate.yaml")
"""What a run's folder gets before the first step."""

MAY_CHANGE = frozenset({
    "accumulation", "attention", "checkpointing", "data", "device", "epochs", "eval_batch", "eval_data", "eval_steps", "gpu_index", "gpus",
    "keep", "launch", "logging_steps", "margin", "max_bad", "max_steps", "memory", "micro_batch", "node_rank", "nodes", "offload", "padded",
    "probe", "rendezvous", "rendezvous_secret_file", "report_to", "run_name", "save_steps", "sharding", "speeds", "tokenizer",
    "verify", "workers",
})  # fmt: skip
"""What a run that goes on may be told anew: how the step is sliced, where it runs, how long it goes on, and where its files lie now. Never
what a step is: the data are known by their fingerprint."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """Everything that `brim train` can be told. None: not said."""

    data: str | tuple[str, ...]
    """A file or folder, or several."""
    output: Path | None = None
    effective_batch: int | None = None
    epochs: float = 1.0
    max_steps: int | None = None
    seed: int = 42
    learning_rate: float | None = None
    schedule: Schedule = "linear"
    warmup: float = 0
    """Steps; below 1, a share of all steps."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    loss_on: LossOn = "answer"
    columns: Mapping[str, str] = field(default_factory=dict)
    max_bad: int = 0
    tokenizer: str | None = None
    eval_data: str | None = None
    eval_split: float | int | None = None
    eval_steps: int | None = None
    save_steps: int | None = None
    keep: int = 2
    logging_steps: int | None = None
    report_to: tuple[str, ...] = ()
    run_name: str | None = None
    workers: int | None = None
    device: DeviceWord | None = None
    memory: int | None = None
    """Of one process; the smallest, where `memories` has one for each."""
    memories: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    launch: Launcher | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    rendezvous_secret_file: str | None = None
    gpu_index: int | None = None
    margin: str | None = None
    plan: Path | None = None
    probe: Path | bool = True
    """A file of `brim probe`; True: a short one runs before the first step; False: none."""
    verify: bool = True
    from_scratch: bool = False
    trust_remote_code: bool = False
    dry_run: bool = False
    settings: Settings = field(default_factory=Settings)
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `settings` that were given."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """All that was given, as plain values: what `--resume` reads back."""
    model: Model
    resumes: RunCard | None = None
    """The card of the run that goes on."""

    @property
    def is_pinned(self) -> bool:
        """Whether the size of a micro-batch was asked for."""
        return "micro_batch" in self.pinned


_OF_REQUEST = {each.name for each in fields(TrainRequest)} - {"settings", "pinned", "asked", "model", "resumes", "memories"}
_OF_SETTINGS = {each.name for each in fields(Settings)}
_OF_SEVERAL = {"launch", "node_rank", "offload", "rendezvous", "rendezvous_secret_file", "sharding", "speeds"}
_PATHS = ("data", "eval_data", "plan", "rendezvous_secret_file", "tokenizer")


def read_request(
    model: str | os.PathLike[str] | None, given: Mapping[str, Any], resume: str | os.PathLike[str] | None
) -> TrainRequest:
    """Check what was given, each thing by itself and against the others. Neither torch nor transformers is imported."""
    given = {name: value for name, value in given.items() if value is not None or name == "max_grad_norm"}
    _refuse_unknown(given)
    card = None
    if resume is not None:
        card, model, given = _taken_up(Path(resume), model, given)
    if model is None:
        raise UsageError(_("There is no model to train."), hint=_("Write: brim train MODEL --data FILE."))
    if "data" not in given:
        raise UsageError(_("There is no training data."), hint=_("Write: brim train MODEL --data FILE."))
    settings = read_settings({name: given[name] for name in given if name in _OF_SETTINGS})
    values = _checked({name: given[name] for name in given if name in _OF_REQUEST})
    check_data(values, settings)
    found = find_model(model, trust_remote_code=bool(values.get("trust_remote_code")))
    return TrainRequest(
        **values,
        settings=settings,
        pinned={name: getattr(settings, name) for name in given if name in _OF_SETTINGS},
        asked=_plain({**given, "model": _absolute(os.fspath(model))}),
        model=found,
        resumes=card,
    )


def check_data(values: Mapping[str, Any], settings: Settings) -> None:
    """What is wrong with the files is told first: it is quickly seen, and a model may bring a lot of code with it."""
    from brim.trainer.data.check import check_file

    columns = dict(values.get("columns") or {}) or None
    for name in ("data", "eval_data"):
        if values.get(name) is not None:
            check_file(values[name], task=settings.task, columns=columns, max_bad=values.get("max_bad", 0))


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = _OF_REQUEST | _OF_SETTINGS
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            text = _("There is no setting {name!r}.").format(name=name)
            raise UsageError(sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else ""))


def _taken_up(folder: Path, model: Any, given: dict[str, Any]) -> tuple[RunCard, str, dict[str, Any]]:
    """A run that goes on: what it was asked for, with what may be told anew."""
    if not (folder / RUN_FILE).is_file():
        raise UsageError(
            _("{folder} holds no run that could go on: there is no {file}.").format(folder=folder, file=RUN_FILE),
            hint=_("Give the folder that `brim train` wrote, or start one: brim train MODEL --data FILE."),
        )
    card = RunCard.read(folder / RUN_FILE)
    before = dict(card.asked)
    if "model" not in before:
        raise RecordError(_("{path} does not say which model was trained.").format(path=folder / RUN_FILE))
    name = str(before.pop("model"))
    _refuse_other_steps(card, name, model, given)
    if given.get("output") is not None and Path(given["output"]).resolve() != folder.resolve():
        raise UsageError(
            _("--resume goes on in {folder}, and -o names another folder.").format(folder=folder), hint=_("Leave -o out.")
        )
    # What was chosen for the run stays chosen, whatever a plan would say of today's memory.
    kept: dict[str, Any] = {
        "effective_batch": card.effective_batch,
        "precision": card.settings.precision,
        "optimizer": card.settings.optimizer,
        "learning_rate": card.recipe.learning_rate,
    }
    if card.settings.method != "full":
        kept |= {"lora_alpha": recorded_alpha(card.settings), "lora_dropout": card.settings.lora_dropout}
    merged = {**kept, **before, **{key: value for key, value in given.items() if key in MAY_CHANGE | {"dry_run"}}}
    if "micro_batch" in given and "accumulation" not in given:
        merged.pop("accumulation", None)
    for one, other in (("max_steps", "epochs"), ("epochs", "max_steps")):
        if one in given and other not in given:
            merged.pop(other, None)
    if {"gpus", "nodes"} & given.keys() and merged.get("gpus", 1) * merged.get("nodes", 1) == 1:
        # One process is enough now: what was said of several no longer applies.
        for key in _OF_SEVERAL - given.keys():
            merged.pop(key, None)
    return card, name, {**merged, "output": str(folder)}


def _refuse_other_steps(card: RunCard, name: str, model: Any, given: Mapping[str, Any]) -> None:
    """What would make the steps of a run other ones cannot be told anew; what is as it was may be said again."""
    in_force = {
        **vars(card.settings), **vars(card.recipe), **vars(card.options),
        "effective_batch": card.effective_batch, "lora_alpha": recorded_alpha(card.settings),
    }  # fmt: skip
    others = {key: value for key, value in _plain(given).items() if key not in MAY_CHANGE | {"output", "dry_run"}}
    if model is not None:
        others["model"] = _absolute(os.fspath(model))
    for key, value in others.items():
        was = name if key == "model" else card.asked.get(key, in_force.get(key))
        if value != was and value != (list(was) if isinstance(was, tuple) else was):
            text = _("This run was started with {name} = {was}, and {now} would make its steps other ones.")
            raise UsageError(
                text.format(name=key.replace("_", "-"), was=was if was is not None else _("its default"), now=value),
                hint=_("Leave it out, or start another run with -o."),
            )


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Every value of its kind; an error that names the flag for every other one."""
    for name in ("effective_batch", "max_steps", "eval_steps", "save_steps", "keep", "logging_steps"):
        _check_whole(name, given.get(name), least=1)
    for name in ("seed", "workers", "max_bad", "gpu_index", "node_rank"):
        _check_whole(name, given.get(name), least=0)
    for name in ("epochs", "learning_rate"):
        _check_number(name, given.get(name), is_above_zero=True)
    for name in ("adam_beta1", "adam_beta2"):
        if isinstance(given.get(name), int | float) and given[name] >= 1:
            raise _not_possible(name, given[name], _("It must be below 1."))
    for name in ("warmup", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
        _check_number(name, given.get(name), is_above_zero=False)
    for name, words in (("schedule", Schedule), ("loss_on", LossOn), ("device", DeviceWord), ("launch", Launcher)):
        if name in given and given[name] not in get_args(words):
            raise _not_possible(name, given[name], _("One of: {words}.").format(words=", ".join(get_args(words))))
    _check_split(given)
    if "memory" in given:
        several = _several(given["memory"])
        given["memory"], given["memories"] = _sizes(several)
    if "speeds" in given:
        given["speeds"] = _speeds(_several(given["speeds"]))
    if "rendezvous" in given and not re.fullmatch(r".+:[0-9]+", given["rendezvous"]):
        raise _not_possible(
            "rendezvous", given["rendezvous"], _("Write the first machine's name or address, and a port: host:29500.")
        )
    for name in ("output", "plan"):
        if name in given:
            given[name] = Path(os.path.expanduser(given[name]))  # noqa: PTH111 (a Path would drop a trailing slash that the user sees)
    if "probe" in given and not isinstance(given["probe"], bool):
        given["probe"] = Path(given["probe"])
    if "data" in given:
        sources = sources_of(given["data"])
        given["data"] = sources if len(sources) > 1 else sources[0]
    for name in ("eval_data", "rendezvous_secret_file", "tokenizer"):
        if name in given:
            given[name] = os.fspath(given[name])
    if "report_to" in given:
        given["report_to"] = _trackers(given["report_to"])
    if "margin" in given:
        given["margin"] = str(given["margin"])
    return given


def _several(value: Any) -> list[Any]:
    """One for all processes, or one for each: `8GiB`, `6GiB,8GiB`, a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def _sizes(several: list[Any]) -> tuple[int, tuple[int, ...]]:
    sizes = tuple(parse_size(each) for each in several)
    return min(sizes), sizes if len(sizes) > 1 else ()


def _speeds(several: list[Any]) -> tuple[float, ...]:
    try:
        speeds = tuple(float(each) for each in several)
    except (TypeError, ValueError):
        speeds = ()
    if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        words = ",".join(str(each) for each in several)
        raise _not_possible("speeds", words, _("Write a number above 0 for each process: 1,1,0.5."))
    return speeds


def _check_whole(name: str, value: Any, *, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _not_possible(name, value, _("It must be a whole number, {least} or more.").format(least=least))


def _check_number(name: str, value: Any, *, is_above_zero: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _not_possible(name, value, _("It must be a number, and not below 0."))
    if is_above_zero and value == 0:
        raise _not_possible(name, value, _("It must be above 0."))


def _check_split(given: dict[str, Any]) -> None:
    split = given.get("eval_split")
    _check_number("eval_split", split, is_above_zero=True)
    if split is not None and split >= 1 and split != int(split):
        raise _not_possible("eval_split", split, _("Give a share below 1, or a number of rows."))
    if split is not None and split >= 1:
        given["eval_split"] = int(split)
    if split is not None and "eval_data" in given:
        raise UsageError(_("--eval-data and --eval-split both say what is evaluated on: give one."))


def _trackers(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else [str(word) for word in value]
    return tuple(word.strip() for word in words if word.strip() and word.strip() != "none")


def _not_possible(name: str, value: Any, why: str) -> UsageError:
    text = _("--{name} {value} is not possible.").format(name=name.replace("_", "-"), value=value)
    return UsageError(sentences(text, why))


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it, with paths that mean the same from another folder."""
    plain: dict[str, Any] = {}
    for name, value in given.items():
        if name in {"dry_run", "output", "resume"}:
            continue
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if name == "data" and not isinstance(value, str):
            plain[name] = [_absolute(os.fspath(path)) for path in value]
        elif (name in _PATHS and isinstance(value, str)) or (name == "probe" and isinstance(value, str)):
            plain[name] = _absolute(value)
        elif isinstance(value, tuple):
            plain[name] = list(value)
        elif isinstance(value, Mapping):
            plain[name] = dict(value)
        else:
            plain[name] = value
    return plain


def _absolute(given: str) -> str:
    """The full path of what is on this disk; names of the Hub and the catalogue as they are."""
    path = Path(given).expanduser()
    return str(path.resolve()) if path.exists() else given
