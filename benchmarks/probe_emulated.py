"""The answers of `brim probe` against brute force, on emulated cards with the real CUDA build of torch.

    python benchmarks/probe_emulated.py [--only 3 --only 7] [-o results.jsonl]

Both look for the largest micro-batch that trains on a card of a few GiB. `brim probe` predicts, tries a few sizes and stops. Brute force
(`emulated/largest.py`) is plain torch, transformers, peft and bitsandbytes: every size in a process of its own, three optimizer steps.
Its answer is the size that trains while the two above it do not; it tries the probe's answer first, then bisects.

The limit is the same for both: the memory of the card, less the margin of a probe (2 percent, at least 2 MiB), counted with the CUDA
context, held by `torch.cuda.set_per_process_memory_fraction`. The verdict is the same too: a size trains if no step runs out of memory
and the allocator does not have to give its cache back in step after step (where it had to, a later pair must do without). The steps of
brute force have no mask, a mask, no mask, because attention may take another kernel; a probe runs both as well, and mixed lengths, an
evaluation and a save.

Prints a table; exit code 1 if any answer differs. Needs an interpreter with the CUDA build of torch: `--python`, by default
`.venv-cuda/bin/python` (`make emulator`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from brim.workload.resolve import find_model

_ROOT = Path(__file__).resolve().parents[1]
_LARGEST = Path(__file__).parent / "emulated" / "largest.py"
Case = dict[str, Any]


def case(gpu: str, memory: str, model: str, method: str, precision: str, optimizer: str, seq_len: int, **more: Any) -> Case:
    return {
        "gpu": gpu, "memory": memory, "model": model, "method": method, "precision": precision, "optimizer": optimizer,
        "seq_len": seq_len, "checkpointing": "none", "attention": "sdpa", "accumulation": 1, "task": "causal-lm", **more,
    }  # fmt: skip


CASES: tuple[Case, ...] = (
    case("t4", "4GiB", "gpt2", "full", "amp-fp16", "adamw", 128),
    case("t4", "4GiB", "smollm2-135m", "lora", "amp-fp16", "adamw", 256),
    case("t4", "3GiB", "smollm2-135m", "qlora", "amp-fp16", "adamw", 256),
    case("t4", "3GiB", "smollm2-135m", "lora-8bit", "amp-fp16", "adamw", 128),
    case("t4", "4GiB", "gpt2", "lora", "fp32", "adamw", 128),
    case("t4", "4GiB", "qwen2.5-0.5b", "qlora", "amp-fp16", "adamw-8bit", 128),
    case("rtx-3080", "6GiB", "smollm2-135m", "full", "amp-bf16", "adamw-8bit", 256),
    case("rtx-3080", "4GiB", "gpt2", "full", "bf16", "adamw-fused", 256),
    case("rtx-3080", "3GiB", "smollm2-135m", "lora", "bf16", "adamw", 512, checkpointing="full"),
    case("rtx-3080", "5GiB", "qwen2.5-0.5b", "lora", "amp-bf16", "adamw", 128),
    case("rtx-3080", "4GiB", "qwen2.5-0.5b", "lora-8bit", "amp-bf16", "adamw-fused", 128),
    case("rtx-4090", "6GiB", "pythia-160m", "full", "fp32", "adamw", 128),
    case("rtx-4090", "6GiB", "smollm2-135m", "full", "amp-bf16", "paged-adamw-8bit", 256),
    case("rtx-4090", "3GiB", "gpt2", "full", "fp32", "sgd", 128),
    case("rtx-4090", "4GiB", "smollm2-135m", "lora", "amp-bf16", "adamw-8bit", 256, checkpointing="full"),
    case("rtx-4090", "4GiB", "pythia-160m", "qlora", "bf16", "adamw", 256),
    case("a100-40gb", "5GiB", "smollm2-135m", "full", "amp-bf16", "adamw-fused", 256, accumulation=2),
    case("a100-40gb", "4GiB", "smollm2-135m", "qlora", "amp-bf16", "paged-adamw-8bit", 256),
    case("a100-40gb", "4GiB", "gpt2", "full", "amp-bf16", "adafactor", 256),
    case("a100-40gb", "3GiB", "gpt2", "lora-8bit", "bf16", "sgd-momentum", 128),
)


def on_card(asked: Case, runner: list[str], command: list[str], question: str = "") -> subprocess.CompletedProcess[str]:
    card = [*runner, "--gpu", asked["gpu"], "--memory", asked["memory"], "--"]
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*card, *command], input=question, capture_output=True, text=True, check=False, env=environment)


def probed(asked: Case, runner: list[str], python: str) -> dict[str, Any]:
    """The answer of `brim probe`, and how many trials it took."""
    words = [python, "-m", "brim", "probe", asked["model"], "--objective", "largest", "--fresh", "--json"]
    for name in ("method", "precision", "optimizer", "seq_len", "checkpointing", "attention", "accumulation"):
        words += [f"--{name.replace('_', '-')}", str(asked[name])]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["BRIM_CACHE"] = cache
        done = on_card(asked, runner, words)
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    found = json.loads(done.stdout)
    return {"largest": found["largest"]["micro_batch"], "trials": len(found["trials"]), "versus": found["versus"]["error"]}


def tried(asked: Case, runner: list[str], python: str, guess: int | None = None) -> dict[str, Any]:
    """The answer of brute force."""
    config = dict(find_model(asked["model"]).config or {})
    plain = {"lora_rank": 8, "lora_targets": [], "max_grad_norm": 1.0, **asked}
    done = on_card(asked, runner, [python, str(_LARGEST)], json.dumps({"case": plain, "config": config, "guess": guess}) + "\n")
    if done.returncode or not done.stdout.strip():
        return {"error": done.stderr.strip()[-400:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def name_of(asked: Case) -> str:
    extra = [
        word for word, has in (("checkpointing", asked["checkpointing"] == "full"), ("x2", asked["accumulation"] > 1)) if has
    ]
    words = [asked["gpu"], asked["memory"], asked["model"], asked["method"], asked["precision"], asked["optimizer"]]
    return " ".join([*words, str(asked["seq_len"]), *extra])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(_ROOT / ".venv-cuda" / "bin" / "python"))
    parser.add_argument("--runner", help="what runs a command on a card, instead of `python -m brim.emulator`")
    parser.add_argument("--only", type=int, action="append", help="the number of a case, as the table has it")
    parser.add_argument("-o", "--output", type=Path, help="a file for the results, as JSON lines")
    options = parser.parse_args()
    print(f"{'':2}  {'case':78}  {'probe':>5}  {'brute force':>11}  trials  predicted")
    runner = [options.runner] if options.runner else [options.python, "-m", "brim.emulator"]
    equal = total = 0
    for number, asked in enumerate(CASES, 1):
        if options.only and number not in options.only:
            continue
        began = time.monotonic()
        found = probed(asked, runner, options.python)
        truth = tried(asked, runner, options.python, found.get("largest"))
        total += 1
        is_equal = "largest" in found and found.get("largest") == truth.get("largest")
        equal += is_equal
        trouble = "" if is_equal else f"  DIFFERS {found.get('error', '')} {truth.get('error', '')}"
        off = f"{found['versus']:+.1%}" if "versus" in found else "-"
        answers = f"{found.get('largest', '-'):>5}  {truth.get('largest', '-'):>11}  {found.get('trials', '-'):>6}  {off:>9}"
        print(f"{number:2}  {name_of(asked):78}  {answers}{trouble}", flush=True)
        if options.output is not None:
            seconds = round(time.monotonic() - began, 1)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": asked, "probe": found, "brute_force": truth, "seconds": seconds}) + "\n")
    print(f"{equal} of {total} answers are equal.")
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
