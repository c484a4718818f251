"""Start the process that trains, hand it the signals that this one gets, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim import locale
from brim.errors import BrimError, ChildError, OutOfMemoryError
from brim.locale import _, sentences
from brim.machine import nvml
from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.machine.child import PARENT_VARIABLE, kill_group
from brim.machine.host import oom_kills
from brim.records import RunCard
from brim.sizes import format_bytes
from brim.trainer.ranks import SECRET_VARIABLE
from brim.trainer.request import LEDGER_FILE, RUN_FILE
from brim.trainer.worker import OUTCOME_VARIABLE, Ended, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_LOOK_SECONDS = 0.5
_HANDED_ON = (signal.SIGINT, signal.SIGTERM)


_QUIET_END = """\
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTSTP})
"""
"""An interruption while Python starts or imports ends it on the spot, without a traceback; one that is ignored (nohup) stays so."""
QUIET_ON_CPU = {"DS_ACCELERATOR": "cpu"}
"""Where DeepSpeed is installed, accelerate imports it, and on the CPU it warns that it has looked for a GPU; told so, it does not."""


def launch(folder: Path, *, module: str = "brim.trainer.worker", device: str = "") -> Ended:
    """Train in a child process, by the `main` of this module; an error where it failed."""
    kills_before = oom_kills()
    reader, writer = os.pipe()
    source = str(Path(__file__).parents[2])
    quiet = QUIET_ON_CPU if device == "cpu" else {}
    environment = {**quiet, **os.environ, **MALLOC_ENVIRONMENT, OUTCOME_VARIABLE: str(writer), "BRIM_LANG": locale.language()}
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment.pop(SECRET_VARIABLE, None)
    if device.startswith("cuda"):
        # The Trainer would spread one process over all GPUs that it sees.
        environment |= nvml.alone(int(device.partition(":")[2] or 0))
    program = f"{_QUIET_END}sys.path.insert(0, {source!r})\nfrom {module} import main\nmain(sys.argv[1:])"
    with _handing_on() as relay:
        try:
            with _held_back():
                process = subprocess.Popen(
                    [sys.executable, "-c", program, str(folder)],
                    pass_fds=[writer],
                    stdin=subprocess.DEVNULL,
                    # Standard output is for the answer of the command that was called.
                    stdout=sys.stderr.fileno() if has_descriptor() else None,
                    env=environment,
                    # A group of its own: Ctrl-C reaches this process, which hands it on once.
                    process_group=0,
                )
                relay.begin(process)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            told = _read(reader, process)
            status = process.wait()
        finally:
            # Where reading failed, the one that trains; else loader workers of one that was killed, who have nobody to load for.
            kill_group(process.pid)
            process.wait()
    if told is None and status < 0 and -status in relay.handed:
        return Ended(stopped_by=-status)
    if told is None:
        raise died(status, folder, killed_by_kernel=oom_kills() > kills_before)
    if told.error:
        raise error_of(told)
    return told


def has_descriptor() -> bool:
    """Whether standard error is a real file: a notebook's is not."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _read(descriptor: int, process: subprocess.Popen[bytes]) -> Ended | None:
    """What the child says at its end; None where it died without a word. Its own children may hold the pipe longer than it lives."""
    parts = []
    while True:
        has_ended = process.poll() is not None
        ready, _write, _error = select.select([descriptor], [], [], 0 if has_ended else _LOOK_SECONDS)
        part = os.read(descriptor, 1 << 16) if ready else b""
        parts.append(part)
        if (ready and not part) or (has_ended and not ready):
            break
    os.close(descriptor)
    try:
        return Ended(**json.loads(b"".join(parts)))
    except (ValueError, TypeError):
        return None


class _Relay:
    """Hands signals on to the process that trains; those that came before it was there, when it is."""

    def __init__(self) -> None:
        self.handed: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in sorted(self.handed):
            self._send(number)

    def hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.handed.add(number)
        self._send(number)

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Ctrl-C and Ctrl-Z. A process that is started meanwhile has them held back too, until `_QUIET_END`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTSTP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handing_on() -> Iterator[_Relay]:
    """Signals to this process are for the one that trains; Ctrl-Z stops both, and `fg` wakes both."""
    relay = _Relay()
    before: dict[int, Any] = {}
    try:
        for number in _HANDED_ON:
            # A signal that whoever started us ignores (nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, relay.hand_on)
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, relay.stop)
    except ValueError:  # not the main thread: signals are somebody else's
        pass
    try:
        yield relay
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def died(status: int, folder: Path, *, killed_by_kernel: bool) -> BrimError:
    """A process that ended without a word, told by its exit status."""
    hint = how_to_go_on(folder)
    if status < 0:
        if -status == signal.SIGKILL and killed_by_kernel:
            return OutOfMemoryError(_("The kernel's out-of-memory killer ended the training."), family="killed", hint=hint)
        message, workaround = explain_end(-status, folder)
        return ChildError(message, hint=sentences(workaround, hint or "") or None)
    return ChildError(_("The training ended with exit code {code}, and said no more.").format(code=status), hint=hint)


def explain_end(number: int, folder: Path) -> tuple[str, str]:
    """A training process that a signal ended: the likely cause, and what to do about it."""
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    text = _("The training process was ended by signal {number} ({name}).").format(number=number, name=name)
    with contextlib.suppress(BrimError, OSError):
        card = RunCard.read(folder / RUN_FILE)
        limit = card.memory_limit_bytes
        if card.limit_is_hard and limit is not None and number in {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}:
            cause = _(
                "It probably ran out of memory under --memory {limit}: native libraries (oneDNN, which computes bfloat16) crash where "
                "an allocation fails."
            )
            way = _("Give a larger --memory, or a smaller --micro-batch.")
            if card.settings.precision != "fp32":
                way = _("Give a larger --memory, a smaller --micro-batch, or --precision fp32.")
            return sentences(text, cause.format(limit=format_bytes(limit))), way
    if number == signal.SIGILL:
        return (
            sentences(
                text, _("The processor lacks an instruction that the program used; some virtual machines report AMX wrongly.")
            ),
            _("Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or give --precision fp32."),
        )
    if number == signal.SIGKILL:
        way = _("If memory ran out on this machine, give a smaller --memory or --micro-batch.")
        return sentences(text, _("Usually that is the kernel's out-of-memory killer, a job scheduler, or a person.")), way
    return sentences(text, _("A native library crashed.")), _("PYTHONFAULTHANDLER=1 in the environment shows where.")


def how_to_go_on(folder: Path) -> str | None:
    """What to type after a failure; None where nothing was trained yet, and the run's folder goes."""
    if not (folder / LEDGER_FILE).is_file() and not any(folder.glob("checkpoint-*")):
        return None
    return _("Nothing but the steps since the last checkpoint is lost: brim train --resume {folder}").format(folder=folder)
