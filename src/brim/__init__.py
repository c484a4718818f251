"""brim: fine-tune language models at the largest batch your hardware can hold.

The optimizer step is a promise: a function of the data, the seed and the recipe. Memory only decides how the step is sliced.

Every public name is here and is imported when it is first used, so that `import brim` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from brim.version import __version__ as __version__

if TYPE_CHECKING:
    from brim.audit.doctor import doctor as doctor
    from brim.audit.observe import observe as observe
    from brim.cli.demo import demo as demo
    from brim.cli.report import report as report
    from brim.cli.watch import watch as watch
    from brim.emulator.run import emulate as emulate
    from brim.errors import (
        BrimError as BrimError,
        ChildError as ChildError,
        ConfigError as ConfigError,
        MissingPackageError as MissingPackageError,
        OutOfMemoryError as OutOfMemoryError,
        RecordError as RecordError,
        RunError as RunError,
        UnknownNameError as UnknownNameError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
        is_out_of_memory as is_out_of_memory,
        out_of_memory_family as out_of_memory_family,
    )
    from brim.machine.budget import ForkServer as ForkServer, run as run, run_command as run_command
    from brim.machine.catalogue import GPUChoice as GPUChoice, find_gpu as find_gpu, gpus as gpus
    from brim.machine.detect import detect as detect
    from brim.machine.device import (
        CpuDevice as CpuDevice,
        Device as Device,
        Reading as Reading,
        TorchDevice as TorchDevice,
    )
    from brim.machine.environment import Environment as Environment, env as env
    from brim.machine.outcome import Outcome as Outcome
    from brim.machine.recorded import RecordedDevice as RecordedDevice, Recorder as Recorder, Recording as Recording
    from brim.machine.records import GPU as GPU, Accelerator as Accelerator, Host as Host, Machine as Machine
    from brim.memory.estimate import estimate as estimate
    from brim.planner.budget import budget as budget
    from brim.planner.largest import max as max  # noqa: A004 (the verb's name)
    from brim.planner.plan import plan as plan
    from brim.planner.recommend import recommend_batch_size as recommend_batch_size
    from brim.planner.solve import solve as solve
    from brim.planner.sweep import sweep as sweep
    from brim.prober.executable import find_executable_batch_size as find_executable_batch_size
    from brim.prober.loader import tune_loader as tune_loader
    from brim.prober.optimizer import BatchSizeOptimizer as BatchSizeOptimizer
    from brim.prober.probe import probe as probe
    from brim.proofs.verify import verify as verify
    from brim.records import (
        Advice as Advice,
        Candidate as Candidate,
        DataCard as DataCard,
        DataReport as DataReport,
        Diagnosis as Diagnosis,
        Emulation as Emulation,
        Estimate as Estimate,
        Evaluation as Evaluation,
        Finding as Finding,
        Ledger as Ledger,
        LedgerEntry as LedgerEntry,
        LedgerHeader as LedgerHeader,
        LedgerSummary as LedgerSummary,
        LoaderSettings as LoaderSettings,
        Measurement as Measurement,
        MemoryPrediction as MemoryPrediction,
        Observation as Observation,
        Plan as Plan,
        Proof as Proof,
        Proven as Proven,
        RunCard as RunCard,
        Saving as Saving,
        ShapePoint as ShapePoint,
        SpeedPrediction as SpeedPrediction,
        TrainingResult as TrainingResult,
        Trial as Trial,
        Verification as Verification,
    )
    from brim.sizes import format_bytes as format_bytes, parse_size as parse_size
    from brim.step.accumulate import GradientAccumulator as GradientAccumulator
    from brim.step.accumulation import calculate_gradient_accumulation as calculate_gradient_accumulation
    from brim.step.batch import BatchPlan as BatchPlan
    from brim.step.budget import Budget as Budget, ShapeCost as ShapeCost
    from brim.step.checker import check_ledger as check_ledger
    from brim.step.ledger import read_ledger as read_ledger
    from brim.step.loop import Step as Step, Steps as Steps, steps as steps
    from brim.stitching.assembling import stitch as stitch
    from brim.stitching.front import StitchLLM as StitchLLM
    from brim.stitching.model import StitchedModel as StitchedModel
    from brim.stitching.recipe import Recipe as Recipe
    from brim.trainer.hf import BrimMixin as BrimMixin, BrimTrainer as BrimTrainer, attach as attach
    from brim.trainer.train import train as train
    from brim.workload.cards import ModelCard as ModelCard
    from brim.workload.parameters import count_parameters as count_parameters
    from brim.workload.records import Configuration as Configuration, Workload as Workload
    from brim.workload.resolve import Model as Model, find_model as find_model, models as models
    from brim.workload.settings import Settings as Settings


_HOMES = {
    "brim.audit.doctor": ("doctor",),
    "brim.audit.observe": ("observe",),
    "brim.cli.demo": ("demo",),
    "brim.cli.report": ("report",),
    "brim.cli.watch": ("watch",),
    "brim.emulator.run": ("emulate",),
    "brim.errors": (
        "BrimError", "ChildError", "ConfigError", "MissingPackageError", "OutOfMemoryError", "RecordError", "RunError",
        "UnknownNameError", "UnsupportedError", "UsageError", "is_out_of_memory", "out_of_memory_family",
    ),
    "brim.machine.budget": ("ForkServer", "run", "run_command"),
    "brim.machine.catalogue": ("GPUChoice", "find_gpu", "gpus"),
    "brim.machine.detect": ("detect",),
    "brim.machine.device": ("CpuDevice", "Device", "Reading", "TorchDevice"),
    "brim.machine.environment": ("Environment", "env"),
    "brim.machine.outcome": ("Outcome",),
    "brim.machine.recorded": ("RecordedDevice", "Recorder", "Recording"),
    "brim.machine.records": ("GPU", "Accelerator", "Host", "Machine"),
    "brim.memory.estimate": ("estimate",),
    "brim.step.accumulation": ("calculate_gradient_accumulation",),
    "brim.planner.budget": ("budget",),
    "brim.planner.largest": ("max",),
    "brim.planner.plan": ("plan",),
    "brim.planner.recommend": ("recommend_batch_size",),
    "brim.planner.solve": ("solve",),
    "brim.planner.sweep": ("sweep",),
    "brim.prober.executable": ("find_executable_batch_size",),
    "brim.prober.loader": ("tune_loader",),
    "brim.prober.optimizer": ("BatchSizeOptimizer",),
    "brim.prober.probe": ("probe",),
    "brim.proofs.verify": ("verify",),
    "brim.records": (
        "Advice", "Candidate", "DataCard", "DataReport", "Diagnosis", "Emulation", "Estimate", "Evaluation", "Finding", "Ledger",
        "LedgerEntry", "LedgerHeader", "LedgerSummary", "LoaderSettings", "Measurement", "MemoryPrediction", "Observation", "Plan", "Proof",
        "Proven", "RunCard", "Saving", "ShapePoint", "SpeedPrediction", "TrainingResult", "Trial", "Verification",
    ),
    "brim.sizes": ("format_bytes", "parse_size"),
    "brim.step.accumulate": ("GradientAccumulator",),
    "brim.step.batch": ("BatchPlan",),
    "brim.step.budget": ("Budget", "ShapeCost"),
    "brim.step.checker": ("check_ledger",),
    "brim.step.ledger": ("read_ledger",),
    "brim.step.loop": ("Step", "Steps", "steps"),
    "brim.stitching.assembling": ("stitch",),
    "brim.stitching.front": ("StitchLLM",),
    "brim.stitching.model": ("StitchedModel",),
    "brim.stitching.recipe": ("Recipe",),
    "brim.trainer.hf": ("BrimMixin", "BrimTrainer", "attach"),
    "brim.trainer.train": ("train",),
    "brim.workload.cards": ("ModelCard",),
    "brim.workload.parameters": ("count_parameters",),
    "brim.workload.records": ("Configuration", "Workload"),
    "brim.workload.resolve": ("Model", "find_model", "models"),
    "brim.workload.settings": ("Settings",),
}  # fmt: skip
_NEED_TRAIN = (
    "brim.cli.demo", "brim.memory.", "brim.planner.", "brim.prober.", "brim.proofs.", "brim.step.", "brim.stitching.", "brim.trainer.",
)  # fmt: skip
"""Beginnings of the homes that need the packages of `brim[train]`; those of `_BASE` do not."""
_BASE = ("brim.step.checker", "brim.step.ledger", "brim.stitching.recipe")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_PUBLIC = sorted([*_HOME_OF, "__version__"])
# `from brim import *` must not replace Python's own `max`.
__all__ = [name for name in _PUBLIC if name != "max"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    if home.startswith(_NEED_TRAIN) and home not in _BASE:
        from brim.extras import require_train

        require_train(f"brim.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return _PUBLIC
