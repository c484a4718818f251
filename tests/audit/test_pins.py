"""The versions that a project runs with are read from every file in which it may ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim.audit.pins import Pins, Range, is_within

OLD = {
    "requirements.txt": "torch\ntransformers[torch]==4.36.2  # last that works\n",
    "requirements-train.txt": "transformers==4.36.2 --hash=sha256:9900\n",
    "requirements/gpu.txt": "transformers~=4.36.0\n",
    "pyproject.toml": '[project]\nname = "mine"\ndependencies = ["torch", "transformers>=4.30,<4.40"]\n',
    "setup.cfg": "[options]\ninstall_requires =\n    torch\n    transformers<4.40\n",
    "setup.py": "from setuptools import setup\nsetup(name='mine', install_requires=['torch', 'transformers<=4.36.2'])\n",
    "environment.yml": "dependencies:\n  - conda-forge::transformers=4.36\n  - pip:\n    - torch\n",
    "Pipfile": '[packages]\ntransformers = "==4.36.2"\n',
    "Pipfile.lock": '{"default": {"transformers": {"version": "==4.36.2"}}}',
    "poetry.lock": '[[package]]\nname = "transformers"\nversion = "4.36.2"\ndescription = "..."\n',
    "uv.lock": 'version = 1\n\n[[package]]\nname = "transformers"\nversion = "4.36.2"\n',
    "Dockerfile": "FROM python\nRUN pip install --no-cache-dir \\\n    torch 'transformers==4.36.2'\n",
    "install.sh": "python -m pip install -q -U transformers==4.36.2 peft\n",
}
POETRY = '[tool.poetry]\nname = "mine"\n\n[tool.poetry.group.train.dependencies]\ntransformers = {version = "^4.36", extras = ["torch"]}\n'


def place(folder: Path, name: str, text: str) -> Path:
    """A script two folders below the file that asks for versions."""
    path = folder / "project" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder / "project" / "src" / "train" / "train.py"


@pytest.mark.parametrize("name", [*OLD, "poetry"])
def test_every_file_that_asks_for_a_version_is_read(tmp_path: Path, name: str) -> None:
    script = place(tmp_path, *(("pyproject.toml", POETRY) if name == "poetry" else (name, OLD[name])))
    pins = Pins.of(script)
    assert pins.knows("transformers")
    assert not pins.allows("transformers", ">=5.0")
    assert pins.requires("Transformers", "<5")
    assert not pins.knows("trl")


def test_a_lower_bound_admits_the_newest_release(tmp_path: Path) -> None:
    pins = Pins.of(place(tmp_path, "requirements.txt", "transformers>=4.30\n"))
    assert pins.allows("transformers", ">=5.15")
    assert not pins.requires("transformers", ">=4.41")
    assert pins.requires("transformers", ">=4.30")


@pytest.mark.parametrize(
    "text", ["", "transformers\n", "# transformers==4.30\n", "sentence-transformers==2.2\n", "transformers !=4.30\n"]
)
def test_without_a_version_the_newest_is_assumed(tmp_path: Path, text: str) -> None:
    pins = Pins.of(place(tmp_path, "requirements.txt", text))
    assert not pins.knows("transformers")
    assert pins.allows("transformers", ">=5.15")
    assert not pins.allows("transformers", "<5")
    assert not pins.requires("transformers", ">=4.0")


def test_the_nearest_folder_decides_and_all_of_its_files_count(tmp_path: Path) -> None:
    script = place(tmp_path, "requirements.txt", "transformers==4.30.2\n")
    script.parent.mkdir(parents=True)
    (script.parent / "requirements.txt").write_text("transformers>=5.20\n")
    assert Pins.of(script).requires("transformers", ">=5.15")
    (script.parent / "requirements-old.txt").write_text("transformers==4.50.0\n")
    assert not Pins.of(script).allows("transformers", ">=5.15")


def test_nothing_above_the_project_is_read(tmp_path: Path) -> None:
    script = place(tmp_path, "pyproject.toml", '[project]\nname = "mine"\n')
    (tmp_path / "requirements.txt").write_text("transformers==4.30.2\n")
    assert not Pins.of(script).knows("transformers")


def test_a_requirements_file_may_include_another(tmp_path: Path) -> None:
    script = place(tmp_path, "requirements.txt", "-r lists/base.txt\n")
    place(tmp_path, "lists/base.txt", "transformers==4.30.2\n-r ../requirements.txt\n")
    assert not Pins.of(script).allows("transformers", ">=5")


def test_a_notebook_is_asked_first(tmp_path: Path) -> None:
    place(tmp_path, "requirements.txt", "transformers==4.30.2\ntrl==0.7.1\n")
    cells = [{"cell_type": "code", "source": ["!pip install -q 'transformers==5.16.0'\n", "# !pip install trl==1.0\n"]}]
    notebook = place(tmp_path, "book.ipynb", json.dumps({"cells": cells})).parents[2] / "book.ipynb"
    pins = Pins.of(notebook)
    assert pins.requires("transformers", "==5.16.0")
    assert pins.requires("trl", "==0.7.1")


def test_a_tag_of_a_repository_is_a_version(tmp_path: Path) -> None:
    text = "transformers @ git+https://github.com/huggingface/transformers.git@v4.36.2\n"
    assert Pins.of(place(tmp_path, "requirements.txt", text)).requires("transformers", "<4.37")


def test_a_project_that_is_the_package_runs_with_its_own_version(tmp_path: Path) -> None:
    script = place(tmp_path, "setup.py", "from setuptools import setup\nsetup(name='axolotl', version='0.4.1')\n")
    pins = Pins.of(script)
    assert pins.is_own("axolotl")
    assert not pins.allows("axolotl", ">=0.17")
    assert not pins.is_own("trl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project\n"), ("setup.py", "setup("), ("Pipfile.lock", "[]"), ("setup.cfg", "install\n"),
        ("pyproject.toml", "[project]\ndependencies = 3\n"), ("requirements.txt", "transformers==\x00\n\u2028==.\n"),
        ("environment.yml", "- - -\n"), ("poetry.lock", "[[package]]\n"),
    ],
)  # fmt: skip
def test_a_broken_file_asks_for_nothing(tmp_path: Path, name: str, text: str) -> None:
    assert not Pins.of(place(tmp_path, name, text)).knows("transformers")


@pytest.mark.parametrize(
    ("specifier", "inside", "outside"),
    [
        ("==4.36.2", "==4.36.2", "==4.36.3"), ("4.36.2", "==4.36.2", "==4.36.1"), ("==4.36.*", "==4.36.9", "==4.37"),
        ("~=4.36", "==4.99", "==5.0"), ("~=4.36.1", "==4.36.9", "==4.37"), ("^4.36", "==4.99", "==5.0"), ("^0.7.4", "==0.7.9", "==0.8"),
        ("~4.36", "==4.36.9", "==4.37"), ("=4.36", "==4.36.9", "==4.37"), (">4.36", "==4.36.1", "==4.36"), ("<=4.36", "==4.36", "==4.36.1"),
        (">=4.30,<5", "==4.99", "==5.0"), ("<=4.35.0.dev0", "==4.34", "==4.36"),
    ],
)  # fmt: skip
def test_specifiers_are_ranges(specifier: str, inside: str, outside: str) -> None:
    assert is_within(inside, specifier)
    assert not is_within(outside, specifier)


def test_what_names_no_version_is_no_range() -> None:
    assert Range.of("latest") is None
    assert Range.of("!=4.30") is None


def test_a_commit_is_a_version_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers @ git+https://github.com/huggingface/transformers@0dcb46e7\n")
    pins = Pins.of(tmp_path)
    assert pins.knows("transformers")
    assert not pins.allows("transformers", ">=5.15")
    assert not pins.requires("transformers", ">=4.0")


def test_the_main_branch_is_the_newest_version(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("git+https://github.com/huggingface/transformers.git@main\n")
    assert Pins.of(tmp_path).allows("transformers", ">=5.15")


def test_an_old_hub_holds_back_transformers(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("huggingface-hub>=0.33.4,<1.0\ntransformers>=4.53.3\n")
    assert not Pins.of(tmp_path).allows("transformers", ">=5.15")
    assert Pins.of(tmp_path).requires("transformers", ">=4.53")
    requirements.write_text("huggingface-hub<1\n")
    assert Pins.of(tmp_path).requires("transformers", "<5")
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nsetup(install_requires=['transformers>=4.53', 'huggingface_hub>=1'])\n"
    )
    requirements.unlink()
    assert Pins.of(tmp_path).allows("transformers", ">=5.15")
