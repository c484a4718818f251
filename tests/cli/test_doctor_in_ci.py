"""`brim doctor` where engineers use it: pre-commit, GitHub Actions, and files in CI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cli.test_doctor import CLEAN, CONFIG, TRAIN

if TYPE_CHECKING:
    from tests.conftest import Cli

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".github" / "actions" / "doctor" / "run.sh"
BLOCKS = re.findall(r"```yaml\n# (\S+)\n(.*?)```", (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a batch size that is held down, as the current folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "config.py").write_text(CONFIG)
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return folder


def run_step(project: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The action's script, with a `brim` on the PATH that is this one."""
    tools = project.parent / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "brim").write_text(f'#!/bin/sh\nexec {sys.executable} -m brim "$@"\n')
    (tools / "brim").chmod(0o755)
    given = {f"INPUT_{name.upper()}": value for name, value in {"install": "none", **inputs}.items()}
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(project.parent / "output"),
        **given,
    }
    return subprocess.run(["bash", str(SCRIPT)], cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_the_actions_script_annotates_and_writes_sarif(project: Path) -> None:
    ended = run_step(project, targets="train.py config.py", sarif_file="found.sarif")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("::error file=train.py,line=8,endLine=8,title=brim doctor%3A batch-clamped::")
    log = json.loads((project / "found.sarif").read_text(encoding="utf-8"))
    assert (log["version"], log["runs"][0]["results"][0]["ruleId"]) == ("2.1.0", "batch-clamped")
    assert (project.parent / "output").read_text() == "sarif-file=found.sarif\n"


def test_the_actions_inputs_reach_the_command(project: Path) -> None:
    assert run_step(project, fail_on="never").returncode == 0
    assert (project / "brim.sarif").is_file()
    assert run_step(project, arguments="--ignore batch-clamped --no-predict").returncode == 0
    (project / "train.py").write_text(CLEAN, encoding="utf-8")
    assert run_step(project).returncode == 0
    assert run_step(project, targets="nowhere").returncode == 2


def test_action_and_script_agree_about_the_inputs() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    used = set(re.findall(r"INPUT_\w+", SCRIPT.read_text()))
    assert used - {"INPUT_"} == set(step["env"])
    assert {f"INPUT_{name.replace('-', '_').upper()}" for name in action["inputs"]} == set(step["env"])
    assert all(each["description"] for each in action["inputs"].values())
    assert SCRIPT.relative_to(ROOT).as_posix() in step["run"]
    assert os.access(SCRIPT, os.X_OK)


def test_the_hook_is_a_command_that_exists(cli: Cli, project: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {"id", "name", "entry", "language"} <= set(hook)
    words = [*hook["entry"].split(), *hook["args"]]
    assert words[0] == "brim"
    ended = cli(*words[1:])
    assert ended.code == 1
    assert ended.out.startswith("train.py:8: high batch-clamped ")
    assert hook["pass_filenames"] is False, "a value is followed through several files"


def test_the_files_to_copy_in_the_docs_are_valid() -> None:
    files = {name: yaml.safe_load(text) for name, text in BLOCKS}
    assert set(files) == {".pre-commit-config.yaml", ".github/workflows/doctor.yml"}
    (hook,) = [hook for repo in files[".pre-commit-config.yaml"]["repos"] for hook in repo["hooks"]]
    assert hook["id"] == yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))[0]["id"]
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    (job,) = files[".github/workflows/doctor.yml"]["jobs"].values()
    (step,) = [step for step in job["steps"] if "brim" in step["uses"]]
    assert set(step.get("with", {})) <= set(inputs)


def git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def clone(folder: Path) -> str:
    """The files of this repository as a new repository; its commit."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return commit(folder)


def commit(folder: Path) -> str:
    git("init", "--quiet", cwd=folder)
    git("add", "--all", cwd=folder)
    git("-c", "user.name=brim", "-c", "user.email=brim@localhost", "commit", "--quiet", "-m", "All", cwd=folder)
    return git("rev-parse", "HEAD", cwd=folder)


@pytest.mark.slow
def test_pre_commit_installs_and_runs_the_hook(project: Path, tmp_path: Path) -> None:
    tools = tmp_path / "venv"
    venv.create(tools, with_pip=True)
    installed = subprocess.run([tools / "bin" / "pip", "install", "--quiet", "pre-commit"], capture_output=True, check=False)
    if installed.returncode:
        pytest.skip("pre-commit cannot be installed: no package index is reachable")
    source = tmp_path / "source"
    source.mkdir()
    config: dict[str, Any] = {"repos": [{"repo": str(source), "rev": clone(source), "hooks": [{"id": "brim-doctor"}]}]}
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    commit(project)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PRE_COMMIT_HOME"] = str(tmp_path / "cache")

    def run_hook() -> subprocess.CompletedProcess[str]:
        command = [str(tools / "bin" / "pre-commit"), "run", "--all-files"]
        return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)

    ended = run_hook()
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "train.py:8: high batch-clamped" in ended.stdout
    (project / "train.py").write_text(CLEAN, encoding="utf-8")
    git("add", "--all", cwd=project)
    ended = run_hook()
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_action_installs_brim_from_its_own_checkout(project: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    clone(source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"RUNNER_TEMP": str(tmp_path / "runner")}
    script = source / SCRIPT.relative_to(ROOT)
    ended = subprocess.run(["bash", str(script)], cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "::error file=train.py,line=8," in ended.stdout
    assert (project / "brim.sarif").is_file()
