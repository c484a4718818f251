"""Records are written whole or not at all, read back equal, and refused in words when they are not what they should be."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from brim import (
    Candidate,
    Configuration,
    Host,
    LedgerEntry,
    Measurement,
    MemoryPrediction,
    Plan,
    RecordError,
    RunError,
    SpeedPrediction,
    Trial,
    Workload,
    find_gpu,
)
from brim.record import Record, read_bounded, write_atomically
from brim.records import AffineFit, BudgetLimit, LedgerHeader, LedgerSummary, LoaderSettings, Proven, Slice, Split
from brim.workload.records import LengthCount

WORKLOAD = Workload(
    model="tinyllama", task="causal-lm", effective_batch=64, max_length=2048, method="lora", lora_rank=16, lora_targets=("q_proj",),
    lengths=(LengthCount(tokens=128, sequences=900), LengthCount(tokens=2048, sequences=100)), samples=1000, learning_rate=1e-4,
)  # fmt: skip
MACHINE = dataclasses.replace(
    find_gpu("rtx-3080-20gb*2").machine(), host=Host(memory_bytes=2**34, available_bytes=2**33, cores=4.0, affinity_cores=4)
)
MEMORY = MemoryPrediction(
    peak_allocated_bytes=10, peak_reserved_bytes=12, peak_device_bytes=14, smallest_surviving_limit_bytes=11, limit_bytes=20,
    fits=True, peak_phase="backward", by_phase={"forward": 8, "backward": 10}, by_kind={"parameters": 4, "activations": 6},
)  # fmt: skip
SPEED = SpeedPrediction(step_seconds=1.5, tokens_per_second=4000.0, epoch_seconds=24.0, steps_per_epoch=16)
BEST = Candidate(
    micro_batch=8, accumulation=4, world_size=2, effective_batch=64, precision="amp-fp16", checkpointing="every:2",
    method="lora", sharding="ddp", num_workers=4, pin_memory=True, prefetch_factor=2, memory=MEMORY, speed=SPEED, reasons=("because",),
)  # fmt: skip
PLAN = Plan(workload=WORKLOAD, machine=MACHINE, fits=True, best=BEST, alternatives=(BEST,), considered=300, elapsed_seconds=1.5)
MEASUREMENT = Measurement(
    workload=WORKLOAD, machine=MACHINE,
    trials=(
        Trial(micro_batch=8, max_length=2048, verdict="ok", steps=3, peak_reserved_bytes=5, step_seconds=0.5),
        Trial(micro_batch=16, max_length=2048, verdict="out-of-memory", phase="backward", message="CUDA out of memory."),
    ),
    largest=Proven(micro_batch=8, tokens_per_second=10.0, peak_bytes=5),
    fit=AffineFit(base_bytes=1.0, bytes_per_sequence=2.0, residual_bytes=0.0),
    loader=LoaderSettings(num_workers=2, prefetch_factor=2, wait_fraction=0.01), predicted=MEMORY,
)  # fmt: skip
ENTRY = LedgerEntry(
    step=1, epoch=0.1, promised_sequences=3, sequence_ids=(5, 1, 9), sequences=3, tokens=90, padded_tokens=96, supervised_tokens=60,
    slices=(Slice(rank=0, sequences=3, length=32),), splits=(Split(rank=0, phase="forward", sequences=3, into=2),),
    compute_seconds=0.5, wait_seconds=0.0, loss=2.5, grad_norm=1.0, learning_rate=1e-4,
)  # fmt: skip
HEADER = LedgerHeader(
    started_at="2026-11-20T09:30:00+00:00", resumed_from_step=11, seed=3, effective_batch=64, sequences_in_data=1000, steps_per_epoch=15,
    drop_last=True, world_size=2, budget=BudgetLimit(unit="bytes", limit=math.inf), device="NVIDIA T4", data_fingerprint="ab12",
    configuration={"precision": "fp16", "learning_rate": 1e-4, "rank": 8, "packing": False, "warmup": None}, notes=("one", "two"),
)  # fmt: skip
SUMMARY = LedgerSummary(
    last_step=20, steps=9, sequences=576, tokens=9000, padded_tokens=9100, supervised_tokens=8000, splits=1, skipped=1, seconds=30.0,
    compute_seconds=27.5, wait_seconds=0.5, peak_allocated_bytes=7, last_loss=2.0, finished=False, reason="KeyboardInterrupt",
)  # fmt: skip
ALL: list[Record] = [WORKLOAD, MACHINE, BEST, PLAN, MEASUREMENT, ENTRY, HEADER, SUMMARY]


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_a_record_survives_its_file(record: Record, tmp_path: Path) -> None:
    path = record.write(tmp_path / "deep" / "record.json")
    assert type(record).read(path) == record
    assert json.loads(path.read_text())["schema"] == record.schema
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_step_can_be_written_down(value: float) -> None:
    text = dataclasses.replace(ENTRY, loss=value).to_json(indent=None)
    assert "\n" not in text
    loss = LedgerEntry.from_json(text).loss
    assert loss is not None
    assert math.isnan(loss) if math.isnan(value) else loss == value


def _changed(record: Record, **changes: Any) -> str:
    data = record.to_dict()
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = data
        for part in parents:
            target = target[part]
        target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "a JSON object is expected"),
        ("{}", 'not a brim file: "schema" should be "brim.plan/1"'),
        (_changed(PLAN, schema=7), "not a brim file"),
        (_changed(PLAN, schema="other/1"), "not a brim file"),
        (MEASUREMENT.to_json(), "holds brim.probe/1, and brim.plan/1 is needed here"),
        (_changed(PLAN, schema="brim.plan/2"), "written by a newer brim"),
        (_changed(PLAN, schema="brim.plan/0"), "does not read"),
        (_changed(PLAN, schema="brim.plan/x"), "does not read"),
        (_changed(PLAN, extra=1), "unknown field 'extra'"),
        (_changed(PLAN, best__memory__extra=1), "unknown field 'best.memory.extra'"),
        (_changed(PLAN, best__micro_batch="8"), "best.micro_batch: Input should be a valid integer (found '8')"),
        (_changed(PLAN, best__micro_batch=0), "best.micro_batch: Input should be greater than or equal to 1"),
        (_changed(PLAN, best__precision="fp13"), "best.precision"),
        (_changed(PLAN, best__checkpointing="every:0"), "best.checkpointing"),
        (_changed(PLAN, best__micro_batch=9), "= 72, and effective_batch is 64"),
        (_changed(PLAN, workload__effective_batch=63), "the plan's effective batch is 64, and the workload asked for 63"),
        (_changed(PLAN, best=None), "must have best"),
        ("[" * 100_000, "not valid JSON"),
        ("\x00\xff", "not valid JSON"),
    ],
)
def test_a_broken_or_foreign_plan_is_refused_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        Plan.read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    wrong = dataclasses.replace(WORKLOAD, effective_batch=-3)
    with pytest.raises(RecordError, match="effective_batch"):
        wrong.write(tmp_path / "workload.json")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_appears_twice_is_refused() -> None:
    with pytest.raises(RecordError, match="the key 'fits' appears twice"):
        Plan.from_json(PLAN.to_json().replace('"fits": true', '"fits": true, "fits": false', 1))


def test_a_missing_field_is_named() -> None:
    data = PLAN.to_dict()
    del data["workload"]["model"]
    with pytest.raises(RecordError, match=r"the field 'workload.model' is missing"):
        Plan.from_json(json.dumps(data))


def test_a_file_that_is_not_there_or_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="Cannot read .*missing.json: No such file"):
        Plan.read(tmp_path / "missing.json")
    with pytest.raises(RecordError, match="Cannot read"):
        Plan.read(tmp_path)


def test_a_measurement_never_names_a_size_that_was_not_run() -> None:
    with pytest.raises(ValueError, match="largest is 16, a size that no trial ran"):
        dataclasses.replace(MEASUREMENT, largest=Proven(micro_batch=16, tokens_per_second=1.0, peak_bytes=1))


@pytest.mark.parametrize("loss", [[], {}, "much", True])
def test_a_strange_loss_is_refused_in_words(loss: object) -> None:
    with pytest.raises(RecordError, match="loss"):
        LedgerEntry.from_json(json.dumps({**ENTRY.to_dict(), "loss": loss}))


@pytest.mark.parametrize("text", ["Infinity", "NaN", '"Infinity"', "1e400"])
def test_a_number_that_is_none_is_refused_where_it_has_no_meaning(text: str) -> None:
    with pytest.raises(RecordError, match="epochs"):
        Workload.from_json(WORKLOAD.to_json().replace('"epochs": 1.0', f'"epochs": {text}'))


def test_odd_paths_schemas_and_letters_are_told(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="Cannot read"):
        Plan.read("a\0b")
    with pytest.raises(RecordError, match="newer brim"):
        Plan.from_json(_changed(PLAN, schema="brim.plan/" + "9" * 5000))
    with pytest.raises((RecordError, RunError)):
        dataclasses.replace(WORKLOAD, model="bad\udcff").write(tmp_path / "x.json")


def test_a_link_keeps_pointing_and_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_atomically(pipe, "through")
        assert reader.communicate()[0] == b"through"
    assert pipe.is_fifo()


def test_a_step_keeps_its_promise_or_not() -> None:
    assert ENTRY.kept()
    assert not dataclasses.replace(ENTRY, promised_sequences=4).kept()
    assert not dataclasses.replace(ENTRY, sequence_ids=(5, 5, 9)).kept()


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_slices_add_up_to_the_effective_batch_over_ranks(accumulation: int, world: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=accumulation * world, max_size=accumulation * world).filter(any))
    configuration = Configuration(
        micro_batch=max(sizes), accumulation=accumulation, world_size=world, effective_batch=sum(sizes), slices=tuple(sizes)
    )
    assert [size for rank in range(world) for size in configuration.slices_of_rank(rank)] == sizes
    with pytest.raises(ValueError, match="effective_batch"):
        dataclasses.replace(configuration, effective_batch=sum(sizes) + 1)


def test_equal_slices_need_no_list() -> None:
    assert BEST.slices_of_rank(1) == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_length": 5}, "belongs to seq2seq"),
        ({"task": "seq2seq"}, "needs target_length"),
        ({"method": "full"}, "belong to LoRA"),
    ],
)
def test_a_workload_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(WORKLOAD, **changes)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"Cannot write .*plan.json: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write"):
        write_atomically(tmp_path / "file" / "plan.json", "x")


def test_a_file_keeps_the_permissions_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_process_killed_while_writing_never_leaves_a_part(tmp_path: Path) -> None:
    """SIGKILL a process that rewrites one file without pause; a reader always finds a whole document."""
    path = tmp_path / "record.json"
    program = (
        "import sys; from brim.record import write_atomically\n"
        "n = 0\nwhile True:\n    n += 1\n    write_atomically(sys.argv[1], '{\"text\": \"' + str(n % 10) * 500_000 + '\"}')\n"
    )
    for _round in range(3):
        with subprocess.Popen([sys.executable, "-c", program, str(path)]) as process:
            path.unlink(missing_ok=True)
            deadline = time.monotonic() + 120
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            for _look in range(20):
                assert len(json.loads(path.read_bytes())["text"]) == 500_000
            process.send_signal(signal.SIGKILL)
        assert len(json.loads(path.read_bytes())["text"]) == 500_000


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 15), (True, 16), (False, 17)])
def test_a_header_that_contradicts_itself_is_refused(drop_last: bool, steps: int) -> None:
    with pytest.raises(ValueError, match="1000 sequences at an effective batch of 64 make 1[56]"):
        dataclasses.replace(HEADER, drop_last=drop_last, steps_per_epoch=steps)


def test_records_are_read_without_torch() -> None:
    program = "import sys, brim.records, brim.step.ledger, brim.step.checker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_pipe_that_nobody_writes_to_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.record._SILENCE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(RecordError, match=r"nothing was written to it for 0\.1 s"):
        Plan.read(tmp_path / "plan.json")


def test_a_pipe_with_a_writer_is_read_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"printf first > {pipe}"]):
        assert read_bounded(pipe, 100) == b"first"


def test_what_has_no_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1025))
    for path in (Path("/dev/zero"), tmp_path / "file"):
        with pytest.raises(OSError, match=r"larger than 1.00 KiB"):
            read_bounded(path, 1024)
    assert read_bounded(tmp_path / "file", 1025) == bytes(1025)
    assert read_bounded(os.devnull, 10) == b""
