"""A loss series is judged by its shape: many synthetic curves, each with many seeds, and few wrong verdicts."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from brim.planner.loss_curve import SHORTEST, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    Curve = Callable[[float, int, int, random.Random], float]
    """Share of the run, step, number of steps, source of noise: the loss, from 1 at the start."""

SEEDS = 60
LENGTHS = (50, 100, 200, 500, 1000)


def _settling(end: float, pace: float, noise: float) -> Curve:
    """Falls from 1 to `end`, fast at first."""
    return lambda x, _step, _count, rng: end + (1 - end) * math.exp(-pace * x) + rng.gauss(0, noise)


def _straight(end: float, noise: float) -> Curve:
    return lambda x, _step, _count, rng: 1 + (end - 1) * x + rng.gauss(0, noise)


def _spiky(x: float, _step: int, _count: int, rng: random.Random) -> float:
    spike = rng.uniform(0.5, 3) if rng.random() < 0.03 else 0.0
    return 0.5 + 0.5 * math.exp(-8 * x) + rng.gauss(0, 0.02) + spike


def _warm_up_bump(x: float, _step: int, _count: int, rng: random.Random) -> float:
    bump = 0.1 * math.exp(-(((x - 0.03) / 0.02) ** 2))
    return 0.4 + 0.6 * math.exp(-6 * max(0.0, x - 0.03)) + bump + rng.gauss(0, 0.02)


def _power_law(_x: float, step: int, _count: int, rng: random.Random) -> float:
    return math.exp(-0.15 * math.log1p(step)) * (1 + rng.gauss(0, 0.04))


def _zigzag(x: float, step: int, _count: int, rng: random.Random) -> float:
    return 1 - 0.1 * x + (0.12 if step % 2 else -0.12) + rng.gauss(0, 0.02)


def _wave(x: float, _step: int, _count: int, rng: random.Random) -> float:
    return 1 - 0.1 * x + 0.2 * math.sin(4.3 * 2 * math.pi * x) + rng.gauss(0, 0.02)


def _explosion(x: float, _step: int, _count: int, rng: random.Random) -> float:
    away = 8 * ((x - 0.8) / 0.2) ** 2 if x > 0.8 else 0.0
    return 0.5 + 0.5 * math.exp(-6 * x) + rng.gauss(0, 0.02) + away


def _fell_and_rose(x: float, _step: int, _count: int, rng: random.Random) -> float:
    level = 0.4 + 0.6 * math.exp(-8 * x) if x < 0.6 else 0.4 + 1.2 * (x - 0.6)
    return level + rng.gauss(0, 0.02)


def _fell_and_rose_less(x: float, _step: int, _count: int, rng: random.Random) -> float:
    """As from 11 to 6, and back to 8."""
    return (1 - 1.52 * x if x < 0.3 else min(0.545 + 0.36 * (x - 0.3), 0.73)) + rng.gauss(0, 0.01)


def _harder_at_the_end(x: float, _step: int, _count: int, rng: random.Random) -> float:
    return 0.5 + 0.5 * math.exp(-10 * x) + (0.11 if x > 0.66 else 0.0) + rng.gauss(0, 0.02)


def _lognormal(end: float, spread: float) -> Curve:
    return lambda x, _step, _count, rng: (end + (1 - end) * math.exp(-10 * x)) * math.exp(rng.gauss(-(spread**2) / 2, spread))


def _about_zero(x: float, _step: int, _count: int, rng: random.Random) -> float:
    """What GRPO reports."""
    return 0.005 * x + rng.gauss(0, 0.02)


def _blow_up_at_the_end(x: float, step: int, count: int, rng: random.Random) -> float:
    return 25.0 if step >= count - 5 else 0.5 + 0.5 * math.exp(-6 * x) + rng.gauss(0, 0.02)


CURVES = [
    pytest.param("keep", _settling(0.5, 6, 0.0), id="falls without noise"),
    pytest.param("keep", _settling(0.5, 6, 0.02), id="falls with noise"),
    pytest.param("keep", _settling(0.6, 5, 0.06), id="falls with the noise of small batches"),
    pytest.param("keep", _settling(0.85, 12, 0.03), id="fell a little early, and is flat: converged"),
    pytest.param("keep", _settling(0.95, 15, 0.005), id="fell by a twentieth early, and is flat: converged"),
    pytest.param("keep", _settling(0.05, 30, 0.01), id="a long plateau"),
    pytest.param("keep", _straight(0.5, 0.03), id="falls in a straight line"),
    pytest.param("keep", _power_law, id="a power law"),
    pytest.param("keep", _spiky, id="falls with rare spikes"),
    pytest.param("keep", _warm_up_bump, id="rises in warm-up first"),
    pytest.param("oscillates", _zigzag, id="zigzag"),
    pytest.param("oscillates", _wave, id="waves"),
    pytest.param("keep", _straight(0.85, 0.3), id="noise without memory as large as the fall"),
    pytest.param("keep", _lognormal(0.8, 0.3), id="small batches of mixed sequences"),
    pytest.param("keep", _lognormal(0.75, 0.45), id="batches of one sequence"),
    pytest.param("keep", _about_zero, id="a loss about zero"),
    pytest.param("crawls", _straight(0.97, 0.0), id="a slow straight line"),
    pytest.param("crawls", _straight(0.96, 0.01), id="a slow straight line with noise"),
    pytest.param("crawls", _straight(1.0, 0.03), id="never falls"),
    pytest.param("diverges", _explosion, id="explodes"),
    pytest.param("diverges", _fell_and_rose, id="falls and rises again"),
    pytest.param("diverges", _fell_and_rose_less, id="falls and rises again by less"),
    pytest.param("keep", _harder_at_the_end, id="harder data at the end"),
    pytest.param("diverges", _straight(1.4, 0.02), id="rises"),
    pytest.param("diverges", _blow_up_at_the_end, id="explodes in the last steps"),
]


def _series(curve: Curve, seed: int, count: int | None = None, scale: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    steps = count or rng.choice(LENGTHS)
    return [scale * curve(step / (steps - 1), step, steps, rng) for step in range(steps)]


@pytest.mark.parametrize(("word", "curve"), CURVES)
def test_curves_are_named_for_what_they_do(word: str, curve: Curve) -> None:
    found = [judge(_series(curve, seed)).word for seed in range(SEEDS)]
    wrong = [other for other in found if other != word]
    assert len(wrong) <= 0.05 * SEEDS, f"{len(wrong)} of {SEEDS} wrong: {sorted(set(wrong))}"


@pytest.mark.parametrize(("word", "curve"), CURVES)
def test_the_unit_of_the_loss_does_not_matter(word: str, curve: Curve) -> None:
    del word
    for seed in range(8):
        words = {judge(_series(curve, seed, scale=scale)).word for scale in (1e-4, 1.0, 2.7, 11.0, 1e5)}
        assert len(words) == 1


@pytest.mark.parametrize("offset", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    ("word", "curve"),
    [
        pytest.param("keep", _settling(0.5, 6, 0.02), id="falls"),
        pytest.param("keep", _settling(0.9, 12, 0.01), id="converged"),
        pytest.param("oscillates", _zigzag, id="zigzag"),
        pytest.param("oscillates", _wave, id="waves"),
        pytest.param("crawls", _straight(0.97, 0.005), id="crawls"),
        pytest.param("diverges", _fell_and_rose, id="diverges"),
    ],
)
def test_a_loss_that_cannot_reach_zero_is_judged_alike(word: str, curve: Curve, offset: float) -> None:
    """The entropy of the data lies under every language model's loss."""
    wrong = sum(judge([loss + offset for loss in _series(curve, seed)]).word != word for seed in range(30))
    assert wrong <= 1


def test_oscillation_lowers_the_rate_and_a_crawl_raises_it() -> None:
    swings = judge(_series(_zigzag, 1), learning_rate=5e-5).advice
    crawls = judge(_series(_straight(0.97, 0.0), 1), learning_rate=5e-5).advice
    assert swings is not None
    assert crawls is not None
    assert (swings.setting, swings.now) == (crawls.setting, crawls.now) == ("learning_rate", 5e-5)
    assert swings.then == pytest.approx(3e-5)
    assert crawls.then == pytest.approx(8e-5)
    assert swings.reason
    assert swings.source


def test_a_good_curve_and_an_unknown_rate_get_no_advice() -> None:
    assert judge(_series(_settling(0.5, 6, 0.02), 1), learning_rate=5e-5).advice is None
    assert judge(_series(_zigzag, 1)).advice is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_loss_that_is_no_number_is_divergence_however_short_the_series(bad: float) -> None:
    verdict = judge([2.0, 1.9, bad, 1.8], learning_rate=5e-5)
    assert verdict.word == "diverges"
    assert "step 3 " in verdict.reason
    assert verdict.advice is None


@pytest.mark.parametrize("count", [0, 1, SHORTEST - 1])
def test_a_short_series_is_not_judged(count: int) -> None:
    verdict = judge([2.0 - 0.01 * step for step in range(count)])
    assert verdict.word == "too-short"
    assert verdict.steps == count
    assert str(SHORTEST) in verdict.reason


def test_the_shortest_series_is_judged_where_it_is_clear() -> None:
    words = [judge(_series(curve, 3, count=SHORTEST)).word for curve in (_settling(0.5, 6, 0.01), _zigzag, _straight(1.5, 0.01))]
    assert words == ["keep", "oscillates", "diverges"]


def test_a_constant_loss_has_not_fallen() -> None:
    for level in (0.0, 0.7, 2.0, 11.3):
        assert judge([level] * 300).word == "crawls"


def test_figures_are_shares_of_the_loss() -> None:
    verdict = judge([4.0 - 0.02 * step for step in range(101)])
    assert verdict.fall == pytest.approx(0.5, abs=0.04)
    assert verdict.swing == pytest.approx(0.0, abs=1e-9)
    zigzag = judge([2.2 if step % 2 else 1.8 for step in range(200)])
    assert zigzag.swing == pytest.approx(0.1, rel=0.2)
    assert zigzag.memory is not None
    assert zigzag.memory < -0.9


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=120), st.sampled_from([None, 5e-5]))
def test_any_series_gets_a_verdict(losses: list[float], rate: float | None) -> None:
    verdict = judge(losses, rate)
    assert verdict.reason
    assert "{" not in verdict.reason
    assert verdict.steps == len(losses)
    assert (verdict.advice is not None) == (rate is not None and verdict.word in {"oscillates", "crawls"})


@given(st.lists(st.floats(0, 20), min_size=SHORTEST, max_size=200))
def test_a_series_that_never_rises_neither_swings_nor_diverges(losses: list[float]) -> None:
    assert judge(sorted(losses, reverse=True)).word in {"keep", "crawls"}
