"""What the reports of a command's processes amount to, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim.emulator.run import needed_bytes, unsupported_feature, verdict_of_processes
from brim.pictures.emulation_words import hint_of, verdict_of
from brim.record import Record
from brim.records.emulations import DevicePeak, Emulation, OutOfMemory


def process(**changes: Any) -> dict[str, Any]:
    return {"uses_cuda": True, "steps": 3, "failures": [], "error": None, "stopped": False, "launch": object(), **changes}


OOM = {"type": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2 GiB."}


@pytest.mark.parametrize(
    ("processes", "code", "verdict"),
    [
        ([process()], 0, "fits"),
        ([process(failures=[{"step": 2}])], 0, "fits"),
        ([process(failures=[{"step": 2}], error=OOM)], 1, "out-of-memory"),
        ([process(failures=[{"step": 4}])], 1, "out-of-memory"),
        ([process(failures=[{"step": 2}])], 1, "failed"),
        ([process(failures=[{"step": 2}], error={"type": "KeyError", "message": "'a'"})], 1, "failed"),
        ([process(failures=[{"step": 4}])], 0, "out-of-memory"),
        (
            [process(steps=0, failures=[{"step": 1}], error={"type": "RuntimeError", "message": "No executable batch size"})],
            1,
            "out-of-memory",
        ),
        ([process(failures=[{"step": 2}], stopped=True)], 0, "fits"),
        ([process(stopped=True)], 1, "fits"),
        ([process(), process(failures=[{"step": 4}], error=OOM)], 1, "out-of-memory"),
        # a search for the batch size in processes of their own
        ([process(steps=0, failures=[{"step": 1}]), process(steps=2), process(steps=1, failures=[{"step": 2}])], 0, "fits"),
        ([process(steps=0, failures=[{"step": 1}]), process(steps=2, stopped=True)], 0, "fits"),
        ([process(steps=0, failures=[{"step": 1}], error=OOM), process(steps=2)], 0, "fits"),
        ([process(steps=0, failures=[{"step": 1}]), process(steps=0)], 0, "out-of-memory"),
        ([process(steps=0, failures=[{"step": 1}]), process(steps=1, failures=[{"step": 2}])], 0, "out-of-memory"),
        ([process(steps=0, failures=[{"step": 1}]), process(steps=2)], 1, "out-of-memory"),
        # two ranks of one launch that leave the loop together
        ([process(launch=7), process(launch=7, failures=[{"step": 4}])], 0, "out-of-memory"),
        ([process(steps=0)], 0, "no-steps"),
        ([process(uses_cuda=False)], 0, "no-cuda"),
        ([], 0, "no-torch"),
        ([], 1, "failed"),
        ([process()], 130, "interrupted"),
    ],
)
def test_the_verdict(processes: list[dict[str, Any]], code: int, verdict: str) -> None:
    assert verdict_of_processes(processes, code) == verdict


def test_processes_that_used_a_card_one_after_the_other_do_not_need_it_together() -> None:
    def used(began: float, ended: float, size: int, **changes: Any) -> dict[str, Any]:
        return process(began=began, ended=ended, devices=[{"device": 0, "peak_device_bytes": size}], **changes)

    assert needed_bytes([used(0, 5, 10), used(6, 9, 30), used(10, 12, 20)]) == 30
    assert needed_bytes([used(0, 5, 10), used(1, 9, 30), used(6, 12, 25)]) == 55
    assert needed_bytes([used(0, 5, 10), used(6, 9, 30, failures=[{"step": 4}])]) == 10
    assert needed_bytes([]) == 0


EMULATION = Emulation(
    command=("python", "train.py"), started_at="2026-11-18T10:00:00+00:00", seconds=12.0, exit_code=0, verdict="fits", gpu="t4", gpus=1,
    memory_bytes=15 << 30, context_bytes=256 << 20, steps=3, steps_requested=3, stopped=True, longest_sequence=412,
    devices=(
        DevicePeak(
            rank=0, device=0, pid=1, peak_allocated_bytes=8 << 30, peak_reserved_bytes=9 << 30, peak_device_bytes=10 << 30, peak_step=2,
            peak_phase="forward",
        ),
    ),
)  # fmt: skip
FAILURE = OutOfMemory(rank=0, device=0, step=2, phase="backward", asked_bytes=2 << 30, free_bytes=1 << 29, where="train.py:31")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "fits for 3 steps, longest sequence 412; evaluation and saving not reached"),
        ({"reached": ("evaluation",)}, "fits for 3 steps, longest sequence 412; saving not reached"),
        ({"stopped": False, "steps": 40, "reached": ("evaluation", "saving")}, "fits: ran to its end, 40 steps, longest sequence 412"),
        ({"verdict": "out-of-memory", "out_of_memory": (FAILURE,)},
         "does not fit: out of memory (step 2, backward): 2.00 GiB requested, 512 MiB free (train.py:31)"),
        ({"verdict": "out-of-memory", "out_of_memory": (replace(FAILURE, step=1, phase="loading"),)},
         "does not fit: out of memory (loading): 2.00 GiB requested, 512 MiB free (train.py:31)"),
        ({"verdict": "no-cuda"}, "unknown: the command did not use CUDA"),
        ({"verdict": "failed", "exit_code": 1, "error": "RuntimeError: cusolver error", "unsupported": "cuSOLVER"},
         "failed: cuSOLVER is not supported on an emulated card"),
        ({"verdict": "failed", "exit_code": 3}, "failed with exit code 3: see its output above"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_was_seen_and_what_was_not(changes: dict[str, Any], text: str) -> None:
    assert verdict_of(replace(EMULATION, **changes)) == text


def test_an_offline_failure_says_what_to_download() -> None:
    failed = replace(EMULATION, verdict="failed", exit_code=1, error="OfflineModeIsEnabled: Cannot reach the Hub")
    assert "hf download" in hint_of(failed)


def test_an_error_is_shown_as_one_line_without_control_characters() -> None:
    failed = replace(EMULATION, verdict="failed", exit_code=1, error="ValueError: bad \x1b[31mred\nsecond line")
    assert verdict_of(failed) == "failed with exit code 1: ValueError: bad \\x1b[31mred"


def test_the_record_survives_a_round_trip() -> None:
    assert isinstance(EMULATION, Record)
    assert Emulation.from_json(EMULATION.to_json()) == EMULATION


def test_what_ended_a_command_and_is_not_emulated_is_found_in_the_errors_of_all_processes() -> None:
    def failed(*refused: str, message: str = "", notes: tuple[str, ...] = ()) -> dict[str, Any]:
        error = {"type": "RuntimeError", "message": message} if message else None
        return process(refused=refused, error=error, notes=[{"code": code} for code in notes])

    worker = failed("cuFFT", "cuSOLVER")
    assert unsupported_feature([worker, failed(message="Process 0 failed: cusolver error: NOT_INITIALIZED")]) == "cuSOLVER"
    assert unsupported_feature([worker, failed(message="'batch'")]) is None
    assert unsupported_feature([worker]) == "cuFFT"
    assert unsupported_feature([failed(notes=("torch-compile",), message="backend='refuse' raised")]) == "torch.compile"
    assert unsupported_feature([failed()]) is None
