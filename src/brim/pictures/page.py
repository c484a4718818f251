"""The page: one HTML file that needs nothing beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _, language
from brim.pictures.markup import Html, join, tag
from brim.pictures.sections_data import data_section
from brim.pictures.sections_emulation import emulation_section
from brim.pictures.sections_findings import findings_section, proofs_section
from brim.pictures.sections_loss import loss_section
from brim.pictures.sections_memory import memory_section
from brim.pictures.sections_plan import plan_section
from brim.pictures.sections_repeat import repeat_section
from brim.pictures.sections_scaling import scaling_section
from brim.pictures.sections_slices import slices_section
from brim.pictures.sections_speed import speed_section
from brim.pictures.sections_timeline import timeline_section
from brim.pictures.sections_verdict import verdict_section
from brim.pictures.steps import look
from brim.pictures.style import hatchings, head_of, script
from brim.version import __version__

if TYPE_CHECKING:
    from brim.pictures.parts import Section
    from brim.pictures.subject import Subject

_TAGS = {"en": "en", "zh_CN": "zh-CN"}


def page(subject: Subject) -> str:
    """A whole document."""
    return document(subject, sections_of(subject))


def sections_of(subject: Subject) -> list[Section]:
    """The sections for which there are records, in the order in which a reader asks."""
    steps = look(subject.ledger) if subject.ledger is not None else None
    has_steps = steps is not None and len(steps) > 0
    found = [
        verdict_section(subject, steps),
        emulation_section(subject.emulation) if subject.emulation is not None else None,
        plan_section(subject),
        memory_section(subject, steps),
        speed_section(subject),
        scaling_section(subject),
        timeline_section(subject),
        data_section(subject, steps),
        loss_section(subject, steps) if steps is not None and has_steps else None,
        slices_section(steps) if steps is not None and has_steps else None,
        findings_section(subject),
        proofs_section(subject),
        repeat_section(subject),
    ]
    return [section for section in found if section is not None]


def document(subject: Subject, sections: list[Section]) -> str:
    """The sections, with what every page has round them."""
    title = subject.title
    contents = [tag("li", tag("a", section.title, href=f"#{section.name}")) for section in sections]
    body = tag(
        "body",
        tag("a", _("Skip to the content"), href="#content", class_="skip"),
        hatchings(),
        tag(
            "header",
            tag("div", tag("p", _("brim report"), class_="brand small"), tag("h1", title)),
            tag("button", id="theme", type="button", hidden=True, data_light=_("Light page"), data_dark=_("Dark page")),
        ),
        tag("nav", tag("ol", *contents), aria_label=_("Contents")),
        tag("main", *(_section(each) for each in sections), id="content", tabindex=-1),
        tag("footer", tag("p", _("Made by brim {version}. This page needs no network.").format(version=__version__))),
        # Of our own text alone, and known to the policy by its hash.
        Html(f"<script>{script()}</script>"),
    )
    head = head_of(_("{title} · brim report").format(title=title))
    return "<!doctype html>\n" + join([tag("html", head, body, lang=_TAGS.get(language(), "en"))]) + "\n"


def _section(found: Section) -> Html:
    return tag(
        "section",
        tag("h2", found.title, id=f"heading-{found.name}"),
        found.body,
        id=found.name,
        aria_labelledby=f"heading-{found.name}",
    )
