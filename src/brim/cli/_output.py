"""What leaves a command: data on stdout, everything else on stderr; `--json` prints one document.

Colour and bars help the eye and carry no meaning alone. rich honours NO_COLOR and FORCE_COLOR; a pipe gets plain text, wide enough
that no column is cut.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click

from brim.locale import _
from brim.machine.screen import json_text, message, printable, printable_line, redraw, silence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

_PIPE_COLUMNS = 240


def note(text: str) -> None:
    """A remark for the person, not for the program that reads stdout."""
    click.echo(message(text), err=True)


def print_json(document: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """One JSON document on stdout."""
    _write(json_text(json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)))


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say what takes a moment, on a terminal, for as long as it takes."""
    if not sys.stderr.isatty():
        yield
        return
    # No spinner: it would need a thread, and a plan forks to use all cores.
    redraw(text)
    try:
        yield
    finally:
        redraw()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Libraries greet on stdout, which is for the answer, and draw bars, which are for terminals."""
    import logging

    # On every import it misses a package that brim does not need.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        if sys.stderr.isatty():
            yield
            return
        # For what is imported later, and for child processes. Importing transformers only to quiet it would take a second.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        said: Any = sys.modules.get("transformers.utils.logging")
        had_bars = said is not None and said.is_progress_bar_enabled()
        if had_bars:
            said.disable_progress_bar()
        try:
            yield
        finally:
            if had_bars:
                said.enable_progress_bar()


def show(*renderables: RenderableType) -> None:
    """Tables and text on stdout."""
    if is_terminal() or "FORCE_COLOR" in os.environ:
        screen = console(sys.stdout)
        for renderable in renderables:
            screen.print(message(renderable) if isinstance(renderable, str) else renderable)
        return
    for line in plain_text(*renderables).splitlines():
        _write(line)


def console(file: IO[str] | None, **settings: Any) -> Console:
    """A console for text from outside: markup in it means nothing, and what would control the terminal is shown as its code."""
    return _console_class()(file=file, highlight=False, emoji=False, markup=False, **settings)


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class Screen(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    return Screen


def plain_text(*renderables: RenderableType, width: int | None = None) -> str:
    """Tables and text without colour and trailing blanks, as wide as a line may be: nothing of a pipe or a file is cut."""
    text = io.StringIO()
    plain = console(text, width=width or line_width(), no_color=True)
    for renderable in renderables:
        if isinstance(renderable, str):
            plain.print(message(renderable), soft_wrap=True)
        else:
            plain.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().split("\n")[:-1])


def indented(text: str) -> RenderableType:
    """Two columns in, also where a terminal wraps the line."""
    if not is_terminal():
        return f"  {text}"
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2))


def is_terminal() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout is not None and sys.stdout.isatty()


def line_width() -> int:
    """How wide a line may be."""
    return console(sys.stdout).width if is_terminal() else _PIPE_COLUMNS


@dataclass(frozen=True)
class Column:
    """A column of a table; where the terminal is narrow, columns of the lowest `rank` go first, and rank 0 never goes."""

    heading: str
    rank: int = 0
    right: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose cells are never cut: what does not fit on the terminal is left out by whole columns."""
    from rich.cells import cell_len
    from rich.table import Table

    rows = [[printable_line(text) for text in row] for row in rows]
    widths = [
        max(cell_len(text) for text in (column.heading, *(row[index] for row in rows))) for index, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    room = line_width()
    while sum(widths[index] + 2 for index in kept) - 2 > room and any(columns[index].rank for index in kept):
        kept.remove(max(kept, key=lambda index: columns[index].rank))
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index in kept:
        made.add_column(columns[index].heading, justify="right" if columns[index].right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(row[index] for index in kept))
    return made


def grid(rows: Iterable[tuple[str, str]], *, indent: int = 2) -> Table:
    """Labels and values in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(" " * indent + printable_line(label), printable_line(value))
    return table


def format_seconds(seconds: float) -> str:
    """`18 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    if seconds < 99.5:
        return _("{count:.3g} s").format(count=seconds)
    minutes = round(seconds / 60)
    if minutes < 60:
        return _("{count} min").format(count=minutes)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return _("{hours} h {minutes:02d} min").format(hours=hours, minutes=minutes)
    days, hours = divmod(hours, 24)
    return _("{days} d {hours} h").format(days=days, hours=hours)


def bar(share: float, *, width: int = 20) -> str:
    """A share of 1 as a bar of eighths of a character: the length says it, the number beside it is exact."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


class ReaderGone(click.exceptions.Exit):
    """Whoever read stdout has what they wanted."""


def _write(text: str) -> None:
    """To stdout; a reader that has gone away (`brim gpus | head -1`) has what it wanted, and that is no failure."""
    try:
        click.echo(text)
    except BrokenPipeError:
        silence_stdout()
        raise ReaderGone(0) from None


@contextlib.contextmanager
def work_is_done() -> Iterator[None]:
    """What is printed inside tells of work that is finished and kept. If it cannot be printed, the exit code is still that of the work."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except (ReaderGone, BrokenPipeError):
        silence_stdout()
    except OSError as error:
        silence_stdout()
        text = _("The result could not be printed: {why}. The work itself is finished.")
        note(text.format(why=error.strerror or error))


def show_path(path: str) -> None:
    """The answer as one word, which a program can take as it is."""
    _write(printable_line(path) if is_terminal() else path)


def silence_stdout() -> None:
    """Let whatever is still printed, at exit too, go nowhere."""
    if sys.stdout is not None:
        silence(sys.stdout.fileno())
