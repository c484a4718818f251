"""`brim train` on emulated cards: every profile with no option but the data and the effective batch, every method, resume, two cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.emulated.conftest import RunOnCard

TINY = """
import json, sys
from pathlib import Path
import brim
from brim.workload.embedded import data_file, write_model

folder = write_model(Path("tiny"))
lines = data_file().read_text(encoding="utf-8").splitlines()
Path("data.jsonl").write_text("\\n".join(lines[:64]) + "\\n", encoding="utf-8")
Path("eval.jsonl").write_text("\\n".join(lines[64:96]) + "\\n", encoding="utf-8")


def train(*words, **options):
    said = []
    found = brim.train("tiny", data="data.jsonl", effective_batch=32, say=said.append, **options)
    card = brim.RunCard.read(Path(found.folder) / "run.json")
    return {"finished": found.finished, "kept": found.promise_kept, "steps": found.steps, "attention": card.settings.attention,
            "precision": card.settings.precision, "peak": found.peak_bytes, "predicted": found.predicted_reserved_bytes,
            "device": card.device, "folder": found.folder, "probed": card.probed, "said": said}
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-3080-10gb", "rtx-4090", "a100-40gb"])
def test_no_option_but_the_data_and_the_effective_batch_is_needed(on_card: RunOnCard, tmp_path: Path, gpu: str) -> None:
    """Without flash-attn, and with the closing line of the command."""
    done = on_card(
        TINY
        + """
import subprocess

command = [sys.executable, "-m", "brim", "train", "tiny", "--data", "data.jsonl", "--effective-batch", "32"]
ran = subprocess.run(command, capture_output=True, text=True)
folders = list(Path("brim-runs").glob("tiny-*"))
card = json.loads((folders[0] / "run.json").read_text()) if folders else {}
result = {"code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr[-3000:], "settings": card.get("settings")}
""",
        gpu,
        memory="1GiB",
        timeout=600,
    )
    found: dict[str, Any] = done.result
    assert found["code"] == 0, found["stderr"]
    assert found["settings"]["attention"] != "flash2"
    assert found["settings"]["precision"] == ("amp-fp16" if gpu == "t4" else "amp-bf16")
    assert "kept: 2 of 2 steps, each with exactly 32 sequences" in found["stdout"]
    assert "reserved at the peak" in found["stdout"]
    assert "with the CUDA context" in found["stdout"]


def test_every_method_trains(on_card: RunOnCard) -> None:
    done = on_card(
        TINY
        + """
recipes = [
    {"method": "lora"}, {"method": "qlora", "precision": "amp-bf16"}, {"method": "lora-8bit", "precision": "bf16"},
    {"optimizer": "adamw-8bit", "precision": "fp32"}, {"optimizer": "paged-adamw-8bit", "precision": "bf16"},
]
result = [train(verify=False, probe=False, max_steps=1, **each) for each in recipes]
""",
        "rtx-4090",
        memory="2GiB",
        timeout=600,
    )
    assert [(each["finished"], each["kept"], each["steps"]) for each in done.result] == [(True, True, 1)] * 5
    assert all(each["peak"] for each in done.result)


def test_a_run_evaluates_saves_and_goes_on(on_card: RunOnCard) -> None:
    done = on_card(
        TINY
        + """
first = train(verify=False, probe=False, max_steps=1, eval_data="eval.jsonl", eval_steps=1, output="run")
second = brim.train(resume="run", max_steps=2)
result = {"first": first, "steps": second.steps, "evaluated": second.evaluation.step, "kept": second.promise_kept,
          "files": sorted(path.name for path in Path("run").iterdir())}
""",
        memory="1GiB",
        timeout=600,
    )
    found = done.result
    assert (found["first"]["steps"], found["steps"], found["evaluated"], found["kept"]) == (1, 2, 2, True)
    assert {"model.safetensors", "config.json", "ledger.jsonl"} <= set(found["files"])


def test_flash2_that_cannot_be_imported_is_refused_before_anything_else(on_card: RunOnCard) -> None:
    done = on_card(
        TINY
        + """
said = []
try:
    brim.train("tiny", data="data.jsonl", effective_batch=32, attention="flash2", say=said.append)
except brim.UnsupportedError as error:
    result = {"message": error.message, "said": said, "folder": Path("brim-runs").exists()}
""",
        "rtx-3080-10gb",
        memory="1GiB",
    )
    assert done.result["message"] == "--attention flash2 cannot run here: the package flash-attn is not installed."
    assert done.result["said"] == []
    assert not done.result["folder"]


@pytest.mark.xfail(reason="loading fails with a tensor of negative size on the small second card; cause not found", strict=False)
def test_one_process_uses_the_card_it_was_given(on_card: RunOnCard) -> None:
    """A Trainer that sees two cards would spread over both. Most of the first is taken."""
    done = on_card(
        TINY
        + """
import torch

held = torch.empty(900 << 20, dtype=torch.uint8, device="cuda:0")
first = second = None
try:
    train(verify=False, probe=False, max_steps=1)
except brim.OutOfMemoryError as error:
    first = error.message
second = train(verify=False, max_steps=1, gpu_index=1, method="qlora", micro_batch=None)
result = {"first": first, "second": second, "held": held.numel()}
""",
        memory="1200MiB",
        count=2,
        timeout=600,
    )
    found = done.result
    assert "does not fit" in found["first"]
    assert (found["second"]["finished"], found["second"]["device"], found["second"]["probed"]) == (True, "cuda:1", True)


@pytest.mark.parametrize(
    "sharding", ["ddp", "fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2", "zero3"))]
)
def test_two_ranks_train_with_every_engine(on_card: RunOnCard, sharding: str) -> None:
    done = on_card(
        TINY
        + f"""
result = train(verify=False, probe=False, max_steps=2, gpus=2, sharding={sharding!r}, precision="bf16" if {sharding!r} != "ddp" else None)
""",
        "a100-40gb",
        memory="4GiB",
        count=2,
        timeout=600,
    )
    assert (done.result["finished"], done.result["kept"], done.result["steps"]) == (True, True, 2)


@pytest.mark.xfail(reason="a card with another capacity than the catalogue's is not recognised by its name")
def test_records_of_a_run_are_read_back(on_card: RunOnCard, tmp_path: Path) -> None:
    """Watch, report and doctor read what a run on a card has left; env and detect describe the card."""
    done = on_card(
        TINY
        + """
import subprocess

train(verify=False, probe=False, max_steps=2, output="run")
def brim_(*words):
    ran = subprocess.run([sys.executable, "-m", "brim", *words], capture_output=True, text=True)
    return ran.returncode, ran.stdout
machine = brim.detect()
device = __import__("brim.machine.device", fromlist=["TorchDevice"]).TorchDevice()
reading = device.read()
result = {
    "watch": brim_("watch", "run", "--once"), "report": brim_("report", "run", "-o", "page.html"), "doctor": brim_("doctor", "run"),
    "env": brim_("env"), "gpu": machine.accelerators[0].gpu.name, "total": machine.accelerators[0].total_bytes,
    "watts": reading.watts, "celsius": reading.celsius, "page": Path("page.html").is_file(),
}
""",
        "rtx-4090",
        memory="2GiB",
        timeout=600,
    )
    found = done.result
    assert (found["gpu"], found["total"]) == ("rtx-4090", 2 << 30)
    assert found["watts"] is not None
    assert found["celsius"] is not None
    assert found["watch"][0] == 0, found["watch"][1]
    assert "step 2" in found["watch"][1].lower() or "2 of 2" in found["watch"][1]
    assert (found["report"][0], found["page"]) == (0, True)
    assert found["doctor"][0] in {0, 1}
    assert "RTX 4090" in found["env"][1]
    assert json.dumps(found["env"])
