"""The page in a real browser: no error, no request, nothing wider than the window, both themes, the keyboard, print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brim import locale
from brim.cli.report import report
from tests.pictures import made
from tests.pictures.browser import CHROMIUM, WHY_NOT, Browser
from tests.pictures.test_page import WHOLE_RUN

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

WIDTHS = (400, 700, 1100, 1600)
OVERFLOWING = """[...document.querySelectorAll('body *')].filter(each => {
  const box = each.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !each.closest('.wide, .hidden, .skip');
}).map(each => each.outerHTML.slice(0, 120))"""
CHARTS = """[...document.querySelectorAll('[role=img]')].map(each => {
  const svg = each.querySelector('svg').getBoundingClientRect();
  return [each.id, svg.width > 150 && svg.height > 40, each.querySelectorAll('path, rect').length > 0];
})"""
SMALLEST_LETTERS = "Math.min(...[...document.querySelectorAll('main text, main p, main td')].map(each => parseFloat(getComputedStyle(each).fontSize)))"
OVERLAPPING = """[...document.querySelectorAll('[role=img]')].flatMap(each => {
  const words = [...each.querySelectorAll('.plot > text:not(.axis):not(.said), .bars > text:not(.row):not(.said)')].map(text => text.getBoundingClientRect());
  return words.some((one, place) => words.slice(place + 1).some(other =>
    one.left < other.right && other.left < one.right && one.top + 2 < other.bottom && other.top + 2 < one.bottom)) ? [each.id] : [];
})"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(16, 19, 24)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    locale.activate("en")
    return report(made.run(tmp_path_factory.mktemp("page") / "run"))


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    browser.troubles.clear()
    browser.requests.clear()
    browser.prefer("light")
    browser.resize(1600)
    browser.open(page)
    yield browser
    assert not browser.troubles
    assert all(address == page.resolve().as_uri() for address in browser.requests)


def test_every_chart_is_there_and_fits_at_every_width(opened: Browser) -> None:
    for width in WIDTHS:
        opened.resize(width)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.evaluate(OVERFLOWING) == []
        assert opened.evaluate(CHARTS) == [[f"chart-{name}", True, True] for name in WHOLE_RUN]
        assert opened.evaluate(OVERLAPPING) == []
        assert opened.evaluate(SMALLEST_LETTERS) >= 12


def test_the_theme_follows_the_system_and_the_button(opened: Browser) -> None:
    assert opened.evaluate(BACKGROUND) == LIGHT
    opened.prefer("dark")
    assert opened.evaluate(BACKGROUND) == DARK
    opened.evaluate("document.getElementById('theme').focus()")
    opened.press("Enter")
    assert opened.evaluate(BACKGROUND) == LIGHT
    assert opened.evaluate("document.getElementById('theme').textContent") == "Dark page"


def test_the_keyboard_reaches_everything(opened: Browser) -> None:
    opened.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    assert opened.evaluate("document.activeElement.getBoundingClientRect().left") == 0
    opened.evaluate("document.getElementById('chart-loss').focus()")
    assert opened.evaluate("document.activeElement.id") == "chart-loss"
    said = "document.getElementById('chart-loss').parentElement.querySelector('.tip').textContent"
    opened.press("ArrowRight")
    assert opened.evaluate(said) == "step 0: evaluation 6.65"
    opened.press("ArrowRight")
    assert opened.evaluate(said).startswith("step 1: loss 6.494, smoothed ")
    opened.press("End")
    assert opened.evaluate(said).startswith("step 200: loss ")
    opened.press("Escape")
    assert opened.evaluate(said) == ""


@pytest.mark.slow
def test_a_page_prints_with_its_tables_opened(opened: Browser) -> None:
    opened.prefer("dark")
    # After the page's own listener, so it sees what print sees.
    opened.evaluate(
        "addEventListener('beforeprint', () => { window.closed_ = document.querySelectorAll('details:not([open])').length; })"
    )
    printed = opened.pdf()
    assert opened.evaluate("window.closed_") == 0
    assert printed.startswith(b"%PDF-")
    assert len(printed) > 20_000
    assert opened.evaluate("document.querySelectorAll('details[open]').length") == 0


def test_hostile_names_and_chinese_do_no_harm(browser: Browser, tmp_path: Path) -> None:
    browser.troubles.clear()
    name = "</script><img src=x onerror=\"document.title='broken'\">中文模型" + "x" * 300
    locale.activate("zh_CN")
    page = report(made.run(tmp_path / "run", name=name, steps=30, notes=(name,), device=name))
    browser.resize(400)
    browser.open(page)
    assert browser.evaluate("document.title").startswith("</script><img")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    assert browser.evaluate("document.documentElement.lang") == "zh-CN"
    assert not browser.troubles


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plan", "many GPUs", "probe", "one step", "nothing", "wild"])
def test_every_kind_of_page_is_sound(browser: Browser, tmp_path: Path, kind: str) -> None:
    browser.troubles.clear()
    wild = [each for each in made.entries(60) if each.step % 11 or each.step < 3]
    if kind == "plan":
        page = report(made.plan("a/very-long-name-of-a-model" * 4).write(tmp_path / "plan.json"))
    elif kind == "many GPUs":
        page = report(made.scaled_plan("a/very-long-name-of-a-model" * 4).write(tmp_path / "plan.json"))
    elif kind == "probe":
        page = report(made.probe().write(tmp_path / "probe.json"))
    else:
        steps = {"one step": list(made.entries(1)), "nothing": [], "wild": wild}[kind]
        page = report(made.ledger(tmp_path / "ledger.jsonl", steps, ends=False))
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for width in WIDTHS:
            browser.resize(width)
            browser.open(page)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(OVERFLOWING) == []
            assert browser.evaluate(OVERLAPPING) == []
    assert browser.pdf().startswith(b"%PDF-")
    assert not browser.troubles
