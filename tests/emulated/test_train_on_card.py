"""`brim train` on emulated cards: default settings on four GPUs, every method, resume, two cards, out of memory outside of a step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.emulated.conftest import RunOnCard
from tests.emulated.snippets import TINY_TRAINING


@pytest.mark.parametrize("gpu", ["t4", "rtx-3080-10gb", "rtx-4090", "a100-40gb"])
def test_the_data_and_the_effective_batch_are_the_only_required_options(on_card: RunOnCard, gpu: str) -> None:
    done = on_card(
        TINY_TRAINING
        + """
import subprocess

command = [sys.executable, "-m", "brim", "train", "tiny", "--data", "data.jsonl", "--effective-batch", "32"]
done = subprocess.run(command, capture_output=True, text=True)
folders = list(Path("brim-runs").glob("tiny-*"))
card = json.loads((folders[0] / "run.json").read_text()) if folders else {}
result = {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr[-3000:], "settings": card.get("settings")}
""",
        gpu,
        memory="1GiB",
        timeout=600,
    )
    result: dict[str, Any] = done.result
    assert result["code"] == 0, result["stderr"]
    assert result["settings"]["attention"] != "flash2"
    assert result["settings"]["precision"] == ("amp-fp16" if gpu == "t4" else "amp-bf16")
    assert "kept: 2 of 2 steps, each with exactly 32 sequences" in result["stdout"]
    assert "reserved at the peak" in result["stdout"]
    assert "with the CUDA context" in result["stdout"]


def test_every_method_trains(on_card: RunOnCard) -> None:
    done = on_card(
        TINY_TRAINING
        + """
recipes = [
    {"method": "lora"}, {"method": "qlora", "precision": "amp-bf16"}, {"method": "lora-8bit", "precision": "bf16"},
    {"optimizer": "adamw-8bit", "precision": "fp32"}, {"optimizer": "paged-adamw-8bit", "precision": "bf16"},
]
result = [train(verify=False, probe=False, max_steps=1, **recipe) for recipe in recipes]
""",
        "rtx-4090",
        memory="2GiB",
        timeout=600,
    )
    assert [(run["finished"], run["kept"], run["steps"]) for run in done.result] == [(True, True, 1)] * 5
    assert all(run["peak"] for run in done.result)


def test_a_run_evaluates_saves_and_resumes(on_card: RunOnCard) -> None:
    done = on_card(
        TINY_TRAINING
        + """
first = train(verify=False, probe=False, max_steps=1, eval_data="eval.jsonl", eval_steps=1, output="run")
second = brim.train(resume="run", max_steps=2)
result = {"first": first, "steps": second.steps, "evaluated": second.evaluation.step, "kept": second.promise_kept,
          "files": sorted(path.name for path in Path("run").iterdir())}
""",
        memory="1GiB",
        timeout=600,
    )
    result = done.result
    assert (result["first"]["steps"], result["steps"], result["evaluated"], result["kept"]) == (1, 2, 2, True)
    assert {"model.safetensors", "config.json", "ledger.jsonl"} <= set(result["files"])


def test_flash2_without_the_package_is_rejected_before_the_run_starts(on_card: RunOnCard) -> None:
    done = on_card(
        TINY_TRAINING
        + """
messages = []
try:
    brim.train("tiny", data="data.jsonl", effective_batch=32, attention="flash2", say=messages.append)
except brim.UnsupportedError as error:
    result = {"message": error.message, "messages": messages, "folder": Path("brim-runs").exists()}
""",
        "rtx-3080-10gb",
        memory="1GiB",
    )
    assert done.result["message"] == "--attention flash2 cannot run here: the package flash-attn is not installed."
    assert done.result["messages"] == []
    assert not done.result["folder"]


def test_one_process_uses_only_the_chosen_card(on_card: RunOnCard) -> None:
    """A Trainer that sees two cards would use both. Most of the first card's memory is taken. The cards have 2 GiB, because transformers
    loads a model with `device_map` only onto a card of more than 1.2 GiB (`caching_allocator_warmup`).
    """
    done = on_card(
        TINY_TRAINING
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
    result = done.result
    assert "does not fit" in result["first"]
    assert (result["second"]["finished"], result["second"]["device"], result["second"]["probed"]) == (True, "cuda:1", True)


@pytest.mark.parametrize(
    "sharding", ["ddp", "fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2", "zero3"))]
)
def test_two_ranks_train_with_every_engine(on_card: RunOnCard, sharding: str) -> None:
    done = on_card(
        TINY_TRAINING
        + f"""
result = train(verify=False, probe=False, max_steps=2, gpus=2, sharding={sharding!r}, precision="bf16" if {sharding!r} != "ddp" else None)
""",
        "a100-40gb",
        memory="4GiB",
        count=2,
        timeout=600,
    )
    assert (done.result["finished"], done.result["kept"], done.result["steps"]) == (True, True, 2)


def test_records_of_a_run_are_read_back(on_card: RunOnCard) -> None:
    """`brim watch`, `report` and `doctor` read the records of a run on a card; `env` and `detect` describe the card."""
    done = on_card(
        TINY_TRAINING
        + """
import subprocess

train(verify=False, probe=False, max_steps=2, output="run")
def run_brim(*words):
    done = subprocess.run([sys.executable, "-m", "brim", *words], capture_output=True, text=True)
    return done.returncode, done.stdout
machine = brim.detect()
device = __import__("brim.machine.device", fromlist=["TorchDevice"]).TorchDevice()
reading = device.read()
result = {
    "watch": run_brim("watch", "run", "--once"), "report": run_brim("report", "run", "-o", "page.html"), "doctor": run_brim("doctor", "run"),
    "env": run_brim("env"), "gpu": machine.accelerators[0].gpu.name, "total": machine.accelerators[0].total_bytes,
    "watts": reading.watts, "celsius": reading.celsius, "page": Path("page.html").is_file(),
}
""",
        "rtx-4090",
        memory="2GiB",
        timeout=600,
    )
    result = done.result
    assert (result["gpu"], result["total"]) == ("rtx-4090-24gb", 2 << 30)
    assert result["watts"] is not None
    assert result["celsius"] is not None
    assert result["watch"][0] == 0, result["watch"][1]
    assert "step 2" in result["watch"][1].lower() or "2 of 2" in result["watch"][1]
    assert (result["report"][0], result["page"]) == (0, True)
    assert result["doctor"][0] in {0, 1}
    assert "RTX 4090" in result["env"][1]
    assert json.dumps(result["env"])


HUNGRY = (
    TINY_TRAINING
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


def hungry_save(value, file, *args, **named):
    "Runs out of memory after the weights of the checkpoint have been written."
    if "optimizer" in str(getattr(file, "name", file)):
        saves.append(file)
        if str(len(saves)) in SAVES_THAT_FAIL:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    return plain_save(value, file, *args, **named)


def build():
    torch.save = hungry_save
    return Hungry(LlamaConfig(
        vocab_size=1600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False, pad_token_id=0,
    ))
''')
os.environ["PYTHONPATH"] = os.getcwd()


def run(**options):
    "The error of a run in the folder `run`, the files in it and its last complete checkpoint."
    error = {}
    try:
        brim.train(**options)
    except brim.BrimError as raised:
        error = {"kind": type(raised).__name__, "code": raised.exit_code, "message": raised.message, "hint": raised.hint}
    names = sorted(path.name for path in Path("run").iterdir() if path.name not in ("plan.json", "timeline.json"))
    return {"error": error, "names": names, "last_checkpoint": last_checkpoint(Path("run")).name}
"""
)


def test_out_of_memory_in_evaluation_and_in_saving_costs_no_step(on_card: RunOnCard) -> None:
    """Three runs in one folder: a checkpoint that cannot be saved; an evaluation that does not fit even with a batch of 1; a run that
    recovers from one failed save and from an evaluation batch that is too large.
    """
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
    result = done.result
    code, stderr = result["unsaved"]
    assert code == 1
    assert stderr.splitlines()[-2:] == [
        "brim: Saving the checkpoint of step 2 ran out of memory. In-memory weights are unaffected.",
        "  Free memory on the GPU, then resume from the last checkpoint: brim train --resume run",
    ]
    assert "Traceback" not in stderr
    assert "UserWarning" not in stderr
    assert [name for name in result["left"] if name.startswith((".", "checkpoint"))] == ["checkpoint-1"]
    too_large, halved = result["too_large"], result["halved"]
    assert (too_large["error"]["kind"], too_large["error"]["code"]) == ("OutOfMemoryError", 1)
    assert too_large["error"]["message"] == "Evaluation ran out of memory with a batch of 1. Training is unaffected."
    assert "brim train --resume run --eval-data FILE" in too_large["error"]["hint"]
    assert too_large["last_checkpoint"] == "checkpoint-2", "the step is saved even if its evaluation fails"
    assert "model.safetensors" not in too_large["names"]
    assert not halved["error"]
    assert halved["last_checkpoint"] == "checkpoint-3"
    assert "brim: Evaluation ran out of memory: its batch size goes from 8 to 4. Training goes on as it was." in done.stderr
    assert "brim: Saving ran out of memory. Freed what can be freed; retrying once." in done.stderr
    assert {"model.safetensors", "config.json"} <= set(halved["names"])
    assert not any(name.startswith(".") for name in halved["names"])
    assert result["evaluations"] == [2, 2, 3], "a step that is trained again is evaluated again"
    assert [step for step in result["steps"] if step] == [1, 2, 2, 3]
