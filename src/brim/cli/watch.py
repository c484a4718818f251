"""`brim watch`: see a run live in the terminal, from its files alone."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from brim.cli._command import option, verb
from brim.cli._numbers import Number, WholeNumber
from brim.cli._output import is_terminal, line_width, print_json, show
from brim.errors import EXIT_FAILED, EXIT_OK, UsageError
from brim.locale import N_, _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.cli._watch_state import Watched
    from brim.pictures.live_state import State

SCREEN_SECONDS: Final = 1.0
LINE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_OLDER_SECONDS: Final = 0.25
"""Of every look, at most so long for the earlier lines of a long ledger."""
_WHOLE_BYTES: Final = 64 << 20
"""One picture waits for the earlier lines of a ledger up to this size: about a second. Of a longer one it shows the end."""
_GIVE_UP_SECONDS: Final = 15.0
"""A process that is gone may be started again: a resume needs some seconds to begin."""
_WIDEST: Final = 100


@verb(
    N_(
        "See a run live: progress, loss, speed, memory against the limit, splits, promise against fact.\n\nRUN is the folder of a run of "
        "brim train, brim.attach or brim observe, or its ledger.jsonl; it may lie on a network disk and belong to another machine. q or "
        "Ctrl-C leaves the view, and the run goes on. In a pipe: a plain line now and then. Exit code 0: the run finished, or goes on. "
        "1: it ended early."
    )
)
@click.argument("run")
@option(
    "--interval",
    type=Number(0.1),
    metavar="S",
    help=N_("Seconds between two looks. Default: 1 on a terminal; 10 between the lines of a pipe."),
)
@option("--every-steps", type=WholeNumber(1), metavar="N", help=N_("In a pipe: a line after so many steps."))
@option("--wait", is_flag=True, help=N_("Wait for the run to begin, if it is not there yet."))
@option("--once", is_flag=True, help=N_("Show the present state and end."))
@click.pass_context
def command(
    ctx: click.Context, /, run: str, as_json: bool, interval: float | None, every_steps: int | None, wait: bool, once: bool
) -> None:
    """Watch until the run has ended; `--json` prints the present state."""
    if as_json:
        state = _present(run, wait=wait)
        print_json(state.to_dict())
    else:
        state = watch(run, interval=interval, every_steps=every_steps, wait=wait, once=once)
    ctx.exit(EXIT_FAILED if state.ended_badly else EXIT_OK)


def watch(
    path: str | Path,
    *,
    interval: float | None = None,
    every_steps: int | None = None,
    wait: bool = False,
    once: bool = False,
) -> State:
    """Show a run until it ends, or until `q` or Ctrl-C; the last state that was seen.

    `path` is the folder of a run or its ledger. `interval` are seconds between two looks; where stdout is no terminal, between two lines,
    unless `every_steps` counts steps instead. `wait` waits for a run that has not begun; `once` shows the present state and returns.
    """
    if (interval is not None and not interval > 0) or (every_steps is not None and every_steps < 1):
        raise UsageError(_("interval and every_steps must be more than zero."))
    watched, state = _opened(path, wait=wait)
    if state.status == "waiting" and once:
        state = _waited(watched)
    if once or state.is_over:
        state = _whole(watched, state)
        _show_once(state)
        return state
    from brim.cli._watch_screen import can_draw

    if can_draw():
        return _on_screen(watched, state, interval or SCREEN_SECONDS)
    return _in_lines(watched, state, interval or LINE_SECONDS, every_steps)


def _present(path: str | Path, *, wait: bool) -> State:
    watched, state = _opened(path, wait=wait)
    if state.status == "waiting":
        state = _waited(watched)
    return _whole(watched, state)


def _opened(path: str | Path, *, wait: bool) -> tuple[Watched, State]:
    """The run, or the reason why there is none to see."""
    from brim.cli._watch_state import Watched, runs_in

    watched = Watched(path)
    state = watched.look()
    if state.status != "waiting" or wait:
        return watched, state
    inside = runs_in(Path(path)) if Path(path).is_dir() else []
    if inside:
        text = _("{path} holds runs, and is none itself.").format(path=path)
        raise UsageError(text, hint=_("The newest is `brim watch {run}`.").format(run=inside[0]))
    raise UsageError(
        _("There is no ledger at {path}, or not one whole line of it yet.").format(path=watched.ledger),
        hint=_("Give the folder of a run, or its ledger.jsonl; with --wait, brim waits for the run to begin."),
    )


def _waited(watched: Watched) -> State:
    while (state := watched.look()).status == "waiting":
        time.sleep(_LOOK_SECONDS)
    return state


def _whole(watched: Watched, state: State) -> State:
    """With the earlier lines too, unless there are too many."""
    return watched.look(math.inf) if 0 < watched.waiting_bytes <= _WHOLE_BYTES else state


def _show_once(state: State) -> None:
    from brim.pictures.live import picture

    encoding = (sys.stdout.encoding or "") if sys.stdout is not None else ""
    width = line_width() if is_terminal() else _WIDEST
    show(picture(state, width=width, ascii_only=not encoding.lower().startswith("utf")))


def _is_over(state: State) -> bool:
    return state.is_over and (state.status != "gone" or state.quiet_seconds >= _GIVE_UP_SECONDS)


def _on_screen(watched: Watched, state: State, interval: float) -> State:
    from brim.cli._watch_screen import Screen
    from brim.pictures.live import line

    with suppress(KeyboardInterrupt), Screen() as screen:
        while not _is_over(state):
            screen.draw(state)
            if screen.wait(interval):
                break
            state = watched.look(_OLDER_SECONDS)
    if state.is_over:
        state = _whole(watched, state)
        _show_once(state)
    else:
        show(line(state))
    return state


def _in_lines(watched: Watched, state: State, interval: float, every_steps: int | None) -> State:
    from brim.pictures.live import line

    told, said, said_at = state, state, -math.inf
    with suppress(KeyboardInterrupt):
        while not _is_over(state):
            for text in _news(told, state):
                show(text)
            told = state
            if said_at == -math.inf or _is_due(said, state, time.monotonic() - said_at >= interval, every_steps):
                show(line(state))
                said, said_at = state, time.monotonic()
            time.sleep(min(interval, _LOOK_SECONDS))
            state = watched.look(_OLDER_SECONDS)
        for text in (*_news(told, state), line(state)):
            show(text)
    return state


def _is_due(said: State, state: State, time_is_up: bool, every_steps: int | None) -> bool:
    if state.status != said.status:
        return True
    if every_steps is not None:
        return abs(state.step - said.step) >= every_steps
    return time_is_up and state.step != said.step


def _news(before: State, state: State) -> Iterator[str]:
    """What deserves a line of its own."""
    from brim.pictures.live import evaluation_text, split_text

    if state.evaluation is not None and state.evaluation != before.evaluation:
        yield _("evaluation: {facts}").format(facts=evaluation_text(state))
    if state.promise.splits > before.promise.splits and state.read_share == before.read_share:
        yield split_text(state.promise)
