"""How long `brim plan` takes for 1,024 GPUs: each question in a fresh process, first with an empty cache folder, then again.

    python benchmarks/plan_scale.py

The promise is 15 s cold on two modest cores. What counts is a machine that does nothing else: the load beside it is printed too, and the
processors' own seconds, which a busy machine changes least.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

QUESTIONS = {
    "8B, full": ["llama-3.1-8b", "--gpu", "h100", "--effective-batch", "1024", "--link", "infiniband-ndr*8"],
    "8B, full, default link": ["llama-3.1-8b", "--gpu", "h100", "--effective-batch", "4096"],
    "8B, LoRA": [
        "llama-3.1-8b",
        "--gpu",
        "a100-80gb",
        "--method",
        "lora",
        "--effective-batch",
        "2048",
        "--link",
        "infiniband-hdr*8",
    ],
    "0.5B, full": ["qwen2.5-0.5b", "--gpu", "a100-80gb", "--effective-batch", "1024", "--link", "infiniband-hdr*8"],
}
GPUS = ["--gpus", "8", "--nodes", "128", "--json"]


def ask(words: list[str], cache: str) -> dict[str, float]:
    """One question in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "brim", "plan", *words, *GPUS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "BRIM_CACHE": cache, "HF_HUB_OFFLINE": "1"},
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    points = json.loads(ended.stdout)["scaling"]["points"]
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2), "points": len(points)}


def main() -> None:
    """Print a line each, and all of it as JSON."""
    found = {}
    for name, words in QUESTIONS.items():
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = ask(words, cache), ask(words, cache)
        found[name] = {"cold": cold, "warm": warm, "load": round(os.getloadavg()[0], 1)}
        print(
            f"{name:<24} cold {cold['seconds']:6.2f} s ({cold['processor_seconds']:.1f} s of processors), "
            f"warm {warm['seconds']:5.2f} s, load {found[name]['load']}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
