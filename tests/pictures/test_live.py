"""The live view is a pure function of a state: it fits any window, and says the same without colour."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len
from rich.console import Console

from brim.pictures.live import bar, clock, line, picture, sparkline
from brim.pictures.live_state import Card, LastEvaluation, MemoryInUse, Promise, Speed, State
from brim.records import Pulse, Split

MIB = 2**20
FULL = State(
    name="tiny", ledger="runs/tiny/ledger.jsonl", status="running", process=4711, is_alive=True, device="cuda:0", effective_batch=32,
    world_size=2, resumed_from_step=100, step=1234, total_steps=5000, epoch=0.74, elapsed_seconds=754.0, remaining_seconds=90_000.0,
    loss=1.2345, curve=tuple(8 / (1 + place) for place in range(240)), evaluation=LastEvaluation(step=1200, loss=1.3, metrics={"accuracy": 0.83}),
    grad_norm=0.83, learning_rate=1.9e-5,
    now=Speed(tokens_per_second=3210, padded_tokens_per_second=3400, step_seconds=0.61, wait_share=0.021),
    mean=Speed(tokens_per_second=3100, padded_tokens_per_second=3300, step_seconds=0.63, wait_share=0.019),
    micro_batches=4, micro_batch=12,
    memory=MemoryInUse(
        peak_bytes=512 * MIB, highest_bytes=540 * MIB, limit_bytes=600 * MIB, predicted_bytes=480 * MIB, predicted_limit_bytes=600 * MIB,
        by_kind={"activations": 300 * MIB, "optimizer": 120 * MIB, "parameters": 60 * MIB},
    ),
    promise=Promise(
        steps=1134, promised=1134, kept=1134, splits=2, last_split_step=812,
        last_split=Split(rank=0, phase="forward", sequences=8, into=2, length=512, requested_bytes=64 * MIB),
    ),
    pulse=Pulse(seconds=1.0, device_utilisation=0.93, workers=4, worker_cpu=0.5, main_cpu=0.9, read_bytes=5 * MIB, retries=3),
    card=Card(name="Tesla T4", busy=0.93, watts=68.0, celsius=64.0, used_bytes=14 * 2**30, total_bytes=15 * 2**30),
)  # fmt: skip
STATUSES = ("waiting", "starting", "running", "stalled", "finished", "ended", "gone")


def _drawn(state: State, width: int = 80, height: int | None = None, **settings: Any) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False, emoji=False, markup=False).print(
        picture(state, width=width, height=height, **settings)
    )
    return text.getvalue().splitlines()


def test_one_screen_shows_all_that_is_known() -> None:
    text = "\n".join(_drawn(FULL, 120))
    for words in (
        "tiny, cuda:0, 2 processes, effective batch 32", "24.7%  1,234/5,000, epoch 0.74", "1 d 1:00:00 to go", "0:12:34 since it went on",
        "went on after step 100", "1.2345  █", "step 1,200: loss 1.3000, accuracy 0.8300", "norm 0.8300, learning rate 1.9e-05",
        "3,210, 3,400 with padding, on average 3,100", "2.1%, on average 1.9%", "512 MiB of 600 MiB, highest 540 MiB", "480 MiB of 600 MiB",
        "activations 300 MiB, optimizer 120 MiB, parameters 60.0 MiB", "93% busy, 68 W, 64 °C, 14.0 GiB of 15.0 GiB, Tesla T4",
        "4 workers at 50%", "kept in 1,134 of 1,134 steps", "4 micro-batches of up to 12",
        "2, step 812: memory ran out in forward of 8 x 512, done in 2 parts (64.0 MiB more were asked for)", "Running.",
    ):  # fmt: skip
        assert words in text


def test_one_is_not_several() -> None:
    alone = dataclasses.replace(FULL, micro_batches=1, pulse=Pulse(seconds=1.0, workers=1, worker_cpu=0.5))
    text = "\n".join(_drawn(alone, 120))
    assert "last step: one micro-batch of 12" in text
    assert "one worker at 50%" in text


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (40, 8), (20, 5), (200, 60), (1, 1)])
def test_the_view_fits_the_window(status: Any, width: int, height: int) -> None:
    state = dataclasses.replace(FULL, status=status, reason="RunError: the disk is full " * 5, quiet_seconds=95.0)
    lines = _drawn(state, width, height)
    assert len(lines) <= height
    assert all(cell_len(each) <= width for each in lines)


def test_a_low_window_keeps_what_matters() -> None:
    text = "\n".join(_drawn(dataclasses.replace(FULL, status="ended", reason="disk full"), 80, 6))
    for words in ("tiny", "1,234/5,000", "1.2345", "Ended early: disk full"):
        assert words in text
    assert "learning rate" not in text


def test_a_narrow_window_is_readable() -> None:
    text = "\n".join(_drawn(FULL, 40, 24))
    for words in ("24.7%", "1.2345", "3,210", "512 MiB of 600 MiB", "kept in 1,134 of 1,134", "2, step 812: memory"):
        assert words in text


def test_without_blocks_there_are_letters() -> None:
    lines = _drawn(dataclasses.replace(FULL, card=None), 80, ascii_only=True)
    assert all(each.isascii() for each in lines)
    assert any("[####" in each for each in lines)


def test_what_is_not_known_is_not_shown() -> None:
    bare = State(name="x", ledger="x/ledger.jsonl", status="starting", observed=True)
    text = "\n".join(_drawn(bare))
    assert "no step is done yet" in text
    assert "observed" in text
    for words in ("loss", "memory", "None", "nan", "promise", "tokens"):
        assert words not in text


def test_a_broken_promise_and_a_diverged_loss_are_shown() -> None:
    state = dataclasses.replace(FULL, loss=math.nan, promise=Promise(steps=10, promised=10, kept=9, skipped=1))
    text = "\n".join(_drawn(state))
    assert "kept in 9 of 10 steps, 1 skipped" in text
    assert "NaN" in text


def test_a_stall_asks_whether_its_process_lives() -> None:
    stalled = dataclasses.replace(FULL, status="stalled", quiet_seconds=95.0)
    assert "Nothing was written for 0:01:35. Its process 4711 is alive" in line(stalled)
    assert "cannot be told from here" in line(dataclasses.replace(stalled, is_alive=None))
    assert "Its process is alive" in line(dataclasses.replace(stalled, process=None))


def test_a_pipe_gets_one_plain_line() -> None:
    assert line(FULL) == (
        "step 1,234 of 5,000 (24.7%), loss 1.2345, 3,210 tokens/s, memory 512 MiB of 600 MiB, data wait 2.1%, splits 2, 1 d 1:00:00 to go"
    )


def test_names_from_files_cannot_steer_the_terminal() -> None:
    state = dataclasses.replace(FULL, name="a\x1b[2Jb\n", status="ended", reason="\x1b]0;title\x07")
    assert "\x1b" not in line(state) + "".join(_drawn(state))


def test_a_sparkline_goes_from_low_to_high() -> None:
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▅▅"
    assert sparkline([1.0, None, math.nan, 2.0], 8) == "▁  █"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""
    assert sparkline([None, None], 8) == "  "
    assert sparkline([8.0] * 50 + [1.0] * 50, 4) == "██▁▁"
    assert sparkline([0.0, 1.0], 2, ascii_only=True) == "_#"


@given(
    values=st.lists(st.none() | st.floats(), max_size=300),
    width=st.integers(min_value=0, max_value=100),
)
def test_a_sparkline_is_never_too_wide_and_never_fails(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


@given(share=st.floats(), width=st.integers(min_value=4, max_value=60), ascii_only=st.booleans())
def test_a_bar_has_its_width(share: float, width: int, ascii_only: bool) -> None:
    assert len(bar(share, width, ascii_only=ascii_only)) == width


def test_times_are_written_as_on_a_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3661, 90_061, -5)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "1 d 1:01:01",
        "0:00:00",
    ]
