"""Bare `brim`: this machine, and the commands that most people want."""

from __future__ import annotations

from importlib import metadata

from rich.text import Text

from brim.cli._machine import machine_rows
from brim.cli._output import grid, show as print_
from brim.extras import INSTALL, missing
from brim.locale import N_, _

_WANTED = (
    ("brim max MODEL --gpu t4", N_("the largest micro-batch that fits, in one number")),
    ("brim plan MODEL --gpu t4", N_("what fits, and how fast, before you pay")),
    ("brim train MODEL --data FILE", N_("train, and keep the batch you asked for whatever the memory does")),
    ("brim doctor .", N_("find what quietly changes the batch in the code you have")),
)


def show() -> None:
    """Print the first screen."""
    from brim.machine.detect import detect

    print_(Text(f"brim {metadata.version('brim')}", style="bold"), "")
    print_(Text(_("This machine"), style="bold"), grid(machine_rows(detect())), "")
    print_(Text(_("What most people want"), style="bold"))
    print_(grid([(command, _(answer)) for command, answer in _WANTED]), "")
    if missing():
        text = _("This is the base installation. For everything that predicts or trains: {command}")
        print_(Text(text.format(command=INSTALL)))
    print_(_("`brim --help` lists everything."))
