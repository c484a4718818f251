"""A patch changes the characters that it is about: nothing else in the file, no other file, and never by halves."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.editing import CannotFix, edited, split_lines
from brim.audit.found import Edit, Found
from brim.audit.patching import Desk, FixPlan, diffs_of, plan_fixes, write_changes
from brim.errors import RunError
from tests.audit.parts import edit, found, source_of

CODE = b"import torch\n\nsize = min(config.batch_size, 2)\nloader = make(size)\n"


def desk_of(*paths: Path) -> Desk:
    return Desk({str(path): source_of(path) for path in paths})


def plan_of(*found: Found, paths: tuple[Path, ...]) -> FixPlan:
    return plan_fixes(found, desk_of(*paths), lambda _file: True)


def patch_of(finding: Found, path: Path) -> str | None:
    return diffs_of([finding], desk_of(path)).get(finding)


def unclamp(path: Path, line: int = 3) -> Found:
    return found(str(path), line, edits=(edit(str(path), line, 7, 32, "config.batch_size"),), is_safe=True)


def test_a_safe_patch_is_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    plan = plan_of(unclamp(path), paths=(path,))
    assert len(plan.fixed) == 1
    write_changes(plan.changes)
    assert path.read_bytes() == CODE.replace(b"min(config.batch_size, 2)", b"config.batch_size")
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "data",
    [
        CODE.replace(b"\n", b"\r\n"),
        CODE.replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + CODE,
        CODE.removesuffix(b"\n"),
        "# -*- coding: latin-1 -*-\n# größe\nsize = min(config.batch_size, 2)\nname = 'é'\n".encode("latin-1"),
        "# -*- coding: gbk -*-\n# 批量\nsize = min(config.batch_size, 2)\nname = '大小'\n".encode("gbk"),
        b"# a\r\n# b\nsize = min(config.batch_size, 2)\r\nx = 1\n",
        b"a = 1\n\x0cb = 1\nsize = min(config.batch_size, 2)\n",
    ],
    ids=["crlf", "cr", "bom", "no-last-newline", "latin-1", "gbk", "mixed-ends", "form-feed"],
)
def test_line_ends_encoding_and_byte_order_mark_stay(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(data)
    plan = plan_of(unclamp(path), paths=(path,))
    assert plan.left == ()
    write_changes(plan.changes)
    assert path.read_bytes() == data.replace(b"min(config.batch_size, 2)", b"config.batch_size")


def test_new_lines_end_as_the_file_does(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"a = 1\r\nb = 2\r\n")
    wish = found(str(path), 1, edits=(edit(str(path), 2, 0, 0, "x = 0\ny = 0\n"),), is_safe=True)
    write_changes(plan_of(wish, paths=(path,)).changes)
    assert path.read_bytes() == b"a = 1\r\nx = 0\r\ny = 0\r\nb = 2\r\n"


def test_the_mode_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    path.chmod(0o750)
    write_changes(plan_of(unclamp(path), paths=(path,)).changes)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_what_would_no_longer_parse_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"if a:\n    b = 2\n")
    only_statement = found(str(path), 2, edits=(edit(str(path), 2, 0, 0, "", end_line=3),), is_safe=True)
    plan = plan_fixes([only_statement], desk_of(path), lambda _file: True, unsafe=True)
    assert plan.changes == ()
    assert plan.left == ((only_statement, "The file would no longer parse."),)
    assert patch_of(only_statement, path) is None


@pytest.mark.parametrize(
    ("name", "text", "new", "column"),
    [("a.json", '{"a": 1}', "}", 6), ("a.yaml", "a: 1\n", "[\n", 3), ("a.toml", "a = 1\n", "=\n", 4)],
    ids=["json", "yaml", "toml"],
)
def test_configs_must_parse_too(tmp_path: Path, name: str, text: str, new: str, column: int) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert patch_of(found(str(path), edits=(edit(str(path), 1, 0, 0, new),)), path) is None
    assert patch_of(found(str(path), edits=(edit(str(path), 1, column, column + 1, "2"),)), path) is not None


def test_a_second_patch_of_the_same_place_waits(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    other = found(str(path), 3, edits=(edit(str(path), 3, 11, 29, "64"),), is_safe=True)
    plan = plan_of(unclamp(path), other, paths=(path,))
    assert len(plan.fixed) == 1
    assert plan.left == ((other, "Another fix changes the same place."),)


def test_a_patch_of_two_files_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_bytes(CODE)
    two.write_bytes(CODE)
    both = found(str(one), 3, edits=(*unclamp(one).edits, edit(str(two), 3, 7, 32, "(")), is_safe=True)
    assert plan_of(both, paths=(one, two)).changes == ()
    good = found(str(one), 3, edits=(*unclamp(one).edits, *unclamp(two).edits), is_safe=True)
    assert len(plan_of(good, paths=(one, two)).changes) == 2


def test_unsafe_patches_and_foreign_files_are_never_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    unsafe = found(str(path), 3, edits=unclamp(path).edits)
    assert plan_of(unsafe, paths=(path,)).changes == ()
    outside = plan_fixes([unclamp(path)], desk_of(path), lambda _file: False)
    assert outside.changes == ()
    assert "outside" in outside.left[0][1]


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path, other = tmp_path / "train.py", tmp_path / "other.py"
    path.write_bytes(CODE)
    other.write_bytes(CODE)
    changes = plan_of(unclamp(other), unclamp(path), paths=(path, other)).changes
    path.write_bytes(b"mine\n")
    with pytest.raises(RunError, match="changed during the audit"):
        write_changes(changes)
    assert path.read_bytes() == b"mine\n"
    assert other.read_bytes() == CODE
    assert not list(tmp_path.glob(".*"))


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_bytes(CODE)
    two.write_bytes(CODE)
    changes = plan_of(unclamp(one), unclamp(two), paths=(one, two)).changes
    really = Path.replace

    def fails_on_the_second(self: Path, target: Path) -> Path:
        if Path(target).name == "b.py":
            raise OSError(28, "No space left on device")
        return really(self, target)

    monkeypatch.setattr(Path, "replace", fails_on_the_second)
    with pytest.raises(RunError, match="No file was changed"):
        write_changes(changes)
    assert (one.read_bytes(), two.read_bytes()) == (CODE, CODE)
    assert {each.name for each in tmp_path.iterdir()} == {"a.py", "b.py"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    path.chmod(0o444)
    with pytest.raises(RunError, match="Permission denied"):
        write_changes(plan_of(unclamp(path), paths=(path,)).changes)


def test_a_link_is_written_through(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_bytes(CODE)
    link.symlink_to(real)
    write_changes(plan_of(unclamp(link), paths=(link,)).changes)
    assert link.is_symlink()
    assert b"min(" not in real.read_bytes()


@pytest.mark.parametrize(
    "data",
    [CODE, CODE.replace(b"\n", b"\r\n"), CODE.removesuffix(b"\n"), "名 = 1\n\nsize = min(config.batch_size, 2)".encode()],
    ids=["unix", "windows", "no-newline", "chinese"],
)
@pytest.mark.parametrize("name", ["train.py", "my train.py", "训练.py"], ids=["plain", "blank", "chinese"])
def test_git_applies_the_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.write_bytes(data)
    patch = patch_of(unclamp(path), path)
    assert patch is not None
    subprocess.run(["git", "init", "--quiet"], check=True, capture_output=True)
    subprocess.run(["git", "apply", "-"], input=patch.encode(), check=True, capture_output=True)
    assert path.read_bytes() == data.replace(b"min(config.batch_size, 2)", b"config.batch_size")


def notebook(**layout: Any) -> str:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Größe\n", "text"]},
        {
            "cell_type": "code",
            "execution_count": 1,
            "metadata": {},
            "outputs": [],
            "source": ["%pip install x\n", "import torch"],
        },
        {
            "cell_type": "code",
            "execution_count": 2,
            "metadata": {},
            "outputs": [],
            "source": "size = min(config.batch_size, 2)\nprint(size)",
        },
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, **layout)


@pytest.mark.parametrize("ending", ["", "\n"], ids=["bare", "newline"])
@pytest.mark.parametrize(
    "layout", [{"indent": 1, "ensure_ascii": False}, {"indent": 2}, {}], ids=["jupyter", "ascii", "one-line"]
)
def test_a_notebook_keeps_its_layout(tmp_path: Path, layout: dict[str, Any], ending: str) -> None:
    path = tmp_path / "train.ipynb"
    text = notebook(**layout) + ending
    path.write_text(text, encoding="utf-8")
    write_changes(plan_of(unclamp(path), paths=(path,)).changes)
    assert path.read_text(encoding="utf-8") == text.replace("min(config.batch_size, 2)", "config.batch_size")


def test_a_notebook_that_cannot_be_written_as_it_was_is_left(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(notebook(indent=1).replace('"nbformat": 4', '"nbformat":    4'))
    plan = plan_of(unclamp(path), paths=(path,))
    assert plan.changes == ()
    assert "unusual layout" in plan.left[0][1]


def test_a_magic_line_of_a_notebook_is_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(notebook(indent=1))
    assert patch_of(found(str(path), edits=(edit(str(path), 1, 0, 0, "x = 1\n"),)), path) is None
    assert patch_of(found(str(path), edits=(edit(str(path), 2, 0, 0, "x = 1\n", end_line=3),)), path) is not None


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="ab #é批", max_size=6), min_size=1, max_size=6),
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=6, max_size=6),
    place=st.tuples(st.integers(1, 7), st.integers(0, 7), st.integers(1, 7), st.integers(0, 7)),
    new=st.text(alphabet="xy\n", max_size=4),
)
def test_an_edit_leaves_what_is_before_and_behind_it(
    lines: list[str], ends: list[str], place: tuple[int, int, int, int], new: str
) -> None:
    text = "".join(line + end for line, end in zip(lines, ends, strict=False))
    first, last = sorted([place[:2], place[2:]])
    made = edited(text, [Edit(file="a", line=first[0], column=first[1], end_line=last[0], end_column=last[1], text=new)])
    kept = split_lines(text)
    before = "".join(kept[: first[0] - 1])
    behind = "".join(kept[last[0] :])
    assert made.startswith(before)
    assert made.endswith(behind)
    assert made.replace("\r\n", "\n").count("\n") >= new.count("\n")


def test_edits_may_not_meet() -> None:
    with pytest.raises(CannotFix):
        edited("abcdef", [edit("a", 1, 0, 3, "x"), edit("a", 1, 2, 4, "y")])
    assert edited("abcdef", [edit("a", 1, 0, 3, "x"), edit("a", 1, 3, 4, "y")]) == "xyef"
    assert edited("abcdef", [edit("a", 1, 0, 3, "x"), edit("a", 1, 0, 3, "x")]) == "xdef"


def test_every_patched_file_parses(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(CODE)
    (change,) = plan_of(unclamp(path), paths=(path,)).changes
    ast.parse(change.after)


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_what_parses_and_does_not_compile_is_not_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    code = "make(old=1, new=2)\n"
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": code}
    path.write_text(code if name.endswith(".py") else json.dumps({"cells": [cell], "nbformat": 4}, indent=1) + "\n")
    twice = found(str(path), 1, edits=(edit(str(path), 1, 5, 8, "new"),), is_safe=True)
    plan = plan_of(twice, paths=(path,))
    assert not plan.changes
    assert len(plan.left) == 1
    assert patch_of(twice, path) is None


def test_await_at_the_top_of_a_cell_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": "await load(size=min(8, 2))\n"}
    path.write_text(json.dumps({"cells": [cell], "nbformat": 4}, indent=1) + "\n")
    one = found(str(path), 1, edits=(edit(str(path), 1, 16, 25, "8"),), is_safe=True)
    assert plan_of(one, paths=(path,)).changes
