"""The child's side of `budget.py`: a process that has imported everything and computed nothing, and forks one child per task.

Why a process between: forking after torch has run parallel work hangs (the OpenMP pool does not survive a fork), and importing
torch afresh for every task costs seconds. So the server imports, never computes, and every task starts as its fork. A fork of a process
that has initialised CUDA cannot use CUDA, and some modules initialise it when they are imported (bitsandbytes does): such a fork replaces
itself by a fresh interpreter, which imports everything again.

Why `RLIMIT_DATA`: it counts the private writable memory of one process, which is where tensors live, and a request beyond it
fails as an allocation that can be caught, instead of drawing the kernel's OOM killer. The limit is set after imports and one warm-up,
so that a budget means what the work itself may take.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.machine.process_memory import (
    data_bytes as data_bytes,
    file_bytes as file_bytes,
    forget_peak as forget_peak,
    peak_data_bytes as peak_data_bytes,
    peak_resident_bytes as peak_resident_bytes,
    resident_bytes as resident_bytes,
    swapped_bytes as swapped_bytes,
)
from brim.machine.screen import say

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_MILLISECONDS = 10
_LONGEST_MESSAGE = 10_000
_LONGEST_TRACEBACK = 100_000

importing_main = False
"""Whether this process is importing its parent's script: a script without a guard would start its children again, without end."""


@dataclass(frozen=True)
class Task:
    """What the server is asked to run in a fork."""

    payload: bytes
    """The pickled callable with its arguments and its warm-up."""
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    main: dict[str, str]
    """How to import the parent's `__main__`, where the callable lives in it."""
    memory_bytes: int | None
    folder: str
    """Where the fork leaves its `result`, `stdout` and `stderr`."""


@dataclass(frozen=True)
class Started:
    """The fork exists."""

    pid: int


@dataclass(frozen=True)
class Returned:
    """The callable came back, with a value or with an exception told in words."""

    value: bytes | None = None
    error: str | None = None
    family: str | None = None
    traceback: str = ""
    footprint_bytes: int | None = None
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    limited_by_hand: bool = False
    """An administrator's hard limit is lower than the budget, and was what was in force."""


@dataclass(frozen=True)
class Ended:
    """The fork is gone; `status` as waitpid gives it."""

    status: int


def send(connection: socket.socket, message: object) -> None:
    """One message: its length, then the pickle. Both ends are brim itself."""
    data = pickle.dumps(message)
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message; EOFError when the other end is gone."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    return pickle.loads(_exactly(connection, length))  # noqa: S301 (from our own parent or child, over a socket pair)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve(descriptor: int) -> None:
    """Take one task after the other from the socket of this number, until the parent closes its end."""
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while True:
        try:
            task = receive(connection)
        except EOFError:
            os._exit(0)  # nothing is left to be done, and taking apart what was imported takes a second
        assert isinstance(task, Task)
        # Modules that the parent can import from where it stands must be importable here too.
        sys.path[:] = task.sys_path
        known = len(sys.modules)
        for module in task.preload:
            # A module that cannot be imported is the task's failure, told with its traceback, not the server's.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        if len(sys.modules) > known:
            # What was imported stays: no fork need look through it for garbage, and so copy all its pages.
            gc.collect()
            gc.freeze()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run_and_exit(task)
        try:
            send(connection, Started(pid))
            send(connection, Ended(_wait(connection, pid)))
        except BrokenPipeError:  # the parent is gone, and wants no answer
            kill_group(pid)
            return


def _wait(connection: socket.socket, pid: int) -> int:
    """Wait for the fork; if the parent goes away first, end the fork and this server with it."""
    parent = select.poll()
    parent.register(connection, select.POLLIN | select.POLLHUP)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            end_descendants(pid)
            return status
        if parent.poll(_POLL_MILLISECONDS) and not connection.recv(1, socket.MSG_PEEK):
            kill_group(pid)
            os._exit(1)


def kill_group(pid: int) -> None:
    """End a process and all that it has started."""
    for end in (os.killpg, os.kill):  # a fork that has not come to setsid yet has no group of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def end_descendants(group: int) -> None:
    """End what a fork that is gone has left behind: its group (a DataLoader's workers), and daemons in sessions of their own.

    This process is their subreaper: whoever loses its parent becomes our child, and so can be found.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (pids := [int(word) for word in listing.read_text(encoding="ascii").split()]):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _run_and_exit(task: Task) -> None:
    """The life of one fork. Never returns into the server's loop."""
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _redirect(task)
        if _cannot_use_cuda():
            Path(task.folder, "task").write_bytes(pickle.dumps(task))
            program = f"{import_statement()}; child.run_task({task.folder!r})"
            os.execv(sys.executable, [sys.executable, "-c", program])  # noqa: S606 (the same process, with a new memory)
    except BaseException:  # noqa: BLE001 (nothing may escape into the server's loop)
        traceback.print_exc()
        os._exit(1)
    _perform_and_exit(task)


def import_statement() -> str:
    """What imports this module in a fresh interpreter: the brim that runs here, also from a source tree that is not installed."""
    source = str(Path(__file__).parents[2])
    return f"import sys; sys.path.insert(0, {source!r}); from brim.machine import child"


def run_task(folder: str) -> None:
    """The task of this folder, in an interpreter that has imported nothing yet."""
    import faulthandler

    faulthandler.enable(file=2)
    task = pickle.loads(Path(folder, "task").read_bytes())  # noqa: S301 (written by this process before it replaced itself)
    sys.path[:] = task.sys_path
    _perform_and_exit(task)


def _cannot_use_cuda() -> bool:
    """Whether the process that this one was forked from had initialised CUDA, as torch says it, or as the driver's open device does."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # noqa: SLF001 (there is no public way to ask)
        return True
    with contextlib.suppress(OSError):
        return any(_link(entry) == "/dev/nvidia-uvm" for entry in os.scandir("/proc/self/fd"))
    return False


def _link(entry: os.DirEntry[str]) -> str:
    try:
        return str(Path(entry.path).readlink())
    except OSError:  # the descriptor of the listing itself
        return ""


def _perform_and_exit(task: Task) -> None:
    code = 1
    try:
        returned = _perform(task)
        # By a file that appears complete or not at all: a fork may be killed at any moment, in the middle of a message too.
        part = Path(task.folder, "result.part")
        part.write_bytes(pickle.dumps(returned))
        part.replace(Path(task.folder, "result"))
        code = 0 if returned.error is None else 1
    except BaseException:  # noqa: BLE001 (nothing may escape into the server's loop)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _perform(task: Task) -> Returned:
    footprint = limit = None
    try:
        for module in task.preload:
            importlib.import_module(module)
        function, arguments, keywords, warm_up = _load(task)
        _warm_up(warm_up)
        if task.memory_bytes is not None:
            footprint = data_bytes()
            limit = set_data_limit(footprint + task.memory_bytes)
        try:
            value = function(*arguments, **keywords)
        finally:
            if limit is not None:
                # Telling what happened takes memory too, and it is not the task's.
                set_data_limit(None)
        answer = pickle.dumps(value)
    except SystemExit as error:
        if error.code in (None, 0):
            return Returned(
                value=pickle.dumps(None), footprint_bytes=footprint, limit_bytes=limit, peak_bytes=peak_resident_bytes()
            )
        return _failure(error, footprint, limit, task.memory_bytes)
    except BaseException as error:  # noqa: BLE001 (a result, not a failure of the tool)
        return _failure(error, footprint, limit, task.memory_bytes)
    return Returned(value=answer, footprint_bytes=footprint, limit_bytes=limit, peak_bytes=peak_resident_bytes())


def _failure(error: BaseException, footprint: int | None, limit: int | None, budget: int | None) -> Returned:
    from brim.errors import out_of_memory_family

    try:
        told = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 (an exception's own __str__ may raise anything)
        told = "".join(traceback.format_tb(error.__traceback__))
    # The frames of the failed work hold its tensors; they are not needed any more.
    traceback.clear_frames(error.__traceback__)
    words = _words(error)
    # Under a limit, a thread that cannot start lacks the memory for its stack.
    starved = limit is not None and "can't start new thread" in words
    return Returned(
        error=f"{type(error).__name__}: {words}" if words else type(error).__name__,
        family="cpu" if starved else out_of_memory_family(error),
        traceback=told[-_LONGEST_TRACEBACK:],
        limited_by_hand=limit is not None and footprint is not None and limit < footprint + (budget or 0),
        footprint_bytes=footprint,
        limit_bytes=limit,
        peak_bytes=peak_resident_bytes(),
    )


def _words(error: BaseException) -> str:
    """The message of an exception, which may be of any length, or fail itself."""
    try:
        return str(error)[:_LONGEST_MESSAGE]
    except Exception:  # noqa: BLE001 (an exception's own __str__ may raise anything)
        return ""


def _load(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[], Any] | None]:
    if task.main:
        from multiprocessing import spawn

        global importing_main
        importing_main = True
        try:
            spawn.prepare(dict(task.main))
        finally:
            importing_main = False
    loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[], Any] | None]
    loaded = pickle.loads(task.payload)  # noqa: S301 (from our own parent, over a socket pair)
    return loaded


def _warm_up(warm_up: Callable[[], Any] | None) -> None:
    """Bring the process to its working footprint: thread pools exist, lazy imports are done, freed memory is given back."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        warm_up_torch(torch)
    if numpy is not None:
        # Its BLAS takes work buffers at the first multiplication, and without memory tries again for ever.
        square = numpy.ones((64, 64))
        square @ square
    if warm_up is not None:
        warm_up()
    gc.collect()
    give_back_memory()


def warm_up_torch(torch: Any) -> None:
    """Start torch's thread pools: a limit set before the OpenMP pool exists ends the process with "Thread creation failed"."""
    with torch.enable_grad():
        weight = torch.ones(256, 256, requires_grad=True)
        (torch.ones(1024, 256) @ weight).relu().sum().backward()
        torch.ones(1 << 20).add_(1).sum().item()


def set_data_limit(limit_bytes: int | None) -> int | None:
    """Set the soft limit on private writable memory, or lift it; what is in force then, for the hard limit is the administrator's."""
    import resource

    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if limit_bytes is None else limit_bytes
    if hard != resource.RLIM_INFINITY and soft != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


HAS_DATA_LIMIT = sys.platform.startswith("linux")


def data_limit() -> int | None:
    """The soft limit on private writable memory that is in force; None: there is none."""
    if not HAS_DATA_LIMIT:
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def give_back_memory() -> None:
    """Ask glibc to return free memory to the system, so that the footprint holds nothing that is free."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


PARENT_VARIABLE: Final = "BRIM_PARENT"
"""The process that started this one, by number."""


def die_with_parent() -> None:
    """Linux: be killed when the parent dies, however it dies. One that was dead before this is missed by the number that it has told."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        expected = os.environ.pop(PARENT_VARIABLE, None)
        if expected is not None and os.getppid() != int(expected):
            os._exit(1)


def _redirect(task: Task) -> None:
    import faulthandler

    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(Path(task.folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    # A fatal signal leaves the Python stack in stderr, and so in the outcome.
    faulthandler.enable(file=2)


def execute(limit_bytes: int | None, command: list[str]) -> None:
    """Become another program, under the limit."""
    die_with_parent()
    if limit_bytes is not None:
        set_data_limit(limit_bytes)
    try:
        os.execvp(command[0], command)  # noqa: S606 (a list, never a shell)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        os._exit(127)


if __name__ == "__main__":
    # Run by its path, so that no trace of brim's own import path reaches the command: `child.py LIMIT COMMAND ...`, 0 for no limit.
    execute(int(sys.argv[1]) or None, sys.argv[2:])
