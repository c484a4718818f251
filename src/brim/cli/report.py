"""`brim report`: a run, a plan or a probe as one offline HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli._command import option, verb
from brim.cli._output import note, print_json, show, work_is_done
from brim.errors import UsageError
from brim.locale import N_, _

if TYPE_CHECKING:
    from brim.pictures.parts import Section

SCHEMA = "brim.report/1"
NAME = "report.html"
_LOOKED_AT_BYTES = 8192


@verb(
    N_(
        "Draw a run, a plan or a probe as one HTML page that needs no network: it can be mailed, printed and kept.\n\nPATH is "
        "the folder of a run, its ledger.jsonl, or a file that brim plan, probe or emulate wrote. A run in progress can be drawn too."
    )
)
@click.argument("path")
@option(
    "-o", "--output", metavar="FILE", help=N_("Where the page goes. Default: report.html in the run's folder, else beside PATH.")
)
@option("--open", "is_opened", is_flag=True, help=N_("Open the page in a browser."))
def command(path: str, as_json: bool, output: str | None, is_opened: bool) -> None:
    """Write the page and say where it is."""
    target, size, sections = _made(path, output)
    with work_is_done():
        if as_json:
            names = [section.name for section in sections]
            print_json({"schema": SCHEMA, "path": str(target), "bytes": size, "sections": names})
        else:
            show(str(target))
    if is_opened and not _open(target):
        note(_("No browser could be opened; open {path} yourself.").format(path=target))


def report(path: str | Path, output: str | Path | None = None) -> Path:
    """Draw what lies at a path as one HTML page; returns where the page is.

    `path` is the folder of a run, its ledger, or a file of a plan or a probe. Without `output` the page goes into the run's folder as
    `report.html`, or beside the file under its name.
    """
    return _made(path, output)[0]


def _made(path: str | Path, output: str | Path | None) -> tuple[Path, int, list[Section]]:
    if not str(path).strip():
        raise UsageError(_("A path is needed, and {path!r} is none.").format(path=str(path)))
    target = _target(Path(path), output)
    from brim.cli._subject import read_subject
    from brim.pictures.page import document, sections_of
    from brim.record import write_atomically

    subject = read_subject(path)
    sections = sections_of(subject)
    text = document(subject, sections)
    return write_atomically(target, text), len(text.encode()), sections


def _target(path: Path, output: str | Path | None) -> Path:
    """Where the page goes, checked before any work is done: nothing but an older page of brim's is ever replaced."""
    if output is None:
        target = path / NAME if path.is_dir() else path.with_name(NAME if path.name == "ledger.jsonl" else path.stem + ".html")
    elif not str(output).strip() or Path(output).is_dir():
        raise UsageError(_("-o needs the name of a file, and {path!r} is none.").format(path=str(output)))
    else:
        target = Path(output)
        if not target.parent.is_dir():
            raise UsageError(_("There is no folder {path}.").format(path=target.parent))
    if target.is_file() and not _is_ours(target):
        raise UsageError(
            _("{path} is not a page that brim made, and is not replaced.").format(path=target),
            hint=_("Name another file: -o page.html"),
        )
    return target


def _is_ours(target: Path) -> bool:
    from brim.pictures.style import GENERATOR

    try:
        with target.open("rb") as stream:
            start = stream.read(_LOOKED_AT_BYTES)
    except OSError:
        return False
    return not start or f'name="generator" content="{GENERATOR}"'.encode() in start


def _open(target: Path) -> bool:
    import webbrowser

    try:
        return webbrowser.open(target.resolve().as_uri())
    except (OSError, webbrowser.Error):
        return False
