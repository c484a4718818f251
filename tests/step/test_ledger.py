"""Every step is written down, survives a kill and a full disk, is read back as it was, and is held against what was promised."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import RecordError, RunError, UsageError
from brim.records import LedgerEntry, LedgerSummary, Pulse, Slice, Split
from brim.step.checker import check_ledger
from brim.step.ledger import LedgerWriter, ids_of_slices, parse_line, read_ledger
from tests.step.ledgers import HEADER, LENGTHS, promised, step_of, written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


REAL = st.floats(allow_nan=True, allow_infinity=True) | st.none()
COUNTS = st.integers(0, 2**70)
SLICES = st.builds(
    Slice, rank=st.integers(0, 9), sequences=st.integers(1, 99), length=st.integers(1, 99), target_length=st.integers(0, 99), items=COUNTS,
    gradient_square=REAL,
)  # fmt: skip
PULSES = st.builds(
    Pulse, seconds=st.floats(0, 1e9), device_utilisation=st.floats(0, 1) | st.none(), workers=COUNTS | st.none(),
    worker_cpu=st.floats(0, 9) | st.none(), main_cpu=st.floats(0, 9) | st.none(), read_bytes=COUNTS | st.none(),
    blocked_seconds=st.floats(0, 1e9) | st.none(), retries=COUNTS | st.none(), swapped_bytes=COUNTS | st.none(),
)  # fmt: skip
SPLITS = st.builds(
    Split, rank=st.integers(0, 9), phase=st.sampled_from(["forward", "backward"]), sequences=st.integers(1, 99), into=st.integers(1, 9),
    length=st.integers(1, 99) | st.none(), requested_bytes=COUNTS | st.none(),
)  # fmt: skip
ENTRIES = st.builds(
    LedgerEntry, kind=st.just("step"), step=st.integers(1, 2**40), epoch=st.floats(0, 1e9), promised_sequences=st.integers(1, 600),
    sequence_ids=st.lists(COUNTS).map(tuple), sequences=COUNTS, tokens=COUNTS, padded_tokens=COUNTS, supervised_tokens=COUNTS,
    slices=st.lists(SLICES).map(tuple), splits=st.lists(SPLITS).map(tuple), limit=REAL, skipped=st.booleans(),
    peak_allocated_bytes=COUNTS | st.none(), peak_reserved_bytes=COUNTS | st.none(), compute_seconds=st.floats(0, 1e9),
    wait_seconds=st.floats(0, 1e9), loss=REAL, grad_norm=REAL, learning_rate=st.floats(0, 1) | st.none(), pulse=PULSES | st.none(),
)  # fmt: skip


@settings(deadline=None)
@given(ENTRIES)
def test_a_step_is_read_as_it_was_written_whatever_its_loss(entry: LedgerEntry) -> None:
    line = entry.to_json(indent=None)
    assert "\n" not in line
    # NaN is not equal to itself; its text is.
    assert repr(parse_line(line)) == repr(entry) == repr(LedgerEntry.from_json(line))
    shuffled = json.dumps(dict(reversed(json.loads(line).items())))
    assert repr(parse_line(shuffled)) == repr(entry)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object is expected"),
        ('{"kind": "step"}', "not a brim file"),
        ('{"schema": "brim.ledger/2", "kind": "other"}', "newer brim"),
        ('{"schema": "brim.ledger/1", "kind": "other"}', 'kind is \'other\'; "header", "step" and "summary" are known'),
        ('{"schema": "brim.ledger/1", "kind": []}', "kind is []"),
        ('{"schema": "brim.ledger/1", "kind": "step", "step": 1}', "'epoch' is missing"),
        (
            HEADER.to_json(indent=None).replace('"steps_per_epoch": 6', '"steps_per_epoch": 5'),
            "22 sequences at an effective batch of 4 make 6",
        ),
        (step_of(1).to_json(indent=None).replace('"loss"', '"lost"'), "unknown field 'lost'"),
    ],
)
def test_a_line_that_is_none_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_line(text, where="here")
    assert says in str(caught.value)
    assert "here" in str(caught.value)


def test_a_whole_run_is_read_back_and_keeps_its_promise(path: Path) -> None:
    written(path, range(1, 15))
    ledger = read_ledger(path)
    assert ledger.headers == (HEADER,)
    assert list(ledger.steps) == [step_of(number) for number in range(1, 15)]
    assert (ledger.superseded, ledger.torn) == (0, False)
    assert ledger.summary is not None
    assert (ledger.summary.steps, ledger.summary.last_step, ledger.summary.finished) == (14, 14, True)
    assert ledger.summary.peak_allocated_bytes == 114
    assert ledger.summary.peak_reserved_bytes is None
    assert check_ledger(ledger, promised=promised, lengths=LENGTHS) == []
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", *["step"] * 14, "summary"]


def test_steps_can_be_looked_at_like_a_list(path: Path) -> None:
    steps = read_ledger(written(path, range(1, 7))).steps
    assert len(steps) == 6
    assert steps[-1].step == 6
    assert [entry.step for entry in steps[1:6:2]] == [2, 4, 6]
    assert len(steps[4:2]) == 0
    with pytest.raises(IndexError):
        _ = steps[6]


def test_the_sequences_of_every_micro_batch_can_be_read_off() -> None:
    entry = step_of(1)
    parts = list(ids_of_slices(entry))
    assert [one for one, _ids in parts] == list(entry.slices)
    assert [one for _slice, ids in parts for one in ids] == list(entry.sequence_ids)
    assert all(len(ids) == one.sequences for one, ids in parts)


def test_a_run_that_continues_supersedes_what_it_takes_again_and_deletes_nothing(path: Path) -> None:
    written(path, range(1, 10))
    before = path.read_bytes()
    written(path, range(8, 13), dataclasses.replace(HEADER, resumed_from_step=7, world_size=2))
    assert path.read_bytes().startswith(before)
    ledger = read_ledger(path)
    assert [entry.step for entry in ledger.steps] == list(range(1, 13))
    assert (len(ledger.headers), ledger.superseded) == (2, 2)
    assert ledger.summary is not None
    assert ledger.summary.steps == 5
    assert check_ledger(ledger, promised=promised, lengths=LENGTHS) == []
    written(path, range(1, 3))
    ledger = read_ledger(path)
    assert [entry.step for entry in ledger.steps] == [1, 2]
    assert ledger.superseded == 14
    assert check_ledger(ledger) == []


def test_an_unfinished_ledger_has_no_summary(path: Path) -> None:
    writer = LedgerWriter(path, HEADER)
    writer.write(step_of(1))
    ledger = read_ledger(path)
    assert (len(ledger.steps), ledger.summary) == (1, None)
    assert check_ledger(ledger) == []
    assert writer.close(finished=False, reason="asked to") == writer.close(finished=True)
    summary = read_ledger(path).summary
    assert summary is not None
    assert (summary.finished, summary.reason) == (False, "asked to")


def test_the_error_that_ends_a_run_is_its_reason(path: Path) -> None:
    def run(error: BaseException) -> LedgerSummary | None:
        with pytest.raises(type(error)), LedgerWriter(path, HEADER):
            raise error
        return read_ledger(path).summary

    for error, reason in ((ZeroDivisionError("by\nzero"), "ZeroDivisionError: by"), (KeyboardInterrupt(), "KeyboardInterrupt")):
        summary = run(error)
        assert summary is not None
        assert (summary.finished, summary.reason) == (False, reason)


def test_wherever_the_last_line_is_torn_the_rest_is_read_and_the_run_goes_on(path: Path) -> None:
    whole = written(path, range(1, 3)).read_bytes()
    lines = whole.splitlines(keepends=True)
    last = sum(map(len, lines[:2]))
    end = last + len(lines[2])
    for cut in [*range(last + 1, end - 1, 41), end - 2, end - 1]:
        path.write_bytes(whole[:cut])
        ledger = read_ledger(path)
        complete = cut == end - 1
        assert (len(ledger.steps), ledger.torn) == ((2, False) if complete else (1, True))
        LedgerWriter(path, dataclasses.replace(HEADER, resumed_from_step=1)).close(finished=True)
        ledger = read_ledger(path)
        assert (len(ledger.steps), len(ledger.headers), ledger.torn) == (1, 2, False)
        assert path.read_bytes().startswith(b"".join(lines[: 3 if complete else 2]))


@pytest.mark.parametrize("rest", [b"", b"{", b'{"schema": "brim.ledger/1", "ki', b"\0" * 5000])
def test_a_file_with_no_whole_line_is_told_and_started_anew(rest: bytes, path: Path) -> None:
    path.write_bytes(rest)
    with pytest.raises(RecordError, match="not one whole line"):
        read_ledger(path)
    written(path, range(1, 2))
    assert check_ledger(read_ledger(path)) == []


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(path: Path) -> None:
    lines = written(path, range(1, 5)).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    with pytest.raises(RecordError, match=r"ledger.jsonl, line 3 is not valid JSON"):
        read_ledger(path)


@pytest.mark.parametrize("foreign", [b"hello", b"hello\n", b'{"a": 1}\n', b'{"schema": "brim.plan/1"}', b"\n"])
def test_nothing_is_appended_to_a_foreign_file(foreign: bytes, path: Path) -> None:
    path.write_bytes(foreign)
    with pytest.raises(UsageError, match="something else than a ledger"):
        LedgerWriter(path, HEADER)
    assert path.read_bytes() == foreign


def test_a_place_where_no_ledger_can_be_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        LedgerWriter(tmp_path, HEADER)
    with pytest.raises(UsageError, match="not a regular file"):
        LedgerWriter("/dev/full", HEADER)
    with pytest.raises(UsageError, match="missing for the ledger does not exist"):
        LedgerWriter(tmp_path / "missing" / "ledger.jsonl", HEADER)
    with pytest.raises(RunError, match="Cannot write"):
        LedgerWriter("a\0b", HEADER)
    with pytest.raises(RecordError, match="Cannot read .*missing"):
        read_ledger(tmp_path / "missing")


def test_a_file_that_may_not_be_written_is_named_at_once(path: Path) -> None:
    written(path, range(1, 2)).chmod(0o400)
    if os.access(path, os.W_OK):
        pytest.skip("This user may write every file (root), so permissions cannot be tried.")
    with pytest.raises(RunError, match="Cannot write .*Permission denied"):
        LedgerWriter(path, HEADER)


def test_letters_that_are_none_do_not_stop_a_run(path: Path) -> None:
    written(path, range(1, 2), dataclasses.replace(HEADER, notes=("bad\udcff", "line\nbreak\u2028", "汉字")))
    assert read_ledger(path).headers[0].notes == ("bad?", "line\nbreak\u2028", "汉字")


WRITE_WITHOUT_END = """
import sys
from tests.step.test_ledger import HEADER, LedgerWriter, step_of
import dataclasses
entry = step_of(1)
writer = LedgerWriter(sys.argv[1], dataclasses.replace(HEADER, resumed_from_step=int(sys.argv[2])))
number = int(sys.argv[2])
while True:
    number += 1
    writer.write(dataclasses.replace(entry, step=number))
    print(number, flush=True)
"""


def test_a_killed_process_leaves_every_step_that_it_had_written(path: Path) -> None:
    resumed = 0
    for _round in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_WITHOUT_END, str(path), str(resumed)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert child.stdout is not None
        told = [child.stdout.readline() for _line in range(200)]
        child.send_signal(signal.SIGKILL)
        told += child.stdout.readlines()
        child.stdout.close()
        child.wait()
        last = max(int(line) for line in told if line.endswith(b"\n"))
        ledger = read_ledger(path)
        numbers = [entry.step for entry in ledger.steps]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) in (last, last + 1)
        assert ledger.summary is None
        resumed = len(numbers) - 50
    assert len(ledger.headers) == 3
    assert ledger.superseded == 100


FULL_DISK = """
import resource, sys
from tests.step.test_ledger import HEADER, LedgerWriter, path_size, read_ledger, step_of
path, troubles = sys.argv[1], []
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
writer = LedgerWriter(path, HEADER, on_trouble=troubles.append)
writer.write(step_of(1))
limit = path_size(path) + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
for number in range(2, 6):
    writer.write(step_of(number))
assert path_size(path) == limit, "the part that fits was written"
assert len(read_ledger(path).steps) == 1 and read_ledger(path).torn
assert len(troubles) == 1 and "Training goes on" in troubles[0], troubles
if sys.argv[2] == "room again":
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.write(step_of(6))
    assert len(read_ledger(path).steps) == 6
writer.close(finished=True)
"""


def path_size(path: str) -> int:
    return Path(path).stat().st_size


def on_a_full_disk(path: Path, then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FULL_DISK, str(path), then]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def test_a_full_disk_costs_no_step_and_no_line(path: Path) -> None:
    ended = on_a_full_disk(path, "room again")
    assert ended.returncode == 0, ended.stderr
    ledger = read_ledger(path)
    assert list(ledger.steps) == [step_of(number) for number in range(1, 7)]
    assert check_ledger(ledger, promised=promised, lengths=LENGTHS) == []


def test_a_disk_that_stays_full_is_an_error_at_the_end(path: Path) -> None:
    ended = on_a_full_disk(path, "still full")
    assert "brim.errors.RunError: Cannot write" in ended.stderr
    assert "Lines at its end that are missing: 5." in ended.stderr
    assert len(read_ledger(path).steps) == 1
    written(path, range(2, 4), dataclasses.replace(HEADER, resumed_from_step=1))
    assert check_ledger(read_ledger(path)) == []


class Refusing:
    """A file that takes nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_a_warning_comes_once_and_never_hides_the_error_that_ended_the_run(path: Path) -> None:
    writer = LedgerWriter(path, HEADER)
    writer._stream = Refusing(writer._stream)  # type: ignore[assignment]

    def run() -> None:
        with writer:
            writer.write(step_of(1))
            writer.write(step_of(2))
            raise ZeroDivisionError

    with pytest.warns(RuntimeWarning) as told, pytest.raises(ZeroDivisionError):
        run()
    assert [str(one.message).partition(": ")[2] for one in told] == [
        "No space left on device. Training goes on; the lines are kept in memory and tried again at every step.",
        "No space left on device. Lines at its end that are missing: 3. The steps themselves were taken.",
    ]


def long_ledger(path: Path, steps: int) -> Path:
    header = dataclasses.replace(HEADER, sequences_in_data=256 * steps, effective_batch=256, steps_per_epoch=steps)
    slices = tuple(Slice(rank=0, sequences=16, length=2) for _one in range(16))
    entry = step_of(1, promised_sequences=256, sequence_ids=(), sequences=256, slices=slices, tokens=300, padded_tokens=512)
    before, after = entry.to_json(indent=None).split('"sequence_ids": []')
    with path.open("w") as stream:
        stream.write(header.to_json(indent=None) + "\n")
        for number in range(1, steps + 1):
            ids = json.dumps(list(range((number - 1) * 256, number * 256)))
            stream.write(before.replace('"step": 1', f'"step": {number}') + f'"sequence_ids": {ids}' + after + "\n")
    return path


def test_a_ledger_of_ten_thousand_steps_is_read_and_checked(path: Path) -> None:
    ledger = read_ledger(long_ledger(path, 10_000))
    assert len(ledger.steps) == 10_000
    assert check_ledger(ledger) == []


def test_steps_are_not_held_in_memory(path: Path) -> None:
    long_ledger(path, 500)
    tracemalloc.start()
    ledger = read_ledger(path)
    held_bytes, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ledger.steps) == 500
    assert held_bytes < path.stat().st_size / 4


def test_the_disk_is_asked_to_keep_lines_every_ten_seconds_and_no_more_often(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda _descriptor: synced.append(now[0]))
    with LedgerWriter(path, HEADER) as writer:
        for number in range(1, 31):
            now[0] += 1
            writer.write(step_of(number))
    assert synced == [100, 110, 120, 130, 130]
    summary = read_ledger(path).summary
    assert summary is not None
    assert summary.seconds == 30


def _hold(path: str, seconds: float) -> None:
    writer = LedgerWriter(path, HEADER)
    time.sleep(seconds)
    del writer


def test_another_process_that_is_writing_keeps_the_ledger_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(str(path), 60.0))
    holder.start()
    try:
        while not path.exists() or not path.stat().st_size:
            time.sleep(0.05)
        with pytest.raises(UsageError, match="Another run is writing"):
            LedgerWriter(path, HEADER)
    finally:
        holder.kill()
        holder.join()
    LedgerWriter(path, HEADER).close(finished=True)


def test_a_line_of_an_earlier_brim_is_read() -> None:
    old = {key: value for key, value in step_of(1).to_dict().items() if key != "pulse"}
    old["slices"] = [{key: one[key] for key in ("rank", "sequences", "length", "target_length")} for one in old["slices"]]
    assert parse_line(json.dumps(old)) == step_of(1)
    header = {key: value for key, value in HEADER.to_dict().items() if key not in {"observed", "memory_limit_bytes"}}
    assert parse_line(json.dumps(header)) == HEADER


def test_each_step_in_force_is_found_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", range(1, 6))
    written(path, range(4, 9), dataclasses.replace(HEADER, resumed_from_step=3))
    ledger, lines = read_ledger(path), path.read_text().splitlines()
    assert (
        [json.loads(lines[line - 1])["step"] for line in ledger.lines]
        == [step.step for step in ledger.steps]
        == list(range(1, 9))
    )
    assert ledger.lines[3] > ledger.lines[2] + 3
