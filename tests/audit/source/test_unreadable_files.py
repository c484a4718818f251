"""Files that cannot be read or parsed are notes that name the reason; nothing is an internal error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import brim
from brim.audit.source.newer_syntax import needed_version
from brim.errors import UsageError

RUNNING = sys.version_info[:2]
NEWER = [
    ('print(f"Using {"cuda" if gpu else "cpu"}")\n', (3, 12)),
    ("text = f\"{'\\n'.join(lines)}\"\n", (3, 12)),
    ('text = f"{\n    size  # of the batch\n}"\n', (3, 12)),
    ("type Batch = dict[str, int]\n", (3, 12)),
    ("type Pair[A, B] = tuple[A, B]\n", (3, 12)),
    ("def first[T](items: list[T]) -> T:\n    return items[0]\n", (3, 12)),
    ("class Box[\n    T,\n]:\n    size = 1\n", (3, 12)),
    ("class Box[T = int]:\n    size = 1\n", (3, 13)),
    ('query = t"{size} rows"\n', (3, 14)),
    ("try:\n    step()\nexcept ValueError, KeyError:\n    pass\n", (3, 14)),
]


@pytest.mark.parametrize(("text", "version"), NEWER)
def test_newer_syntax_is_told_by_its_version(text: str, version: tuple[int, int]) -> None:
    assert needed_version(text) == (version if version > RUNNING else None)


@pytest.mark.parametrize(
    "text",
    [
        'print "a"\n',
        "x = = 1\n",
        'x = f"{a["b"]}" = = 3\n',
        'text = """\ntype X = int\n"""\nx = = 2\n',
        "def f(:\n",
        "class A[T:\n    pass\n",
        "'never closed\n",
        'f"{never closed\n',
    ],
)
def test_what_no_python_takes_needs_no_newer_one(text: str) -> None:
    assert needed_version(text) is None


@pytest.mark.skipif(RUNNING >= (3, 14), reason="template strings are read by this Python")
def test_files_of_a_newer_python_are_counted_and_named(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.py").write_text('query = t"{size} rows"\n')
    (tmp_path / "train.py").write_text("x = 1\n")
    diagnosis = brim.doctor(tmp_path)
    assert diagnosis.files == 1
    (note,) = diagnosis.notes
    assert note.startswith("Needs Python >= 3.14 to read, not audited: 4 (")
    assert "not valid Python" not in note
    with pytest.raises(UsageError, match=r"a\.py needs Python >= 3\.14 to read; this is Python 3\."):
        brim.doctor(tmp_path / "a.py")


@pytest.mark.parametrize("encoding", ["rot13", "zlib", "hex", "base64", "nonsense", "undefined", "idna"])
def test_odd_encodings_are_notes(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "odd.py").write_bytes(f"# coding: {encoding}\nvzcbeg bf\n# \xff\n".encode("latin-1"))
    (tmp_path / "train.py").write_text("x = 1\n")
    diagnosis = brim.doctor(tmp_path)
    assert diagnosis.files == 1
    assert len(diagnosis.notes) == 1
    assert "odd.py cannot be decoded: " in diagnosis.notes[0]
    with pytest.raises(UsageError, match="cannot be decoded"):
        brim.doctor(tmp_path / "odd.py")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 5000 + "1" + ")" * 5000,
        "x = " + "+".join(["size"] * 5000),
        "x = " + "-" * 5000 + "1",
        "x = " + "a." * 5000 + "b",
        "if a == 0:\n    x = 0\n" + "".join(f"elif a == {index}:\n    x = {index}\n" for index in range(5000)),
    ],
    ids=["brackets", "sum", "signs", "attributes", "ladder"],
)
def test_deep_nesting_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.py").write_text(text + "\n")
    (tmp_path / "train.py").write_text("x = 1\n")
    diagnosis = brim.doctor(tmp_path)
    assert diagnosis.files == 1
    assert "Not audited: " in diagnosis.notes[0]
    assert "deep.py" in diagnosis.notes[0]


def test_a_file_that_is_too_large_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("x = 1  # a long line of some generated file\n" * 250_000)
    (tmp_path / "train.py").write_text("x = 1\n")
    (note,) = brim.doctor(tmp_path).notes
    assert note.endswith("large.py was not read: it has 10.5 MiB, more than 3.81 MiB.")
