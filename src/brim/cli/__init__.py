"""The command line: one file a verb, and the conventions of all verbs once.

    __init__.py   main: the verbs found lazily, errors mapped to exit codes
    _verbs.py     the list of verbs, grouped as the help shows them
    _command.py   what every verb shares: --json, --config, --lang, translated help
    _config.py    the config file: default < file < flag, unknown keys refused with a suggestion
    _output.py    data on stdout, the rest on stderr; tables and bars
    _home.py      bare `brim`
    env.py ...    one file a verb

Heavy imports happen inside the verb that needs them: `brim --help` answers in under 0.2 s.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import click

from brim.cli._command import Brim, speak, value_of
from brim.cli._output import note, silence_stdout
from brim.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, BrimError
from brim.extras import is_of_train, missing_package
from brim.locale import _
from brim.machine.screen import outlive_the_terminal

if TYPE_CHECKING:
    from collections.abc import Sequence


_PREDICTING = ("estimate", "plan", "max")


def entry() -> NoReturn:
    """The console script."""
    predicts = sys.argv[1:2] and sys.argv[1] in _PREDICTING
    if predicts:
        # A trace quantises with stand-ins of its own; peft would import the real package all the same, and that imports torch's compiler:
        # a second and a half of every cold start. This process never trains.
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
        # Imports and traces make objects by the million that stay: looking through them again and again is a tenth of a cold start.
        gc.set_threshold(200_000, 20, 100)
    outlive_the_terminal()
    code = main()
    # Python flushes at exit and complains where it cannot: a reader that is gone is none of our business, a full disk is a failure.
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError:
        silence_stdout()
        code = code or EXIT_FAILED
    if predicts and "torch" in sys.modules:
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)  # nothing is left to be done, and taking torch and transformers apart takes a second
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed or does not fit, 2 wrong usage, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _prepare(given)
        result = Brim().main(args=given, prog_name="brim", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain(_("Interrupted."))
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _usage(error)
    except BrimError as error:
        _complain(error.message, error.hint)
        _show_traceback()
        return error.exit_code
    except OSError as error:
        # Files that the user named have errors of their own; what is left is the terminal, the pipe, a full disk behind stdout.
        _complain(_("The output could not be written: {why}.").format(why=error.strerror or error))
        _show_traceback()
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 (the last line of defence: a defect of brim, told as one)
        if isinstance(error, ModuleNotFoundError) and is_of_train(error):
            _complain(missing_package(f"`brim {' '.join(given[:1])}`", str(error.name).partition(".")[0]).message)
            _show_traceback()
            return EXIT_USAGE
        _complain(
            _("This is a defect of brim: {kind}: {why}").format(kind=type(error).__name__, why=error),
            _("BRIM_DEBUG=1 shows where it happened; please report it with the output of `brim env`."),
        )
        _show_traceback()
        return EXIT_FAILED
    return result if isinstance(result, int) else EXIT_OK


def _prepare(arguments: list[str]) -> None:
    """Before anything is parsed or printed, since help and errors speak too: the language, and streams that never fail on a character."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    speak(value_of("--lang", arguments) or os.environ.get("BRIM_LANG"))


def _usage(error: click.ClickException) -> int:
    """Click's errors in brim's form: one message, and what to type next."""
    hint = None
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = _("`{command} --help` shows what it takes.").format(command=error.ctx.command_path)
    _complain(error.format_message(), hint)
    _show_traceback()
    return EXIT_USAGE


def _complain(message: str, hint: str | None = None) -> None:
    note(f"brim: {message}")
    if hint:
        note(f"  {hint}")


def _show_traceback() -> None:
    if os.environ.get("BRIM_DEBUG", "") not in {"", "0"}:
        note(traceback.format_exc())
