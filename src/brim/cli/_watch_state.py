"""From the files of a run to what it does at this moment. Every look reads only what is new."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.cli._watch_follow import Follower
from brim.cli._watch_life import Life, environment_of, life_of
from brim.errors import RecordError, UsageError
from brim.locale import _
from brim.pictures.live_state import Card, LastEvaluation, MemoryInUse, Promise, Speed, State, Status
from brim.records.runs import Evaluation, RunCard

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from brim.records.ledgers import LedgerHeader

LEDGER: Final = "ledger.jsonl"
CURVE_POINTS: Final = 240
_LAST_STEPS: Final = 20
"""What "now" means."""
_LOOKED_AT: Final = 32
"""Of one part of the curve no more steps are looked at: a million would take a while, every second."""
_LEAST_QUIET_SECONDS: Final = 30.0
_QUIET_STEPS: Final = 10
"""Nothing written for so many steps' time, the slowest of the last: that needs a question mark."""
_GONE_SECONDS: Final = 3.0
"""A ledger that is opened, or handed over, has no lock for a moment."""


class Watched:
    """One run: its folder, or only its ledger."""

    def __init__(self, path: str | Path) -> None:
        self.ledger = ledger_of(path)
        self._folder = self.ledger.parent
        self._follower = Follower(self.ledger)
        self._card = _File(self._folder / "run.json", RunCard.read)
        self._evaluations = _File(self._folder / "evaluations.jsonl", _read_evaluations)

    def look(self, seconds: float = 0.0) -> State:
        """The state now. Where the ledger is long and its earlier lines have not been read, so many seconds are spent on them."""
        is_there = self._follower.look(seconds)
        card: RunCard | None = self._card.look()
        if not is_there or not (self._follower.headers or len(self._follower.columns)):
            self._refuse_foreign()
            return State(name=self._name(card), ledger=str(self.ledger), status="waiting")
        return self._state(card, self._evaluations.look() or {})

    @property
    def waiting_bytes(self) -> int:
        """Of lines that have not been read yet."""
        return self._follower.waiting_bytes

    def _refuse_foreign(self) -> None:
        if self._follower.unreadable:
            raise UsageError(
                _("{path} is not a ledger.").format(path=self.ledger),
                hint=_("Give the folder of a run, or its ledger.jsonl."),
            )

    def _name(self, card: RunCard | None) -> str:
        return card.name if card is not None else self._folder.resolve().name

    def _state(self, card: RunCard | None, evaluations: dict[int, Evaluation]) -> State:
        seen = self._follower
        columns, last = seen.columns, seen.last()
        header = seen.headers[-1] if seen.headers else None
        step = columns.step[-1] if len(columns) else header.resumed_from_step if header is not None else 0
        total = _total_steps(card, header)
        now, mean = self._speed(_LAST_STEPS), self._speed(None)
        life, quiet = life_of(self.ledger), seen.quiet_seconds()
        status = self._status(life, quiet, evaluations)
        pulse = seen.last("pulse")
        slices = last.slices if last is not None else ()
        return State(
            name=self._name(card),
            ledger=str(self.ledger),
            status=status,
            reason=seen.summary.reason if seen.summary is not None else "",
            quiet_seconds=quiet,
            process=life.process,
            is_alive=life.is_alive,
            observed=header is not None and header.observed,
            device=header.device if header is not None else "",
            effective_batch=header.effective_batch if header is not None else None,
            world_size=header.world_size if header is not None else 1,
            resumed_from_step=header.resumed_from_step if header is not None else 0,
            step=step,
            total_steps=total,
            epoch=last.epoch if last is not None else None,
            elapsed_seconds=self._elapsed(header, quiet if status == "gone" else 0.0),
            remaining_seconds=_remaining(step, total, now.step_seconds, evaluations)
            if status in ("running", "stalled")
            else None,
            loss=last.loss if last is not None else None,
            curve=curve(columns.of["loss"]),
            evaluation=_newest(evaluations, step),
            grad_norm=last.grad_norm if last is not None else None,
            learning_rate=last.learning_rate if last is not None else None,
            now=now,
            mean=mean,
            micro_batches=len(slices),
            micro_batch=max((one.sequences for one in slices), default=None),
            memory=self._memory(card, header),
            promise=self._promise(),
            pulse=pulse.pulse if pulse is not None else None,
            card=_card(header, life) if status in ("starting", "running", "stalled") else None,
            read_share=self._read_share(),
            unreadable_lines=seen.unreadable,
        )

    def _status(self, life: Life, quiet: float, evaluations: dict[int, Evaluation]) -> Status:
        seen = self._follower
        if seen.summary is not None:
            return "finished" if seen.summary.finished else "ended"
        if life.is_alive is False and quiet >= _GONE_SECONDS:
            return "gone"
        slowest = max(seen.columns.last("seconds", _LAST_STEPS), default=0.0)
        evaluating = max((each.seconds for each in evaluations.values()), default=0.0)
        if quiet > max(_LEAST_QUIET_SECONDS, _QUIET_STEPS * slowest, 2 * evaluating):
            return "stalled"
        return "running" if len(seen.columns) else "starting"

    def _elapsed(self, header: LedgerHeader | None, quiet: float) -> float | None:
        if self._follower.summary is not None:
            return self._follower.summary.seconds
        if header is None:
            return None
        try:
            began = datetime.fromisoformat(header.started_at)
        except ValueError:
            return None
        return max(0.0, (datetime.now(UTC) - (began if began.tzinfo else began.astimezone())).total_seconds() - quiet)

    def _speed(self, count: int | None) -> Speed:
        columns = self._follower.columns
        if not len(columns):
            return Speed()
        if count is None:
            sums, counted, steps = columns.sums, columns.counted_seconds, len(columns)
        else:
            tokens = columns.last("tokens", count)
            steps = len(tokens)
            sums = {
                name: math.fsum(value for value in columns.last(name, count) if not math.isnan(value))
                for name in ("tokens", "padded_tokens", "seconds", "wait_seconds")
            }
            counted = math.fsum(
                seconds for seconds, known in zip(columns.last("seconds", count), tokens, strict=True) if not math.isnan(known)
            )
        seconds = sums["seconds"]
        return Speed(
            tokens_per_second=sums["tokens"] / counted if counted else None,
            padded_tokens_per_second=sums["padded_tokens"] / counted if counted else None,
            step_seconds=seconds / steps,
            wait_share=sums["wait_seconds"] / seconds if seconds else None,
        )

    def _memory(self, card: RunCard | None, header: LedgerHeader | None) -> MemoryInUse:
        columns = self._follower.columns
        peaks = [peak for peak in columns.last("peak_bytes", _LAST_STEPS) if not math.isnan(peak)]
        predicted = card.predicted if card is not None else None
        kinds: list[tuple[Any, int]] = (
            sorted(predicted.by_kind.items(), key=lambda pair: -pair[1]) if predicted is not None else []
        )
        # Steps report what the allocator has reserved, without the context.
        kinds = [(kind, size) for kind, size in kinds if kind != "context"]
        return MemoryInUse(
            peak_bytes=int(max(peaks)) if peaks else None,
            highest_bytes=int(columns.highest_bytes) or None,
            limit_bytes=_limit_of(card, header),
            predicted_bytes=predicted.peak_reserved_bytes if predicted is not None else None,
            predicted_limit_bytes=predicted.limit_bytes if predicted is not None else None,
            by_kind=dict(kinds),
        )

    def _promise(self) -> Promise:
        columns, split = self._follower.columns, self._follower.last("split")
        sums = columns.sums
        return Promise(
            steps=len(columns),
            promised=int(sums["promised"]),
            kept=int(sums["kept"]),
            skipped=int(sums["skipped"]),
            splits=int(sums["splits"]),
            last_split_step=split.step if split is not None else None,
            last_split=split.splits[-1] if split is not None else None,
        )

    def _read_share(self) -> float:
        waiting = self._follower.waiting_bytes
        with suppress(OSError, ZeroDivisionError):
            return max(0.0, 1 - waiting / self.ledger.stat().st_size)
        return 1.0


def ledger_of(path: str | Path) -> Path:
    """The ledger that is meant by a folder or a file; where there is none yet, the place where it would appear."""
    path = Path(path)
    if path.is_dir():
        others = sorted(path.glob("ledger*.jsonl"))
        return path / LEDGER if (path / LEDGER).exists() or len(others) != 1 else others[0]
    return path if path.suffix == ".jsonl" or path.is_file() else path / LEDGER


def runs_in(folder: Path) -> list[Path]:
    """Folders of runs inside this one, the newest first."""
    found = [path for path in folder.glob(f"*/{LEDGER}") if path.is_file()]
    return [path.parent for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def curve(losses: array[float] | Sequence[float], points: int = CURVE_POINTS) -> tuple[float | None, ...]:
    """Mean losses of equal parts of the run, at most so many. A part without a number is None."""
    count = len(losses)
    parts = min(points, count)
    edges = (round(count * place / max(1, parts)) for place in range(parts + 1))
    return tuple(_mean(losses, begin, end) for begin, end in pairwise(edges))


def _mean(values: array[float] | Sequence[float], begin: int, end: int) -> float | None:
    apart = max(1, (end - begin) // _LOOKED_AT)
    known = [value for value in values[begin:end:apart] if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _remaining(step: int, total: int | None, step_seconds: float | None, evaluations: dict[int, Evaluation]) -> float | None:
    """At the speed of the last steps, and with evaluations as often as until now."""
    if total is None or step_seconds is None or not step:
        return None
    evaluating = sum(each.seconds for each in evaluations.values()) / step
    return max(0, total - step) * (step_seconds + evaluating)


def _newest(evaluations: dict[int, Evaluation], step: int) -> LastEvaluation | None:
    """Of the steps in force: a run that went on from an earlier step has not come to the later ones again."""
    done = [number for number in evaluations if number <= step]
    if not done:
        return None
    found = evaluations[max(done)]
    return LastEvaluation(step=found.step, loss=found.loss, metrics=dict(found.metrics))


def _total_steps(card: RunCard | None, header: LedgerHeader | None) -> int | None:
    if card is not None:
        return card.total_steps
    if header is None:
        return None
    most, epochs = (header.configuration.get(name) for name in ("max_steps", "num_train_epochs"))
    if isinstance(most, int) and most > 0:
        return int(most)
    if isinstance(epochs, int | float) and header.steps_per_epoch is not None and epochs > 0:
        return math.ceil(epochs * header.steps_per_epoch)
    return None


def _card(header: LedgerHeader | None, life: Life) -> Card | None:
    """Ask the driver, where the run's process is on this machine: its own environment says which card it calls the first."""
    if header is None or life.process is None:
        return None
    # The ledger of `brim observe` names the card as people do, and is written by another process than the one that trains.
    device = header.configuration.get("device") if header.observed else header.device
    backend, _colon, number = str(device or "").partition(":")
    if backend != "cuda":
        return None
    from brim.machine import nvml

    wanted = environment_of(life.process).get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if header.observed and "CUDA_VISIBLE_DEVICES" in header.configuration:
        wanted = str(header.configuration["CUDA_VISIBLE_DEVICES"])
    shown = nvml.visible(nvml.cards(), wanted)
    index = int(number) if number.isdigit() else 0
    if index >= len(shown):
        return None
    card, told = shown[index], nvml.telemetry(shown[index].index)
    return Card(
        name=card.name, busy=told.busy, watts=told.watts, celsius=told.celsius,
        used_bytes=card.total_bytes - card.free_bytes, total_bytes=card.total_bytes,
    )  # fmt: skip


class _File:
    """A small file that is read again when it has changed. What is missing, or cannot be understood, is None."""

    def __init__(self, path: Path, read: Any) -> None:
        self._path, self._read = path, read
        self._seen: tuple[int, int] | None = None
        self._content: Any = None

    def look(self) -> Any:
        try:
            state = self._path.stat()
            seen = state.st_mtime_ns, state.st_size
            if seen != self._seen:
                self._content, self._seen = self._read(self._path), seen
        except (OSError, RecordError):
            self._content = None
        return self._content


def _read_evaluations(path: Path) -> dict[int, Evaluation]:
    """By step; of two of one step the later counts. A torn last line is passed over."""
    found = {}
    for line in path.read_bytes().splitlines():
        with suppress(RecordError):
            each = Evaluation.from_json(line)
            found[each.step] = each
    return found


def _limit_of(card: RunCard | None, header: LedgerHeader | None) -> int | None:
    """What the run may take: as `brim train` says it, else what the device had."""
    if card is not None and card.memory_limit_bytes is not None:
        return card.memory_limit_bytes
    return header.memory_limit_bytes if header is not None else None
