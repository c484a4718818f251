"""`print(record)` is what the command prints; a notebook gets tables; `repr()` stays that of the dataclass."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.cli._views import _VIEWS
from brim.planner import answers
from brim.printing import Printable
from brim.record import Record
from brim.records import predictions
from tests.conftest import Cli
from tests.pictures import made
from tests.planner.emit.plans import PLANS

PLAN = PLANS["lora in fp16 on a t4"]


class _Cells(HTMLParser):
    """The text of every cell, and how the tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.cells[-1] += data


def test_a_gpu_prints_as_its_command_does(cli: Cli) -> None:
    gpu = brim.gpus("t4")
    assert f"{gpu}\n" == cli("gpus", "t4").out
    assert gpu == brim.find_gpu("t4").gpu
    assert repr(gpu).startswith("GPU(name='t4'")
    with pytest.raises(brim.UsageError, match="2 GPUs"):
        brim.gpus("t4*2")
    with pytest.raises(brim.UnknownNameError):
        brim.gpus("t5000")


def test_a_choice_says_what_was_assumed() -> None:
    text = str(brim.find_gpu("rtx-3080*2"))
    assert "rtx-3080-10gb x 2" in text
    assert "commonest" in text


def test_a_model_prints_as_its_command_does(cli: Cli) -> None:
    model = brim.models("qwen2.5-7b")
    assert f"{model}\n" == cli("models", "qwen2.5-7b").out
    assert model.parameters() == 7_615_616_512
    assert str(next(card for card in brim.models() if card.name == "qwen2.5-7b")) == str(model)
    assert len(brim.models()) > 100


def test_an_estimate_prints_as_its_command_does(cli: Cli) -> None:
    arguments = ("--gpu", "t4", "--method", "lora", "--seq-len", "256")
    printed = cli("estimate", "smollm2-135m", *arguments).out
    found = brim.estimate("smollm2-135m", gpu="t4", method="lora", seq_len=256)
    assert printed.startswith(str(found))  # the command also looks for a saving
    cells = _Cells(found._repr_html_() or "").cells
    assert "parameters" in cells
    assert brim.format_bytes(found.by_kind["parameters"]) in cells


def test_a_plan_sweep_and_solution_print_as_their_commands_do(cli: Cli) -> None:
    words: dict[str, Any] = {"gpu": "t4", "method": "lora", "seq_len": 256, "effective_batch": 8}
    flags = ("--gpu", "t4", "--method", "lora", "--seq-len", "256", "--effective-batch", "8")
    ended = cli("plan", "smollm2-135m", *flags)
    found = brim.plan("smollm2-135m", **words)
    assert _without_time(str(found)) == _without_time(ended.out)
    assert str(brim.sweep("smollm2-135m", "1,2", **words)) + "\n" == cli("plan", "smollm2-135m", *flags, "--sweep", "1,2").out
    solved = brim.solve("smollm2-135m", "micro-batch", gpu="t4", method="lora", seq_len=256)
    assert str(solved) + "\n" == cli("plan", "smollm2-135m", *flags[:6], "--solve", "micro-batch").out


def _without_time(text: str) -> list[str]:
    return [line for line in text.splitlines() if " considered in " not in line]


def test_a_plan_where_nothing_fits_names_the_command_that_would() -> None:
    found = brim.plan("llama-3.1-8b", gpu="gtx-1080-ti", method="full", seq_len=128, effective_batch=2)
    assert not found.fits
    assert "brim plan llama-3.1-8b" in str(found)


RECORDS: dict[str, Record] = {
    "probe": made.probe(),
    "plan": made.plan(),
    "plan on several GPUs": made.scaled_plan(),
    "plan without predictions": PLAN,
    "verification": made.verification(proven=False),
    "result": brim.TrainingResult(
        folder="out", finished=True, steps=8, total_steps=8, effective_batch=4, promise_kept=True, first_loss=2.0, last_loss=1.0
    ),
    "machine": made.machine(),
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_returned_prints_and_is_a_table_in_a_notebook(name: str) -> None:
    record = RECORDS[name]
    text, html = str(record), record._repr_html_()
    assert text != repr(record)
    assert "\x1b" not in text
    assert html is not None
    assert _Cells(html).cells
    assert repr(record).startswith(type(record).__name__ + "(")


def test_every_view_belongs_to_a_class_that_prints() -> None:
    kinds = {**vars(answers), **vars(predictions), **{name: getattr(brim, name) for name in brim.__all__}}
    for name in _VIEWS:
        assert issubclass(kinds[name], Printable), name


def test_a_record_without_a_command_prints_as_its_fields() -> None:
    candidate = PLAN.best
    assert candidate is not None
    assert str(candidate) == repr(candidate)
    assert candidate._repr_html_() is None


def test_what_a_record_holds_is_text_and_no_markup() -> None:
    from dataclasses import replace

    hostile = replace(PLAN, workload=replace(PLAN.workload, model="<script>alert(1)</script>"))
    html = hostile._repr_html_()
    assert html is not None
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_a_plan_emits_files_without_writing_and_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = PLAN.emit("trl")
    assert list(found.texts) == ["trl_sft.yaml"]
    assert not found.paths
    assert not list(tmp_path.iterdir())
    assert "trl_sft.yaml" in str(found)
    written = PLAN.emit("trl", "deepspeed", output="out")
    assert {path.name: path.read_text() for path in written.paths} == written.texts
    assert (tmp_path / "out" / "trl_sft.yaml").read_text() == found.texts["trl_sft.yaml"]
    with pytest.raises(brim.UnknownNameError, match="tlr"):
        PLAN.emit("tlr")


def test_printing_needs_no_torch() -> None:
    program = (
        "import sys, brim;"
        "print(brim.gpus('t4')); print(brim.models('tinyllama')); repr(brim.gpus('t4'));"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "False"
