"""Which lines and launchers count for the run that was observed."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.audit.observing.blaming import Ran, blame, project_of, with_source

SCRIPT = """\
import argparse
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
batch_size = min(options.batch_size, 2)
loader = DataLoader(list(range(100)), batch_size=batch_size, shuffle=True)
"""


def ran(folder: Path, *arguments: str, command: tuple[str, ...] | None = None) -> Ran:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "train.sh").write_text('BATCH=${1:-64}\n[ "$BATCH" -gt 32 ] && BATCH=32\npython train.py --batch-size $BATCH\n')
    (folder / "sweep.sh").write_text("bash train.sh 64\n")
    line = ("python", str(script), *arguments)
    return Ran(command or line, script, line)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--batch-size", "100"), "You set 100 (the command line), the DataLoader gets 2."),
        (("--batch-size=7",), "You set 7 (the command line), the DataLoader gets 2."),
        ((), "train.py:4), the DataLoader gets 2."),
    ],
    ids=["given", "given-by-equals", "default"],
)
def test_the_observed_command_says_what_was_set_and_a_launcher_that_did_not_run_says_nothing(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    here = ran(tmp_path, *arguments)
    project = project_of(here)
    assert project is not None
    (finding,) = blame(project, here)
    assert (finding.rule, Path(finding.file).name, finding.line) == ("batch-clamped", "train.py", 6)
    assert sentence in finding.message
    assert "train.sh" not in finding.message


def test_without_a_flag_the_default_of_the_script_is_what_was_asked_for(tmp_path: Path) -> None:
    project = project_of(ran(tmp_path))
    assert project is not None
    asked = with_source(None, project, 2)
    assert asked is not None
    assert (asked.effective_batch, asked.micro_batch) == (16, 8)


@pytest.mark.parametrize("launcher", ["train.sh", "sweep.sh"])
def test_a_launcher_that_ran_or_was_called_by_one_is_blamed_for_its_own_lines(tmp_path: Path, launcher: str) -> None:
    here = ran(tmp_path, "--batch-size", "32", command=("bash", str(tmp_path / launcher)))
    project = project_of(here)
    assert project is not None
    assert {Path(finding.file).name for finding in blame(project, here)} == {"train.py", "train.sh"}


def test_another_script_of_the_folder_decides_nothing(tmp_path: Path) -> None:
    here = ran(tmp_path, "--batch-size", "100")
    alone = tmp_path / "alone.py"
    alone.write_text("import torch\n")
    for files in ((), (str(alone),)):
        project = project_of(Ran(("python", "alone.py"), alone, ("python", "alone.py"), files))
        assert project is not None
        assert with_source(None, project, 1) is None
        assert not blame(project, here)


def test_a_module_of_a_package_that_ran_is_blamed_through_its_imports(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    script, other = package / "train.py", package / "data.py"
    (package / "__init__.py").write_text("")
    begin, _clamp, end = SCRIPT.partition("batch_size = min(options.batch_size, 2)")
    script.write_text("from package.data import held\n" + begin + "batch_size = held(options.batch_size)" + end)
    other.write_text("def held(batch_size):\n    return min(batch_size, 2)\n")
    words = ("python", "-m", "package.train", "--batch-size", "100")
    here = Ran(words, script, words, (str(script), str(other)))
    project = project_of(here)
    assert project is not None
    (finding,) = blame(project, here)
    assert (Path(finding.file).name, finding.line) == ("data.py", 2)
    assert "You set 100 (the command line)" in finding.message
