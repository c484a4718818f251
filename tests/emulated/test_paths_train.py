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


def test_one_process_uses_the_card_it_was_given(on_card: RunOnCard) -> None:
    """A Trainer that sees two cards would spread over both. Most of the first is taken. Smaller cards do not do: transformers loads onto
    a card with `device_map` only if it has more than 1.2 GiB (`caching_allocator_warmup`).
    """
    done = on_card(
        TINY
        + """
import torch

held = torch.empty(1500 << 20, dtype=torch.uint8, device="cuda:0")
first = second = None
try:
    train(verify=False, probe=False, max_steps=1)
except brim.OutOfMemoryError as error:
    first = error.message
second = train(verify=False, max_steps=1, gpu_index=1, method="qlora", micro_batch=None)
result = {"first": first, "second": second, "held": held.numel()}
""",
        memory="2GiB",
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
    assert (found["gpu"], found["total"]) == ("rtx-4090-24gb", 2 << 30)
    assert found["watts"] is not None
    assert found["celsius"] is not None
    assert found["watch"][0] == 0, found["watch"][1]
    assert "step 2" in found["watch"][1].lower() or "2 of 2" in found["watch"][1]
    assert (found["report"][0], found["page"]) == (0, True)
    assert found["doctor"][0] in {0, 1}
    assert "RTX 4090" in found["env"][1]
    assert json.dumps(found["env"])


HUNGRY = (
    TINY
    + """
import os, subprocess
from brim.trainer.manifest import last_checkpoint

Path("hungry.py").write_text('''
import os
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EVALUATION_MIB = int(os.environ.get("EVALUATION_MIB", "0"))
SAVES_THAT_FAIL = os.environ.get("SAVES_THAT_FAIL", "").split()
plain_save, saves = torch.save, []


class Hungry(LlamaForCausalLM):
    has_trained = False

    def forward(self, input_ids=None, **named):
        self.has_trained |= self.training
        if self.has_trained and not self.training:
            torch.empty(len(input_ids) * EVALUATION_MIB << 20, dtype=torch.uint8, device=input_ids.device)
        return super().forward(input_ids=input_ids, **named)


def hungry_save(what, where, *args, **named):
    "Runs out of memory when the weights of the checkpoint are written already."
    if "optimizer" in str(where):
        saves.append(where)
        if str(len(saves)) in SAVES_THAT_FAIL:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    return plain_save(what, where, *args, **named)


def build():
    torch.save = hungry_save
    return Hungry(LlamaConfig(
        vocab_size=1600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False, pad_token_id=0,
    ))
''')
os.environ["PYTHONPATH"] = os.getcwd()


def run(**options):
    "The error of a run in the folder `run`, and what it left there."
    error = {}
    try:
        brim.train(**options)
    except brim.BrimError as raised:
        error = {"kind": type(raised).__name__, "code": raised.exit_code, "message": raised.message, "hint": raised.hint}
    names = sorted(path.name for path in Path("run").iterdir() if path.name not in ("plan.json", "timeline.json"))
    return {"error": error, "names": names, "whole": last_checkpoint(Path("run")).name}
"""
)


def test_out_of_memory_in_evaluation_and_in_saving_costs_no_step(on_card: RunOnCard) -> None:
    """Three times in one folder: a checkpoint that cannot be saved; an evaluation of which not one sequence fits; both, but not so bad."""
    done = on_card(
        HUNGRY
        + """
words = ["hungry:build", "--tokenizer", "tiny", "--data", "data.jsonl", "--eval-data", "eval.jsonl", "--eval-batch", "8", "--eval-steps", "2",
         "--save-steps", "1", "--micro-batch", "16", "--accumulation", "2", "--max-steps", "3", "--no-probe", "--no-verify", "--workers", "0"]
os.environ["SAVES_THAT_FAIL"] = "2 3"
unsaved = subprocess.run([sys.executable, "-m", "brim", "train", *words, "-o", "run"], capture_output=True, text=True)
left = sorted(path.name for path in Path("run").iterdir())
os.environ |= {"SAVES_THAT_FAIL": "", "EVALUATION_MIB": "2000"}
too_large = run(resume="run")
os.environ |= {"SAVES_THAT_FAIL": "1", "EVALUATION_MIB": "150"}
result = {
    "unsaved": [unsaved.returncode, unsaved.stderr], "left": left, "too_large": too_large, "halved": run(resume="run"),
    "evaluations": [json.loads(line)["step"] for line in open("run/evaluations.jsonl")],
    "steps": [json.loads(line).get("step") for line in open("run/ledger.jsonl")],
}
""",
        memory="1GiB",
    )
    found = done.result
    code, told = found["unsaved"]
    assert code == 1
    assert told.splitlines()[-2:] == [
        "brim: Saving the checkpoint of step 2 ran out of memory. In-memory weights are unaffected.",
        "  Free memory on the GPU, then resume from the last checkpoint: brim train --resume run",
    ]
    assert "Traceback" not in told
    assert "UserWarning" not in told
    assert [name for name in found["left"] if name.startswith((".", "checkpoint"))] == ["checkpoint-1"]
    too_large, halved = found["too_large"], found["halved"]
    assert (too_large["error"]["kind"], too_large["error"]["code"]) == ("OutOfMemoryError", 1)
    assert too_large["error"]["message"] == "Evaluation ran out of memory with a batch of 1. Training is unaffected."
    assert "brim train --resume run --eval-data FILE" in too_large["error"]["hint"]
    assert too_large["whole"] == "checkpoint-2", "the step that could not be evaluated is saved"
    assert "model.safetensors" not in too_large["names"]
    assert not halved["error"]
    assert halved["whole"] == "checkpoint-3"
    assert "brim: Evaluation ran out of memory: its batch size goes from 8 to 4. Training goes on as it was." in done.stderr
    assert "brim: Saving ran out of memory. Freed what can be freed; retrying once." in done.stderr
    assert {"model.safetensors", "config.json"} <= set(halved["names"])
    assert not any(name.startswith(".") for name in halved["names"])
    assert found["evaluations"] == [2, 2, 3], "of a step that was taken twice the later counts"
    assert [step for step in found["steps"] if step] == [1, 2, 2, 3]
