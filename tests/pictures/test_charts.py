"""Each chart is text made of numbers: well-formed, complete, and at the right places."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from brim.pictures.areas import Areas, area_chart
from brim.pictures.bars import Bar, stacked_bars
from brim.pictures.charts import Line, Note, byte_axis, count_axis, number_axis, stairs, xy_chart
from brim.pictures.histogram import bins_of, histogram
from brim.pictures.markup import Html, tag, text
from brim.pictures.plot import Level, curve
from brim.pictures.scales import Scale, byte_ticks, bytes_short

MIB = 1024**2


def marked(svg: str, name: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(svg).iter() if name in (each.get("class") or "").split()]


def test_nothing_that_a_user_wrote_becomes_a_tag() -> None:
    assert tag("p", "</p><img src=x onerror=alert(1)>", title='"><script>') == (
        '<p title="&quot;&gt;&lt;script&gt;">&lt;/p&gt;&lt;img src=x onerror=alert(1)&gt;</p>'
    )
    assert text("\x00\x1b[31m\u202eabc\ud800") == "\\x00\\x1b[31m\\u202eabc\\ud800"
    assert tag("p", Html("<b>"), None, 3) == "<p><b>3</p>"
    assert tag("p", hidden=True, lang=None, data_x_y=1, class_="a") == '<p hidden data-x-y="1" class="a"></p>'


def test_bars_are_as_long_as_their_sizes() -> None:
    bars = [Bar("one", "100 MiB", [("parameters", 25 * MIB), ("logits", 75 * MIB)], is_best=True), Bar("none", "0 B", [])]
    svg = stacked_bars(bars, ticks=byte_ticks, form=bytes_short, limit=(200.0 * MIB, "limit", "far"))
    first, second = marked(svg, "part")
    assert (first.get("x"), first.get("width")) == ("0%", "12.5%")
    assert (second.get("x"), second.get("width")) == ("12.5%", "37.5%")
    assert [each.text for each in marked(svg, "best")] == ["one", "100 MiB"]
    assert marked(svg, "limit")[0].get("x1") == "100%"


def test_a_limit_far_away_is_said_and_leaves_the_bars_their_length() -> None:
    bars = [Bar("one", "62 MiB", [("parameters", 62.0 * MIB)])]
    svg = stacked_bars(bars, ticks=byte_ticks, form=bytes_short, limit=(18_000.0 * MIB, "limit", "limit, far to the right"))
    assert [each.get("width") for each in marked(svg, "part")] == ["100%"]
    assert [each.text for each in marked(svg, "limit")] == ["limit, far to the right"]


def test_words_at_the_right_keep_away_from_the_line_of_the_limit() -> None:
    bars = [Bar("one", "100 MiB", [("parameters", 100.0 * MIB)])]
    beside = stacked_bars(bars, ticks=byte_ticks, form=bytes_short, limit=(200.0 * MIB, "limit", "far"))
    alone = stacked_bars(bars, ticks=byte_ticks, form=bytes_short)
    assert [each.get("dx") for svg in (beside, alone) for each in marked(svg, "row")] == [None, "-8", None, None]


def test_bars_of_nothing_can_be_drawn() -> None:
    assert ET.fromstring(stacked_bars([Bar("a", "", [("rest", 0.0)])], ticks=byte_ticks, form=bytes_short)) is not None


def test_a_curve_has_a_gap_where_there_is_no_number() -> None:
    path = curve([0, 1, 2, 3], [1.0, math.nan, 2.0, 3.0], Scale(0, 3), Scale(0, 4), "s1")
    drawn = ET.fromstring(path).get("d") or ""
    assert drawn.count("M") == 2
    assert "nan" not in drawn
    assert ET.fromstring(curve([0], [None], Scale(0, 1), Scale(0, 1), "s1")).get("d") == ""


def test_a_chart_shows_lines_marks_levels_and_events() -> None:
    line = Line("loss", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0], "s1", "dot")
    drawing = xy_chart(
        count_axis([1.0, 3.0], "step"), number_axis([1.0, 3.0], "loss", from_zero=True), [line], across=[Level(2.5, "limit 2.5", "limit")],
        notes=[Note(2.0, 2.0, "here", "star", "s2")], events=[2.0],
    )  # fmt: skip
    assert len(marked(drawing.svg, "dot")) == 3
    assert len(marked(drawing.svg, "event")) == 1
    assert {each.text for each in marked(drawing.svg, "said")} == {"limit 2.5", "here"}
    assert drawing.tips.splitlines() == ["0\tstep 1: loss 3", "500\tstep 2: loss 2", "1000\tstep 3: loss 1"]


def test_a_chart_of_one_point_and_of_equal_values_can_be_drawn() -> None:
    for values in ([2.0], [2.0, 2.0, 2.0], [0.0]):
        xs = [float(place) for place in range(len(values))]
        drawing = xy_chart(count_axis(xs, "step"), byte_axis(values, "bytes"), [Line("a", xs, list(values), "s1")])
        assert "nan" not in drawing.svg.lower()


def test_wild_values_get_a_logarithmic_axis_and_tame_ones_do_not() -> None:
    assert number_axis([1.0, 1.0, 1.0, 500.0], "norm", may_be_log=True).scale.is_log
    assert not number_axis([1.0, 2.0, 3.0], "norm", may_be_log=True).scale.is_log
    assert not number_axis([0.0, 1.0, 1.0, 500.0], "norm", may_be_log=True).scale.is_log


def test_counts_go_up_in_stairs() -> None:
    assert stairs([1, 2, 3], [4, 4, 5]) == ([1, 2, 3, 3], [4, 4, 4, 5])
    assert stairs([], []) == ([], [])


def test_a_histogram_marks_what_it_is_told_to() -> None:
    bins = bins_of([(3, 2), (4, 8), (9, 1)])
    drawing = histogram(bins, [(4.0, "median 4")], x_title="tokens", y_title="sequences", said=[str(each) for each in bins])
    assert len(marked(drawing.svg, "part")) == 3
    assert [each.text for each in marked(drawing.svg, "said")] == ["median 4"]
    assert len(drawing.tips.splitlines()) == len(bins)


def test_areas_are_stacked_and_named_where_there_is_room() -> None:
    areas = Areas(["forward"] * 5 + ["backward"] * 5, {"parameters": [50.0] * 10, "temporary": [1.0] * 10}, [60.0] * 10)
    drawing = area_chart(
        areas, across=[Level(80.0, "limit", "limit")], titles=("events", "memory"), kind_name=str.upper, phase_name=str.title,
        said=["x"] * 10,
    )  # fmt: skip
    assert len(marked(drawing.svg, "area")) == 2
    words = [each.text for each in ET.fromstring(drawing.svg).iter("text")]
    assert {"PARAMETERS", "Forward", "Backward", "limit"} <= set(words)
    assert "TEMPORARY" not in words


def test_a_peak_of_one_point_has_a_width_and_its_full_height() -> None:
    areas = Areas(["forward"] * 11, {"logits": [*[10.0] * 5, 100.0, *[10.0] * 5]}, [100.0] * 11)
    drawing = area_chart(areas, across=[], titles=("events", "memory"), kind_name=str, phase_name=str, said=[""] * 11)
    [path] = marked(drawing.svg, "area")
    corners = re.findall(r"H([\d.]+)V([\d.]+)", path.get("d", ""))
    widths = [
        float(after[0]) - float(at[0]) for at, after in pairwise(corners) if float(at[1]) == min(float(y) for _x, y in corners)
    ]
    assert widths == [pytest.approx(100)]
