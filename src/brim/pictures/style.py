"""How the page looks: its colours, its style (page.css), its script (page.js), and the policy that allows these two and nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

from brim.pictures.markup import Html, join, tag

PALETTE: Final[dict[str, tuple[str, str]]] = {
    # name: on white, on black. Text reaches 4.5 : 1 against `page` and `card`, what is drawn 3 : 1; a test computes it.
    "page": ("#f6f7f9", "#101318"),
    "card": ("#ffffff", "#181c23"),
    "edge": ("#d9dee5", "#323a46"),
    "text": ("#1b2027", "#e7eaef"),
    "quiet": ("#545d69", "#a3adba"),
    "link": ("#1d5fa8", "#86b8f5"),
    "good": ("#17683a", "#7fd79b"),
    "bad": ("#b3261e", "#ff9088"),
    "care": ("#805300", "#eec064"),
    "limit": ("#b3261e", "#ff9088"),
    "predicted": ("#7440ad", "#caa6f3"),
    "s1": ("#2563b0", "#7fb0f0"),
    "s2": ("#b0530a", "#f2a65e"),
    "s3": ("#2a7845", "#79cf95"),
    "parameters": ("#3b6fb6", "#79a6e6"),
    "buffers": ("#7d5a48", "#c9a48f"),
    "workspace": ("#66707d", "#a7afba"),
    "optimizer": ("#2f854b", "#74c98f"),
    "gradients": ("#bd5c0a", "#f0a05a"),
    "communication": ("#1c7f80", "#67cfcf"),
    "activations": ("#c43d4b", "#f08a94"),
    "logits": ("#8753b3", "#c6a0ea"),
    "temporary": ("#8c6d00", "#dcc14e"),
    "fragmentation": ("#77818d", "#b9c1cb"),
    "context": ("#454e5a", "#8b95a3"),
}
_NOT_FILLS: Final = (
    "page",
    "card",
    "edge",
    "text",
    "quiet",
    "link",
    "good",
    "bad",
    "care",
    "limit",
    "predicted",
    "s1",
    "s2",
    "s3",
)
_HATCHED: Final = {
    "gradients": "M0 8L8 0",
    "logits": "M4 0V8",
    "temporary": "M0 4H8",
    "optimizer": "M0 0L8 8",
    "fragmentation": "M0 0L8 8M0 8L8 0",
    "context": "M0 4H8M4 0V8",
}
"""Colour never speaks alone: neighbours in a bar differ by their hatching too."""


@cache
def stylesheet() -> str:
    """All of it."""
    light, dark = ("".join(f"--{name}:{pair[place]};" for name, pair in PALETTE.items()) for place in (0, 1))
    themes = (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )
    fills = "".join(
        f".part.{name}{{fill:{f'url(#h-{name})' if name in _HATCHED else f'var(--{name})'}}}"
        for name in PALETTE
        if name not in _NOT_FILLS
    )
    fills += "".join(f".area.{name}{{fill:var(--{name})}}" for name in PALETTE if name not in _NOT_FILLS)
    looks = "".join(
        f".line.{name},.level.{name}{{stroke:var(--{name})}}.mark.{name}{{fill:var(--{name});stroke:var(--{name})}}.said.{name}{{fill:var(--{name})}}"
        for name in ("s1", "s2", "s3", "limit", "predicted")
    )
    printed = f"@media print{{:root,:root:not([data-theme=light]),:root[data-theme=dark]{{color-scheme:light;{light}}}}}\n"
    return f"{themes}{printed}{fills}\n{looks}\n{_own('page.css')}"


@cache
def script() -> str:
    """The few lines that the page can do without."""
    return _own("page.js")


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def hatchings() -> Html:
    """The patterns that bars and areas are filled with, once for the whole page."""
    made = [
        tag(
            "pattern", tag("rect", width=8, height=8, fill=f"var(--{name})"), tag("path", d=path, class_="hatch"),
            id=f"h-{name}", width=8, height=8, patternunits="userSpaceOnUse",
        )
        for name, path in _HATCHED.items()
    ]  # fmt: skip
    return tag("svg", tag("defs", *made), width=0, height=0, class_="hidden", aria_hidden="true", focusable="false")


def policy() -> str:
    """What the page may do: show itself. Style and script are known by their hashes, and nothing else is allowed."""
    styled, scripted = (_hash(text) for text in (stylesheet(), script()))
    return f"default-src 'none'; style-src '{styled}'; script-src '{scripted}'; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def head_of(title: str) -> Html:
    """All that stands in <head>."""
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        # Made here and of our own text alone: it may not be escaped.
        join([Html(f"<style>{stylesheet()}</style>")]),
    )


GENERATOR: Final = "brim report"
