"""The ledger of a script that is only watched, written while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from brim.records import LedgerEntry, LedgerHeader, Slice
from brim.records.ledgers import Pulse
from brim.step.ledger import LedgerWriter

if TYPE_CHECKING:
    from pathlib import Path

    from brim.audit.observing.tally import Step

Event = dict[str, Any]


@dataclass(frozen=True)
class Began:
    """When the observing began: for people, and by the clock that seconds are counted with."""

    at: str
    clock: float

    @classmethod
    def now(cls) -> Began:
        """This moment."""
        return cls(datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic())


class Book:
    """One ledger. Its header is written with the first step: only then it is known what trains, and where."""

    def __init__(
        self, path: Path, *, began: Began, promised: int | None, ranks: int, first: Event, settings: list[Event]
    ) -> None:
        self.path = path
        self._promised = promised
        self._sequences = 0
        self._data = _sequences_in_data(settings)
        header = _header(began.at, promised, ranks, first, settings)
        self._writer = LedgerWriter(path, header, on_trouble=lambda _sentence: None, started=began.clock)

    def write(self, step: Step) -> None:
        """Append a step."""
        sequences = step.sequences or 0
        self._sequences += sequences
        self._writer.write(
            LedgerEntry(
                step=step.number,
                epoch=self._sequences / self._data if self._data else 0.0,
                promised_sequences=self._due(step),
                sequence_ids=(),
                sequences=sequences,
                tokens=step.total("tokens"),
                padded_tokens=step.padded_tokens,
                supervised_tokens=step.total("targets"),
                slices=tuple(
                    Slice(rank=rank, sequences=rows, length=length or None)
                    for rank, rows, length in step.micros
                    if rows and step.sequences is not None
                ),
                skipped=step.skipped,
                peak_allocated_bytes=step.largest("allocated"),
                peak_reserved_bytes=step.largest("reserved"),
                compute_seconds=step.compute_seconds,
                wait_seconds=step.largest("wait"),
                loss=_mean_loss(step),
                learning_rate=step.largest("rate"),
                pulse=_pulse(step),
            )
        )

    def close(self, *, finished: bool, reason: str) -> None:
        """The summary."""
        self._writer.close(finished=finished, reason=reason)

    def _due(self, step: Step) -> int | None:
        """What was asked for; where the data ends, what was left of it."""
        if self._promised is None or step.sequences is None or step.calls > 1:
            return None
        return min(self._promised, step.sequences) if step.ends_data else self._promised


def _header(at: str, promised: int | None, ranks: int, first: Event, settings: list[Event]) -> LedgerHeader:
    facts: dict[str, Any] = {}
    for event in settings:
        if event["kind"] == "fact":
            facts |= event["settings"]
    return LedgerHeader(
        started_at=at,
        observed=True,
        seed=None,
        effective_batch=promised,
        drop_last=None,
        world_size=ranks,
        device=str(first.get("card") or first.get("device") or "cpu"),
        memory_limit_bytes=first.get("limit") if first.get("limit") is not None else _host_memory(first),
        data_fingerprint=None,
        configuration={**facts, "cores": _cores(first), **_device(first)},
        versions={name: str(first[name]) for name in ("python", "torch") if name in first},
    )


def _device(first: Event) -> dict[str, Any]:
    """Torch's name of the card, and which cards the script could see: `brim watch` asks the driver about it."""
    if first.get("card") is None:
        return {}
    named = {"device": first.get("device"), "CUDA_VISIBLE_DEVICES": first.get("visible")}
    return {name: value for name, value in named.items() if value is not None}


def _host_memory(first: Event) -> int | None:
    """On the CPU the limit is the machine's memory, which every process shares."""
    if first.get("device") != "cpu":
        return None
    from brim.machine.host import host

    return host().memory_bytes


def _cores(first: Event) -> int | None:
    """What the process may use, by its own affinity and by the quota that it shares with us."""
    from brim.machine.host import host

    quota, cores = host().quota_cores, first.get("cores")
    return cores if not cores or not quota else max(1, min(int(cores), int(quota)))


def _sequences_in_data(settings: list[Event]) -> int | None:
    trains = {event["loader"] for event in settings if event["kind"] == "trains"}
    sizes = [event.get("sequences") for event in settings if event["kind"] == "loader" and event["loader"] in trains]
    return int(sizes[0]) if len(sizes) == 1 and sizes[0] else None


def _mean_loss(step: Step) -> float | None:
    losses = [event.get("loss") for event in step.by_rank.values()]
    return None if any(loss is None for loss in losses) else sum(float(loss) for loss in losses if loss is not None) / len(losses)


def _pulse(step: Step) -> Pulse | None:
    found = step.by_rank[min(step.by_rank)].get("pulse")
    return Pulse(**found) if found else None
