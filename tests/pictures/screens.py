"""The pictures of docs/report.md, from a composed run: `python -m tests.pictures.screens`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from brim.cli.report import report
from tests.pictures import made
from tests.pictures.browser import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    """Three looks at one page: wide and light, wide and dark, as narrow as a telephone."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        made.run(Path(name) / "run")
        # The page shows how to repeat it: with the name of a folder, not with that of a passing one.
        os.chdir(name)
        page = report("run")
        with Browser(Path(name) / "browser") as browser:
            for file, scheme, width, selector, height in (
                ("report.png", "light", 1100, "header", 1330),
                ("report-dark.png", "dark", 1100, "#loss", 1180),
                ("report-narrow.png", "light", 400, "#memory", 1400),
            ):
                browser.prefer(scheme)
                browser.resize(width)
                browser.open(page)
                top = browser.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top + scrollY")
                browser.screenshot(IMAGES / file, clip={"x": 0, "y": max(0, top - 24), "width": width, "height": height})


if __name__ == "__main__":
    main()
