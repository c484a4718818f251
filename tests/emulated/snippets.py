"""Code that several test files put at the start of their snippets."""

from __future__ import annotations

TINY_TRAINING = """
import json, sys
from pathlib import Path
import brim
from brim.workload.embedded import data_file, write_model

folder = write_model(Path("tiny"))
lines = data_file().read_text(encoding="utf-8").splitlines()
Path("data.jsonl").write_text("\\n".join(lines[:64]) + "\\n", encoding="utf-8")
Path("eval.jsonl").write_text("\\n".join(lines[64:96]) + "\\n", encoding="utf-8")


def train(**options):
    messages = []
    run = brim.train("tiny", data="data.jsonl", effective_batch=32, say=messages.append, **options)
    card = brim.RunCard.read(Path(run.folder) / "run.json")
    return {"finished": run.finished, "kept": run.promise_kept, "steps": run.steps, "attention": card.settings.attention,
            "precision": card.settings.precision, "peak": run.peak_bytes, "predicted": run.predicted_reserved_bytes,
            "device": card.device, "folder": run.folder, "probed": card.probed, "messages": messages}
"""
"""Writes the embedded model to `tiny` and its data to `data.jsonl` and `eval.jsonl`. `train` trains it and returns a summary of the run."""

RUN_BRIM = """
import json, subprocess, sys, time
from pathlib import Path


def run_brim(*words):
    done = subprocess.run([sys.executable, "-m", "brim", *map(str, words)], capture_output=True, text=True)
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
"""
"""`run_brim` runs a command of brim and returns its exit code and output."""
