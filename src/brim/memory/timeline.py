"""The memory of a step over its events, as a file: `.json` and `.csv` for programs, `.svg` to look at.

One row an event of the second step (the steady state): its phase, its layer, the bytes allocated and reserved after it, and the bytes of
each kind. A picture has no use for more points than it has columns: it takes the largest value of every run of events.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.errors import UsageError
from brim.locale import _
from brim.memory.peaks import Walk, first_round_of_second_step, phase_of
from brim.record import write_atomically

if TYPE_CHECKING:
    from brim.memory.estimate import Question

_FORMATS = (".json", ".csv", ".svg")


def check_path(path: str) -> None:
    """Refuse a file whose format is not known, before any work is done."""
    if Path(path).suffix.lower() not in _FORMATS:
        text = _("--timeline {path}: the name must end in .json, .csv or .svg.").format(path=path)
        raise UsageError(text)
    if not Path(path).absolute().parent.is_dir():
        text = _("--timeline {path}: there is no folder {folder}.").format(path=path, folder=Path(path).parent)
        raise UsageError(text)


@dataclass(frozen=True)
class Timeline:
    """Columns of equal length, one entry an event."""

    phases: list[str]
    layers: list[int | None]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    kinds: dict[str, NDArray[np.int64]]
    """Bytes in use by kind; they add up to `allocated`."""
    limit_bytes: int

    @classmethod
    def of(cls, walk: Walk, limit_bytes: int) -> Timeline:
        """The second step of a walk."""
        trace = walk.trace
        first = first_round_of_second_step(trace)
        places = [trace.places[place] for place in trace.event_places]
        # On a GPU the stream contains the step twice: show the last one.
        start = max(
            index
            for index, place in enumerate(places)
            if place.round == first and place.phase == "forward" and places[index - 1].phase not in {"forward", "backward"}
        )
        events = np.array(trace.events, dtype=np.int64)
        numbers = np.where(events >= 0, events, ~events)
        changes = np.where(events >= 0, walk.blocks[numbers], -walk.blocks[numbers])
        kind_of = np.array([trace.births[number].kind for number in numbers.tolist()])
        kinds = {str(kind): np.cumsum(np.where(kind_of == kind, changes, 0))[start:] for kind in sorted(set(kind_of.tolist()))}
        places = places[start:]
        return cls(
            phases=[phase_of(place) for place in places],
            layers=[place.layer for place in places],
            allocated=walk.allocated[start:],
            reserved=walk.reserved[start:],
            kinds=dict(sorted(kinds.items(), key=lambda pair: -int(pair[1].max()))),
            limit_bytes=limit_bytes,
        )

    def capped(self, most: int) -> Timeline:
        """At most so many entries: of every run of events the one with the most bytes, so that no peak is lost."""
        count = len(self.allocated)
        if count <= most:
            return self
        edges = np.linspace(0, count, most + 1).astype(np.int64)
        kept = [int(start + np.argmax(self.allocated[start:end])) for start, end in pairwise(edges.tolist())]
        return Timeline(
            phases=[self.phases[index] for index in kept],
            layers=[self.layers[index] for index in kept],
            allocated=self.allocated[kept],
            reserved=self.reserved[kept],
            kinds={kind: values[kept] for kind, values in self.kinds.items()},
            limit_bytes=self.limit_bytes,
        )

    def to_json(self) -> str:
        """One document, a list a column."""
        document = {
            "schema": "brim.timeline/1",
            "limit_bytes": self.limit_bytes,
            "phase": self.phases,
            "layer": self.layers,
            "allocated_bytes": self.allocated.tolist(),
            "reserved_bytes": self.reserved.tolist(),
            "kind_bytes": {kind: values.tolist() for kind, values in self.kinds.items()},
        }
        return json.dumps(document) + "\n"

    def to_csv(self) -> str:
        """One line an event."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            ["event", "phase", "layer", "allocated_bytes", "reserved_bytes", *(f"{kind}_bytes" for kind in self.kinds)]
        )
        columns = zip(*(values.tolist() for values in self.kinds.values()), strict=True)
        rows = zip(self.phases, self.layers, self.allocated.tolist(), self.reserved.tolist(), columns, strict=True)
        for index, (phase, layer, allocated, reserved, kinds) in enumerate(rows):
            writer.writerow([index, phase, "" if layer is None else layer, allocated, reserved, *kinds])
        return text.getvalue()


def write_timeline(question: Question, path: str) -> Path:
    """Walk the stream again and write it in the format that the name says."""
    timeline = Timeline.of(question.walk(question.obtain()), question.where.limit_bytes)
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        from brim.memory.drawing import draw

        return write_atomically(path, draw(timeline, f"{question.name}, {question.where.label}"))
    return write_atomically(path, timeline.to_json() if suffix == ".json" else timeline.to_csv())
