"""Several processes of one run, started by torchrun or accelerate and listened to: how they ended, and whether to start them anew.

brim has no scheduler. On several machines the same command is given on each; the first one prepares the run, in a folder that all see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim import locale
from brim.errors import ChildError
from brim.locale import _
from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.machine.child import PARENT_VARIABLE, kill_group
from brim.machine.host import host
from brim.records import Launcher
from brim.trainer.launching import QUIET_ON_CPU, died, has_descriptor, how_to_go_on
from brim.trainer.lessons import Lessons, told
from brim.trainer.ranks import OF_A_LAUNCH, SECRET_VARIABLE
from brim.trainer.watching import born
from brim.trainer.worker import Ended, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


MOST_STARTS: Final = 8
"""A limit that falls at each of them is below one sequence long before."""
ACCELERATE_FILE: Final = "accelerate.yaml"
_LOOPBACK: Final = "127.0.0.1"
_LOOK_SECONDS: Final = 0.2
JOIN_SECONDS: Final = 900
"""For the launchers of all machines to meet, once the run is prepared (`doorway.py`)."""
_PATIENCE_SECONDS: Final = 10.0
"""After a second signal."""
_HEARD = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Group:
    """Which processes, and where."""

    launcher: Launcher
    gpus: int
    """Processes on each machine."""
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    """`host:port` of the first machine, where there are several."""
    device: str | None = None
    secret: bytes = field(default=b"", repr=False)
    """What the machines share, where there are several; never on a command line, in a record or in the environment of a rank."""

    def command(self, folder: Path, module: str) -> list[str]:
        """The launcher with its arguments, and what each rank runs."""
        program = ["-m", "brim.trainer.rank", str(folder), module]
        if self.launcher == "accelerate":
            where = ["--num_processes", str(self.gpus * self.nodes), "--num_machines", str(self.nodes)]
            address, _colon, port = (self.rendezvous or f"{_LOOPBACK}:0").rpartition(":")
            where += ["--machine_rank", str(self.node_rank), "--main_process_ip", address, "--main_process_port", port]
            return ["accelerate", "--config_file", str(folder / ACCELERATE_FILE), *where, *program]
        where = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.gpus), "--max-restarts", "0"]
        if self.nodes == 1:
            # No name is looked up, and no port is fought for: the system picks one.
            where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_LOOPBACK}:0", "--local-addr", _LOOPBACK]
            where += ["--rdzv-conf", "is_host=true", "--rdzv-id", uuid.uuid4().hex]
        else:
            assert self.rendezvous is not None
            # Static: c10d would number the machines by their names, and --memory and --speeds are told by rank.
            where += ["--rdzv-backend", "static", "--rdzv-endpoint", self.rendezvous, "--node-rank", str(self.node_rank)]
            where += ["--rdzv-id", folder.name, "--rdzv-conf", f"timeout={JOIN_SECONDS}"]
        return ["torchrun", *where, *program]


def train_in_group(folder: Path, group: Group, *, module: str, say: Callable[[str], None]) -> Ended:
    """Start the ranks; anew with smaller slices, where that is the answer. An error where they failed."""
    for start in range(1, MOST_STARTS + 1):
        known = len(Lessons.of(folder).lessons)
        ended = _once(folder, group, module)
        lessons = Lessons.of(folder).lessons
        if not ended.error or len(lessons) == known or start == MOST_STARTS:
            break
        say(told(lessons[-1]))
    if ended.error:
        raise error_of(ended)
    return ended


def _once(folder: Path, group: Group, module: str) -> Ended:
    with tempfile.TemporaryDirectory(prefix="brim-ranks-") as outbox:
        command = [sys.executable, "-m", "brim.trainer.starting", *group.command(folder, module)]
        with _listening(Path(outbox)) as ears:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # Standard output is for the answer of the command that was called.
                stdout=sys.stderr.fileno() if has_descriptor() else None,
                env=_environment(group, outbox),
                process_group=0,
            )
            try:
                ears.begin(process)
                status = _waited(process, ears)
            finally:
                kill_group(process.pid)
                process.wait()
                for pid in _processes(Path(outbox)):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(os.getpgid(pid), signal.SIGKILL) if os.getpgid(pid) != os.getpgid(0) else os.kill(
                            pid, signal.SIGKILL
                        )
        return _judged(_said(Path(outbox)), status, ears.heard, folder)


def _waited(process: subprocess.Popen[bytes], ears: _Ears) -> int:
    patience = _PATIENCE_SECONDS
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
        if len(ears.heard) > 1:
            patience -= _LOOK_SECONDS
        if patience <= 0:  # they were asked twice: one may be where no signal reaches it
            kill_group(process.pid)


def _environment(group: Group, outbox: str) -> dict[str, str]:
    """Ours, without what another launch has left in it."""
    from brim.trainer.rank import DEVICE_VARIABLE, OUTBOX_VARIABLE

    kept = {name: value for name, value in os.environ.items() if not name.startswith((*OF_A_LAUNCH, SECRET_VARIABLE))}
    threads = str(max(1, int(host().cores) // group.gpus))
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(dict.fromkeys(filter(None, (source, kept.get("PYTHONPATH")))))
    # torchrun makes a folder for logs that nobody asked for, and leaves it; and it ends its ranks when a terminal is closed.
    added = {
        OUTBOX_VARIABLE: outbox,
        "PET_LOG_DIR": outbox,
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT",
        "BRIM_LANG": locale.language(),
        "PYTHONPATH": path,
    }
    added[PARENT_VARIABLE] = str(os.getpid())
    if group.device is not None:
        added[DEVICE_VARIABLE] = group.device
    is_here = group.nodes == 1 or (group.rendezvous or "").startswith(("127.", "localhost:"))
    if is_here and sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = "lo"
    quiet = QUIET_ON_CPU if group.device == "cpu" else {}
    # What the store's own threads write when a rank is gone is told by brim, in a sentence.
    silent = {} if os.environ.get("BRIM_DEBUG", "") not in {"", "0"} else {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    return {"OMP_NUM_THREADS": threads, **quiet, **silent, **kept, **MALLOC_ENVIRONMENT, **added}


def _said(outbox: Path) -> list[Ended]:
    found = []
    for path in sorted(outbox.glob("ended-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Ended(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def _processes(outbox: Path) -> list[int]:
    found = []
    for path in outbox.glob("pid-*"):
        with contextlib.suppress(OSError, ValueError):
            number, born_at = path.read_text(encoding="utf-8").split(" ")
            # A number may be another's by now.
            if born(int(number)) == born_at:
                found.append(int(number))
    return found


def _judged(said: list[Ended], status: int, handed: list[int], folder: Path) -> Ended:
    """One answer of many: the reason before its echoes."""
    # Who was asked to stop in the middle of meeting leaves without a word, and the others miss it: no failure.
    failed = [ended for ended in said if ended.error and not (handed and ended.is_echo)]
    if failed:
        # An error that is another rank's word, or that a broken connection raised, says less than the reason itself.
        best = min(failed, key=lambda ended: (not ended.again, ended.is_echo))
        return Ended(**{**vars(best), "hint": best.hint or how_to_go_on(folder)})
    if said and all(ended.finished for ended in said) and status == 0:
        return said[0]
    stopped = next((ended for ended in said if ended.stopped_by is not None), None)
    if stopped is not None or handed:
        return Ended(stopped_by=handed[0] if handed else stopped.stopped_by if stopped else None)
    raise (
        died(status, folder, killed_by_kernel=False)
        if not said
        else ChildError(_("The ranks ended, and said no more."), hint=how_to_go_on(folder))
    )


class _Ears:
    """Signals are for the ranks themselves: a launcher would give them thirty seconds, and a step and its checkpoint may take longer.

    Ranks finish their step, save and stop at the first; a second one ends them. What comes before there is a launcher, it gets then.
    """

    def __init__(self, outbox: Path) -> None:
        self.heard: list[int] = []
        self._outbox = outbox
        self._launcher: subprocess.Popen[bytes] | None = None

    def begin(self, launcher: subprocess.Popen[bytes]) -> None:
        self._launcher = launcher
        if self.heard:
            self._pass_on()

    def hear(self, number: int, _frame: FrameType | None) -> None:
        self.heard.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        pids = _processes(self._outbox)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        if not pids and self._launcher is not None:
            with contextlib.suppress(ProcessLookupError):
                self._launcher.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _listening(outbox: Path) -> Iterator[_Ears]:
    ears = _Ears(outbox)
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
        for number in _HEARD:
            # A signal that whoever started us ignores (nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, ears.hear)
    try:
        yield ears
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
