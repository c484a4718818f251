"""Bare `brim`: this machine, and the three commands that most people want."""

from __future__ import annotations

from importlib import metadata

from rich.text import Text

from brim.cli._machine import machine_rows
from brim.cli._output import grid, show as print_
from brim.cli._verbs import VERBS
from brim.locale import N_, _

_WANTED = (
    ("plan", "brim plan MODEL --gpu t4", N_("what fits, and how fast, before you pay")),
    ("train", "brim train MODEL --data FILE", N_("train, and keep the batch you asked for whatever the memory does")),
    ("doctor", "brim doctor .", N_("find what quietly changes the batch in the code you have")),
)


def show() -> None:
    """Print the first screen."""
    from brim.machine.detect import detect

    print_(Text(f"brim {metadata.version('brim')}", style="bold"), "")
    print_(Text(_("This machine"), style="bold"), grid(machine_rows(detect())), "")
    print_(Text(_("What most people want"), style="bold"))
    here = [VERBS[verb].is_here for verb, _command, _answer in _WANTED]
    rows = [
        (command if is_here else f"{command} *", _(answer))
        for is_here, (_verb, command, answer) in zip(here, _WANTED, strict=True)
    ]
    print_(grid(rows), "")
    if not all(here):
        print_(_("* not in this version yet"))
    print_(_("`brim --help` lists everything."))
