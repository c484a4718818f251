"""The other verbs on a machine with an emulated card: env, observe, watch, verify and stitch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.emulated.conftest import RunOnCard
from tests.emulated.test_paths_train import TINY

from brim.machine.capability import CONTEXT_BYTES
from brim.machine.catalogue import find_gpu

HELD = 256 << 20
"""Bytes that another process holds."""
BRIM = """
import json, subprocess, sys, time
from pathlib import Path


def brim_(*words):
    ran = subprocess.run([sys.executable, "-m", "brim", *map(str, words)], capture_output=True, text=True)
    return {"code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-3080", "rtx-4090", "a100"])
def test_env_and_detect_describe_the_card_and_who_holds_its_memory(on_card: RunOnCard, gpu: str) -> None:
    done = on_card(
        BRIM
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
env = brim_("env", "--json")
result = {{
    "count": len(before), "idle": before[0].free_bytes, "name": card.gpu.name, "total": card.total_bytes, "free": card.free_bytes,
    "capability": card.gpu.compute_capability, "bf16": card.gpu.bf16, "holder": holder.pid, "env": env,
    "processes": [[each.pid, each.used_bytes, each.name] for each in nvml.processes(0)], "others": str(others_here(0)),
}}
holder.stdin.close()
holder.wait()
result["after"] = brim.detect().accelerators[0].free_bytes
""",
        gpu,
    )
    found, card = done.result, find_gpu(gpu).gpu
    assert (found["count"], found["name"], found["total"]) == (1, card.name, card.usable_bytes)
    assert (found["capability"], found["bf16"]) == (card.compute_capability, card.bf16)
    assert found["idle"] == found["after"] == found["total"]
    assert found["free"] == found["total"] - HELD - CONTEXT_BYTES
    ((pid, used, name),) = found["processes"]
    assert (pid, used) == (found["holder"], HELD + CONTEXT_BYTES)
    assert f"{name} (pid {pid})" in found["others"]
    _check_env(found["env"], found)


def _check_env(ran: dict[str, Any], found: dict[str, Any]) -> None:
    """`brim env` asks torch in a child process, so that the card has a context of it for a moment."""
    assert ran["code"] == 0, ran["stderr"]
    env = json.loads(ran["stdout"])
    (device,), (card,) = env["torch"]["devices"], env["machine"]["accelerators"]
    assert (device["total_bytes"], device["compute_capability"]) == (found["total"], found["capability"])
    assert device["free_bytes"] == found["free"] - CONTEXT_BYTES
    assert (card["gpu"]["name"], card["total_bytes"], card["free_bytes"]) == (found["name"], found["total"], found["free"])
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
        BRIM
        + SCRIPTS
        + """
result = {
    "loop": brim_("observe", "--json", "-o", "seen", "--effective-batch", 64, "--", sys.executable, "loop.py"),
    "hf": brim_("observe", "--json", "-o", "seen-hf", "--", sys.executable, "hf.py"),
    "watch": brim_("watch", "seen", "--once"), "doctor": brim_("doctor", "seen"),
}
""",
        "rtx-4090",
        memory="2GiB",
    )
    found = done.result
    loop, trainer = (_observed(found[name]) for name in ("loop", "hf"))
    assert (found["loop"]["code"], loop["exit_code"]) == (7, 7)
    assert (found["hf"]["code"], trainer["exit_code"]) == (0, 0), found["hf"]["stderr"]
    assert _batch(loop) == (4, 3, 1, 12, 3)
    assert _batch(trainer) == (4, 2, 1, 8, 3)
    assert (loop["configured"]["effective_batch"], trainer["configured"]["effective_batch"]) == (64, 8)
    assert trainer["evaluation_passes"] == 1
    assert [(failure["phase"], failure["sequences"], failure["survived"]) for failure in loop["memory_failures"]] == [
        ("forward", 16, True)
    ]
    for name, observed in (("loop", loop), ("hf", trainer)):
        assert observed["device"] == "NVIDIA GeForce RTX 4090"
        assert (observed["peak_allocated_bytes"], observed["peak_reserved_bytes"]) == _peaks(found[name])
        assert not observed["notes"]
    assert "4 x 3 x 1 = 12, you configured 64" in found["loop"]["stderr"]
    assert "of 2.00 GiB" in found["watch"]["stdout"]
    assert "run-promise-broken" in found["doctor"]["stdout"]


def _observed(ran: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(ran["stdout"].splitlines()[-1])
    return record


def _batch(observed: dict[str, Any]) -> tuple[int, ...]:
    batch = observed["in_force"]
    return batch["micro_batch"], batch["accumulation"], batch["ranks"], batch["sequences"], observed["steps"]


def _peaks(ran: dict[str, Any]) -> tuple[int, ...]:
    """As the script itself has read them."""
    line = next(line for line in ran["stdout"].splitlines() if line.startswith("peak "))
    return tuple(int(word) for word in line.split()[1:])


def test_watch_shows_the_card_of_a_run(on_card: RunOnCard) -> None:
    """Of two cards the second: a training that was given it, and a script that sees no other."""
    done = on_card(
        TINY
        + BRIM
        + SCRIPTS
        + """
import os, signal

Path("endless.py").write_text(Path("loop.py").read_text().replace("rows(36)", "rows(400_000)").replace("zero_grad()", "zero_grad(); time.sleep(0.3)")
                              .replace("import sys", "import sys, time"))
train = ["train", "tiny", "--data", "data.jsonl", "--effective-batch", "32", "--epochs", "1000", "--no-probe", "--no-verify", "-o", "run",
         "--gpu-index", "1"]
observe = ["observe", "-o", "seen", "--", "env", "CUDA_VISIBLE_DEVICES=1", sys.executable, "endless.py"]
running = {name: subprocess.Popen([sys.executable, "-m", "brim", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
           for name, words in (("seen", observe), ("run", train))}
result, end = {}, time.monotonic() + 120
for name, process in running.items():
    while time.monotonic() < end and process.poll() is None:
        state = brim_("watch", name, "--json", "--wait")
        if state["code"] == 0 and json.loads(state["stdout"])["status"] == "running":
            break
        time.sleep(0.5)
    result[name] = {"state": state, "picture": brim_("watch", name, "--once")}
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    result[name] |= {"code": process.returncode, "output": output[-3000:], "after": brim_("watch", name, "--json")}
""",
        "rtx-4090",
        memory="2GiB",
        count=2,
    )
    for name, found in done.result.items():
        assert found["state"]["code"] == 0, (name, found["output"])
        card = json.loads(found["state"]["stdout"])["card"]
        assert card["name"] == "NVIDIA GeForce RTX 4090"
        assert card["total_bytes"] == 2 << 30
        assert card["used_bytes"] > CONTEXT_BYTES
        assert None not in (card["busy"], card["watts"], card["celsius"])
        assert "40 °C" in found["picture"]["stdout"]
        assert json.loads(found["after"]["stdout"])["card"] is None


def test_stitch_and_verify_do_not_use_the_card_and_a_stitched_model_trains_on_it(on_card: RunOnCard) -> None:
    """The verbs prove on the CPU. A module that is on the card is proven there, with real numbers, also after a training with autocast."""
    done = on_card(
        TINY
        + BRIM
        + """
import threading, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from brim.machine import nvml
from brim.stitching.rows import Pad

tokenizer = AutoTokenizer.from_pretrained(folder)
vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
LlamaForCausalLM(LlamaConfig(
    vocab_size=vocabulary, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=False,
)).save_pretrained("other")
Path("recipe.yaml").write_text('''
donors: {first: ./tiny, second: ./other}
layers:
  - {donor: first, layers: 0-1}
  - {donor: second, layers: 1, adapter: linear}
train: [adapters, head]
''')
seen, is_over = set(), threading.Event()
def look():
    while not is_over.wait(0.02):
        seen.update(process.pid for process in nvml.processes(0))
watching = threading.Thread(target=look)
watching.start()
stitched = brim_("stitch", "recipe.yaml", "-o", "stitched", "--json")
verified = brim_("verify", "tiny", "--precision", "amp-bf16", "--json")
is_over.set()
watching.join()

class Rows:
    rows = [tokenizer(json.loads(line)["response"])["input_ids"][:64] for line in lines[:32]]
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return {"input_ids": self.rows[index], "labels": self.rows[index]}

front = brim.StitchLLM("stitched", Rows(), tokenizer)
names = {name for name, parameter in front.model.named_parameters() if parameter.requires_grad}
before = {name: parameter.detach().clone() for name, parameter in front.model.named_parameters()}
trained = front.train("out", learning_rate=1e-2, per_device_train_batch_size=8, max_steps=4, save_steps=2, logging_steps=1, report_to="none",
                      disable_tqdm=True, eval_dataset=Rows(), eval_strategy="steps", eval_steps=4)
changed = {name for name, parameter in front.model.named_parameters() if not torch.equal(parameter.cpu(), before[name])}
ledger = [json.loads(line) for line in open("out/ledger.jsonl")]
plain = LlamaForCausalLM.from_pretrained("other")
trainer = Trainer(plain, TrainingArguments("plain", max_steps=1, fp16=True, report_to="none", disable_tqdm=True), train_dataset=Rows(),
                  data_collator=Pad(0))
for _ in range(2):
    trainer.train()
again = brim.StitchLLM("out", Rows(), tokenizer, verify=False)
again.train("out", learning_rate=1e-2, per_device_train_batch_size=8, max_steps=5, report_to="none", disable_tqdm=True, resume_from_checkpoint=True)
result = {
    "stitched": stitched, "verified": verified, "seen": sorted(seen), "device": str(front.model.device), "fp16": front.trainer.args.fp16,
    "trains": sorted(names), "changed": sorted(changed), "losses": [line["loss"] for line in ledger if line["kind"] == "step"],
    "sequences": [len(line["sequence_ids"]) for line in ledger if line["kind"] == "step"], "resumed": again.trainer.state.global_step,
    "proofs": [[proof.verdict for proof in brim.verify(model).proofs] for model in (front.model, plain)],
    "evaluated": [entry["eval_loss"] for entry in front.trainer.state.log_history if "eval_loss" in entry],
}
""",
        memory="2GiB",
        compute=True,
    )
    found = done.result
    assert found["stitched"]["code"] == 0, found["stitched"]["stderr"]
    assert found["verified"]["code"] == 0, found["verified"]["stderr"]
    assert found["seen"] == []
    assert (found["device"], found["fp16"]) == ("cuda:0", True)
    assert found["changed"] == found["trains"]
    assert found["sequences"] == [32] * 4
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert 0 < found["evaluated"][0] < found["losses"][0]
    assert found["resumed"] == 5
    assert found["proofs"] == [["pass"] * 5] * 2
