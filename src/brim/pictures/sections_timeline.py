"""The memory of one step over its events, and what is alive at its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.areas import Areas, area_chart
from brim.pictures.markup import join, tag
from brim.pictures.parts import Key, Section, Table, figure, table
from brim.pictures.plot import Level
from brim.pictures.scales import is_far
from brim.pictures.thinning import highest, spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.pictures.subject import Subject

_POINTS: Final = 240
"""Each has a column of its own, on a telephone too."""


def timeline_section(subject: Subject) -> Section | None:
    """As predicted: nobody can look into a step as it runs without slowing it down."""
    found = subject.timeline
    if not found or not found["allocated_bytes"]:
        return None
    allocated = found["allocated_bytes"]
    kept = highest(allocated, _POINTS)
    order = [*(kind for kind in words.KINDS if kind in found["kind_bytes"]), *(set(found["kind_bytes"]) - set(words.KINDS))]
    kinds = {kind: [found["kind_bytes"][kind][place] for place in kept] for kind in order if max(found["kind_bytes"][kind]) > 0}
    areas = Areas([found["phase"][place] for place in kept], kinds, [found["reserved_bytes"][place] for place in kept])
    limit, most = found.get("limit_bytes"), max(found["reserved_bytes"])
    across = (
        [Level(limit, _("limit {size}").format(size=words.size(limit)), "limit")] if limit and not is_far(limit, [most]) else []
    )
    peak = max(range(len(allocated)), key=allocated.__getitem__)
    said = [
        _("{phase}, {size} allocated").format(phase=_place(found, place), size=words.size(allocated[place])) for place in kept
    ]
    drawing = area_chart(
        areas, across=across, titles=(_("events of one step, in their order"), _("memory")), kind_name=words.kind,
        phase_name=words.phase, said=said,
    )  # fmt: skip
    says = _("The peak is {size} ({phase}).").format(size=words.size(allocated[peak]), phase=_place(found, peak))
    if limit:
        says = sentences(says, _("The limit is {limit}.").format(limit=words.size(limit)))
    legend = [Key(words.kind(kind), f"area {kind}", "field") for kind in kinds]
    legend.append(Key(_("reserved by the allocator"), "reserved", "line"))
    rows = [
        [
            words.count(kept[place]), _place(found, kept[place]), words.size(allocated[kept[place]]),
            *(words.size(kinds[kind][place]) for kind in kinds),
        ]
        for place in spread(len(kept), 40)
    ]  # fmt: skip
    data = Table([_("event"), _("where"), _("allocated"), *(words.kind(kind) for kind in kinds)], rows, frozenset({1}))
    chart = figure("timeline", _("Memory of one step, as predicted"), says, drawing, data, legend=legend)
    return Section(
        "timeline",
        _("One step"),
        join([chart, tag("h3", _("Alive at the peak")), table(_alive(subject, peak), _("Alive at the peak"))]),
    )


def _alive(subject: Subject, peak: int) -> Table:
    assert subject.timeline is not None
    sizes = {kind: values[peak] for kind, values in subject.timeline["kind_bytes"].items() if values[peak] > 0}
    whole = sum(sizes.values()) or 1
    rows = [
        [words.kind(kind), words.size(size), words.share(size / whole)]
        for kind, size in sorted(sizes.items(), key=lambda pair: -pair[1])
    ]
    return Table([_("kind"), _("size"), _("share")], rows)


def _place(found: Mapping[str, Any], place: int) -> str:
    layer = found["layer"][place]
    phase = words.phase(found["phase"][place])
    return phase if layer is None else _("{phase}, layer {number}").format(phase=phase, number=layer)
