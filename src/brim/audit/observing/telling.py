"""Make the record of what was seen."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import out_of_memory_family
from brim.locale import _
from brim.machine.secrets import masked
from brim.records.observations import Configured, LoaderInForce, MemoryFailure, Observation, Reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.observing.following import Followed, Follower
    from brim.audit.observing.reading import Process, Reader

Event = dict[str, Any]
_KILLED = 128 + 9
_MESSAGE = 300
_LOADER_FIELDS = (
    "where", "batch_size", "num_workers", "pin_memory", "drop_last", "shuffle", "prefetch_factor", "persistent_workers", "sequences",
)  # fmt: skip


def observation(follower: Follower, command: Sequence[str], *, exit_code: int, configured: Configured | None) -> Observation:
    """The record, without what the source audit adds."""
    main = follower.main()
    base: dict[str, Any] = {
        "command": masked(command), "started_at": follower.began.at, "seconds": time.monotonic() - follower.began.clock,
        "exit_code": exit_code,
        "reach": reach(follower.reader), "configured": configured, "memory_failures": _failures(follower.reader.processes, exit_code),
        "notes": _notes(follower, command, exit_code),
    }  # fmt: skip
    if main is None:
        process = next(iter(follower.reader.processes), None)
        opening = {} if process is None else process.opening
        settings = [] if process is None else process.settings
        return Observation(
            **base,
            script=opening.get("script"),
            versions=_versions(opening),
            settings=_settings(settings),
        )
    return Observation(**base, **_of_run(main))


def reach(reader: Reader) -> Reach:
    """How far the observers came."""
    if reader.runs:
        return "steps"
    if reader.processes:
        return "no-steps"
    if reader.has("torch"):
        return "no-optimizer"
    return "no-torch" if reader.has("reached") else "not-reached"


def _of_run(each: Followed) -> dict[str, Any]:
    tally, identity = each.tally, each.run.first.identity
    in_force = tally.in_force(len(each.run.ranks), each.machines)
    windows, short = tally.short_windows(in_force.sequences // each.machines) if in_force else ([], 0)
    ends = [process.end for process in each.run.ranks.values() if process.end is not None]
    after_last_step = float((each.run.first.end or {}).get("evaluation", 0.0))
    return {
        "script": identity.get("script"), "device": identity.get("card") or identity.get("device"), "versions": _versions(identity),
        "world_size": each.run.world, "in_force": in_force, "steps": tally.steps, "skipped": tally.skipped,
        "short_windows": tuple(windows), "short_windows_count": short,
        "discarded_micro_batches": tally.discarded + sum(int(end["discarded"]) for end in ends),
        "unstepped_micro_batches": sum(len(end["micros"]) for end in ends), "sequences": tally.sequences,
        "supervised_tokens": tally.supervised, "evaluation_passes": tally.evaluations + sum(int(end["evaluations"]) for end in ends),
        "first_learning_rate": tally.rates[0] if tally.rates else None, "last_learning_rate": tally.rates[-1] if tally.rates else None,
        "loaders": _loaders(each.settings), "compute_seconds": tally.seconds["compute"], "wait_seconds": tally.seconds["wait"],
        "evaluation_seconds": tally.seconds["evaluation"] + after_last_step, "own_seconds": tally.seconds["own"],
        "peak_allocated_bytes": tally.allocated, "peak_reserved_bytes": tally.reserved, "settings": _settings(each.settings),
        "ledger": None if each.book is None else str(each.book.path),
    }  # fmt: skip


def _versions(identity: Event) -> dict[str, str]:
    return {name: str(identity[name]) for name in ("python", "torch") if name in identity}


def _settings(events: Sequence[Event]) -> dict[str, Any]:
    return {
        f"{event['of']}.{name}": value for event in events if event["kind"] == "fact" for name, value in event["settings"].items()
    }


def _loaders(events: Sequence[Event]) -> tuple[LoaderInForce, ...]:
    trains = {event["loader"] for event in events if event["kind"] == "trains"}
    found = [
        LoaderInForce(trains=event["loader"] in trains, **{name: event[name] for name in _LOADER_FIELDS})
        for event in events
        if event["kind"] == "loader"
    ]
    return tuple(sorted(found, key=lambda loader: not loader.trains))


def _failures(processes: Sequence[Process], exit_code: int) -> tuple[MemoryFailure, ...]:
    found = []
    for process in processes:
        for error in process.errors:
            if not _is_about_memory(error):
                continue
            survived = error.get("survived", False) or (process.end is not None and exit_code == 0)
            found.append(
                MemoryFailure(
                    rank=int(process.identity.get("rank", 0)), after_step=error["step"], phase=error["phase"],
                    sequences=error["rows"] or None, survived=survived, message=_first_line(error["message"]),
                )
            )  # fmt: skip
    return tuple(found)


def _is_about_memory(error: Event) -> bool:
    """By the names of its classes, or by what it says where that is an error of the running program."""
    names = [str(name) for name in error["types"]]
    if any(out_of_memory_family(f"{name}:") for name in names):
        return True
    speaks = any(name in {"builtins.RuntimeError", "builtins.OSError", "builtins.SystemError"} for name in names)
    return speaks and out_of_memory_family(str(error["message"])) is not None


def _first_line(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[0][:_MESSAGE] if lines else ""


def _notes(follower: Follower, command: Sequence[str], exit_code: int) -> tuple[str, ...]:
    notes: list[str] = []
    reader, main = follower.reader, follower.main()
    if not reader.runs:
        notes.append(_why_nothing(reader, command))
    for process in reader.processes:
        notes += [
            _("The observer gave up: {why}.").format(why=event["error"])
            for event in process.settings
            if event["kind"] == "gave-up"
        ]
    if main is not None:
        notes += _notes_on_run(main)
    if len(reader.runs) > 1:
        text = _(
            "The command trained in {count} processes that know nothing of each other; this is about the one with the most steps."
        )
        notes.append(text.format(count=len(reader.runs)))
    notes += [_("brim had trouble of its own: {why}").format(why=each) for each in follower.troubles]
    if exit_code == _KILLED:
        notes.append(_("Signal 9 ended the command: that is what the system does when memory is full."))
    return tuple(dict.fromkeys(notes))


def _notes_on_run(each: Followed) -> list[str]:
    notes, run = [], each.run
    if each.tally.in_force(1) is None:
        notes.append(_("What entered the model holds no tensor that brim knows how to count, so the batch is not known."))
    if len(run.ranks) < run.expected:
        text = _("Only {seen} of {all} ranks took a step; the numbers are theirs.")
        notes.append(text.format(seen=len(run.ranks), all=run.expected))
    elif each.machines > 1:
        text = _("This machine has {here} of {all} ranks. Those of the others are taken to be like these.")
        notes.append(text.format(here=len(run.ranks), all=run.world))
    if each.tally.optimizers > 1:
        text = _("{count} optimizers step each for itself; every step is counted, whoever took it.")
        notes.append(text.format(count=each.tally.optimizers))
    unseen = int((run.first.end or {}).get("unseen_steps", 0))
    if unseen:
        text = _("Steps on what no watched model gave, which are not counted: {count}.")
        notes.append(text.format(count=unseen))
    if any(process.steps for process in run.ranks.values()):
        notes.append(_("The ranks ended at different steps; only steps that all of them completed are counted."))
    return notes


def _why_nothing(reader: Reader, command: Sequence[str]) -> str:
    trouble = reader.trouble()
    if trouble:
        return _("The observer does not work with this installation: {why}.").format(why=trouble)
    reached = reach(reader)
    if reached == "no-steps":
        return _("An optimizer was made, and it never took a step on what a model gave.")
    if reached == "no-optimizer":
        return _("torch was imported, and no optimizer of torch was made: nothing was trained.")
    if reached == "no-torch":
        return _("Python ran, and torch was never imported: nothing was trained.")
    switch = _isolating_switch(command)
    if switch is not None:
        text = _(
            "The observer was not loaded: {switch} tells Python to ignore PYTHONPATH or its site module. Leave it out to be observed."
        )
        return text.format(switch=switch)
    text = _(
        "The observer was not loaded: {command} started no Python that reads PYTHONPATH (a container, another machine, `python -I`)."
    )
    return text.format(command=shlex.join(list(command)[:3]))


def _isolating_switch(command: Sequence[str]) -> str | None:
    """-S, -I or -E among the switches of a Python."""
    words = list(command)
    for place, word in enumerate(words):
        if not Path(word).name.startswith("python"):
            continue
        for switch in words[place + 1 :]:
            if not switch.startswith("-") or switch in {"-m", "-c"}:
                break
            if not switch.startswith("--") and set(switch[1:]) & set("SIE") and set(switch[1:]) <= set("bBdEhiIOPqsSuvx"):
                return switch
    return None
