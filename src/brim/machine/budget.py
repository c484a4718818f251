"""The budgeted CPU: run a callable or a command in a child process under a hard memory limit, and learn how it ended.

    outcome = run(train_one_step, batch, memory_bytes=parse_size("1GiB"), timeout_seconds=60, preload=("torch",))
    outcome.verdict   # "ok", "out-of-memory", "killed", "timeout" or "crash"

Signals, exit codes and time-outs are results here, never failures of the tool, and the parent is unharmed by all of them. A budget
means what the work itself may take: it counts from the child's footprint after imports and one warm-up. A command has no such moment
that could be seen from outside, so there the limit counts the whole process.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.machine import child
from brim.machine.child import Ended, Returned, Started, Task, kill_group, receive, send
from brim.machine.host import oom_kills
from brim.machine.outcome import Outcome, of_return, of_status, of_timeout
from brim.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# glibc keeps freed memory unless told otherwise; with these, headroom over the tensors' own peak is 2.5-6.4 % instead of
# 13-47 %, and runs repeat (docs/log.md).
# oneDNN, which computes bfloat16, keeps the code that it makes for each shape, and so does torch's layer above it: 1,024 shapes each.
# Slices hardly ever repeat a shape, so that a training of a million parameters grew by 60 MiB a step. A step's own products fit in these.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "16",
}
_TAIL_BYTES = 64 * 1024
_EXIT_GRACE_SECONDS = 5.0
_IMPORT_SECONDS = 300.0
"""How long the modules of `preload` may take to import: generous, for network file systems."""


def run(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    memory_bytes: int | str | None = None,
    timeout_seconds: float | None = None,
    preload: Sequence[str] = (),
    warm_up: Callable[[], Any] | None = None,
    **keywords: Any,
) -> Outcome:
    """Run one callable in a child of its own. For several in a row, `ForkServer` pays for the imports once."""
    with ForkServer() as server:
        return server.run(
            function, *arguments,
            memory_bytes=memory_bytes, timeout_seconds=timeout_seconds, preload=preload, warm_up=warm_up, **keywords,
        )  # fmt: skip


class ForkServer:
    """A process that has imported everything and computed nothing; every `run` is one fork of it.

    The first run pays for importing `preload`; the later ones start in milliseconds. One task runs at a time.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        if child.importing_main:
            raise UsageError(
                _("This script starts child processes while it is being imported by one."),
                hint=_('Put the call under `if __name__ == "__main__":`.'),
            )
        if not hasattr(os, "fork"):
            raise UnsupportedError(_("Trial runs in child processes need fork, which this platform does not have."))
        self._lock = threading.Lock()
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def run(
        self,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        memory_bytes: int | str | None = None,
        timeout_seconds: float | None = None,
        preload: Sequence[str] = (),
        warm_up: Callable[[], Any] | None = None,
        **keywords: Any,
    ) -> Outcome:
        """Run `function(*arguments, **keywords)` in a fork.

        `memory_bytes` (a SIZE: an integer, or "1GiB") is what it may take above its footprint after `preload` is imported and `warm_up`
        has run; `timeout_seconds` counts from the fork. The callable and its arguments must be importable from a module, as for any child.
        """
        budget_bytes = _checked(memory_bytes, timeout_seconds)
        payload = _pickle(function, arguments, keywords, warm_up)
        with self._lock, tempfile.TemporaryDirectory(prefix="brim-") as folder:
            task = Task(
                payload=payload,
                preload=tuple(preload),
                sys_path=tuple(sys.path),
                main=_main_module() if b"__main__" in payload else {},
                memory_bytes=budget_bytes,
                folder=folder,
            )
            kills_before, began = oom_kills(), time.monotonic()
            status, timed_out = self._exchange(task, timeout_seconds)
            returned = _returned(Path(folder) / "result")
            timed_out = timed_out and returned is None  # it ended in the very moment in which its time did
            facts: dict[str, Any] = {
                "stdout": _tail(Path(folder) / "stdout"),
                "stderr": _tail(Path(folder) / "stderr"),
                "seconds": time.monotonic() - began,
                "footprint_bytes": returned.footprint_bytes if returned else None,
                "limit_bytes": returned.limit_bytes if returned else None,
                "peak_bytes": returned.peak_bytes if returned else None,
            }
        if timed_out:
            return of_timeout(timeout_seconds or _IMPORT_SECONDS, budget_bytes, facts)
        if returned is not None:
            return of_return(returned, budget_bytes, facts)
        return of_status(status, oom_kills() > kills_before, facts)

    def close(self) -> None:
        """End the server, and whatever still runs in it. A later `run` starts a new one."""
        if self._connection is not None:
            # Forks of this process may hold the socket too: closing our copy alone would tell the server nothing.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=_EXIT_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._end()
        self._process = self._connection = None

    def _end(self) -> None:
        """End a server that does not listen."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The server, started if there is none: at first, and after one that died (a preloaded module may crash it)."""
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._process, self._connection
        self.close()
        self._connection, theirs = socket.socketpair()
        program = f"{child.import_statement()}; child.serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # What a preloaded module prints is no output of ours.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **MALLOC_ENVIRONMENT, **self._environment},
                # Ctrl-C in the terminal reaches the parent, which decides what becomes of its children.
                start_new_session=True,
            )
        return self._process, self._connection

    def _exchange(self, task: Task, timeout_seconds: float | None) -> tuple[int, bool]:
        """Send the task and follow it to its end: its wait status, and whether it ran out of time."""
        process, connection = self._start()
        pid: int | None = None
        timed_out = False
        try:
            connection.settimeout(_IMPORT_SECONDS)
            send(connection, task)
            while True:
                try:
                    message = receive(connection)
                except TimeoutError:
                    timed_out = True
                    if pid is None:  # still importing: the server itself hangs
                        self._end()
                        return 0, True
                    kill_group(pid)
                    connection.settimeout(None)
                    continue
                if isinstance(message, Started):
                    pid = message.pid
                    connection.settimeout(None if timeout_seconds == math.inf else timeout_seconds)
                elif isinstance(message, Ended):
                    return message.status, timed_out
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            # The server itself is gone: its own end is the answer.
            status = _wait_status(process.wait())
            self.close()
            return status, False
        except BaseException:
            if pid is not None:
                kill_group(pid)
            self.close()
            raise


def run_command(
    command: Sequence[str],
    *,
    memory_bytes: int | str | None = None,
    timeout_seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
) -> Outcome:
    """Run a command in a child; `memory_bytes` limits the whole process (and, separately, each process that it starts)."""
    if isinstance(command, str) or not command:
        raise UsageError(_("A command is a list of words, the program first."))
    limit_bytes = _checked(memory_bytes, timeout_seconds)
    kills_before, began = oom_kills(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="brim-") as scratch:
        stdout, stderr = Path(scratch) / "stdout", Path(scratch) / "stderr"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, child.__file__, str(limit_bytes or 0), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, **MALLOC_ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )
            timed_out = False
            try:
                process.wait(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                kill_group(process.pid)
                process.wait()
        facts: dict[str, Any] = {
            "stdout": _tail(stdout),
            "stderr": _tail(stderr),
            "seconds": time.monotonic() - began,
            "limit_bytes": limit_bytes,
        }
    if timed_out:
        assert timeout_seconds is not None
        return of_timeout(timeout_seconds, limit_bytes, facts)
    if process.returncode == 0:
        return Outcome(verdict="ok", exit_code=0, **facts)
    return of_status(_wait_status(process.returncode), oom_kills() > kills_before, facts)


def _pickle(*parts: object) -> bytes:
    try:
        return pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            _("This cannot be sent to a child process: {why}.").format(why=error),
            hint=_("Define the function in a module (not in a notebook, a lambda or another function), and give it plain data."),
        ) from error


def _main_module() -> dict[str, str]:
    """How a child may import what lives in this process's `__main__`, as multiprocessing's spawn does."""
    from multiprocessing import spawn

    data = {key: value for key, value in spawn.get_preparation_data("brim").items() if key.startswith("init_main")}
    path = data.get("init_main_from_path")
    if not data or (path is not None and not Path(path).is_file()):
        raise UsageError(
            _("What was defined at a prompt, in a notebook or on standard input cannot be sent to a child process."),
            hint=_("Put the function into a file and import it from there."),
        )
    return data


def _wait_status(return_code: int) -> int:
    """Subprocess's return code, as waitpid would have said it."""
    return -return_code if return_code < 0 else return_code << 8


def _checked(memory_bytes: int | str | None, timeout_seconds: float | None) -> int | None:
    """The budget in bytes; an error for what cannot be a budget or a time."""
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise UsageError(_("A time limit of {seconds:g} s leaves no time at all.").format(seconds=timeout_seconds))
    if memory_bytes is None:
        return None
    _require_data_limit()
    return parse_size(memory_bytes)


def _require_data_limit() -> None:
    if sys.platform != "linux":
        raise UnsupportedError(
            _("A memory budget on the CPU needs Linux: only there does RLIMIT_DATA limit what a process allocates."),
            hint=_("Leave out --memory, or run in a Linux container."),
        )


def _returned(path: Path) -> Returned | None:
    if not path.exists():
        return None
    with path.open("rb") as stream:
        returned = pickle.load(stream)  # noqa: S301 (our own child wrote it a moment ago, into a private folder)
    assert isinstance(returned, Returned)
    return returned


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - _TAIL_BYTES))
        return stream.read().decode("utf-8", errors="replace")
