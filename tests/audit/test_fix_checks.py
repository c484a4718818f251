"""A fix is offered only if it changes something, reads what exists, and a second audit agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import brim
from brim.audit.doctor import AuditRequest, examine
from brim.audit.editing import CannotFix
from brim.audit.fix_checks import FixChecks, compare_audits, line_after, without_stale_comments
from brim.audit.found import Edit, Found
from brim.audit.source.files import parse
from brim.audit.source.module import Source
from tests.audit.parts import add_rules, edit, found

CONFIG = """\
from dataclasses import dataclass

@dataclass
class Config:
    batch_size: int = 64

class Server:
    workers: int = 1

def train(config: Config, data):
    size = 2
    print(config.batch_size)
    return size
"""


def checks_of(text: str, name: str = "train.py") -> tuple[FixChecks, dict[str, Source]]:
    source = Source(name, text)
    return FixChecks({name: source}, {name: parse(source, "train")}), {name: source}


def replacing(text: str, old: str, new: str, name: str = "train.py") -> Edit:
    """An edit that replaces the first occurrence of a text within a line."""
    line = next(index for index, each in enumerate(text.split("\n"), start=1) if old in each)
    column = text.split("\n")[line - 1].index(old)
    return edit(name, line, column, column + len(old), new)


def refused(text: str, old: str, new: str) -> str:
    checks, _sources = checks_of(text)
    try:
        checks.refuse_harmful([replacing(text, old, new)])
    except CannotFix as error:
        return str(error)
    return ""


def test_an_attribute_must_be_known() -> None:
    assert refused(CONFIG, "= 2", "= config.batch_size") == ""
    assert refused(CONFIG, "= 2", "= config.workers") == "config is not known to have the attribute workers."
    assert refused(CONFIG, "= 2", "= other.batch_size") == "other is not defined in this file."


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch-size')\nargs = p.parse_args()\nsize = 2\n",
            True,
        ),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--other')\nargs = p.parse_args()\nsize = 2\n", False),
        ("class Base:\n    batch_size = 1\nclass C(Base):\n    pass\nargs = C()\nsize = 2\n", True),
        ("class C:\n    def __init__(self):\n        self.batch_size = 1\n    def run(self, args):\n        size = 2\n", False),
        ("def f(args):\n    size = 2\n    return args.batch_size\n", True),
        ("def f(args):\n    size = 2\ndef g(args):\n    return args.batch_size\n", False),
    ],
)
def test_attributes_come_from_arguments_classes_and_other_uses(text: str, known: bool) -> None:
    assert (refused(text, "= 2", "= args.batch_size") == "") == known


def test_an_attribute_of_self_belongs_to_its_class() -> None:
    text = "class A:\n    def __init__(self):\n        self.size = 4\n    def run(self):\n        n = 2\nclass B:\n    def run(self):\n        m = 2\n"
    assert refused(text, "n = 2", "n = self.size") == ""
    assert refused(text, "m = 2", "m = self.size") == "self is not known to have the attribute size."


def test_a_fix_must_change_something() -> None:
    assert refused(CONFIG, "size = 2", "size = size") == "The fix would assign size to itself."
    assert refused(CONFIG, "= 2", "= (2)") == "The fix changes nothing."
    uses = "config = read()\nprint(config.size, config.find)\na(find=True)\n"
    assert refused(uses, "True", "config.size") == "The fix would replace a boolean by another setting."
    assert refused(uses, "True", "config.find") == ""


def test_deleting_code_is_recognised() -> None:
    checks, _sources = checks_of("x = 3\nif x > 2:\n    x = 2\nf(a=1, b=2)\n")
    assert checks.deletes_code([edit("train.py", 2, 0, 0, "", end_line=4)])
    assert checks.deletes_code([edit("train.py", 3, 4, 9, "pass")])
    assert checks.deletes_code([edit("train.py", 4, 2, 7, "")])
    assert not checks.deletes_code([edit("train.py", 4, 2, 3, "c")])


@pytest.mark.parametrize(
    ("line", "old", "new", "expected"),
    [
        ("size = min(x, 2)  # the card is small", "min(x, 2)", "x", "size = x"),
        ("size = min(x, 2)  # noqa: F821", "min(x, 2)", "x", "size = x  # noqa: F821"),
        ("steps = n // m  # steps of an epoch", "//", "/", "steps = n / m  # steps of an epoch"),
        ("f(old='a')  # every step", "old", "new", "f(new='a')  # every step"),
        ("f(old='a')  # old was renamed", "old", "new", "f(new='a')"),
        ("size = min(x, 2); name = '# no comment'", "min(x, 2)", "x", "size = x; name = '# no comment'"),
    ],
)
def test_a_comment_about_what_is_gone_goes_too(line: str, old: str, new: str, expected: str) -> None:
    from brim.audit.editing import edited

    _checks, sources = checks_of(line + "\n")
    assert edited(line, without_stale_comments([replacing(line, old, new)], sources)) == expected


def test_a_second_audit_must_find_less_and_nothing_new() -> None:
    fixed, other = found("a.py", 3), found("a.py", 9)
    edits = {"a.py": [edit("a.py", 2, 0, 0, "", end_line=3)]}
    assert line_after(3, edits["a.py"]) == 2
    assert compare_audits([fixed, other], [found("a.py", 8)], [fixed], edits) is None
    left = compare_audits([fixed, other], [found("a.py", 2), found("a.py", 8)], [fixed], edits)
    assert left is not None
    assert (left.found, left.why) == (frozenset([fixed]), "The finding would remain.")
    new = compare_audits([fixed], [found("b.py", 1, rule="test-low")], [fixed], edits)
    assert new is not None
    assert new.why == "A second audit would report test-low in b.py."


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


TRAIN = """\
from dataclasses import dataclass
from torch.utils.data import DataLoader

@dataclass
class Config:
    batch_size: int = 64

def loader(data, config: Config):
    size = min(config.batch_size, 2)  # 2 fits into 8 GB
    return DataLoader(data, batch_size=size)
"""


def test_a_safe_fix_is_confirmed_by_the_second_audit(tmp_path: Path) -> None:
    (finding,) = brim.doctor(write(tmp_path, train=TRAIN)).findings
    assert finding.is_safe
    assert finding.patch is not None
    assert "+    size = config.batch_size\n" in finding.patch


def test_a_fix_that_does_not_remove_its_finding_is_not_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, train="x = 1\n") / "train.py"
    add_rules(monkeypatch)

    def finds_always(project: object) -> list[Found]:
        return [found(str(path), 1, edits=(edit(str(path), 1, 4, 5, "3"),), is_safe=True)]

    monkeypatch.setattr("brim.audit.source.examine.examine_project", finds_always)
    examined = examine(AuditRequest.create(path))
    assert examined.fixes.changes == ()
    assert [why for _found, why in examined.fixes.left] == ["The finding would remain."]
    assert [each.is_safe for each in examined.diagnosis().findings] == [False]


def test_a_fix_that_deletes_code_needs_to_be_asked_for(tmp_path: Path) -> None:
    text = TRAIN.replace(
        "    size = min(config.batch_size, 2)  # 2 fits into 8 GB\n",
        "    size = config.batch_size\n    if size > 2:\n        size = 2\n",
    )
    examined = examine(AuditRequest.create(write(tmp_path, train=text)))
    assert examined.fixes.changes == ()
    assert "--unsafe" in examined.fixes.left[0][1]
    (change,) = examined.plan(unsafe=True).changes
    assert b"if size" not in change.after


def test_thousands_of_fixes_take_seconds_and_are_all_made(tmp_path: Path) -> None:
    calls = "".join(
        f"a{index} = TrainingArguments('x', evaluation_strategy='steps', eval_steps={index})\n" for index in range(1500)
    )
    (tmp_path / "requirements.txt").write_text("transformers>=5\n")
    examined = examine(AuditRequest.create(write(tmp_path, train="from transformers import TrainingArguments\n" + calls)))
    (change,) = examined.fixes.changes
    assert change.after.count(b" eval_strategy=") == 1500
    assert len(examined.diagnosis().findings) == 1500


def test_a_notebook_is_audited_again_from_its_new_cells(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": TRAIN.splitlines(keepends=True)}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4}, indent=1) + "\n")
    (finding,) = brim.doctor(tmp_path / "a.ipynb").findings
    assert finding.is_safe
