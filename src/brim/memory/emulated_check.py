"""`brim estimate --check`: train the same configuration for three steps on an emulated card, with plain torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.emulator.build import compiled, torch_build
from brim.emulator.card import check_capability, emulated_card, environment, session
from brim.errors import RunError, UnsupportedError
from brim.locale import _
from brim.records.predictions import EmulatedCheck
from brim.workload.resolve import Model
from brim.workload.settings import Settings

if TYPE_CHECKING:
    from brim.memory.estimate import Question
    from brim.records import Estimate

_TRAINING: Final = Path(str(files("brim.emulator").joinpath("training.py")))
"""The training is a separate program, so that the measured process does not import brim."""
_UNLIMITED: Final = 1 << 40
"""Memory of the card. The check compares peaks; the estimate decides whether they fit."""
_MEASURED: Final = frozenset(
    {
        "task", "method", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "micro_batch", "seq_len", "accumulation", "precision",
        "optimizer", "checkpointing", "attention", "padded", "max_grad_norm",
    }
)  # fmt: skip
"""Settings that the reference training supports; all others must have their default values."""


def check_emulated(question: Question, answer: Estimate, *, python: str | None = None) -> EmulatedCheck:
    """Train the configuration of an estimate on an emulated card and return the peaks that torch reports.

    `python` is an interpreter with the CUDA build of torch: by default BRIM_EMULATOR_PYTHON, else this one.
    """
    case = _case_of(question, answer.settings)
    torch = torch_build(python or os.environ.get("BRIM_EMULATOR_PYTHON") or sys.executable)
    card = emulated_card(question.where.gpu.name if question.where.gpu is not None else "", memory_bytes=_UNLIMITED)
    check_capability(card, torch)
    libraries = compiled(torch)
    began = time.monotonic()
    request = json.dumps({"case": case, "config": dict(question.config)})
    with session() as shared:
        done = subprocess.run(
            [str(torch.python), str(_TRAINING)],
            input=request + "\n",
            env=environment(card, libraries, shared),
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.strip().splitlines()
    measured: dict[str, Any] = (
        json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-400:] or f"exit code {done.returncode}"}
    )
    if "error" in measured:
        raise RunError(_("The emulated training failed: {error}").format(error=measured["error"]))
    return EmulatedCheck(
        peak_allocated_bytes=measured["allocated"],
        peak_reserved_bytes=measured["reserved"],
        torch_version=measured["torch"],
        seconds=time.monotonic() - began,
    )


def _case_of(question: Question, settings: Settings) -> dict[str, Any]:
    gpu = question.where.gpu
    if gpu is None or gpu.backend != "cuda":
        raise UnsupportedError(_("--check needs an NVIDIA card: --gpu t4."))
    if not isinstance(question.model, Model) or question.config is None:
        raise UnsupportedError(_("--check needs a model with a config.json."))
    changed = [
        field.name
        for field in fields(Settings)
        if field.name not in _MEASURED and getattr(question.given, field.name) != field.default
    ]
    if changed:
        text = _("--check does not cover {options}.")
        raise UnsupportedError(text.format(options=", ".join("--" + name.replace("_", "-") for name in changed)))
    if settings.ranks > 1:
        raise UnsupportedError(_("--check covers one GPU; this estimate is for {count}.").format(count=settings.ranks))
    if gpu.sm is None:
        raise UnsupportedError(_("--check needs a card of the catalogue: --gpu t4."), hint=_("`brim gpus` lists the catalogue."))
    if settings.optimizer == "lion":
        raise UnsupportedError(_("--check does not cover {options}.").format(options="--optimizer lion"))
    if settings.attention not in {"sdpa", "eager"} or settings.checkpointing not in {"none", "full"}:
        text = _("--check covers attention sdpa and eager, and checkpointing none and full.")
        raise UnsupportedError(text)
    case = {name: getattr(settings, name) for name in sorted(_MEASURED)}
    return {**case, "lora_targets": list(settings.lora_targets), "model": question.name, "gpu": gpu.name}
