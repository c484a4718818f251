"""Everything can be read in both themes, and the policy lets in nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from brim.pictures import style
from brim.pictures.style import PALETTE, policy, script, stylesheet

WORDS = ("text", "quiet", "link", "good", "bad", "care")
SURFACES = ("page", "card")


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_and_drawings_stand_out_from_what_is_behind_them(theme: int) -> None:
    for surface in SURFACES:
        behind = PALETTE[surface][theme]
        for name in WORDS:
            assert contrast(PALETTE[name][theme], behind) >= 4.5, (name, surface)
        for name in set(PALETTE) - {*WORDS, *SURFACES, "edge"}:
            assert contrast(PALETTE[name][theme], behind) >= 3.0, (name, surface)


def test_the_policy_knows_style_and_script_by_their_hashes_and_allows_nothing_else() -> None:
    for text in (stylesheet(), script()):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy()
    assert policy().startswith("default-src 'none'")
    assert "unsafe" not in policy()


def test_style_and_script_ask_for_nothing() -> None:
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|fetch\(|XMLHttp|</", stylesheet() + script())


def test_every_colour_that_is_used_is_in_the_palette() -> None:
    assert set(re.findall(r"var\(--([\w-]+)\)", stylesheet())) <= set(PALETTE)


def test_style_and_script_ship_with_the_package() -> None:
    folder = Path(style.__file__).parent
    assert (folder / "page.css").is_file()
    assert (folder / "page.js").is_file()
