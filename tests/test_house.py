"""The house itself: public names, arrows between rooms, files that must be there, and nothing of this machine in them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import brim

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "brim"

PUBLIC = [
    "Accelerator",
    "Advice",
    "BatchPlan",
    "BatchSizeOptimizer",
    "BrimError",
    "BrimMixin",
    "BrimTrainer",
    "Budget",
    "Candidate",
    "ChildError",
    "ConfigError",
    "Configuration",
    "DataCard",
    "CpuDevice",
    "DataReport",
    "Diagnosis",
    "Device",
    "Emulation",
    "Environment",
    "Estimate",
    "Evaluation",
    "Finding",
    "ForkServer",
    "GPU",
    "GPUChoice",
    "GradientAccumulator",
    "Host",
    "Ledger",
    "LedgerEntry",
    "LedgerHeader",
    "LedgerSummary",
    "LoaderSettings",
    "Machine",
    "Measurement",
    "MissingPackageError",
    "MemoryPrediction",
    "Model",
    "Observation",
    "ModelCard",
    "OutOfMemoryError",
    "Outcome",
    "Plan",
    "Proof",
    "Proven",
    "Reading",
    "Recipe",
    "RecordError",
    "RecordedDevice",
    "RunCard",
    "Recorder",
    "Recording",
    "RunError",
    "Saving",
    "Settings",
    "ShapeCost",
    "ShapePoint",
    "SpeedPrediction",
    "Step",
    "Steps",
    "StitchLLM",
    "StitchedModel",
    "TorchDevice",
    "TrainingResult",
    "Trial",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "Workload",
    "__version__",
    "attach",
    "budget",
    "calculate_gradient_accumulation",
    "check_ledger",
    "count_parameters",
    "demo",
    "detect",
    "doctor",
    "emulate",
    "env",
    "estimate",
    "find_executable_batch_size",
    "find_gpu",
    "find_model",
    "format_bytes",
    "gpus",
    "is_out_of_memory",
    "max",
    "models",
    "observe",
    "out_of_memory_family",
    "parse_size",
    "plan",
    "probe",
    "read_ledger",
    "recommend_batch_size",
    "report",
    "run",
    "run_command",
    "solve",
    "steps",
    "stitch",
    "sweep",
    "train",
    "tune_loader",
    "verify",
    "watch",
]


def test_the_exported_names_are_exactly_these() -> None:
    assert sorted([*brim.__all__, "max"]) == sorted(PUBLIC)
    assert sorted(dir(brim)) == sorted(PUBLIC)


def test_every_exported_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(brim, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = brim.nothing


def test_type_checkers_see_every_exported_name() -> None:
    text = (SOURCE / "__init__.py").read_text()
    seen = set(re.findall(r"(\w+) as \1\b", text))
    assert seen | {"__version__"} == set(PUBLIC)


def test_the_arrows_between_the_rooms_hold() -> None:
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "4 kept, 0 broken" in ended.stdout


def test_every_room_of_the_design_is_there_and_says_what_it_is_for() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == {
        "workload", "machine", "emulator", "memory", "speed", "planner", "prober", "step", "trainer", "proofs", "stitching", "audit", "pictures",
        "locale", "cli", "records",
    }  # fmt: skip
    for room in rooms:
        assert (SOURCE / room / "__init__.py").read_text().startswith('"""')


def test_no_module_is_called_utils() -> None:
    assert not [path for path in SOURCE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "misc", "common"}]


def test_files_stay_small_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines for path in SOURCE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450
    }
    assert not long


def test_the_two_commands_stand_first_in_the_readme() -> None:
    for name in ("README.md", "README.zh-CN.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert -1 < text.find("make demo") < text.find("## ") + 3000
        assert -1 < text.find("make test") < text.find("## ") + 3000


def test_dependencies_have_honest_ranges_and_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _equal, version = line.partition("==")
            assert version, line
            pins[name.lower().replace("_", "-")] = version
    assert pins["torch"] == "2.13.0"
    from packaging.requirements import Requirement

    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "deepspeed", "quant", "dev"}
    for requirement in map(Requirement, [*project["dependencies"], *(text for extra in extras.values() for text in extra)]):
        if requirement.name == "brim":
            assert requirement.extras == {"train"}
            continue
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier


def test_data_files_are_part_of_the_package() -> None:
    for name in ("machine/gpus.toml", "workload/catalogue/decoders.toml", "locale/zh_CN/LC_MESSAGES/brim.mo", "py.typed"):
        assert (SOURCE / name).is_file()


def test_no_pickle_is_loaded_but_between_brims_own_processes() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        # With weights_only=True torch builds tensors and plain values, and runs no code.
        if re.search(r"pickle\.load|torch\.load\((?!.*weights_only=True)", path.read_text())
    }
    assert users == {"machine/budget.py", "machine/child.py", "machine/outcome.py"}
