"""The command line's verbs and flags are a promise: this list changes only on purpose."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import click

from brim.cli._click import MESSAGES
from brim.cli._command import Brim
from brim.cli._verbs import GROUPS, VERBS

SURFACE = {
    "brim": ["--help", "--lang", "--version", "-h"],
    "demo": ["--config", "--help", "--json", "--lang", "--output", "-h", "-o"],
    "env": ["--config", "--help", "--json", "--lang", "-h"],
    "estimate": [
        "--accumulation", "--attention", "--base-dtype", "--check", "--checkpointing", "--config", "--device", "--eval-batch", "--freeze",
        "--gpu", "--gpus", "--grad-accum", "--gradient-as-bucket-view", "--help", "--json", "--lang", "--lora-alpha", "--lora-dropout",
        "--lora-dtype", "--lora-rank", "--lora-targets", "--loss", "--max-grad-norm", "--max-length", "--memory", "--method",
        "--micro-batch", "--nodes", "--offload", "--optimizer", "--padded", "--precision", "--seq-len", "--sharding", "--target-len",
        "--task", "--timeline", "--trust-remote-code", "--unpadded", "-h", "model",
    ],
    "emulate": [
        "--allow-writes", "--compute", "--config", "--full", "--gpu", "--help", "--json", "--lang", "--longest", "--memory", "--output",
        "--python", "--steps", "-h", "-o", "words",
    ],
    "gpus": ["--bf16", "--config", "--help", "--json", "--lang", "--min-memory", "--vendor", "-h", "name"],
    "max": [
        "--accumulation", "--attention", "--base-dtype", "--batch-size", "--checkpointing", "--columns", "--config", "--data", "--device",
        "--effective-batch", "--eval-batch", "--freeze", "--gpu", "--gpus", "--grad-accum", "--gradient-as-bucket-view", "--help",
        "--json", "--lang", "--lora-alpha", "--lora-dropout", "--lora-dtype", "--lora-rank", "--lora-targets", "--loss", "--margin",
        "--max-grad-norm", "--max-length", "--memory", "--method", "--nodes", "--offload", "--optimizer", "--padded", "--precision",
        "--probe", "--seq-len", "--sharding", "--target-len", "--task", "--tokenizer", "--trust-remote-code", "--unpadded", "-h", "model",
    ],
    "plan": [
        "--accumulation", "--apply", "--attention", "--base-dtype", "--batch-size", "--checkpointing", "--columns", "--config", "--data", "--device",
        "--drop-last", "--effective-batch", "--emit", "--epochs", "--eval-batch", "--freeze", "--from-batch", "--gpu", "--gpus",
        "--grad-accum", "--gradient-as-bucket-view", "--help", "--host-cores", "--host-memory", "--json", "--lang", "--learning-rate",
        "--link", "--lora-alpha", "--lora-dropout", "--lora-dtype", "--lora-rank", "--lora-targets", "--loss", "--lr", "--margin",
        "--max-grad-norm", "--max-length", "--memory", "--method", "--micro-batch", "--nodes", "--noise-scale", "--offload",
        "--optimizer", "--output", "--padded", "--precision", "--price", "--probe", "--samples", "--seq-len", "--sharding", "--solve",
        "--sweep", "--target-len", "--task", "--tokenizer", "--trust-remote-code", "--unpadded", "--vary", "--warmup-steps", "-h", "-o",
        "model",
    ],
    "probe": [
        "--accumulation", "--attention", "--base-dtype", "--batch-size", "--checkpointing", "--columns", "--config", "--data", "--device",
        "--effective-batch", "--eval-batch", "--freeze", "--fresh", "--gpu-index", "--gpus", "--grad-accum", "--gradient-as-bucket-view",
        "--help", "--json", "--lang", "--lora-alpha", "--lora-dropout", "--lora-dtype", "--lora-rank", "--lora-targets", "--loss",
        "--margin", "--max-grad-norm", "--max-length", "--max-trials", "--memory", "--method", "--micro-batch", "--nodes", "--objective",
        "--offload", "--optimizer", "--output", "--padded", "--precision", "--seq-len", "--sharding", "--target-len", "--task",
        "--time-limit", "--tokenizer", "--trust-remote-code", "--unpadded", "-h", "-o", "model",
    ],
    "verify": [
        "--attention", "--config", "--full", "--help", "--json", "--lang", "--max-length", "--output", "--precision", "--proofs", "--run",
        "--seed", "--seq-len", "--shrunk", "--task", "--trust-remote-code", "-h", "-o", "models",
    ],
    "stitch": [
        "--as-family", "--config", "--device", "--dry-run", "--force", "--gpu", "--help", "--json", "--lang", "--max-length", "--memory",
        "--micro-batch", "--no-verify", "--output", "--seq-len", "--verify", "-h", "-o", "recipe",
    ],
    "doctor": [
        "--all", "--baseline", "--config", "--diff", "--explain", "--fail-on", "--fix", "--format", "--gpu", "--gpus", "--help",
        "--ignore", "--json", "--lang", "--max-length", "--model", "--no-predict", "--only", "--output", "--predict", "--rules",
        "--select", "--seq-len", "--unsafe", "--verbose", "--write-baseline", "--yes", "-h", "-o", "targets",
    ],
    "train": [
        "--accumulation", "--adam-beta1", "--adam-beta2", "--adam-epsilon", "--attention", "--base-dtype", "--batch-size",
        "--checkpointing", "--columns", "--config", "--data", "--device", "--dry-run", "--effective-batch", "--epochs", "--eval-batch",
        "--eval-data", "--eval-split", "--eval-steps", "--eval-strategy", "--freeze", "--from-scratch", "--gpu-index", "--gpus",
        "--grad-accum", "--gradient-as-bucket-view", "--help", "--json", "--keep", "--lang", "--launch", "--learning-rate",
        "--logging-steps", "--lora-alpha", "--lora-dropout", "--lora-dtype", "--lora-rank", "--lora-targets", "--loss", "--loss-on",
        "--lr", "--margin", "--max-bad", "--max-grad-norm", "--max-length", "--max-steps", "--memory", "--method", "--micro-batch",
        "--no-probe", "--no-verify", "--node-rank", "--nodes", "--offload", "--optimizer", "--output", "--padded", "--plan",
        "--precision", "--probe", "--rendezvous", "--rendezvous-secret-file", "--report-to", "--resume", "--run-name", "--save-steps",
        "--schedule", "--seed",
        "--seq-len", "--sharding", "--speeds", "--target-len", "--task", "--tokenizer", "--trust-remote-code", "--unpadded", "--warmup",
        "--warmup-ratio", "--weight-decay", "--workers", "-h", "-o", "model",
    ],
    "watch": ["--config", "--every-steps", "--help", "--interval", "--json", "--lang", "--once", "--wait", "-h", "run"],
    "report": ["--config", "--help", "--json", "--lang", "--open", "--output", "-h", "-o", "path"],
    "observe": [
        "--batch-size", "--config", "--effective-batch", "--help", "--json", "--lang", "--no-source", "--output", "-h", "-o", "words",
    ],
    "models": ["--config", "--help", "--json", "--lang", "--search", "--task", "--trust-remote-code", "-h", "name"],
}  # fmt: skip
DESIGNED = {
    "estimate", "plan", "probe", "verify", "train", "doctor", "emulate", "observe", "stitch", "watch", "report", "demo", "env", "gpus", "max", "models",
}  # fmt: skip


def _flags(command: click.Command) -> list[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    return sorted(flag for parameter in command.get_params(context) for flag in parameter.opts + parameter.secondary_opts)


def test_verbs_and_flags_are_exactly_these() -> None:
    found = {"brim": _flags(Brim())}
    for verb in VERBS.values():
        found[verb.name] = _flags(importlib.import_module(verb.module).command)
    assert found == SURFACE


def test_every_designed_verb_has_its_place_in_the_help() -> None:
    assert set(VERBS) == DESIGNED
    assert len(GROUPS) == 5


def test_no_verb_hides_a_room() -> None:
    import brim

    rooms = {
        "machine",
        "memory",
        "speed",
        "planner",
        "prober",
        "step",
        "trainer",
        "proofs",
        "stitching",
        "audit",
        "pictures",
        "locale",
    }
    assert not rooms & DESIGNED
    assert callable(brim.gpus)
    assert callable(brim.models)
    assert callable(brim.env)


def test_help_imports_nothing_heavy() -> None:
    """`brim --help` answers in under 0.2 s because it imports none of these; benchmarks/startup.py has the time."""
    heavy = [
        "torch",
        "transformers",
        "numpy",
        "pydantic",
        "rich",
        "huggingface_hub",
        "datasets",
        "psutil",
        "yaml",
        "jinja2",
        "pynvml",
    ]
    for arguments in (["--help"], ["--version"], ["gpus", "--help"], ["models", "--help"], ["env", "--help"], ["demo", "--help"]):
        program = (
            f"import sys, json; from brim.cli import main; code = main({arguments!r});"
            f"print(json.dumps([code, [m for m in {heavy!r} if m in sys.modules]]), file=sys.stderr)"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert json.loads(ended.stderr) == [0, []], arguments


def test_catalogues_answer_without_torch() -> None:
    program = (
        "import sys; from brim.cli import main;"
        "codes = [main(['gpus', '--json']), main(['models', '--json']), main(['gpus', 't4']), main(['models', 'tinyllama'])];"
        "print(codes, 'torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "[0, 0, 0, 0] False False"


def test_importing_brim_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import brim; print(sorted(m for m in set(sys.modules) - before if m.startswith('brim')))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "['brim', 'brim.version']"


def test_the_sentences_listed_as_clicks_are_clicks() -> None:
    import ast
    from pathlib import Path

    known = set()
    for file in Path(click.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"_", "ngettext"}:
                known |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    assert set(MESSAGES) <= known
