"""`brim env`, `brim observe` and `brim watch` on a machine with emulated cards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.emulated.conftest import RunOnCard
from tests.emulated.snippets import RUN_BRIM, TINY_TRAINING

from brim.machine.capability import CONTEXT_BYTES
from brim.machine.catalogue import find_gpu

HELD = 256 << 20
"""Bytes that another process allocates."""


@pytest.mark.parametrize("gpu", ["t4", "rtx-3080", "rtx-4090", "a100"])
def test_env_and_detect_describe_the_card_and_the_processes_on_it(on_card: RunOnCard, gpu: str) -> None:
    done = on_card(
        RUN_BRIM
        + f"""
import brim
from brim.machine import nvml
from brim.machine.sharing import others_here

HOLD = '''
import sys, torch
held = torch.empty({HELD}, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
'''
before = brim.detect().accelerators
holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert holder.stdout.readline().strip() == "held"
card = brim.detect().accelerators[0]
env = run_brim("env", "--json")
result = {{
    "count": len(before), "idle": before[0].free_bytes, "name": card.gpu.name, "total": card.total_bytes, "free": card.free_bytes,
    "capability": card.gpu.compute_capability, "bf16": card.gpu.bf16, "holder": holder.pid, "env": env,
    "processes": [[process.pid, process.used_bytes, process.name] for process in nvml.processes(0)], "others": str(others_here(0)),
}}
holder.stdin.close()
holder.wait()
result["after"] = brim.detect().accelerators[0].free_bytes
""",
        gpu,
    )
    result, card = done.result, find_gpu(gpu).gpu
    assert (result["count"], result["name"], result["total"]) == (1, card.name, card.usable_bytes)
    assert (result["capability"], result["bf16"]) == (card.compute_capability, card.bf16)
    assert result["idle"] == result["after"] == result["total"]
    assert result["free"] == result["total"] - HELD - CONTEXT_BYTES
    ((pid, used, name),) = result["processes"]
    assert (pid, used) == (result["holder"], HELD + CONTEXT_BYTES)
    assert f"{name} (pid {pid})" in result["others"]
    _check_env(result["env"], result)


def _check_env(command: dict[str, Any], detected: dict[str, Any]) -> None:
    """`brim env` queries torch in a child process, whose CUDA context also takes memory of the card."""
    assert command["code"] == 0, command["stderr"]
    env = json.loads(command["stdout"])
    (device,), (card,) = env["torch"]["devices"], env["machine"]["accelerators"]
    assert (device["total_bytes"], device["compute_capability"]) == (detected["total"], detected["capability"])
    assert device["free_bytes"] == detected["free"] - CONTEXT_BYTES
    assert (card["gpu"]["name"], card["total_bytes"], card["free_bytes"]) == (
        detected["name"],
        detected["total"],
        detected["free"],
    )
    assert env["problems"] == []


SCRIPTS = '''
Path("small.py").write_text("""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False)


class Hungry(LlamaForCausalLM):
    def forward(self, input_ids=None, **named):
        torch.empty((len(input_ids) > 8) << 40, dtype=torch.uint8, device=input_ids.device)
        return super().forward(input_ids=input_ids, **named)


def rows(count):
    return [{"input_ids": torch.arange(1, 33), "labels": torch.arange(1, 33)} for _ in range(count)]
""")
Path("loop.py").write_text("""
import sys
import torch
from torch.utils.data import DataLoader
from small import Hungry, config, rows

model = Hungry(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
try:
    model(input_ids=torch.ones(16, 8, dtype=torch.long, device="cuda"))
except torch.OutOfMemoryError:
    print("survived")
for number, batch in enumerate(DataLoader(rows(36), batch_size=min(64, 4), pin_memory=True), 1):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(**{name: value.cuda(non_blocking=True) for name, value in batch.items()}).loss / 3
    scaler.scale(loss).backward()
    if number % 3 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
print("peak", peak, torch.cuda.max_memory_reserved())
sys.exit(7)
""")
Path("hf.py").write_text("""
import torch
from transformers import Trainer, TrainingArguments
from transformers import LlamaForCausalLM
from small import config, rows

arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, report_to="none", save_strategy="no",
    fp16=True, disable_tqdm=True, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=8,
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows(64), eval_dataset=rows(8))
trainer.train()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
""")
'''


def test_observe_sees_a_loop_and_a_trainer_on_the_card(on_card: RunOnCard) -> None:
    done = on_card(
        RUN_BRIM
        + SCRIPTS
        + """
result = {
    "loop": run_brim("observe", "--json", "-o", "observed", "--effective-batch", 64, "--", sys.executable, "loop.py"),
    "hf": run_brim("observe", "--json", "-o", "observed-hf", "--", sys.executable, "hf.py"),
    "watch": run_brim("watch", "observed", "--once"), "doctor": run_brim("doctor", "observed"),
}
""",
        "rtx-4090",
        memory="2GiB",
    )
    result = done.result
    loop, trainer = (_record(result[name]) for name in ("loop", "hf"))
    assert (result["loop"]["code"], loop["exit_code"]) == (7, 7)
    assert (result["hf"]["code"], trainer["exit_code"]) == (0, 0), result["hf"]["stderr"]
    assert _batch(loop) == (4, 3, 1, 12, 3)
    assert _batch(trainer) == (4, 2, 1, 8, 3)
    assert (loop["configured"]["effective_batch"], trainer["configured"]["effective_batch"]) == (64, 8)
    assert trainer["evaluation_passes"] == 1
    assert [(failure["phase"], failure["sequences"], failure["survived"]) for failure in loop["memory_failures"]] == [
        ("forward", 16, True)
    ]
    for name, observed in (("loop", loop), ("hf", trainer)):
        assert observed["device"] == "NVIDIA GeForce RTX 4090"
        assert (observed["peak_allocated_bytes"], observed["peak_reserved_bytes"]) == _peaks(result[name])
        assert not observed["notes"]
    assert "4 x 3 x 1 = 12, you configured 64" in result["loop"]["stderr"]
    assert "of 2.00 GiB" in result["watch"]["stdout"]
    assert "run-promise-broken" in result["doctor"]["stdout"]


def _record(command: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(command["stdout"].splitlines()[-1])
    return record


def _batch(observed: dict[str, Any]) -> tuple[int, ...]:
    batch = observed["in_force"]
    return batch["micro_batch"], batch["accumulation"], batch["ranks"], batch["sequences"], observed["steps"]


def _peaks(command: dict[str, Any]) -> tuple[int, ...]:
    """Allocated and reserved, as the script prints them."""
    line = next(line for line in command["stdout"].splitlines() if line.startswith("peak "))
    return tuple(int(word) for word in line.split()[1:])


def test_watch_shows_the_card_of_a_run(on_card: RunOnCard) -> None:
    """The second of two cards: a training with `--gpu-index 1`, and a script with CUDA_VISIBLE_DEVICES=1."""
    done = on_card(
        TINY_TRAINING
        + RUN_BRIM
        + SCRIPTS
        + """
import os, signal

Path("endless.py").write_text(Path("loop.py").read_text().replace("rows(36)", "rows(400_000)").replace("zero_grad()", "zero_grad(); time.sleep(0.3)")
                              .replace("import sys", "import sys, time"))
train = ["train", "tiny", "--data", "data.jsonl", "--effective-batch", "32", "--epochs", "1000", "--no-probe", "--no-verify", "-o", "run",
         "--gpu-index", "1"]
observe = ["observe", "-o", "observed", "--", "env", "CUDA_VISIBLE_DEVICES=1", sys.executable, "endless.py"]
running = {name: subprocess.Popen([sys.executable, "-m", "brim", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
           for name, words in (("observed", observe), ("run", train))}
result, end = {}, time.monotonic() + 120
for name, process in running.items():
    while time.monotonic() < end and process.poll() is None:
        state = run_brim("watch", name, "--json", "--wait")
        if state["code"] == 0 and json.loads(state["stdout"])["status"] == "running":
            break
        time.sleep(0.5)
    result[name] = {"state": state, "picture": run_brim("watch", name, "--once")}
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    result[name] |= {"code": process.returncode, "output": output[-3000:], "after": run_brim("watch", name, "--json")}
""",
        "rtx-4090",
        memory="2GiB",
        count=2,
    )
    for name, run in done.result.items():
        assert run["state"]["code"] == 0, (name, run["output"])
        card = json.loads(run["state"]["stdout"])["card"]
        assert card["name"] == "NVIDIA GeForce RTX 4090"
        assert card["total_bytes"] == 2 << 30
        assert card["used_bytes"] > CONTEXT_BYTES
        assert None not in (card["busy"], card["watts"], card["celsius"])
        assert "40 °C" in run["picture"]["stdout"]
        assert json.loads(run["after"]["stdout"])["card"] is None
