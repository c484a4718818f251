"""Compares `brim probe` with brute force, on emulated cards with the real CUDA build of torch.

    python benchmarks/probe_emulated.py [--only 3 --only 7] [-o results.jsonl]

Both look for the largest micro-batch that trains on a card of a few GiB. `brim probe` predicts, tries a few sizes and stops. Brute force
(`emulated/largest.py`) trains every size for three optimizer steps in its own process, with plain torch, transformers, peft and
bitsandbytes. Its result is a size that trains while the next two sizes do not. It tries the result of the probe first, then bisects.

Both use the same limit, set with `torch.cuda.set_per_process_memory_fraction`: the memory of the card, CUDA context included, minus the
margin of a probe (2 percent, at least 2 MiB). Both use the same criterion: a size trains if no step runs out of memory and the allocator
does not have to release its cache in every step (see `emulated/largest.py`). Brute force trains without a mask in one process and with a
mask in another, because attention may use a different kernel. A probe does both in one process, and also trains mixed lengths, evaluates
and saves.

Prints a table; exit code 1 if any result differs. Needs an interpreter with the CUDA build of torch: `--python`, by default
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

from brim.machine.host import cache_folder
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


def on_card(
    spec: Case, runner: list[str], command: list[str], stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    card = [*runner, "--gpu", spec["gpu"], "--memory", spec["memory"], "--"]
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", **os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    return subprocess.run([*card, *command], input=stdin, capture_output=True, text=True, check=False, env=variables)


def probe_result(spec: Case, runner: list[str], python: str) -> dict[str, Any]:
    """The result of `brim probe`, its number of trials and the error of its prediction."""
    words = [python, "-m", "brim", "probe", spec["model"], "--objective", "largest", "--fresh", "--json"]
    for name in ("method", "precision", "optimizer", "seq_len", "checkpointing", "attention", "accumulation"):
        words += [f"--{name.replace('_', '-')}", str(spec[name])]
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that no earlier probe is reused, with the compiled card
        emulator = cache_folder() / "emulator"
        emulator.mkdir(parents=True, exist_ok=True)
        (Path(cache) / "emulator").symlink_to(emulator.resolve(), target_is_directory=True)
        done = on_card(spec, runner, words, environment={"BRIM_CACHE": cache})
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    record = json.loads(done.stdout)
    return {"largest": record["largest"]["micro_batch"], "trials": len(record["trials"]), "versus": record["versus"]["error"]}


def brute_force_result(spec: Case, runner: list[str], python: str, guess: int | None = None) -> dict[str, Any]:
    config = dict(find_model(spec["model"]).config or {})
    complete = {"lora_rank": 8, "lora_targets": [], "max_grad_norm": 1.0, **spec}
    done = on_card(spec, runner, [python, str(_LARGEST)], json.dumps({"case": complete, "config": config, "guess": guess}) + "\n")
    if done.returncode or not done.stdout.strip():
        return {"error": done.stderr.strip()[-400:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def name_of(spec: Case) -> str:
    extra = [
        word
        for word, applies in (("checkpointing", spec["checkpointing"] == "full"), ("x2", spec["accumulation"] > 1))
        if applies
    ]
    words = [spec["gpu"], spec["memory"], spec["model"], spec["method"], spec["precision"], spec["optimizer"]]
    return " ".join([*words, str(spec["seq_len"]), *extra])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(_ROOT / ".venv-cuda" / "bin" / "python"))
    parser.add_argument("--runner", help="the program that provides the card; default: python -m brim.emulator")
    parser.add_argument("--only", type=int, action="append", help="run only the case with this number in the table; repeatable")
    parser.add_argument("-o", "--output", type=Path, help="a file for the results, as JSON lines")
    options = parser.parse_args()
    print(f"{'':2}  {'case':78}  {'probe':>5}  {'brute force':>11}  trials  predicted")
    runner = [options.runner] if options.runner else [options.python, "-m", "brim.emulator"]
    equal = total = 0
    for number, spec in enumerate(CASES, 1):
        if options.only and number not in options.only:
            continue
        began = time.monotonic()
        probe = probe_result(spec, runner, options.python)
        brute_force = brute_force_result(spec, runner, options.python, probe.get("largest"))
        total += 1
        is_equal = "largest" in probe and probe["largest"] == brute_force.get("largest")
        equal += is_equal
        difference = "" if is_equal else f"  DIFFERS {probe.get('error', '')} {brute_force.get('error', '')}"
        error = f"{probe['versus']:+.1%}" if "versus" in probe else "-"
        columns = (
            f"{probe.get('largest', '-'):>5}  {brute_force.get('largest', '-'):>11}  {probe.get('trials', '-'):>6}  {error:>9}"
        )
        print(f"{number:2}  {name_of(spec):78}  {columns}{difference}", flush=True)
        if options.output is not None:
            seconds = round(time.monotonic() - began, 1)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": spec, "probe": probe, "brute_force": brute_force, "seconds": seconds}) + "\n")
    print(f"{equal} of {total} results are equal.")
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
