"""How a child process ended, and how that is told: by its exit, its signal, the kernel's counter, and its last words."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import ChildError, OutOfMemoryError, out_of_memory_family
from brim.locale import _, sentences
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from brim.machine.child import Returned

Verdict = Literal["ok", "out-of-memory", "killed", "timeout", "crash"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child process ended."""

    verdict: Verdict
    value: Any = None
    """What the callable returned."""
    message: str = ""
    """One sentence for a person; empty where all went well."""
    family: str | None = None
    """Out of memory: who said so (`brim.errors.out_of_memory_family`)."""
    traceback: str = ""
    """Crash and out-of-memory: the child's Python traceback, as far as there is one."""
    signal: int | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    """The last 64 KiB of what the child printed."""
    seconds: float = 0.0
    footprint_bytes: int | None = None
    """Private writable memory of the child when the limit was set."""
    limit_bytes: int | None = None
    """The limit that was in force: footprint and budget together."""
    peak_bytes: int | None = None
    """Largest resident memory of the child, where it lived to tell."""

    def unwrap(self) -> Any:
        """The value, or the error that fits the verdict."""
        if self.verdict == "ok":
            return self.value
        if self.verdict == "out-of-memory":
            raise OutOfMemoryError(self.message, family=self.family)
        raise ChildError(self.message)


def explain_signal(number: int) -> str:
    """A sentence on a child that a signal ended."""
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    text = _("The child process was ended by signal {number} ({name}).").format(number=number, name=name)
    reason = {
        signal.SIGILL: _(
            "The processor lacks an instruction that the program used. Some virtual machines report AMX and do not have it, which "
            "crashes bfloat16: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment before the start."
        ),
        signal.SIGKILL: _("Usually that is the kernel's out-of-memory killer, a job scheduler, or a person."),
        signal.SIGBUS: _("Usually /dev/shm or the disk behind a memory-mapped file is full."),
        signal.SIGSEGV: _("A native library crashed; what it printed is in stderr."),
        signal.SIGABRT: _("A native library aborted; what it printed is in stderr."),
    }.get(signal.Signals(number) if number in signal.valid_signals() else signal.SIGTERM)
    return sentences(text, reason or "")


def of_timeout(seconds: float, memory_bytes: int | None, facts: dict[str, Any]) -> Outcome:
    """Under a budget, a library may wait for ever for memory that does not come (a BLAS that tries again, a thread that cannot start)."""
    family = out_of_memory_family(last_words(facts["stderr"])) if memory_bytes is not None else None
    if family is not None:
        message = _("Out of memory: {error}").format(error=_last_line(facts["stderr"]))
        return Outcome(verdict="out-of-memory", message=message, family=family, traceback=facts["stderr"], **facts)
    message = _("The child process took longer than {seconds:g} s and was ended.").format(seconds=seconds)
    return Outcome(verdict="timeout", message=message, **facts)


def last_words(stderr: str) -> str:
    """What ended a process, by what it printed: the last exception of a Python traceback, else the last few lines.

    Earlier lines may tell of an out-of-memory that was survived, and say nothing of the end.
    """
    # What comes after is the stack that Python prints for a fatal signal.
    lines = stderr.partition("Fatal Python error: ")[0].rstrip().splitlines()
    start = max((index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line), default=None)
    if start is not None:
        # The exception follows the frames, which are indented.
        tail = [line for line in lines[start + 1 :] if not line.startswith(" ")]
        return "\n".join(tail)
    return "\n".join(lines[-5:])


def of_return(returned: Returned, memory_bytes: int | None, facts: dict[str, Any]) -> Outcome:
    """A callable that came back: with a value, or with an exception told in words."""
    if returned.error is None:
        assert returned.value is not None
        try:
            value = pickle.loads(returned.value)  # noqa: S301 (our own child)
        except Exception as trouble:  # noqa: BLE001 (whatever the value's own code raises)
            message = _("What the child process returned cannot be read here: {error}").format(error=_first_line(repr(trouble)))
            return Outcome(verdict="crash", message=message, **facts)
        return Outcome(verdict="ok", value=value, exit_code=0, **facts)
    if returned.family is not None:
        error = _first_line(returned.error)
        if memory_bytes is None or returned.limited_by_hand:
            message = _("Out of memory: {error}").format(error=error)
        else:
            message = _("Out of memory under a budget of {size}: {error}").format(size=format_bytes(memory_bytes), error=error)
        return Outcome(
            verdict="out-of-memory",
            message=message,
            family=returned.family,
            traceback=returned.traceback,
            exit_code=1,
            **facts,
        )
    message = _("The child process failed: {error}").format(error=_first_line(returned.error))
    return Outcome(verdict="crash", message=message, traceback=returned.traceback, exit_code=1, **facts)


def of_status(status: int, oom_killed: bool, facts: dict[str, Any]) -> Outcome:
    """Judge a child that died without telling: by signal, by the kernel's counter, by what it printed last."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if number is not None else os.WEXITSTATUS(status)
    stderr = facts["stderr"]
    # A native library that cannot allocate prints and aborts (std::bad_alloc, libgomp) and no Python exception is seen.
    family = "killed" if number == signal.SIGKILL and oom_killed else None
    if number in {None, signal.SIGABRT, signal.SIGINT}:  # OpenBLAS interrupts itself when it cannot start its threads
        family = out_of_memory_family(last_words(stderr))
    if family is not None:
        told = _("the kernel's out-of-memory killer ended the child process") if family == "killed" else _last_line(stderr)
        message = _("Out of memory: {error}").format(error=told)
        return Outcome(
            verdict="out-of-memory",
            message=message,
            family=family,
            traceback=stderr,
            signal=number,
            exit_code=code,
            **facts,
        )
    if number is not None:
        return Outcome(verdict="killed", message=explain_signal(number), traceback=stderr, signal=number, **facts)
    message = _("The child process ended with exit code {code}: {error}").format(code=code, error=_last_line(stderr))
    return Outcome(verdict="crash", message=message, traceback=stderr, exit_code=code, **facts)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else _("it printed nothing")
