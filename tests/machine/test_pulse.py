"""The machine's pulse: who computed and who waited since the last look, in any interpreter, and never an error."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.machine import pulse
from brim.machine.pulse import PulseMeter
from brim.records import Pulse

ON_LINUX = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="This system has no /proc, so its counters are not told."
)
BUSY = "while True: pass"
MOST_LOOKS = 1000


def test_what_is_read_is_a_pulse_of_the_ledger() -> None:
    meter = PulseMeter()
    found = Pulse(**meter.read())
    assert found.seconds > 0
    assert found.workers is None
    assert found.device_utilisation is None
    assert found.retries is None


def test_a_process_that_computes_is_seen_to() -> None:
    meter = PulseMeter()
    sum(number * number for number in range(200_000))
    assert meter.read()["main_cpu"] > 0


@ON_LINUX
def test_busy_and_idle_workers_are_told_apart() -> None:
    commands = [[sys.executable, "-c", BUSY], [sys.executable, "-c", "input()"]]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
    try:
        meters = [PulseMeter(workers=lambda pid=worker.pid: [pid]) for worker in workers]  # type: ignore[misc]
        most = [0.0, 0.0]
        for _look in range(MOST_LOOKS):
            # Until the clock of the busy one has ticked: a hundredth of a second of work, whenever it gets it.
            most = [max(before, meter.read()["worker_cpu"]) for before, meter in zip(most, meters, strict=True)]
            if most[0] > 0.5:
                break
            sum(range(50_000))
        assert most[0] > 0.5
        assert meters[0].read()["workers"] == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


@ON_LINUX
def test_a_worker_that_has_ended_is_not_counted_and_not_an_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    meter = PulseMeter(workers=lambda: [gone.pid])
    found = meter.read()
    assert found["worker_cpu"] is None
    assert found["read_bytes"] is not None


def test_what_cannot_be_asked_is_not_known() -> None:
    def broken() -> Any:
        raise RuntimeError("no driver")

    found = PulseMeter(workers=broken, utilisation=broken, retries=broken).read()
    assert (found["workers"], found["device_utilisation"], found["retries"]) == (0, None, None)


def test_the_device_is_asked_by_whoever_knows_it() -> None:
    counts = iter([3, 3, 8])
    meter = PulseMeter(utilisation=lambda: 1.7, retries=lambda: next(counts))
    assert [(found["device_utilisation"], found["retries"]) for found in (meter.read(), meter.read())] == [(1.0, 0), (1.0, 5)]


STAT = b"7 (a) b (c)) S " + b" ".join(str(field).encode() for field in range(4, 53))
"""Fields 4 to 52 of /proc/PID/stat, each its own number, after a name with blanks and parentheses."""


def _system(monkeypatch: pytest.MonkeyPatch, **files: bytes) -> dict[str, bytes]:
    """A system that tells only this, by the last part of a path."""
    monkeypatch.setattr(pulse, "_text", lambda path: files.get(path.rpartition("/")[2], b""))
    return files


def test_a_system_that_tells_nothing_still_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    _system(monkeypatch)
    found = PulseMeter(workers=lambda: [1, 2]).read()
    known = {name for name, value in found.items() if value is not None}
    assert known == {"seconds", "workers", "main_cpu"}


def test_the_fields_of_a_process_are_those_of_the_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    _system(monkeypatch, stat=STAT, io=b"rchar: 5\nread_bytes: 4096\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert pulse._process(7) == {"cpu": (14 + 15) / ticks, "blocked_seconds": 42 / ticks, "read_bytes": 4096}


def test_where_the_kernel_does_not_count_waits_of_a_process_those_of_the_machine_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = _system(monkeypatch, stat=STAT, task_delayacct=b"0\n")
    files["io"] = b"some avg10=1.00 avg60=0.50 avg300=0.10 total=2000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    meter = PulseMeter()
    files["io"] = files["io"].replace(b"2000000", b"2000100")
    found = meter.read()
    assert found["blocked_seconds"] == pytest.approx(min(1e-4, found["seconds"]))


def test_swap_counts_only_while_a_part_of_this_process_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    files = _system(monkeypatch, status=b"Name: x\nVmSwap:\t      0 kB\n", vmstat=b"pswpin 1\npswpout 10\n")
    meter = PulseMeter()
    files["vmstat"] = b"pswpout 50\n"
    assert meter.read()["swapped_bytes"] == 0
    files["status"] = b"VmSwap:\t   2048 kB\n"
    assert meter.read()["swapped_bytes"] is None
    files["vmstat"] = b"pswpout 53\n"
    assert meter.read()["swapped_bytes"] == 3 * os.sysconf("SC_PAGE_SIZE")


def test_the_file_runs_alone_and_in_an_old_interpreter() -> None:
    source = Path(pulse.__file__)
    ast.parse(source.read_text(encoding="utf-8"), feature_version=(3, 9))
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('pulse', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.PulseMeter().read()['seconds'] > 0, 'brim' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program, str(source)], capture_output=True, text=True, check=True)
    assert ended.stdout == "True False\n"
