"""`brim demo`: the whole way on an embedded tiny model and data set, for real, on this machine's CPU."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from brim.cli._command import option, verb
from brim.cli._output import note, print_json, quiet_libraries, show, show_path, work_is_done
from brim.errors import UsageError
from brim.locale import N_, _


def demo(output: str | Path | None = None, *, say: Any = None) -> dict[str, Any]:
    """Estimate, plan, probe, prove, train, run out of memory, keep the promise, draw it. Returns what each stage found.

    `output` is a folder for the two runs and the page; by default one in `./brim-runs`.
    """
    from brim.cli._demo_stages import stages

    folder = _folder(output)
    document: dict[str, Any] = {"schema": "brim.demo/1", "folder": str(folder)}
    began = time.monotonic()
    for stage in stages(folder):
        if say is not None:
            say(stage.title)
        found = stage.run()
        document[stage.key] = found.data
        if say is not None:
            say("\n".join([*found.lines, ""]))
    document["seconds"] = round(time.monotonic() - began, 1)
    return document


@verb(
    N_(
        "Show the whole way on this machine's CPU: estimate, plan, probe, proofs, training, an out-of-memory that is survived, the "
        "promise kept, and the page. Needs no GPU, no download and about a minute. Each stage says what it proves."
    )
)
@option("-o", "--output", metavar="DIR", help=N_("Folder for the runs and the page. Default: ./brim-runs/demo-TIME."))
def command(as_json: bool, output: str | None) -> None:
    """Run the stages one after the other."""
    with quiet_libraries():
        document = demo(output, say=None if as_json else _show)
    with work_is_done():
        if as_json:
            print_json(document)
            return
        note(_("Took {seconds:.0f} s. Look at it:").format(seconds=document["seconds"]))
        show_path(document["report"]["path"])


def _show(text: str) -> None:
    from rich.text import Text

    show(Text(text, style="bold") if text[:1].isdecimal() else text)


def _folder(output: str | Path | None) -> Path:
    if output is None:
        return Path("brim-runs") / f"demo-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(_("{folder} is not empty.").format(folder=folder), hint=_("Give another folder with -o."))
    return folder
