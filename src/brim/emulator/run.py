"""`brim emulate`: run a command on an emulated card, unchanged, and report its peak memory.

    find the interpreter of the command -> compile the card for its torch (build.py) -> session folder -> run in the foreground
    -> reports of the agent, one per process -> Emulation

The agent (agent/) runs inside the command's interpreter. The session folder holds the reports, the shadow of the command's files and its
temporary files. It is removed at the end, also if brim is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from brim.emulator.agent.shadow import default_passed
from brim.emulator.build import compiled, interpreter, torch_build
from brim.emulator.card import (
    check_capability,
    emulated_card,
    environment as card_environment,
    has_kernels,
    session as card_session,
)
from brim.errors import EXIT_INTERRUPTED, UsageError
from brim.locale import _
from brim.machine.catalogue import gpus
from brim.machine.foreground import run_foreground
from brim.machine.secrets import masked
from brim.records.emulations import (
    CardFit,
    DevicePeak,
    Emulation,
    EmulationVerdict,
    MemoryOwner,
    OutOfMemory,
    Reason,
    SeenShape,
)
from brim.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from brim.emulator.build import TorchBuild
    from brim.emulator.card import EmulatedCard

DEFAULT_STEPS: Final = 3
_PREFIX: Final = "brim-emulate-"
_LOCK: Final = "lock"
_OFFLINE: Final = {
    "BRIM_EMULATED": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}
"""The results are not real, so the command must not publish them."""

_REAPER: Final = """
import os, shutil, signal, sys, time
words, folder = sys.stdin.read().split(), sys.argv[1]

def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def of_the_session():
    marker = b"BRIM_EMULATE_SESSION=" + os.fsencode(folder)
    pids = {int(word) for word in words}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                if marker in environ.read().split(b"\\0"):
                    pids.add(int(name))
        except (OSError, ValueError):
            pass
    return {pid for pid in pids - {os.getpid()} if is_running(pid)}

def end(number, seconds):
    deadline = time.monotonic() + seconds
    signalled = set()
    while (left := of_the_session()) and time.monotonic() < deadline:
        for pid in left - signalled:
            try:
                os.kill(pid, number)
            except OSError:
                pass
        signalled |= left
        time.sleep(0.1)

if "done" not in words:
    end(signal.SIGTERM, 10)
    end(signal.SIGKILL, 10)
    shutil.rmtree(folder, ignore_errors=True)
"""
"""Waits until brim exits. If brim was killed before it wrote "done", it ends all processes of the session and removes the folder.
Processes are found by their environment, because the workers of a launcher may have their own process groups."""


def emulate(
    command: Sequence[str],
    *,
    gpu: str,
    memory: str | int | None = None,
    steps: int = DEFAULT_STEPS,
    full: bool = False,
    longest: bool = False,
    compute: bool = False,
    allow_writes: bool = False,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
) -> Emulation:
    """Run a command on an emulated CUDA card and return the record of its memory.

    `command` is a list of words: `["python", "train.py"]`. `gpu` names a card of the catalogue, or several (`"rtx-3080*2"`); `memory` is
    the capacity of each, instead of the catalogue's. The command is stopped after `steps` optimizer steps, unless `full`. `longest` puts
    the longest rows of Hugging Face datasets first. `compute` also computes floating-point operators, on the host. Files that the
    command writes go to a temporary folder, unless `allow_writes`. `python` is the interpreter that the command uses, if it cannot be read
    from the command.
    """
    words = _words(command)
    if steps < 1:
        raise UsageError(_("--steps {steps} is too small (minimum 1).").format(steps=steps))
    card = emulated_card(gpu, memory_bytes=parse_size(memory) if memory is not None else None)
    variables = dict(os.environ if environment is None else environment)
    torch = torch_build(python or interpreter(words, variables))
    check_capability(card, torch)
    libraries = compiled(torch)
    with _session() as session, card_session() as shared:
        settings = {"steps": None if full else steps, "allow_writes": allow_writes, "longest": longest}
        (session.folder / "settings.json").write_text(json.dumps(settings))
        interruptions: list[bool] = []
        started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
        exit_code = run_foreground(
            words,
            _environment(
                session.folder, allow_writes, card_environment(card, libraries, shared, compute=compute, base=variables)
            ),
            hint=_hint(),
            started=session.started,
            interrupted=lambda: interruptions.append(True),
            stdout=stdout,
        )
        processes = _reports(session.folder)
        reached_python = any(session.folder.glob("python-*"))
        seconds = time.monotonic() - started
    ranks = [process for process in processes if process["uses_cuda"]]
    reasons = [Reason(code=note["code"], values=note["values"]) for process in processes for note in process["notes"]]
    refused = list(dict.fromkeys(name for process in processes for name in process["refused"]))
    reasons += [Reason(code=UNSUPPORTED[name]) for name in refused]
    shapes = sorted({name for process in ranks for name in process["uncomputed_shapes"]})
    if shapes:
        reasons.append(Reason(code="uncomputed-shapes", values={"operators": ", ".join(shapes)}))
    if card.assumption:
        reasons.append(Reason(code="gpu-assumed", values={"text": card.assumption}))
    if not reached_python:
        reasons.append(Reason(code="no-agent"))
    verdict = verdict_of_processes(processes, exit_code, interrupted=bool(interruptions))
    devices = tuple(_device_peak(process, device) for process in ranks for device in process["devices"])
    lead = ranks[0] if ranks else None
    if verdict == "fits" and any(process["stopped"] and process["steps"] == 1 for process in ranks):
        reasons.append(Reason(code="one-step"))
    return Emulation(
        command=masked(words),
        started_at=started_at,
        seconds=seconds,
        exit_code=exit_code,
        verdict=verdict,
        gpu=card.gpu.name,
        gpus=card.count,
        memory_bytes=card.memory_bytes,
        context_bytes=card.context_bytes,
        compute=compute,
        steps=min((process["steps"] for process in ranks if process["steps"]), default=0),
        steps_requested=None if full else steps,
        stopped=any(process["stopped"] for process in ranks),
        reached=tuple(name for name in ("evaluation", "saving") if any(name in process["reached"] for process in ranks)),
        longest_sequence=max((process["longest"] for process in ranks), default=0) or None,
        world_size=max((process["world_size"] for process in ranks), default=1),
        devices=devices,
        shapes=_shapes(ranks),
        out_of_memory=tuple(
            _failure(process, failure) for process in sorted(ranks, key=_ended_by_memory) for failure in process["failures"]
        ),
        error=next((_error(process) for process in (*ranks, *processes) if process["error"]), None),
        unsupported=unsupported_feature(processes) if verdict == "failed" else None,
        cards=_cards(card, torch, ranks) if verdict == "fits" else (),
        uncomputed=tuple(sorted({name for process in ranks for name in process["uncomputed"]})),
        written=tuple(dict.fromkeys(path for process in processes for path in process["written"])),
        versions=dict(lead["versions"]) if lead is not None else {},
        reasons=_unique(reasons),
    )


def _words(command: Sequence[str]) -> list[str]:
    if isinstance(command, str):
        raise UsageError(
            _("emulate takes the command as a list of words, not as one string: {command!r}.").format(command=command),
            hint=_("Use {call}.").format(call=f"brim.emulate({command.split()}, gpu=...)"),
        )
    words = [str(word) for word in command]
    if not words:
        raise UsageError(_("A command is needed."), hint=_("Write it after two dashes: brim emulate --gpu t4 -- python train.py"))
    return words


def _hint() -> str:
    return _("Write the command as you would without brim: brim emulate --gpu t4 -- python train.py")


def _environment(session: Path, allow_writes: bool, environment: dict[str, str]) -> dict[str, str]:
    temporary = str(session / "tmp")
    return {
        **environment,
        **_OFFLINE,
        "BRIM_EMULATE_SESSION": str(session),
        "TMPDIR": temporary,
        "TMP": temporary,
        "TEMP": temporary,
    } | (
        {}
        if allow_writes
        else {"BRIM_CARD_WRITABLE": os.pathsep.join(map(os.path.realpath, (str(session), *default_passed(environment))))}
    )


# ---- the session folder


@dataclass(frozen=True)
class _Session:
    folder: Path
    reaper: subprocess.Popen[bytes]

    def started(self, pid: int) -> None:
        assert self.reaper.stdin is not None
        with suppress(OSError):
            self.reaper.stdin.write(f"{pid}\n".encode())
            self.reaper.stdin.flush()


@contextmanager
def _session() -> Iterator[_Session]:
    """A private folder that is removed at the end, by this process or by the reaper."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    (folder / "tmp").mkdir()
    lock = (folder / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # In a session of its own, so that Ctrl-C does not end it before brim.
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _REAPER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield _Session(folder, reaper)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
        with suppress(OSError):
            reaper.communicate(b"done\n")


def _sweep() -> None:
    """Remove folders of sessions that were killed together with their reaper: their locks are free."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _reports(session: Path) -> list[dict[str, Any]]:
    """The reports of the command's processes, rank 0 first."""
    reports = []
    for path in session.glob("process-*.json"):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    return sorted(reports, key=lambda process: (process["rank"], process["pid"]))


# ---- from reports to the record


def verdict_of_processes(processes: list[dict[str, Any]], exit_code: int, *, interrupted: bool = False) -> EmulationVerdict:
    """The verdict, from the reports of the processes and the exit code of the command."""
    ranks = [process for process in processes if process["uses_cuda"]]
    if interrupted or exit_code == EXIT_INTERRUPTED:
        return "interrupted"
    # A launcher that fails after its ranks were stopped is not a failure of the training.
    has_stopped = bool(ranks) and all(process["stopped"] for process in ranks)
    if not has_stopped and any(_ended_by_memory(process) for process in ranks) and (exit_code or not _has_trained(ranks)):
        return "out-of-memory"
    if exit_code and not has_stopped:
        return "failed"
    if not processes:
        return "no-torch"
    if not ranks:
        return "no-cuda"
    return "fits" if any(process["steps"] for process in ranks) else "no-steps"


def _has_trained(ranks: list[dict[str, Any]]) -> bool:
    """Whether one launch completed steps and none of its ranks ran out of memory. A command that tries several sizes, each in its own
    process, handles the errors of the sizes that do not fit.
    """
    launches: dict[Any, list[dict[str, Any]]] = {}
    for process in ranks:
        launches.setdefault(process["launch"], []).append(process)
    return any(
        any(process["steps"] for process in launch) and not any(_ended_by_memory(process) for process in launch)
        for launch in launches.values()
    )


def _ended_by_memory(process: dict[str, Any]) -> bool:
    """Whether the process did not survive its last out-of-memory error: it ended with it, or completed no step after it."""
    if not process["failures"]:
        return False
    error = process["error"]
    if error is not None and ("OutOfMemory" in error["type"] or "out of memory" in error["message"]):
        return True
    return bool(process["failures"][-1]["step"] > process["steps"])


UNSUPPORTED: Final = {
    "cuSOLVER": "no-cusolver",
    "cuFFT": "no-cufft",
    "cuSPARSE": "no-cusparse",
    "cuDNN": "no-cudnn",
    "CUDA graphs": "no-cuda-graphs",
}
"""Features that the card refuses (native/blas.c, native/runtime.c), and the codes of their notes."""
_IN_MESSAGES: Final = {"CUDA graphs": "operation not supported"}
"""The text by which a feature is recognised in an error message, if that is not its name."""


def unsupported_feature(processes: list[dict[str, Any]]) -> str | None:
    """The feature that a failed command needs and that is not emulated; None if it failed for another reason."""
    if any(note["code"] == "torch-compile" for process in processes for note in process["notes"]):
        return "torch.compile"
    refused = list(dict.fromkeys(name for process in processes for name in process["refused"]))
    errors = [process["error"]["message"].casefold() for process in processes if process["error"]]
    if not errors:  # a child process of multiprocessing prints its error and does not report it
        return refused[0] if refused else None
    return next((name for name in refused if any(_IN_MESSAGES.get(name, name).casefold() in error for error in errors)), None)


def _device_peak(process: dict[str, Any], device: dict[str, Any]) -> DevicePeak:
    return DevicePeak(
        rank=process["rank"], device=device["device"], pid=process["pid"], peak_allocated_bytes=device["peak_allocated_bytes"],
        peak_reserved_bytes=device["peak_reserved_bytes"], peak_device_bytes=device["peak_device_bytes"], peak_step=device["peak_step"],
        peak_phase=device["peak_phase"], owners=tuple(MemoryOwner(**owner) for owner in device["owners"]),
        unaccounted_bytes=device["unaccounted_bytes"], retries=device["retries"], out_of_memory_errors=device["ooms"],
    )  # fmt: skip


def _failure(process: dict[str, Any], failure: dict[str, Any]) -> OutOfMemory:
    return OutOfMemory(rank=process["rank"], **failure)


def _error(process: dict[str, Any]) -> str:
    return f"{process['error']['type']}: {process['error']['message']}"


def _shapes(ranks: Sequence[dict[str, Any]]) -> tuple[SeenShape, ...]:
    """The shapes of all ranks. The count of a shape is that of the rank that had it most often."""
    counts: Counter[tuple[str, int, int | None]] = Counter()
    for process in ranks:
        for mode, rows, length, count in process["shapes"]:
            counts[mode, rows, length] = max(counts[mode, rows, length], count)
    return tuple(
        SeenShape(mode=mode, rows=rows, length=length, count=count)  # type: ignore[arg-type]
        for (mode, rows, length), count in counts.most_common()
    )


def _cards(emulated: EmulatedCard, torch: TorchBuild, ranks: Sequence[dict[str, Any]]) -> tuple[CardFit, ...]:
    """Cards of the catalogue for which this torch has kernels, smallest first."""
    needed = needed_bytes(ranks)
    known = [gpu for gpu in gpus() if gpu.backend == "cuda" and gpu.sm is not None and has_kernels(gpu.sm, torch)]
    return tuple(
        CardFit(
            gpu=gpu.name,
            usable_bytes=gpu.usable_bytes,
            holds=gpu.usable_bytes >= needed,
            same_capability=gpu.sm == emulated.capability,
        )
        for gpu in sorted(known, key=lambda gpu: gpu.usable_bytes)
    )


def needed_bytes(ranks: Sequence[dict[str, Any]]) -> int:
    """Memory that one card must have: the highest sum over processes that used it at once, without those that ran out of memory."""
    kept = [process for process in ranks if not _ended_by_memory(process)]
    together: Counter[tuple[int, float]] = Counter()
    for process in kept:
        for other in kept:
            if other["began"] <= process["began"] <= other["ended"]:
                for device in other["devices"]:
                    together[device["device"], process["began"]] += device["peak_device_bytes"]
    return max(together.values(), default=0)


def _unique(reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Remove duplicates: every rank reports the same notes."""
    return tuple({json.dumps([reason.code, reason.values], sort_keys=True): reason for reason in reasons}.values())
