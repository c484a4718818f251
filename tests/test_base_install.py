"""The base installation: what works without the packages of `brim[train]`, and what everything else says.

Most tests run a child Python in which those packages cannot be imported. One slow test builds the wheel and installs it for real.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

import brim
from brim import extras
from brim.cli._verbs import VERBS
from brim.errors import BrimError, MissingPackageError, UsageError
from tests.audit.config.parts import LLAMA_FACTORY
from tests.audit.run.ledgers import HEADER, step_of, write
from tests.conftest import Cli
from tests.pictures import made

ROOT = Path(__file__).parents[1]
HEAVY = (*extras.TRAIN, "datasets", "pandas", "bitsandbytes", "deepspeed", "trl", "babel")
HEAVY_VERBS = ("demo", "estimate", "max", "plan", "probe", "stitch", "train", "verify")
HEAVY_NAMES = {
    "BatchPlan", "BatchSizeOptimizer", "BrimMixin", "BrimTrainer", "Budget", "GradientAccumulator", "ShapeCost", "Step", "Steps",
    "StitchLLM", "StitchedModel", "attach", "budget", "calculate_gradient_accumulation", "demo", "estimate", "find_executable_batch_size",
    "max", "plan", "probe", "recommend_batch_size", "solve", "steps", "stitch", "sweep", "train", "tune_loader", "verify",
}  # fmt: skip
ONE_LINE = re.compile(r"brim: `brim \w+` needs torch, which is not installed\. Install it with: pip install 'brim\[train\]'\n")
BLOCK = """
import contextlib, io, json, sys

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked)

def call(arguments):
    from brim.cli import main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return [code, out.getvalue(), err.getvalue()]
"""
LOOP = """\
from torch.utils.data import DataLoader
from config import Config


def main(dataset):
    config = Config()
    loader = DataLoader(dataset, batch_size=16)
    print(config.batch_size)
"""
CONFIG = """\
from dataclasses import dataclass


@dataclass
class Config:
    batch_size: int = 64
"""


def base(program: str, folder: Path, blocked: tuple[str, ...] = HEAVY) -> Any:
    """What a program prints as JSON where those packages cannot be imported."""
    ended = subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=blocked) + program], cwd=folder, capture_output=True, text=True, check=False,
        timeout=120, env={**os.environ, "BRIM_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def called(folder: Path, *commands: list[str], blocked: tuple[str, ...] = HEAVY) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each command, all in one child."""
    answers = base(f"print(json.dumps([call(each) for each in {commands!r}]))", folder, blocked)
    return [(code, out, err) for code, out, err in answers]


def project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(LOOP, encoding="utf-8")
    (folder / "config.py").write_text(CONFIG, encoding="utf-8")
    return folder


def test_the_list_of_packages_is_that_of_pyproject() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=]", text)[0] for text in found["optional-dependencies"]["train"]}
    assert names == set(extras.TRAIN)
    declared = {re.split(r"[<>=]", text)[0] for text in found["dependencies"]}
    assert not declared & set(HEAVY)


def test_only_declared_packages_are_imported() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [
        *found["dependencies"],
        *(text for name in ("train", "quant", "deepspeed") for text in found["optional-dependencies"][name]),
    ]
    declared = {re.split(r"[<>=\[]", text)[0].lower() for text in texts} | {"pynvml", "yaml", "pydantic_core", "flash_attn"}
    imported = {name for path in (ROOT / "src" / "brim").rglob("*.py") for name in _imported(path)}
    assert not {name.lower() for name in imported - sys.stdlib_module_names} - declared - {"brim", "brim_card"}


def test_every_module_of_the_base_is_imported_and_every_other_name_says_what_it_needs(tmp_path: Path) -> None:
    program = """
import brim
found = {}
for name in dir(brim):
    try:
        getattr(brim, name)
    except ImportError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found[name] = [str(error), error.name, "BrimError" in kinds]
print(json.dumps(found))
"""
    found = base(program, tmp_path)
    assert set(found) == HEAVY_NAMES
    for name, told in found.items():
        text = f"brim.{name} needs torch, which is not installed. Install it with: pip install 'brim[train]'"
        assert told == [text, "torch", True]


def test_the_error_is_an_import_error_and_one_of_ours() -> None:
    error = extras.missing_package("brim.plan", "torch")
    assert isinstance(error, MissingPackageError)
    assert isinstance(error, ImportError)
    assert isinstance(error, BrimError)
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert str(error) == error.msg == error.message
    assert brim.MissingPackageError is MissingPackageError


@pytest.mark.parametrize("blocked", [HEAVY, ("torch",)], ids=["base", "without torch"])
def test_a_verb_that_needs_more_says_so_in_one_line(tmp_path: Path, blocked: tuple[str, ...]) -> None:
    commands = [
        ["demo"],
        ["stitch", "recipe.yaml", "-o", "out"],
        *([verb, "tinyllama"] for verb in HEAVY_VERBS if verb not in {"demo", "stitch"}),
    ]
    assert {each[0] for each in commands} == {name for name, verb in VERBS.items() if verb.needs_train} == set(HEAVY_VERBS)
    for code, out, err in called(tmp_path, *commands, blocked=blocked):
        assert (code, out) == (2, "")
        assert ONE_LINE.fullmatch(err)
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "nothing is written"


def test_a_package_that_is_only_missed_later_is_one_line_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_arrow(*_arguments: object, **_options: object) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")

    monkeypatch.setattr("brim.machine.catalogue.gpus", without_arrow)
    assert cli("gpus").code == 1, "an installed package that lacks a module is a defect"
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "pyarrow")
    ended = cli("gpus")
    assert ended.code == 2
    assert ended.err == "brim: `brim gpus` needs pyarrow, which is not installed. Install it with: pip install 'brim[train]'\n"


def test_help_of_every_verb_is_there(tmp_path: Path) -> None:
    for code, out, err in called(tmp_path, ["--help"], *([verb, "--help"] for verb in VERBS)):
        assert (code, err) == (0, "")
        assert out.startswith("Usage: brim ")


def test_catalogues_and_the_first_screen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
    (tmp_path / "odd.json").write_text(json.dumps({**_LLAMA, "model_type": "brim_stitched"}), encoding="utf-8")
    commands = [[], ["env"], ["gpus"], ["gpus", "t4", "--json"], ["models"], ["models", "tinyllama"], ["models", "config.json"]]
    answers = called(tmp_path, *commands)
    assert [code for code, _out, _err in answers] == [0] * len(commands)
    assert "pip install 'brim[train]'" in answers[0][1]
    assert "pip install 'brim[train]'" in answers[1][1]
    assert "child process" not in answers[1][1]
    misspelt, from_hub, odd = called(tmp_path, ["models", "tinylama"], ["models", "nobody/nothing"], ["models", "odd.json"])
    assert misspelt[0] == from_hub[0] == odd[0] == 2
    assert "Nearest: tinyllama" in misspelt[2]
    assert "from the Hub needs huggingface_hub, which is not installed" in from_hub[2]
    assert "A stitched model needs torch" in odd[2]


def test_the_doctor_reads_code_and_says_that_memory_is_not_predicted(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    (tmp_path / "trained.yaml").write_text(LLAMA_FACTORY, encoding="utf-8")
    code, config = called(tmp_path, ["doctor", str(folder), "--json"], ["doctor", "trained.yaml", "--gpu", "t4", "--json"])
    assert code[0] == 1
    assert json.loads(code[1])["findings"]
    assert not json.loads(code[1])["notes"]
    notes = json.loads(config[1])["notes"]
    assert notes == ["Memory is not predicted by the base installation. For predictions: pip install 'brim[train]'"]


def test_the_doctor_compares_a_run_with_its_promise_and_judges_no_figures(tmp_path: Path) -> None:
    entries = [step_of(number, **({"loss": math.nan} if number > 30 else {})) for number in range(1, 41)]
    entries[20] = dataclasses.replace(entries[20], sequences=7)
    write(tmp_path / "ledger.jsonl", entries, HEADER)
    full = json.loads(_in_this_process(tmp_path))
    [[code, out, _err]] = called(tmp_path, ["doctor", "ledger.jsonl", "--json"])
    light = json.loads(out)
    assert code == 1
    promises = [each for each in full["findings"] if each["rule"] == "run-promise-broken"]
    assert promises
    assert light["findings"] == promises != full["findings"]
    assert "ledger.jsonl: Speed, memory, loss and noise are not judged by the base installation." in light["notes"][-1]
    program = """
import brim
print(json.dumps(brim.check_ledger(brim.read_ledger("ledger.jsonl"))))
"""
    assert base(program, tmp_path) == brim.check_ledger(brim.read_ledger(tmp_path / "ledger.jsonl"))


def test_reports_are_drawn_from_every_record(tmp_path: Path) -> None:
    made.run(tmp_path / "run", steps=30)
    made.plan().write(tmp_path / "plan.json")
    made.probe().write(tmp_path / "probe.json")
    answers = called(
        tmp_path, ["report", "run"], ["report", "plan.json"], ["report", "probe.json"], ["watch", "run"], ["doctor", "run"]
    )
    assert [code for code, _out, _err in answers] == [0] * len(answers)
    for name in ("run/report.html", "plan.html", "probe.html"):
        assert "</html>" in (tmp_path / name).read_text(encoding="utf-8")


def test_a_script_is_observed_by_its_own_interpreter(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT, encoding="utf-8")
    [[code, out, _err]] = called(tmp_path, ["observe", "--json", "--", sys.executable, "train.py"])
    assert code == 0
    assert json.loads(out)["steps"] == 8


def test_emulate_asks_the_interpreter_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    [[code, _out, err]] = called(tmp_path, ["emulate", "--gpu", "t4", "--", python, "train.py"])
    assert code == 2
    assert "has no PyTorch" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_installs_in_seconds_and_stays_small(tmp_path: Path) -> None:
    """Sizes, every base verb, and `uvx --from WHEEL brim doctor .` from an empty environment."""
    wheel = _wheel(tmp_path)
    venv.create(tmp_path / "base", with_pip=True)
    python = tmp_path / "base" / "bin" / "python"
    site = next((tmp_path / "base" / "lib").glob("python*/site-packages"))
    before = _bytes_below(site)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--dest", tmp_path / "downloads", wheel], check=True, timeout=300)
    subprocess.run([*pip, "install", "--no-index", "--find-links", tmp_path / "downloads", wheel], check=True, timeout=300)
    downloaded, installed = _bytes_below(tmp_path / "downloads"), _bytes_below(site) - before
    print(f"base installation: {downloaded / 1e6:.1f} MB of downloads, {installed / 1e6:.1f} MB installed")
    assert downloaded <= 20e6
    assert installed <= 60e6
    absent = [name for name in HEAVY if list(site.glob(f"{name}/__init__.py"))]
    assert not absent

    folder = project(tmp_path / "project")
    made.run(tmp_path / "run", steps=30)
    first = []
    for _time in range(3):
        began = time.monotonic()
        ended = _run([python.with_name("brim"), "doctor", "."], folder)
        first.append(time.monotonic() - began)
        assert (ended.returncode, "Findings: 1" in ended.stdout) == (1, True), ended.stderr
    print(f"first finding: {statistics.median(first):.2f} s (median of 3)")
    assert statistics.median(first) <= 5.0
    for arguments in (
        [],
        ["--help"],
        ["env"],
        ["gpus"],
        ["models"],
        ["doctor", "../run"],
        ["report", "../run"],
        ["watch", "../run"],
    ):
        ended = _run([python.with_name("brim"), *arguments], folder)
        assert ended.returncode == 0, ended.stderr
    ended = _run([python.with_name("brim"), "plan", "tinyllama"], folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ONE_LINE.fullmatch(ended.stderr)
    ended = _run([python, "-c", "import brim; brim.plan"], folder)
    assert "brim.plan needs torch" in ended.stderr

    began = time.monotonic()
    ended = _run([*_uvx(tmp_path), "--from", wheel, "brim", "doctor", "."], folder)
    print(f"uvx with an empty cache: {time.monotonic() - began:.1f} s")
    assert (ended.returncode, "Findings: 1" in ended.stdout) == (1, True), ended.stderr


def _wheel(folder: Path) -> Path:
    ended = _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheel", ROOT], folder)
    if ended.returncode:
        pytest.skip(f"The wheel could not be built, which takes hatchling from a package index: {ended.stderr[-300:]}")
    [wheel] = (folder / "wheel").glob("*.whl")
    return wheel


def _uvx(folder: Path) -> list[str | Path]:
    """uvx with a cache of its own, from an environment that holds nothing else."""
    if shutil.which("uvx"):
        return ["uvx", "--cache-dir", folder / "uv-cache"]
    venv.create(folder / "uv", with_pip=True)
    ended = _run([folder / "uv" / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"], folder)
    if ended.returncode:
        pytest.skip(f"uv could not be installed from a package index: {ended.stderr[-300:]}")
    return [folder / "uv" / "bin" / "uvx", "--cache-dir", folder / "uv-cache"]


def _run(command: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user runs it: without the paths by which the tests find the sources."""
    own = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=300
    )


def _bytes_below(folder: Path) -> int:
    """As `du` counts them: whole blocks."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    whole = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    parts = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in whole | parts}


def _in_this_process(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return brim.doctor("ledger.jsonl").to_json()


_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000, "num_hidden_layers": 4, "intermediate_size": 256,
}  # fmt: skip
_SCRIPT = """\
import torch

data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(2, (32,)))
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in torch.utils.data.DataLoader(data, batch_size=4):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
